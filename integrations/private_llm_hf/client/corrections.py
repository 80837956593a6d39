"""Preparing for protocol "assisted": products of masks are made, checked and stored, before or while a model runs.

Who computes them (this machine, or a host that runs a server of "assisted") knows the masks and must be another than
the server that gets masked rows later. It learns how many rows there are, not when or whether they are used.
"""

import itertools
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import cast

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.assisted.corrections import BlockFacts, CorrectionFolder, Corrections
from private_llm.assisted.fixed_point import BYTES
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, CorrectionsUsedUp
from private_llm.net.ledger import size
from private_llm.protocol_facts import ASSISTED
from private_llm_hf.checkpoint.weights import Sink, WeightList, WeightSource, skeleton
from private_llm_hf.client.assisted_experts import experts_at_servers
from private_llm_hf.client.assisted_model import open_assisted
from private_llm_hf.client.assisted_rows import Sides, sent_layers, sides_of, uses_a_token
from private_llm_hf.client.launch import start_parties
from private_llm_hf.client.product_servers import ProductServers

_BLOCK_ROWS, _BLOCK_BYTES, _BLOCK_ELEMENTS = 64, 1 << 28, 1 << 24  # at most; a session loses the rest of its last block
_LOOK_S, _TOUCH_S = 0.5, 60.0  # seconds between looks at the folder, and between signs of life to who computes


def check_online(config: PrivateConfig) -> None:
    """Raises ConfigError if there is one server and no folder, CorrectionsUsedUp if the folder is empty."""
    if config.corrections is None:
        if config.endpoints == 1:
            raise ConfigError("hosts: got one server; want two, or corrections='FOLDER' from `private-llm prepare`")
    elif not CorrectionFolder(config.corrections).rows():
        raise CorrectionsUsedUp(
            f"corrections: {config.corrections} holds none; make some with `private-llm prepare MODEL --corrections "
            f"{config.corrections} --tokens N`"
        )


class Preparation:
    """Adds blocks to a folder. sizes: of every weight. uses: see `uses_a_token`."""

    def __init__(self, servers: ProductServers, folder: CorrectionFolder, sizes: list[Sides], uses: int) -> None:
        self._servers, self.folder, self._uses = servers, folder, uses
        self._bits = servers.weight_bits
        self.bytes_per_row = BYTES[self._bits] * sum(outputs for outputs, _ in sizes)
        widest = max(map(max, sizes))
        elements = min(_BLOCK_ELEMENTS, servers.most_elements)
        rows = min(_BLOCK_ROWS, _BLOCK_BYTES // self.bytes_per_row, elements // widest)
        self.rows, self._preparer = max(1, rows), next(iter(servers.config.hosts), "")

    def add(self, wanted: int, progress: Callable[[str, int, int], None]) -> None:
        """Blocks of so many rows. Raises ConfigError for a full disk, ProtocolAbort naming a wrong product."""
        done, tokens = 0, wanted // self._uses
        while done < wanted:
            rows = min(self.rows, wanted - done)
            check_space(self.folder, rows * self.bytes_per_row)
            digests = cast(Corrections, self._servers.corrections).digests
            facts = BlockFacts.fresh(rows, digests, self._preparer, self._bits)
            made = {}
            for name, products in self._servers.mask_products(rows, facts.key):
                made[name] = products
                progress(name, done // self._uses, tokens)
            self.folder.add(facts, made)
            done += rows
            progress("", done // self._uses, tokens)

    def keep(
        self, rows: int, progress: Callable[[str, int, int], None], notice: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Until it is interrupted or `stop` says so: add blocks whenever fewer rows are left."""
        touched = time.monotonic()
        while not stop():
            missing = rows - self.folder.rows()
            if missing > 0:
                more = max(missing, min(self.rows, rows))
                self.add(more, progress)
                left = self.folder.rows() // self._uses
                notice(f"made {more // self._uses} tokens; {left} are left in {self.folder.path}")
            elif time.monotonic() - touched > _TOUCH_S:
                self._servers.costs()
                touched = time.monotonic()
            else:
                time.sleep(_LOOK_S)


def check_space(folder: CorrectionFolder, wanted: int) -> None:
    """Raises ConfigError if a folder's disk has less."""
    free = shutil.disk_usage(folder.path).free
    if wanted > free:
        raise ConfigError(f"corrections: they take {size(wanted)}, and {folder.path} has {size(free)} free")


def make_corrections(
    model_class: type[PreTrainedModel], config: PretrainedConfig, weights: WeightSource, private_config: PrivateConfig,
    tokens: int, keep: int, progress: Callable[[str, int, int], None], notice: Callable[[str], None],
    stop: Callable[[], bool],
) -> int:  # fmt: skip
    """See `private_llm_hf.prepare_corrections`. Raises ConfigError for settings that fit no preparation."""
    if private_config.protocol != ASSISTED or private_config.corrections is None:
        raise ConfigError("prepare: want PrivateConfig(protocol='assisted', corrections='FOLDER')")
    if tokens < 0 or keep < 0 or not tokens + keep:
        raise ConfigError(f"tokens, keep: got {tokens} and {keep}; want one of them above 0")
    folder = CorrectionFolder.made(private_config.corrections)
    model = skeleton(model_class, config)
    of_experts = (sizes.sides() for sizes in experts_at_servers(model, private_config.experts).values())
    sizes = [*map(sides_of, sent_layers(model).values()), *itertools.chain.from_iterable(of_experts)]
    uses = uses_a_token(model_class, config)
    each = BYTES[private_config.weight_bits] * uses * sum(outputs for outputs, _ in sizes)
    more = max(tokens, keep - folder.rows() // uses)
    refills = f", and more whenever fewer than {keep} are left" if keep else ""
    notice(f"{size(each)} a token; {more} tokens, {size(each * more)} in all, in {folder.path}{refills}")
    check_space(folder, each * more)
    servers = start_parties(replace(private_config, corrections=str(folder.path)))

    def shown(wanted: WeightList, sink: Sink, local: bool) -> None:
        def put(name: str, tensor: Tensor) -> None:
            progress(f"reading {name}", 0, more)
            sink(name, tensor)

        weights(wanted, put, local)

    with closing(open_assisted(model_class, config, shown, servers, None)):
        preparation = Preparation(cast(ProductServers, servers), folder, sizes, uses)
        at_once = max(1, min(preparation.rows, more * uses) // uses)
        notice(f"in blocks of up to {at_once} tokens; what a session leaves of the block that it used last is lost")
        preparation.add(tokens * uses, progress)
        if keep:
            preparation.keep(keep * uses, progress, notice, stop)
    return folder.rows() // uses
