"""Weights on their way: checkpoints, calibration, shares in files, and what all agree upon."""

from pathlib import Path

from private_llm.errors import ConfigError, ShareFileError


def want_config(what: str, name: str) -> None:
    """Raises ConfigError for names that transformers would look up as a hub id and report upon as one."""
    path = Path(name)
    a_path = name.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2 or "\\" in name
    held = any((path / each).is_file() for each in ("config.json", "adapter_config.json"))
    for wrong, why in (
        (not name.strip(), "got an empty name"),
        (path.is_file(), "it is a file"),
        (not path.exists() and a_path, "no such folder"),
        ((path / "client").is_dir() and not held, f"it is what `share` wrote; users name its folder {path / 'client'}"),
        (path.is_dir() and not held, "the folder holds no config.json"),
    ):
        if wrong:
            raise ConfigError(f"{what} of {name!r}: {why} (want a model folder or a hub id)")


def share_path(folder: Path, party: int) -> Path:
    """Where a party's share file lies."""
    return folder / f"party{party}.safetensors"


def want_share_file(path: Path) -> None:
    """Raises ShareFileError for what is no share file at all, before PyTorch is imported, which checks the rest."""
    why = "no such file"
    if path.is_file():
        with path.open("rb") as file:
            why = "" if b'"private-llm share file ' in file.read(1 << 20) else "it is no share file"
    if why:
        raise ShareFileError(
            f"{path}: {why}; want what `private-llm share` wrote for this party, party0.safetensors for party 0"
        )
