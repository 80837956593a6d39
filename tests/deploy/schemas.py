"""Schemas of the fields that the deployment files use, written from the projects' API references.

Closed: a field that is not named here is a mistake until somebody has looked it up and adds it. References: Kubernetes
API v1.30 and later, LeaderWorkerSet API v1, Prometheus operator API v1, Compose specification.
"""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]


def faults(value: object, schema: Schema) -> list[str]:
    """What does not fit, one line each."""
    found = Draft202012Validator(schema).iter_errors(value)
    return sorted(f"{'.'.join(map(str, each.path))}: {each.message}" for each in found)


def closed(required: str = "", **fields: Schema) -> Schema:
    """An object of these fields and no others. required: names with spaces between."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def each(item: Schema) -> Schema:
    """A list that is not empty."""
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def mapping(item: Schema) -> Schema:
    return {"type": "object", "additionalProperties": item}


def matching(pattern: str) -> Schema:
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS = each(TEXT)
NUMBER: Schema = {"type": "integer", "minimum": 0}
YES_NO: Schema = {"type": "boolean"}
NAME = matching(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
QUANTITY = matching(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
LABELS = mapping(matching(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?"))
PORT: Schema = {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, matching(r"[a-z0-9-]{1,15}")]}
PROTOCOL = one_of("TCP", "UDP", "SCTP")

# -- Kubernetes -------------------------------------------------------------------------------------------------------
META = closed("name", name=NAME, namespace=NAME, labels=LABELS, annotations=mapping({"type": "string"}))
TEMPLATE_META = closed(labels=LABELS, annotations=mapping({"type": "string"}))
SELECTOR = closed(matchLabels=LABELS)
PROBE = closed(
    "httpGet",
    httpGet=closed("path port", path=TEXT, port=PORT),
    periodSeconds=NUMBER, timeoutSeconds=NUMBER, failureThreshold=NUMBER, initialDelaySeconds=NUMBER,
)  # fmt: skip
CONTAINER = closed(
    "name image resources securityContext",
    name=NAME, image=TEXT, args=TEXTS, command=TEXTS,
    env=each(closed("name", name=TEXT, value={"type": "string"})),
    ports=each(closed("containerPort", name=matching(r"[a-z0-9-]{1,15}"), containerPort=PORT, protocol=PROTOCOL)),
    startupProbe=PROBE, livenessProbe=PROBE, readinessProbe=PROBE,
    resources=closed(requests=mapping(QUANTITY), limits=mapping(QUANTITY)),
    securityContext=closed(
        "allowPrivilegeEscalation readOnlyRootFilesystem capabilities",
        allowPrivilegeEscalation=YES_NO, readOnlyRootFilesystem=YES_NO, capabilities=closed(add=TEXTS, drop=TEXTS),
    ),
    volumeMounts=each(closed("name mountPath", name=NAME, mountPath=matching("/.+"), readOnly=YES_NO)),
)  # fmt: skip
VOLUME = closed(
    "name",
    name=NAME,
    configMap=closed("name", name=NAME),
    secret=closed("secretName", secretName=NAME, defaultMode={"type": "integer", "minimum": 0, "maximum": 0o777}),
    persistentVolumeClaim=closed("claimName", claimName=NAME, readOnly=YES_NO),
    emptyDir=closed(sizeLimit=QUANTITY, medium=one_of("", "Memory")),
)
POD = closed(
    "containers",
    automountServiceAccountToken=YES_NO, enableServiceLinks=YES_NO, terminationGracePeriodSeconds=NUMBER,
    restartPolicy=one_of("Always", "OnFailure", "Never"), activeDeadlineSeconds=NUMBER,
    securityContext=closed(
        runAsNonRoot=YES_NO, runAsUser=NUMBER, runAsGroup=NUMBER, fsGroup=NUMBER,
        fsGroupChangePolicy=one_of("OnRootMismatch", "Always"),
        seccompProfile=closed("type", type=one_of("RuntimeDefault", "Localhost", "Unconfined")),
    ),
    containers=each(CONTAINER), volumes=each(VOLUME),
)  # fmt: skip
PEERS = each(
    closed(podSelector=SELECTOR, namespaceSelector=SELECTOR, ipBlock=closed("cidr", cidr=TEXT, **{"except": TEXTS}))
)
POLICY_PORTS = each(closed(port=PORT, protocol=PROTOCOL))


def kind(api: str, name: str, required: str = "spec", **fields: Schema) -> Schema:
    """An object of the API."""
    return closed(
        f"apiVersion kind metadata {required}",
        apiVersion={"const": api}, kind={"const": name}, metadata=META, **fields,
    )  # fmt: skip


LWS = closed(
    "replicas leaderWorkerTemplate",
    replicas=NUMBER,
    startupPolicy=one_of("LeaderCreated", "LeaderReady"),
    rolloutStrategy=closed(
        "type",
        type=one_of("RollingUpdate"),
        rollingUpdateConfiguration=closed(maxUnavailable=NUMBER, maxSurge=NUMBER, partition=NUMBER),
    ),
    networkConfig=closed("subdomainPolicy", subdomainPolicy=one_of("Shared", "UniquePerReplica")),
    leaderWorkerTemplate=closed(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy=one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
        leaderTemplate=closed("spec", metadata=TEMPLATE_META, spec=POD),
        workerTemplate=closed("spec", metadata=TEMPLATE_META, spec=POD),
    ),
)
SERVICE = closed(
    "selector ports",
    type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
    externalTrafficPolicy=one_of("Local", "Cluster"),
    publishNotReadyAddresses=YES_NO, selector=LABELS,
    ports=each(closed("port", name=NAME, port=PORT, targetPort=PORT, protocol=PROTOCOL)),
)  # fmt: skip
KINDS: dict[str, Schema] = {
    "Namespace": kind("v1", "Namespace", ""),
    "PersistentVolumeClaim": kind(
        "v1", "PersistentVolumeClaim",
        spec=closed(
            "accessModes resources",
            accessModes=each(one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")),
            resources=closed("requests", requests=closed("storage", storage=QUANTITY)),
            storageClassName=NAME,
        ),
    ),
    "Pod": kind("v1", "Pod", spec=POD),
    "LeaderWorkerSet": kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", spec=LWS),
    "Service": kind("v1", "Service", spec=SERVICE),
    "NetworkPolicy": kind(
        "networking.k8s.io/v1", "NetworkPolicy",
        spec=closed(
            "podSelector policyTypes",
            podSelector=SELECTOR, policyTypes=each(one_of("Ingress", "Egress")),
            ingress=each(closed(**{"from": PEERS}, ports=POLICY_PORTS)),
            egress=each(closed(to=PEERS, ports=POLICY_PORTS)),
        ),
    ),
    "PodDisruptionBudget": kind(
        "policy/v1", "PodDisruptionBudget",
        spec=closed("selector", minAvailable=NUMBER, maxUnavailable=NUMBER, selector=SELECTOR),
    ),
    "ServiceMonitor": kind(
        "monitoring.coreos.com/v1", "ServiceMonitor",
        spec=closed(
            "selector endpoints",
            selector=SELECTOR, namespaceSelector=closed(matchNames=each(NAME)),
            endpoints=each(closed("port", port=NAME, path=TEXT, interval=matching(r"\d+(ms|s|m|h)"))),
        ),
    ),
    "Kustomization": closed(
        "apiVersion kind resources",
        apiVersion={"const": "kustomize.config.k8s.io/v1beta1"}, kind={"const": "Kustomization"},
        namespace=NAME, resources=TEXTS,
    ),
}  # fmt: skip

# -- Compose ----------------------------------------------------------------------------------------------------------
DURATION = matching(r"(\d+(us|ms|s|m|h))+")
COMPOSE_SERVICE = closed(
    "image build",
    image=TEXT, build=closed("context", context=TEXT, dockerfile=TEXT, args=mapping({"type": "string"})),
    command=TEXTS, entrypoint=TEXTS, environment=mapping({"type": "string"}), ports=TEXTS,
    volumes=each({"oneOf": [
        TEXT,
        closed("type target", type=one_of("bind", "volume", "tmpfs"), source=TEXT, target=TEXT, read_only=YES_NO,
               bind=closed(create_host_path=YES_NO)),
    ]}),
    tmpfs=TEXTS, user=TEXT, read_only=YES_NO, cap_drop=TEXTS, cap_add=TEXTS, security_opt=TEXTS,
    ulimits=mapping(NUMBER), mem_limit=TEXT, memswap_limit=TEXT, init=YES_NO, stop_signal=TEXT,
    stop_grace_period=DURATION, network_mode=TEXT,
    restart=matching(r"no|always|unless-stopped|on-failure(:\d+)?"),
    healthcheck=closed("test", test=TEXTS, interval=DURATION, timeout=DURATION, retries=NUMBER, start_period=DURATION),
    depends_on=mapping(closed(
        "condition", condition=one_of("service_started", "service_healthy", "service_completed_successfully")
    )),
)  # fmt: skip
COMPOSE: Schema = {
    **closed("name services", name=NAME, services=mapping(COMPOSE_SERVICE), volumes=mapping({"type": "null"})),
    "patternProperties": {"^x-": {}},
}
