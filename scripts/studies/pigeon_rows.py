"""PIGEON's own works, with what its C++ engine takes for them and what this library aims at.

REFERENCE: HPMPC (commit 29c3c54, g++ 12.2 -Ofast -march=native, 512-bit vectors, one process per party, parallel-prefix
adder, preprocessing merged with the online phase), median of three runs on two cores of a 2.6 GHz Xeon with AVX-512 and
VAES, as docs/studies/pigeon.md says; the better of two quiet series where there are two. Its figures are for
dummy weights, 5 fractional bits, truncation that may wrap, constant seeds, and Quad's check after the outputs are
opened; Quad's with one instruction repaired that made it ten times slower on this processor. Bytes are over all links.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import scripts_folder  # noqa: F401 - finds `bench`
from bench.catalogue import make
from bench.measure import measure
from bench.rows import Row
from bench.whole import WholeWork
from bench.work import Shape, Work

from private_llm.config import PrivateConfig

Party = Literal["trio", "quad"]
REFERENCE_MACHINE = "two cores of a 2.6 GHz Xeon with AVX-512 and VAES"
"""Where the reference's figures were taken; nobody took them on the machine of whoever runs this table."""
PROTOCOLS: tuple[Party, ...] = ("trio", "quad")


@dataclass(frozen=True)
class Figure:
    """Seconds and megabytes (10^6 bytes over all links) of one work; None: nobody said."""

    seconds: float | None = None
    megabytes: float | None = None


@dataclass(frozen=True)
class Line:
    """One line of the table: a work of the catalogue in a ring of 64 or 32 bits, and both columns of figures.

    work, shape: as in the catalogue. reference, aim: empty where nobody measured or wished.
    """

    label: str
    work: str
    shape: Shape
    ring: Literal[64, 32]
    reference: dict[Party, Figure] = field(default_factory=dict)
    aim: dict[Party, Figure] = field(default_factory=dict)


def _both(trio: Figure, quad: Figure) -> dict[Party, Figure]:
    return {"trio": trio, "quad": quad}


_IMAGES, _DIGITS = (16, 3, 32, 32), (16, 1, 28, 28)
LINES: tuple[Line, ...] = (
    Line(
        "2^20 ReLU", "relu", (1 << 20,), 64,
        _both(Figure(0.174, 113.1), Figure(0.490, 194.1)), _both(Figure(0.17, 95.0), Figure(0.45, 175.0)),
    ),
    Line(
        "2^20 ReLU", "relu", (1 << 20,), 32,
        _both(Figure(0.097, 54.8), Figure(0.269, 94.1)), _both(Figure(0.10, 48.0), Figure(0.25)),
    ),
    Line(
        "matmul 128^3 x 20, 8 side by side", "matmuls", (8, 128, 20), 64,
        _both(Figure(0.294, 62.9), Figure(0.656, 104.9)), _both(Figure(0.15), Figure(0.35)),
    ),
    Line(
        "matmul 128^3 x 20, 16 side by side", "matmuls", (16, 128, 20), 32,
        _both(Figure(0.290, 62.9), Figure(0.596, 104.9)), _both(Figure(0.10), Figure(0.20)),
    ),
    Line(
        "LeNet-5, 28 x 28, batch 16", "lenet", _DIGITS, 32,
        _both(Figure(0.0353, 6.8), Figure(0.0695, 11.7)), _both(Figure(0.05), Figure(0.10)),
    ),
    Line(
        "AlexNet, CIFAR, batch 16", "alexnet", _IMAGES, 32,
        _both(Figure(1.103, 132.2), Figure(2.048, 226.1)), _both(Figure(0.5), Figure(1.0)),
    ),
    Line(
        "VGG-16, CIFAR, batch 16", "vgg16", _IMAGES, 32,
        _both(Figure(2.288, 286.9), Figure(4.599, 490.4)), _both(Figure(1.1), Figure(2.2)),
    ),
)  # fmt: skip
"""Shapes as the reference ran them: some are independent matrices side by side. Aims: from the project's plan."""

