"""A party's settings file: TOML, checked as a whole; environment variables may replace single settings.

`PRIVATE_LLM_PARTY__LIMITS__ROWS=8` replaces `rows` of `[limits]`. Relative paths are seen from the file's folder.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from private_llm_hf.service.settings import ServiceSettings
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, refuse_unknown
from private_llm.net.addresses import Address, parse_address
from private_llm.net.roles import check_user
from private_llm.net.wire import legible

PREFIX = "PRIVATE_LLM_PARTY__"
_ELSEWHERE = {"protocol": "protocol", "hosts": "hosts", "tls": "[tls]", "party_mode": "nothing (it is 'remote')"}
"""Settings of PrivateConfig that have a place of their own in the file."""
_PATHS = ("offline_folder", "offload_folder")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LONGEST = 120


def _split(value: object) -> object:
    """Lists from the environment: with commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Tls(_Table):
    certificate: Path
    key: Path
    ca: Path
    allow: Annotated[list[str], BeforeValidator(_split)] | None = None
    allow_file: Path | None = None


class _LimitsTable(_Table):
    sessions: int = ServiceSettings.sessions
    sessions_per_user: int = ServiceSettings.sessions_per_user
    waiting: int = ServiceSettings.waiting
    rows: int = ServiceSettings.rows
    positions: int | None = None
    positions_in_all: int | None = None
    elements: int | None = None
    offline_bytes: int = ServiceSettings.offline_bytes
    gather_s: float = ServiceSettings.gather_s


class _Operator(_Table):
    address: str = "127.0.0.1:9100"


class _Log(_Table):
    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class _File(BaseSettings):
    """The tables of the file."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)

    party: int
    hosts: Names
    protocol: str = "trio"
    drain_s: float = ServiceSettings.drain_s
    models: dict[str, Path]
    tls: _Tls | None = None
    computation: dict[str, Any] = Field(default_factory=dict)
    limits: _LimitsTable = _LimitsTable()
    operator: _Operator = _Operator()
    log: _Log = _Log()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, *_: object, **__: object,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        """The environment before the file, which is handed in as keywords."""
        return env_settings, init_settings


@dataclass(frozen=True)
class HostingSettings:
    """How an organisation runs its party. operator: where the operator port listens (None: nowhere).

    log_format: "text" or "json". log_level: as of Python's logging, in small letters.
    """

    party: int
    config: PrivateConfig
    service: ServiceSettings
    operator: Address | None
    log_format: Literal["text", "json"]
    log_level: str


def read_settings(path: Path, environment: Mapping[str, str] | None = None) -> HostingSettings:
    """The settings of a file. Raises ConfigError saying which setting is wrong, what was found and what is wanted."""
    text = _text_of(path)
    _check_environment(os.environ if environment is None else environment)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}; want TOML, as `private-llm party --example-config` prints") from None
    refuse_unknown(values, _File.model_fields, f"{path.name}: ")
    try:
        return _settings(_File(**values), path.resolve().parent)
    except ValidationError as error:
        raise ConfigError(f"{path.name}: " + "; ".join(_in_words(each, values) for each in error.errors())) from None
    except SettingsError as error:
        raise ConfigError(f"{PREFIX}...: {legible(str(error))[:_LONGEST]}; want JSON for a whole table") from None
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(
            f"--config: {path}: {cause}; want a settings file; `private-llm party --example-config` prints one"
        ) from None


def _check_environment(environment: Mapping[str, str]) -> None:
    names = [name for name in environment if name.upper().startswith(PREFIX)]
    refuse_unknown(
        [name[len(PREFIX) :].split("__")[0].lower() for name in names], _File.model_fields, f"environment, {PREFIX}: "
    )


def _settings(file: _File, base: Path) -> HostingSettings:
    config = _config(file, base)
    if not 0 <= file.party < config.endpoints:
        raise ConfigError(f"party: got {file.party}; want 0 to {config.endpoints - 1} for {file.protocol!r}")
    for name in file.models:
        if not _MODEL.fullmatch(name):
            raise ConfigError(f"models: got the name {name!r}; want 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    models = {name: _share_file(base / path, file.party) for name, path in file.models.items()}
    service = ServiceSettings(models, **file.limits.model_dump(), drain_s=file.drain_s)
    operator = parse_address(file.operator.address) if file.operator.address else None
    return HostingSettings(file.party, config, service, operator, file.log.format, file.log.level)


def _config(file: _File, base: Path) -> PrivateConfig:
    values = dict(file.computation)
    for name, place in _ELSEWHERE.items():
        if name in values:
            raise ConfigError(f"computation: got {name!r}, whose place is {place}; leave it out of [computation]")
    refuse_unknown(values, [each.name for each in fields(PrivateConfig)], "computation: ")
    for name in _PATHS:
        if isinstance(values.get(name), str):
            values[name] = str(base / values[name])
    if values.get("idle_s") == 0:  # TOML has no None
        values["idle_s"] = None
    for host in file.hosts:
        parse_address(host)
    values |= {"protocol": file.protocol, "hosts": file.hosts, "party_mode": "remote"}
    if file.tls is not None:
        values["tls"] = _tls(file.tls, base)
    return PrivateConfig.from_dict(values)


def _tls(tls: _Tls, base: Path) -> dict[str, str | None]:
    if tls.allow is not None and tls.allow_file is not None:
        raise ConfigError("tls.allow, tls.allow_file: got both; want the names, or the file that lists them")
    if tls.allow == []:
        raise ConfigError("tls.allow: got no name, which admits nobody; leave it out to admit all users of the CA")
    for name in tls.allow or ():
        check_user(name)
    allow = None if tls.allow is None else ",".join(tls.allow)
    if tls.allow_file is not None:
        allow = str(base / tls.allow_file)
    return {name: str(base / getattr(tls, name)) for name in ("certificate", "key", "ca")} | {"allow": allow}


def _share_file(path: Path, party: int) -> Path:
    if not path.is_dir():
        return path
    from private_llm_hf.checkpoint.share_files import share_path  # which takes seconds, and a sample needs no path

    return share_path(path, party)


def _in_words(error: Any, values: Mapping[str, Any]) -> str:  # noqa: ANN401 - pydantic's own dictionary
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{place}: got none; want one; `private-llm party --example-config` shows it"
    if error["type"] == "extra_forbidden":
        table = _File.model_fields[str(error["loc"][0])].annotation
        known = next((each for each in _TABLES if table in (each, each | None)), None)
        names = ", ".join(sorted(known.model_fields)) if known else "none here"
        return f"{place}: unknown key; known keys: {names}"
    found = legible(repr(error["input"]))[:_LONGEST]
    return f"{place}: got {found}; want: {error['msg'].removeprefix('Input should be ')}"


_TABLES: tuple[type[_Table], ...] = (_Tls, _LimitsTable, _Operator, _Log)


# -- The settings file as an example, with every table explained ------------------------------------------------------
EXAMPLE = """\
# One party of a private-llm service. Check it with: private-llm party --config party.toml --check
# Relative paths are seen from this file's folder. An environment variable replaces a setting:
# PRIVATE_LLM_PARTY__LIMITS__ROWS=8, PRIVATE_LLM_PARTY__HOSTS=a:7000,b:7000,c:7000

