"""Which blocks of corrections a server has heard of, so that a client that was restored from a copy repeats no mask."""

import os
import threading
from collections import Counter
from pathlib import Path

from private_llm.assisted.corrections import sync_folder
from private_llm.errors import TransportError

_MOST, _MOST_A_SESSION = 1 << 22, 1 << 12
"""Names that a process keeps in memory, some 500 MB, half of them of one user with a name, and those of a session."""
_known: set[bytes] = set()
_of_user: Counter[str] = Counter()
_lock = threading.Lock()


class UsedBlocks:
    """Of all sessions of this process and, in a folder, of those before it."""

    def __init__(self, folder: str | None, user: str = "") -> None:
        self._user = user
        self._folder = None if folder is None else Path(folder) / "used-blocks"
        self._added = 0

    def add(self, block: str) -> bool:
        """Keep a name; whether it is new. Raises TransportError where there is no room for it."""
        self._added += 1
        if self._added > _MOST_A_SESSION:
            raise TransportError(f"blocks: got more than {_MOST_A_SESSION} in a session; open another one")
        with _lock:
            if bytes.fromhex(block) in _known:
                return False
            if len(_known) >= _MOST or (self._user and _of_user[self._user] >= _MOST // 2):
                raise TransportError("this server has heard of too many blocks; its operator must start it again")
            _known.add(bytes.fromhex(block))
            _of_user[self._user] += 1
        if self._folder is None:
            return True
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.close(os.open(self._folder / block, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        sync_folder(self._folder)
        return True