_LARGE_IMAGE = (1, 3, 224, 224, 64)
IMAGENET: tuple[Line, ...] = (
    Line("ResNet-50, ImageNet, batch 1", "resnet50", _LARGE_IMAGE, 32),
    Line("VGG-16, ImageNet, batch 1", "vgg16-imagenet", _LARGE_IMAGE, 32),
)
"""The networks of its Tables 4 to 6, with average pools as there. With parties as threads they take 1.8 and 5.6 GB
under trio, 2.4 and 10.7 GB under quad."""

_FRACTION = {64: 18, 32: 12}


@dataclass(frozen=True)
class Job:
    """A line under one protocol, ready to be measured."""

    line: Line
    protocol: Party
    work: Work | WholeWork
    config: PrivateConfig

    @property
    def modes(self) -> tuple[PrivateConfig, ...]:
        """Settings to try: parties as asked for, or with party_mode="auto" as threads and as processes."""
        if self.config.party_mode != "auto":
            return (self.config,)
        return (replace(self.config, party_mode="threads"), replace(self.config, party_mode="processes"))

    def run(self, repeat: int, progress: Callable[[], None] = lambda: None) -> Row:
        """Measure; of several modes the faster one counts (its row says which it was)."""
        rows = [measure(self.work, config, repeat, progress=progress) for config in self.modes]
        return min(rows, key=lambda row: row.seconds["median"])

    def to_dict(self, row: Row) -> dict[str, Any]:
        """The row as JSON, with the figures that it is compared with (None at other shapes than theirs)."""
        label = f"{row.name} {'x'.join(map(str, row.shape))}"
        compared = dict.fromkeys(("aim_seconds", "aim_bytes", "reference_seconds", "reference_bytes"))
        if self.comparable:
            label = self.line.label
            aim, reference = (found.get(self.protocol, Figure()) for found in (self.line.aim, self.line.reference))
            compared = {
                "aim_seconds": aim.seconds, "aim_bytes": _bytes(aim),
                "reference_seconds": reference.seconds, "reference_bytes": _bytes(reference),
            }  # fmt: skip
        return {
            **row.to_dict(), "name": f"pigeon-{row.name}", "label": label, **compared,
            "reference_machine": REFERENCE_MACHINE,
        }  # fmt: skip

    @property
    def comparable(self) -> bool:
        """Whether shape and circuit are the reference's."""
        config = self.config
        circuit = (config.adder, config.relu_bits, config.relu_low)
        return self.work.shape == self.line.shape and circuit == ("prefix", config.ring, 0)


def jobs(
    config: PrivateConfig, protocols: Sequence[Party] = PROTOCOLS, tiny: bool = False, imagenet: bool = False
) -> Iterator[Job]:
    """Every line under every protocol, with the other settings of `config`.

    Comparisons run the parallel-prefix adder over the whole ring, unless `config` names another adder or key bits.
    tiny: smallest shapes, parties as threads unless `config` says otherwise. imagenet: the large networks, too.
    """
    adder: Literal["prefix", "ripple"] = "ripple" if config.adder == "ripple" else "prefix"
    mode: Literal["auto", "threads", "processes", "remote", "distributed"] = config.party_mode
    if tiny and mode == "auto":
        mode = "threads"
    for protocol in protocols:
        for line in (*LINES, *IMAGENET) if imagenet else LINES:
            settings = replace(
                config, protocol=protocol, insecure=False, ring=line.ring, frac_bits=_FRACTION[line.ring],
                relu_bits=config.relu_bits or line.ring, adder=adder, party_mode=mode, calibrate=False,
            )  # fmt: skip
            yield Job(line, protocol, make(line.work, None if tiny else line.shape, tiny=tiny), settings)


def _bytes(figure: Figure) -> int | None:
    return None if figure.megabytes is None else round(figure.megabytes * 1e6)
