"""A server of protocol "assisted": it holds public weights and multiplies them by masks, or by masked rows.

A server with the key of masks gets labels only, another one masked rows; where the products of masks were prepared,
the latter is the only one. Neither holds a secret of its own.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never, get_args

import torch
from torch import Tensor

from private_llm.assisted.corrections import sync_folder
from private_llm.assisted.fixed_point import BYTES, LINES, IntegerWeight, lines_digest
from private_llm.assisted.masks import mask
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.kernels import ops
from private_llm.kernels.address import memory_bytes
from private_llm.kernels.devices import device_for
from private_llm.net.incoming import Allowance
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.weight_sharing import KEY_BYTES, unpacked_key
from private_llm.ring.prg import Seed
from private_llm_hf.party.command_loop import tell_costs
from private_llm_hf.party.node import agree
from private_llm_hf.wire.assisted import (
    COMMAND,
    HEADER,
    LONGEST_LABEL,
    MOST_ELEMENTS,
    REQUEST,
    BeginBlock,
    BlockBegun,
    LoadLines,
    MaskKey,
    ServerCommand,
    TellWeights,
    UseLines,
    WeightsHeld,
    elements,
)
from private_llm_hf.wire.commands import Stop, TellCosts, recv_message, send_message

_COMMANDS: tuple[type[ServerCommand | Stop], ...] = (*get_args(ServerCommand), Stop)
_MOST_WEIGHTS, _MOST_CHARACTERS = 1 << 16, 1 << 24  # of a session, and of the names of their layers
_BYTES_AN_ELEMENT, _LEAST_ELEMENTS = 48, 1 << 18  # of a product; those of the last row of a large model
_MOST_COMMAND = 1 << 16  # bytes
_EACH_S, _AT_ONCE = 0.02, 100  # between two questions, but for so many at once: who only asks takes everybody's time


@dataclass(frozen=True)
class _Held:
    """A weight, int16 or int8 [outputs, inputs and zeros]. name: of its layers."""

    name: str
    inputs: int
    lines: Tensor


class OpenWeights:
    """The weights of a checkpoint that a server multiplies by, each by its digest; sessions share them.

    source: folder or hub id, for messages. device: where they lie. weight_bits: as of `PrivateConfig`.
    """

    def __init__(self, source: str, device: torch.device, weight_bits: int) -> None:
        self.source, self._device, self.weight_bits = source, device, weight_bits
        self.weights: dict[str, tuple[int, Tensor]] = {}

    def load(self, weight: IntegerWeight, name: str) -> int:
        """Keep one weight; how many there were before. name: of its layers, as `ProductServers.load`."""
        number, inputs = len(self.weights), weight.lines.shape[1]
        self.weights.setdefault(lines_digest(weight.lines), (inputs, ops.narrow_lines(weight.lines).to(self._device)))
        return number

    @property
    def name(self) -> str:
        """What a client is told that it is."""
        return Path(self.source).name.encode("ascii", "replace").decode()[:100]


class ServerMemory:
    """What all sessions of a server hold: a quarter of its memory for products, `elements` each, so that none waits for
    another's; the rest for weights of clients, half of it for one user with a name.
    """

    def __init__(self, device: torch.device, clients: int = 1) -> None:
        """Raises ConfigError for more clients than there is memory for."""
        self._whole = memory_bytes()
        if device.type == "cuda":
            self._whole = min(self._whole, torch.cuda.mem_get_info(device)[1])
        room = self._whole // 4 // _BYTES_AN_ELEMENT
        self.elements = MOST_ELEMENTS if clients == 1 else min(MOST_ELEMENTS, room // clients)
        if self.elements < _LEAST_ELEMENTS:
            raise ConfigError(
                f"clients: got {clients}; the memory of this machine suffices for {room // _LEAST_ELEMENTS}"
            )
        self.most = self._whole * 3 // 4
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, user: str, more: int) -> None:
        """Hold so many bytes of weights more. Raises TransportError for too many."""
        with self._lock:
            held, in_all = self._held[user], self._held.total()
            if in_all + more > self.most or (user and held + more > self.most // 2):
                raise TransportError(
                    f"weights: got {in_all + more} bytes in all, {held + more} of this user; this server takes three "
                    f"quarters of its {self._whole} bytes, and half of that of one user"
                )
            self._held[user] += more

    def give_back(self, user: str, held: int) -> None:
        """So many bytes of weights are gone."""
        with self._lock:
            self._held[user] -= held


class ProductServer:
    """One server's end of a session."""

    def __init__(
        self, config: PrivateConfig, transport: Transport, weights: OpenWeights | None = None,
        memory: ServerMemory | None = None, user: str = "",
    ) -> None:  # fmt: skip
        """weights: of a checkpoint that this server read (None: it takes those of its client). memory: of all sessions
        of this server. user: the client's name.

        Raises ConfigError if the client runs other settings.
        """
        self._bits, self._size = config.weight_bits, BYTES[config.weight_bits]
        self._open, self._device, self._user = weights, device_for(config.device, transport.me), user
        self._memory = memory or ServerMemory(self._device)
        agree(config, transport, [CLIENT])
        self.transport = transport
        self._weights: list[_Held] = []
        self._bytes = self._characters = 0
        self._seed: Seed | None = None
        self._blocks = UsedBlocks(config.offline_folder, user)
        self._questions = Allowance(_EACH_S, _AT_ONCE)
        self.busy_since: float | None = None  # since when an answer is computed, None: none is

    def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Multiply, and answer commands, until the client stops. ready: is called before each request is read. Raises
        what ended the session otherwise, and TransportError for a request that this server does not answer.
        """
        try:
            while self._serve_one(ready):
                pass
        finally:
            self._memory.give_back(self._user, self._bytes)

    def _serve_one(self, ready: Callable[[], None]) -> bool:
        """Whether the client goes on."""
        self.transport.wait(CLIENT)
        ready()
        asked = self.transport.recv_bytes(CLIENT, REQUEST, HEADER.size + self._size * self._memory.elements)
        if asked != COMMAND:
            self._multiply(asked)
            return True
        command: ServerCommand | Stop = recv_message(self.transport, CLIENT, _COMMANDS, _MOST_COMMAND)
        if isinstance(command, Stop):
            return False
        self._obey(command)
        return True

    def _obey(self, command: ServerCommand) -> None:
        early = 0.0 if isinstance(command, LoadLines | UseLines) else self._questions.lacks()
        if early:
            time.sleep(early)
        match command:
            case MaskKey():
                self._seed = unpacked_key(self.transport.recv(CLIENT, "mask key", (KEY_BYTES,), torch.uint8))
            case BeginBlock():
                if not self._weights:
                    raise TransportError("a block began before a weight was loaded")
                send_message(self.transport, CLIENT, BlockBegun(self._blocks.add(command.block)))
            case TellWeights():
                name, weights = (None, {}) if self._open is None else (self._open.name, self._open.weights)
                shapes = {(lines.shape[0], inputs) for inputs, lines in weights.values()}
                held = WeightsHeld(name, tuple(weights), tuple(shapes), self._memory.elements)
                send_message(self.transport, CLIENT, held)
            case UseLines():
                self._weights.append(self._own(command))
            case LoadLines():
                if self._open is not None:
                    raise TransportError(f"this server multiplies by weights of {self._open.source!r} only")
                width = self._bits // 8
                size = width * elements(command.outputs, command.inputs, 1)
                self._count(command.name, 2 * size)  # it is there twice for a moment
                shape = (command.outputs, command.inputs)
                raw = self.transport.recv(CLIENT, "weight", (width * command.outputs * command.inputs,), torch.uint8)
                lines = ops.narrow_lines(raw.view(LINES[self._bits]).view(shape)).to(self._device)
                self._weights.append(_Held(command.name, command.inputs, lines))
                del raw, lines
                self._memory.give_back(self._user, size)
                self._bytes -= size
            case TellCosts():
                tell_costs(self.transport, self.transport.ledger, command)
            case _:
                assert_never(command)

    def _multiply(self, asked: bytes) -> None:
        """Answer a frame that asks for a product, by that product, packed."""
        self.busy_since = time.monotonic()
        weight, rows = self._asked(asked)
        operand = self._operand(memoryview(asked)[HEADER.size :], rows, weight.inputs)
        with self.transport.ledger.scope(weight.name):
            product = self.product(operand, weight, rows)
            self.transport.ledger.add_round("product")
            self.transport.send(CLIENT, "product", product)
        self.busy_since = None

    def _asked(self, asked: bytes) -> tuple[_Held, int]:
        """Raises TransportError for unknown weights, and for no rows or too many."""
        if len(asked) < HEADER.size:
            raise TransportError(f"request: got {len(asked)} bytes; want {HEADER.size} and what is multiplied")
        number, rows = HEADER.unpack_from(asked)
        if number >= len(self._weights):
            raise TransportError(f"weight {number} was not loaded; there are {len(self._weights)}")
        weight = self._weights[number]
        outputs = weight.lines.shape[0]
        if not 0 < elements(rows, weight.inputs, outputs) <= self._memory.elements:
            raise TransportError(
                f"rows: got {rows} for a weight of {outputs} x {weight.inputs}; want one at least, and fewer at a time"
            )
        return weight, rows

    def _operand(self, given: memoryview, rows: int, inputs: int) -> Tensor:
        """The mask of a label, or masked rows, packed. Raises TransportError where the client mixes up the servers."""
        if self._seed is not None and len(given) <= LONGEST_LABEL:
            return mask(self._seed, bytes(given).decode("ascii", "replace"), rows, inputs)
        if self._seed is not None or len(given) != self._size * rows * inputs:
            raise TransportError(
                f"request: got {len(given)} bytes for {rows} rows of {inputs}; a server with the key of masks takes "
                f"a label, another one masked rows of {self._size} bytes an element"
            )
        return torch.frombuffer(bytearray(given), dtype=torch.uint8)

    def _own(self, command: UseLines) -> _Held:
        """A weight of this server's own. Raises TransportError for another digest."""
        found = None if self._open is None else self._open.weights.get(command.digest)
        if found is None:
            raise TransportError(f"weight '{command.name}': this server holds none with the digest that was asked for")
        self._count(command.name, 0)
        inputs, lines = found
        return _Held(command.name, inputs, lines)

    def _count(self, name: str, more: int) -> None:
        """Hold bytes of a weight. Raises TransportError as `ServerMemory.take`, and for too many weights."""
        self._characters += len(name)
        if len(self._weights) >= _MOST_WEIGHTS or self._characters > _MOST_CHARACTERS:
            raise TransportError(f"weights: got more than {_MOST_WEIGHTS}, or {_MOST_CHARACTERS} characters of names")
        self._memory.take(self._user, more)
        self._bytes += more

    def product(self, x: Tensor, weight: _Held, rows: int) -> Tensor:
        """x weight^T modulo 2^40 (8-bit weights: 2^32), packed, for so many rows of elements or of their bytes."""
        self.transport.ledger.add_macs(rows * weight.inputs * weight.lines.shape[0])
        return ops.narrow_matmul(x if weight.lines.is_cpu else x.to(weight.lines.device), weight.lines, rows)


