"""Container and compose files: what runs in them exists, nothing may be written, ports and times fit the settings."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from private_llm_hosting.settings import read_settings

from private_llm.config import VERSION
from tests.deploy.files import (
    DEPLOY,
    FOLDER,
    IMAGE,
    OPERATOR_PORT,
    PARTY,
    PORT,
    ROOT,
    SETTINGS,
    USER,
    documents,
    parsed,
)
from tests.deploy.schemas import COMPOSE, faults

CONTAINERFILE = DEPLOY / "Containerfile"
ORGANISATION = DEPLOY / "compose" / "party.yaml"
DESK = DEPLOY / "compose" / "desk.yaml"


def services(path: Path) -> dict[str, dict[str, Any]]:
    return documents(path)[0]["services"]


def instructions() -> list[tuple[str, str]]:
    """Instructions of the container file with their texts, continued lines joined."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def name_of(value: Path | str) -> str:
    return value.stem if isinstance(value, Path) else value


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


# -- image ------------------------------------------------------------------------------------------------------------
KNOWN = {"FROM", "ARG", "WORKDIR", "RUN", "COPY", "ENV", "USER", "STOPSIGNAL", "EXPOSE", "ENTRYPOINT", "CMD"}


def test_the_image_runs_a_party_as_nobody_special() -> None:
    found = instructions()
    assert {name for name, _ in found} <= KNOWN
    last = dict(found)  # of each kind the last one
    assert last["USER"] == f"{USER}:{USER}"
    assert [int(port) for port in last["EXPOSE"].split()] == [PORT, OPERATOR_PORT]
    assert json.loads(last["ENTRYPOINT"]) == ["private-llm"]
    assert json.loads(last["CMD"]) == PARTY
    assert last["STOPSIGNAL"] == "SIGTERM"
    order = [name for name, _ in found]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name in ("RUN", "COPY"))


def test_only_the_wheel_and_pins_get_into_the_image() -> None:
    copied = [text.split()[:-1] for name, text in instructions() if name == "COPY" and not text.startswith("--from")]
    sources = {source for each in copied for source in each}
    wheel = f"dist/private_llm-{VERSION}-py3-none-any.whl"  # as setuptools names it
    assert sources == {"constraints.txt", wheel}
    assert (ROOT / "constraints.txt").is_file()
    assert f'"./{Path(wheel).name}[' in CONTAINERFILE.read_text()
    ignored = CONTAINERFILE.with_name("Containerfile.dockerignore").read_text().splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == sources


def test_the_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'\.whl\[([\w,]+)\]"', CONTAINERFILE.read_text())
    entry = json.loads(dict(instructions())["ENTRYPOINT"])
    assert set(entry) <= set(project["scripts"])
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert f"-t private-llm:{VERSION} ." in CONTAINERFILE.read_text()


# -- compose ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [ORGANISATION, DESK], ids=lambda path: path.stem)
def test_compose_files_fit_the_specification(path: Path) -> None:
    assert faults(documents(path)[0], COMPOSE) == []


