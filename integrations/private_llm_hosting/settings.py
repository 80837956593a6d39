"""A party's settings, checked as a whole: from a file (TOML), the environment, and the command line, each of which
replaces single settings of the one before.

`PRIVATE_LLM_PARTY__LIMITS__ROWS=8` replaces `rows` of `[limits]`. Relative paths are seen from the file's folder, or
without a file from where the party starts.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from private_llm_hf.checkpoint import share_path
from private_llm_hf.service.settings import ServiceSettings

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, refuse_unknown
from private_llm.net.addresses import Address, parse_address
from private_llm.net.roles import check_user, common_name
from private_llm.protocol_facts import ASSISTED
from private_llm.tls_config import TLSConfig
from private_llm.token_sharding import ShardingPlan
from private_llm.typed_settings import check_types, settings_of

EXAMPLE = resources.files(__package__).joinpath("party.toml").read_text("utf-8")
"""A settings file that explains every table, for parties of trio."""
PREFIX = "PRIVATE_LLM_PARTY__"
_ELSEWHERE = {"protocol": "protocol", "hosts": "hosts", "tls": "[tls]", "party_mode": "nothing (it is 'remote')"}
"""Settings of PrivateConfig that have a place of their own in the file."""
_PATHS = {
    "tls": ("folder", "certificate", "key", "ca", "allow_file"),
    "computation": ("offline_folder", "offload_folder"),
}
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


_Table = TypeVar("_Table")


@dataclass(frozen=True)
class _Tls:
    folder: str | None = None
    certificate: str | None = None
    key: str | None = None
    ca: str | None = None
    allow: tuple[str, ...] | None = None
    allow_file: str | None = None


@dataclass(frozen=True)
class _Operator:
    address: str = "127.0.0.1:9100"


@dataclass(frozen=True)
class _Log:
    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True)
class _File:
    """The file: settings before its first table, and its tables."""

    party: int
    hosts: tuple[str, ...]
    protocol: str = "trio"
    clients: int = 1
    sessions: int | None = None
    checkpoint: str | None = None
    drain_s: float = ServiceSettings.drain_s
    models: Mapping[str, str] = field(default_factory=dict)
    tls: Mapping[str, Any] | None = None
    computation: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    operator: Mapping[str, Any] = field(default_factory=dict)
    log: Mapping[str, Any] = field(default_factory=dict)


_OF_ONE, _OF_SEVERAL = ("sessions", "checkpoint"), ("drain_s", "limits", "operator", "log")
"""Settings that only a party has that serves one client at a time, or several."""


@dataclass(frozen=True)
class PartySettings:
    """How a party runs. models: its share files, by a name for logs.

    service: how it serves several clients at a time (None: one after the other, `sessions` of them or all). checkpoint:
    the public model that a CompNode, or a server of 'assisted', reads itself. operator: where the operator port listens
    (None: nowhere). log_format: "text" or "json". log_level: as of Python's logging, in small letters.
    """

    party: int
    config: PrivateConfig
    models: Mapping[str, Path]
    service: ServiceSettings | None = None
    sessions: int | None = None
    checkpoint: str | None = None
    operator: Address | None = None
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"


def example_of(protocol: str) -> str:
    """The settings file that explains every table, for parties, nodes or servers of this protocol."""
    about, base, models, tls, limits, computation, *service = EXAMPLE.removesuffix("\n").split("\n\n")
    config = PrivateConfig(protocol=protocol, insecure=True)
    hosts = "".join(f'  "party{number}.example.org:7000",\n' for number in range(config.endpoints))
    base = re.sub(r'(  "party.*\n)+', hosts, base)
    if protocol != "trio":
        base = re.sub(r"protocol = .*", f'protocol = "{protocol}"', base)
    if config.facts is None:  # public weights; the second and later lines of limits are those of shares
        models = 'checkpoint = "model"            # folder or hub id of the public model that its clients ask for'
        computation = "\n".join(computation.split("\n")[:4])
        limits = "\n".join(limits.split("\n")[:3])
    elif not config.facts.hides:
        computation += "\ninsecure = true                 # this protocol hides nothing"
    if config.plan is not None:  # a node serves one client at a time
        base = re.sub(r"\n(clients|drain_s) = .*", "", base)
        base = base.replace("\nhosts = ", f"\n# {_nodes_of(config.plan)}\nhosts = ", 1)
        return "\n\n".join((about, base, models, tls, computation)) + "\n"
    return "\n\n".join((about, base, models, tls, limits, computation, *service)) + "\n"


def _nodes_of(plan: ShardingPlan) -> str:
    small = ShardingPlan(3, 4, 1)
    shape = f"{{alpha = {small.alpha}, c = {small.c}, m = {small.m}}}"
    return (
        f"The default plan has {plan.kinds}, in this order, a host each; with\n"
        f"# plan = {shape} in [computation] there are {small.kinds}."
    )


def read_settings(
    path: Path | None, environment: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None
) -> PartySettings:
    """The settings of a file, if there is one, with those of the environment and of options, which have its form.
    Raises ConfigError saying which setting is wrong, what was found and what is wanted.
    """
    values = {} if path is None else _read(path)
    _merge(values, _of_environment(os.environ if environment is None else environment))
    try:
        refuse_unknown(values, settings_of(_File))
        if path is not None:
            _rebase(values, path.resolve().parent)
        if options and "models" in options:
            values.pop("models", None)
        _merge(values, {name: value for name, value in (options or {}).items() if value != {}})
        return _settings(values)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}" if path else str(error)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--config: {path}: {cause}; want TOML, as `private-llm party --example-config` prints"
        ) from None


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Texts, or what they are as JSON: numbers, true and false, lists, whole tables."""
    found: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.upper().startswith(PREFIX):
            continue
        *tables, key = name[len(PREFIX) :].lower().split("__")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        for table in reversed(tables):
            key, value = table, {key: value}
        refuse_unknown([key], settings_of(_File), f"environment, {PREFIX}: ")
        _merge(found, {key: value})
    return found