party = 0                       # this party's number, from 0
hosts = [                       # every party's address, in order, the same at all parties and users
  "party0.example.org:7000",
  "party1.example.org:7000",
  "party2.example.org:7000",
]
protocol = "trio"               # trio, dealer (3 parties) or quad (4); the same everywhere
drain_s = 30.0                  # seconds that sessions may take to end after SIGTERM

[models]                        # name for logs = this party's share file, or a folder with party<N>.safetensors
demo = "shares/party0.safetensors"

[tls]                           # made by `private-llm certs`: ca, then request, then sign
certificate = "tls/party0.pem"  # common name party0; read anew when the file is replaced
key = "tls/party0.key"          # mode 600
ca = "tls/ca.pem"
allow_file = "users.txt"        # users that may come in, a name a line; or allow = ["alice", "bob"]; or all of the CA

[limits]
sessions = 64                   # clients' sessions at a time
sessions_per_user = 16          # of one user (the name in the certificate)
waiting = 64                    # clients that may wait in line for one
rows = 32                       # of one pass, over all requests that it serves
offline_bytes = 1073741824      # on this party's disk, of what is prepared for planned calls (0: nothing is)
gather_s = 0.005                # how long a pass waits for the next requests of sessions that were in the last one
# positions = 4096              # that one session's caches may hold (default: as this machine's memory allows)
# positions_in_all = 65536      # those of all sessions together, half of them of one user (default: the same)
# elements = 50000000           # of the largest array of one pass (default: the same)

[computation]                   # settings of PrivateConfig; those that parties agree upon as everywhere
timeout_s = 120.0               # seconds of silence after which another endpoint counts as dead
idle_s = 1800.0                 # seconds without a call that end a session (0: never)
device = "cpu"                  # or "cuda:0"
# adder = "auto"                # parties far apart: comparison keys where they are faster; these three lines the same
# bandwidth_mbit = 1000         # at all parties, and --adder auto,bandwidth_mbit=1000,latency_ms=20 at
# latency_ms = 20               # users. Mbit/s of a party's connection, milliseconds one way

[operator]
address = "127.0.0.1:9100"      # /live, /ready, /metrics; no authentication: keep it on loopback ("" turns it off)

[log]
format = "text"                 # or "json": one object per line
level = "info"
"""
