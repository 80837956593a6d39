"""Kubernetes manifests: fields exist, parts refer to each other rightly, times and ports fit the settings."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.files import DEPLOY, FOLDER, OPERATOR_PORT, PARTY, PORT, SETTINGS, USER, documents, parsed
from tests.deploy.schemas import KINDS, faults

FOLDER_K8S = DEPLOY / "kubernetes"
ALL = [(path, each) for path in sorted(FOLDER_K8S.glob("*.yaml")) for each in documents(path)]
LABEL = {"app.kubernetes.io/name": "private-llm-party"}


def named(kind: str, name: str = "private-llm-party") -> dict[str, Any]:
    (found,) = [each for _, each in ALL if each["kind"] == kind and each["metadata"]["name"] == name]
    return found["spec"]


def pod() -> dict[str, Any]:
    return named("LeaderWorkerSet")["leaderWorkerTemplate"]["workerTemplate"]["spec"]


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return found


@pytest.mark.parametrize(("path", "manifest"), ALL, ids=[f"{path.stem}-{each['kind']}" for path, each in ALL])
def test_fields_exist(path: Any, manifest: dict[str, Any]) -> None:
    assert faults(manifest, KINDS[manifest["kind"]]) == []


def test_the_schemas_would_find_something() -> None:
    for change in ({"replica": 1}, {"replicas": "1"}, {"startupPolicy": "Later"}):
        manifest = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": {"name": "x"}}
        assert faults({**manifest, "spec": {**named("LeaderWorkerSet"), **change}}, KINDS["LeaderWorkerSet"])


def test_the_kustomization_names_the_files() -> None:
    (kustomization,) = documents(FOLDER_K8S / "kustomization.yaml")
    apart = {"kustomization.yaml", "load-shares.yaml", "service-monitor.yaml"}
    assert set(kustomization["resources"]) | apart == {path.name for path, _ in ALL}
    for path, each in ALL:
        if path.name in apart - {"kustomization.yaml"}:
            assert each["metadata"]["namespace"] == kustomization["namespace"]
    (namespace,) = documents(FOLDER_K8S / "namespace.yaml")
    assert namespace["metadata"]["name"] == kustomization["namespace"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kustomize_builds_it() -> None:
    words = ["kubectl", "kustomize", str(FOLDER_K8S)]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    built = list(yaml.safe_load_all(result.stdout))
    (kustomization,) = documents(FOLDER_K8S / "kustomization.yaml")
    assert len(built) == sum(len(documents(FOLDER_K8S / name)) for name in kustomization["resources"])
    assert {each["metadata"].get("namespace") for each in built} == {kustomization["namespace"], None}


# -- the party --------------------------------------------------------------------------------------------------------
def test_there_is_one_group_of_one_pod() -> None:
    spec = named("LeaderWorkerSet")
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (1, 1)
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}
    assert int(container()["resources"]["limits"]["nvidia.com/gpu"]) >= 1


def test_the_pod_runs_the_party() -> None:
    assert container()["args"] == PARTY
    assert parsed(container()["args"])[0] == "party"
    assert {each["name"]: each["containerPort"] for each in container()["ports"]} == {
        "party": PORT, "operator": OPERATOR_PORT,
    }  # fmt: skip
    assert container()["env"] == [{"name": "PRIVATE_LLM_PARTY__OPERATOR__ADDRESS", "value": f"0.0.0.0:{OPERATOR_PORT}"}]
    assert pod()["terminationGracePeriodSeconds"] > SETTINGS["drain_s"] + 5


def test_probes_ask_the_operator_port() -> None:
    asked = {name: container()[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {each["port"] for each in asked.values()} == {"operator"}
    assert {name: each["path"] for name, each in asked.items()} == {
        "startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["party", "load-shares"])
def test_pods_are_shut_in(name: str) -> None:
    spec = pod() if name == "party" else named("Pod", name)
    for each in spec["containers"]:
        rights = each["securityContext"]
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in each["resources"]["limits"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == USER
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False


def test_files_are_where_the_settings_say() -> None:
    mounts = {each["name"]: each for each in container()["volumeMounts"]}
    volumes = {each["name"]: each for each in pod()["volumes"]}
    assert set(mounts) == set(volumes)
    tls = {value.rpartition("/")[0] for name, value in SETTINGS["tls"].items() if name != "allow_file"}
    shares = {value.rpartition("/")[0] for value in SETTINGS["models"].values()}
    assert {mounts["tls"]["mountPath"]} == {f"{FOLDER}/{folder}" for folder in tls}
    assert {mounts["shares"]["mountPath"]} == {f"{FOLDER}/{folder}" for folder in shares}
    assert mounts["settings"]["mountPath"] == FOLDER
    for name in ("tls", "shares", "settings"):
        assert mounts[name]["readOnly"] is True
        assert "subPath" not in mounts[name]  # such files are never renewed
    assert volumes["tls"]["secret"]["defaultMode"] & 0o007 == 0
    claim = volumes["shares"]["persistentVolumeClaim"]["claimName"]
    assert named("PersistentVolumeClaim", claim)
    assert named("Pod", "load-shares")["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim


# -- around it --------------------------------------------------------------------------------------------------------
def test_services_lead_to_a_party_that_is_not_ready() -> None:
    """Parties link through them before they are ready, and figures matter most then."""
    template = named("LeaderWorkerSet")["leaderWorkerTemplate"]["workerTemplate"]
    assert template["metadata"]["labels"] == LABEL
    for name, port, target in (
        ("private-llm-party", PORT, "party"), ("private-llm-operator", OPERATOR_PORT, "operator"),
    ):  # fmt: skip
        service = named("Service", name)
        assert service["publishNotReadyAddresses"] is True
        assert service["selector"] == LABEL
        assert [(each["port"], each["targetPort"]) for each in service["ports"]] == [(port, target)]
    assert named("Service", "private-llm-operator")["type"] == "ClusterIP"


def test_operators_alone_reach_the_operator_port() -> None:
    policy = named("NetworkPolicy")
    assert policy["podSelector"]["matchLabels"] == LABEL
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    rules = {rule["ports"][0]["port"]: rule for rule in policy["ingress"]}
    assert set(rules) == {PORT, OPERATOR_PORT}
    assert "from" not in rules[PORT]
    assert rules[OPERATOR_PORT]["from"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, PORT}
    assert named("NetworkPolicy", "private-llm-rest") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_the_party_is_not_evicted() -> None:
    assert named("PodDisruptionBudget") == {"minAvailable": 1, "selector": {"matchLabels": LABEL}}


def test_prometheus_finds_the_figures() -> None:
    monitor = named("ServiceMonitor")
    (service,) = [
        each for _, each in ALL if each["kind"] == "Service" and each["metadata"]["name"] == "private-llm-operator"
    ]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert [(each["port"], each["path"]) for each in monitor["endpoints"]] == [("operator", "/metrics")]
    template = named("LeaderWorkerSet")["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["annotations"]
    assert template == {
        "prometheus.io/scrape": "true", "prometheus.io/port": str(OPERATOR_PORT), "prometheus.io/path": "/metrics",
    }  # fmt: skip
