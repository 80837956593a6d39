"""Where an endpoint's certificate and key are."""

from dataclasses import dataclass
from pathlib import Path

from private_llm.errors import ConfigError
from private_llm.typed_settings import check_types


@dataclass(frozen=True)
class TLSConfig:
    """Paths of this endpoint's certificate and key and of the CA that signed all endpoints (mutual TLS 1.3).

    The certificate's common name must be the endpoint's name (`party0`, `party1`, ..., `client` or `client:NAME`).
    allow: at a party, the users it admits: path (with a slash) of a file with a name a line, read at every handshake,
    or names with commas (None: every client that the CA signed for).
    """

    certificate: str
    key: str
    ca: str
    allow: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "tls: ")

    @classmethod
    def in_folder(cls, folder: str | Path, name: str = "client") -> "TLSConfig":
        """An endpoint's files as `private-llm certs` names them. Raises ConfigError for those that are not there."""
        if not str(folder):
            raise ConfigError(
                "tls: got an empty name; want the folder of this endpoint's certificate and key, and ca.pem"
            )
        files = {"certificate": f"{name}.pem", "key": f"{name}.key", "ca": "ca.pem"}
        missing = [file for file in files.values() if not (Path(folder) / file).is_file()]
        if missing:
            found = f"{folder} lacks {', '.join(missing)}" if Path(folder).is_dir() else f"there is no folder {folder}"
            raise ConfigError(
                f"tls: {found}; want the files from whoever runs the CA (for a trial: `private-llm certs`)"
            )
        return cls(**{key: str(Path(folder) / file) for key, file in files.items()})