def test_the_schema_would_find_something() -> None:
    file = documents(ORGANISATION)[0]
    file["services"]["party"]["read_onli"] = True
    assert faults(file, COMPOSE)


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in (ORGANISATION, DESK) for name in services(path)], ids=name_of
)
def test_every_container_is_shut_in(path: Path, name: str) -> None:
    service = services(path)[name]
    assert service["image"] == IMAGE
    assert (path.parent / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == CONTAINERFILE
    assert (path.parent / service["build"]["context"]).resolve() == ROOT
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ulimits"] == {"core": 0}
    if name == "prepare":
        assert service["network_mode"] == "none"
    else:
        assert service["user"] == f"{USER}:{USER}"
        assert "cap_add" not in service


@pytest.mark.parametrize(
    ("path", "name"), [(ORGANISATION, "party"), *((DESK, f"party{n}") for n in range(3))], ids=name_of
)
def test_parties_run_what_the_guide_says(path: Path, name: str) -> None:
    service = services(path)[name]
    assert service["command"] == PARTY
    assert parsed(service["command"])[0] == "party"
    assert seconds(service["stop_grace_period"]) > SETTINGS["drain_s"] + 5
    assert service["stop_signal"] == "SIGTERM"
    assert re.search(rf"http://127\.0\.0\.1:{OPERATOR_PORT}/(live|ready)'", service["healthcheck"]["test"][-1])
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")


def test_an_organisation_s_party() -> None:
    service = services(ORGANISATION)["party"]
    assert service["ports"] == [f"{PORT}:{PORT}", f"127.0.0.1:{OPERATOR_PORT}:{OPERATOR_PORT}"]
    (folder,) = [volume for volume in service["volumes"] if volume["type"] == "bind"]
    assert folder["target"] == FOLDER
    assert folder["read_only"] is True
    assert folder["source"].startswith("${PARTY_FOLDER:?")
    assert service["mem_limit"] == service["memswap_limit"]  # no swap
    assert service["environment"] == {"PRIVATE_LLM_PARTY__OPERATOR__ADDRESS": f"0.0.0.0:{OPERATOR_PORT}"}


def test_the_desk_s_organisations_share_nothing() -> None:
    found = services(DESK)
    for number in range(3):
        volumes = found[f"party{number}"]["volumes"]
        assert volumes == [f"party{number}:{FOLDER}:ro", f"kernels{number}:/var/cache/private-llm"]
        assert "ports" not in found[f"party{number}"]
    declared = set(documents(DESK)[0]["volumes"])
    used = {volume.split(":")[0] for each in found.values() for volume in each["volumes"]}
    assert {name for name in used if "/" not in name} == declared


def test_the_desk_s_gateway() -> None:
    service = services(DESK)["gateway"]
    name, values = parsed(service["command"])
    assert name == "gateway"
    assert values["hosts"] == [",".join(f"party{n}:{PORT}" for n in range(3))]
    assert service["ports"] == [f"127.0.0.1:{values['port']}:{values['port']}"]
    assert not values["no_token"]
    assert service["environment"]["PRIVATE_LLM_GATEWAY_TOKEN"].startswith("${PRIVATE_LLM_GATEWAY_TOKEN:?")
    assert values["model"] == f"{FOLDER}/client"
    assert str(values["tls"]) == f"{FOLDER}/tls"


def test_preparing_a_desk_gives_each_party_its_own(tmp_path: Path) -> None:
    """The script, with a stand-in for `private-llm` that makes files of the right names; the settings are real."""
    from private_llm_hosting.settings import EXAMPLE

    (tmp_path / "example.toml").write_text(EXAMPLE)
    shim = tmp_path / "bin" / "private-llm"
    shim.parent.mkdir()
    shim.write_text(
        '#!/bin/sh\nset -eu\ncase "$1" in\n'
        'certs) mkdir -p "$3/client-demo"; for n in ca.pem party0.pem party0.key party1.pem party1.key party2.pem '
        'party2.key client-demo/client.pem client-demo/client.key client-demo/ca.pem; do echo "$n" > "$3/$n"; done;;\n'
        'share) mkdir -p "$4/client"; for n in 0 1 2; do echo "$n" > "$4/party$n.safetensors"; done; '
        'echo {} > "$4/client/config.json";;\n'
        f"party) cat {tmp_path}/example.toml;;\nesac\n"
    )
    shim.chmod(0o755)
    python = shim.with_name("python")
    python.write_text("#!/bin/sh\necho model\n")
    python.chmod(0o755)
    desk = tmp_path / "desk"
    entry = services(DESK)["prepare"]["entrypoint"]
    words = ["sh", str(DEPLOY / "compose" / "prepare_desk.sh"), str(desk), entry[3]]
    for _ in range(2):  # the second time it changes nothing
        subprocess.run(words, check=True, timeout=60, env={"PATH": f"{shim.parent}:/usr/bin:/bin"})
    for number in range(3):
        home = desk / f"party{number}"
        settings = read_settings(home / "party.toml", {})
        assert settings.party == number
        assert settings.config.hosts == tuple(entry[3].split(","))
        assert settings.config.tls is not None
        for path in (settings.config.tls.certificate, settings.config.tls.key, *settings.service.models.values()):
            assert f"party{number}" in Path(path).name
            assert Path(path).is_file()
            assert Path(path).stat().st_mode & 0o077 == 0
        names = {path.name for path in home.rglob("*") if path.is_file()}
        own = {f"party{number}.pem", f"party{number}.key", f"party{number}.safetensors"}
        assert names == {"party.toml", "users.txt", "ca.pem", *own}
    assert {path.name for path in (desk / "user").rglob("*")} == {
        "tls", "client", "ca.pem", "client.pem", "client.key", "config.json",
    }  # fmt: skip