# -- which blocks of corrections a server has heard of: a client that was restored from a copy repeats no mask ---------
_MOST_BLOCKS, _MOST_BLOCKS_A_SESSION = 1 << 22, 1 << 12
"""Names that a process keeps in memory, some 500 MB, half of them of one user with a name, and those of a session."""
_known_blocks: set[bytes] = set()
_blocks_of_user: Counter[str] = Counter()
_blocks_lock = threading.Lock()


class UsedBlocks:
    """Of all sessions of this process and, in a folder, of those before it."""

    def __init__(self, folder: str | None, user: str = "") -> None:
        self._user = user
        self._folder = None if folder is None else Path(folder) / "used-blocks"
        self._added = 0

    def add(self, block: str) -> bool:
        """Keep a name; whether it is new. Raises TransportError where there is no room for it."""
        self._added += 1
        if self._added > _MOST_BLOCKS_A_SESSION:
            raise TransportError(f"blocks: got more than {_MOST_BLOCKS_A_SESSION} in a session; open another one")
        with _blocks_lock:
            if bytes.fromhex(block) in _known_blocks:
                return False
            if len(_known_blocks) >= _MOST_BLOCKS or (self._user and _blocks_of_user[self._user] >= _MOST_BLOCKS // 2):
                raise TransportError("this server has heard of too many blocks; its operator must start it again")
            _known_blocks.add(bytes.fromhex(block))
            _blocks_of_user[self._user] += 1
        if self._folder is None:
            return True
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.close(os.open(self._folder / block, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        sync_folder(self._folder)
        return True