def _merge(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Replace settings, in tables only those that `more` has."""
    for name, value in more.items():
        old = values.get(name)
        values[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value


def _rebase(values: dict[str, Any], base: Path) -> None:
    """Relative paths as seen from the file's folder."""
    for table in ("models", *_PATHS):
        held = values.get(table)
        if isinstance(held, dict):
            names = _PATHS.get(table, held)
            moved = {name: str(base / held[name]) for name in names if isinstance(held.get(name), str)}
            values[table] = {**held, **moved}
    checkpoint = values.get("checkpoint")
    if isinstance(checkpoint, str) and (base / checkpoint).exists():  # else the id of one of a hub
        values["checkpoint"] = str(base / checkpoint)


def _settings(values: dict[str, Any]) -> PartySettings:
    for name, wanted in {"party": "this party's number (--index)", "hosts": "all parties' addresses (--hosts)"}.items():
        if values.get(name) in (None, "", []):
            raise ConfigError(f"{name}: got none; want {wanted}; `private-llm party --example-config` shows it")
    file = _File(**{**values, "hosts": _listed(values["hosts"])})
    check_types(file)
    config = _config(file)
    if not 0 <= file.party < config.endpoints:
        raise ConfigError(f"party: got {file.party}; want 0 to {config.endpoints - 1} for {file.protocol!r} (--index)")
    if file.tls is not None:
        config = replace(config, tls=_tls(file.tls, file.party))
    models = {name: _share_file(name, path, file.party) for name, path in file.models.items()}
    for name, count in (("clients", file.clients), ("sessions", file.sessions)):
        if count is not None and count < 1:
            raise ConfigError(f"{name}: got {count}; want at least 1")
    several = file.clients > 1
    assisted = config.protocol == ASSISTED
    if several and config.facts is None and not assisted:
        raise ConfigError(
            f"clients: got {file.clients}; under {file.protocol!r} a party serves one client at a time: want 1, and a "
            "party of its own for each"
        )
    of_others = [name for name in _OF_ONE if name != "checkpoint" or not assisted] if several else _OF_SEVERAL
    refused = [name for name in of_others if name in values]
    if refused:
        wanted = "1 (one after the other)" if several else "more than 1 (several at a time), such as 64"
        raise ConfigError(f"{', '.join(refused)}: got clients = {file.clients}; these settings want {wanted}")
    if not several and len(models) > 1:
        raise ConfigError(f"models: got {len(models)} with clients = 1; want one, or more clients")
    operator, log = _table(_Operator, "operator", file.operator), _table(_Log, "log", file.log)
    address = parse_address(operator.address) if several and operator.address else None
    service = _service(file, models) if several else None
    return PartySettings(
        file.party, config, models, service, file.sessions, file.checkpoint, address, log.format, log.level
    )


def _service(file: _File, models: Mapping[str, Path]) -> ServiceSettings:
    known = {*settings_of(ServiceSettings)} - {"models", "sessions", "drain_s"}
    if file.protocol == ASSISTED:
        known = {"sessions_per_user", "waiting"}
        if models:
            raise ConfigError("models, --shares: 'assisted' has public weights; leave it out, or want checkpoint")
    elif not models:
        raise ConfigError("models: got none; want the share file of at least one model, {name: path}")
    refuse_unknown(file.limits, known, "limits: ")
    return ServiceSettings(models, file.clients, drain_s=file.drain_s, **file.limits)


def _table(cls: type[_Table], name: str, values: Mapping[str, Any]) -> _Table:
    refuse_unknown(values, settings_of(cls), f"{name}: ")
    made = cls(**values)
    check_types(made, f"{name}.")
    return made


def _listed(value: object) -> object:
    """A list, also of texts with commas, as in the environment."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return [name.strip() for part in parts for name in part.split(",") if name.strip()]


def _config(file: _File) -> PrivateConfig:
    values = dict(file.computation)
    for name, place in _ELSEWHERE.items():
        if name in values:
            raise ConfigError(f"computation: got {name!r}, whose place is {place}; leave it out of [computation]")
    refuse_unknown(values, settings_of(PrivateConfig), "computation: ")
    if values.get("idle_s") == 0:  # TOML has no None
        values["idle_s"] = None
    if values.get("ring") == 32:
        values.setdefault("frac_bits", 12)
    for host in file.hosts:
        parse_address(host)
    return PrivateConfig.from_dict(values | {"protocol": file.protocol, "hosts": file.hosts, "party_mode": "remote"})


def _tls(table: Mapping[str, Any], party: int) -> TLSConfig:
    tls = _table(_Tls, "tls", {**table, "allow": _listed(table.get("allow"))})
    if tls.allow is not None and tls.allow_file is not None:
        raise ConfigError("tls.allow, tls.allow_file: got both; want the names, or the file that lists them")
    if tls.allow is not None and not tls.allow:
        raise ConfigError("tls.allow: got no name, which admits nobody; leave it out to admit all users of the CA")
    for name in tls.allow or ():
        check_user(name)
    allow = None if tls.allow is None else ",".join(tls.allow)
    if tls.allow_file is not None:
        allow = str(Path(tls.allow_file).absolute())  # with a slash, by which a file is known
    if tls.folder is not None and (tls.certificate, tls.key, tls.ca) == (None, None, None):
        return replace(TLSConfig.in_folder(tls.folder, common_name(party)), allow=allow)
    if tls.folder is not None or tls.certificate is None or tls.key is None or tls.ca is None:
        raise ConfigError("tls: want folder (--tls), or certificate, key and ca: users are known by their certificates")
    return TLSConfig(tls.certificate, tls.key, tls.ca, allow)


def _share_file(name: str, where: object, party: int) -> Path:
    if not _MODEL.fullmatch(name):
        raise ConfigError(f"models: got the name {name!r}; want 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    if not isinstance(where, str):
        raise ConfigError(f"models.{name}: got {where!r}; want a share file, or its folder")
    path = Path(where)
    if not path.is_dir():
        return path
    return share_path(path, party)
