"""The first layers under secret sharing, the rest on the nodes of a sharding plan (Cascade, appendix A).

Parties run the model up to a layer and stop there with shares of its hidden states. Each CompNode gets the shares of
its own rows, opens them, and goes on from that layer; no node sees a token or an embedding, no party sees anything.
What each CompNode opens is [batch, rows, hidden] ring elements: for trio and dealer two elements each, for quad two
and two digests; all slices together cost as much as opening the states to one endpoint.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.parallel_sessions import node_links
from private_llm.net.transport import Transport
from private_llm.protocols.session import join_as_client
from private_llm_hf.checkpoint.model_spec import ModelSpec, describe, model_class
from private_llm_hf.checkpoint.weights import Sink
from private_llm_hf.client.costs import Costs
from private_llm_hf.client.nodes import Nodes, NodeStep, join_nodes
from private_llm_hf.client.parties import Parties
from private_llm_hf.client.session_client import Secret
from private_llm_hf.token_sharding.cut import Cut
from private_llm_hf.wire.commands import CacheEdit, Call, CallOrEdit, Description, Forward


def join_split(config: PrivateConfig, transport: Transport, shutdown: Callable[[], None]) -> "SplitParties":
    """The client's end, after agreeing with every party and every node."""
    nodes = join_nodes(config, node_links(transport, config.parties, config.endpoints - config.parties), shutdown)
    return SplitParties(config, transport, nodes, shutdown)


class SplitParties(Parties):
    """The parties of the first layers, with the nodes of the rest after them."""

    def __init__(self, config: PrivateConfig, transport: Transport, nodes: Nodes, shutdown: Callable[[], None]) -> None:
        super().__init__(config, transport, join_as_client(config, transport), shutdown)
        self._nodes = nodes

    def use_stored(self, description: Description, mine: Callable[[], str | None]) -> bool:
        """Parties and nodes get the model from the client."""
        return False

    @contextmanager
    def loading(self, description: Description, stop_after: str | None = None) -> Iterator[Sink]:
        """Public weights: to the parties those up to the cut, to the CompNodes the others."""
        kind = model_class(description.class_)
        config = kind.config_class.from_dict(dict(description.config))
        cut = Cut.of(kind, config, self.config.split or 0)
        short = cut.shortened(config)
        before = replace(describe(kind, short), ranges=description.ranges)
        wanted = ModelSpec.of(kind, short).shared.shapes
        last = f"{cut.path}.{cut.count - 1}"
        with super().loading(before, last) as parties, self._nodes.loading(description, cut=cut) as nodes:

            def sink(name: str, tensor: Tensor) -> None:
                if name in wanted:
                    parties(name, tensor)
                if not cut.belongs_before(name):
                    nodes(name, tensor)

            yield sink

    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """As `Parties.forward`: the parties compute and send rows to nodes, which go on and answer."""
        with self.alone():
            step = self._nodes.step(call)
            command = split_forward(call, step, self.config.parties)
            with self._call():
                self.ask(command.call, secrets, command.slices)
                checked = self.opened()[1]
                kind, opened = self._nodes.run(step, "states", lambda node, rows: None)
                return kind, {**opened, **checked}

    def command(self, edit: CacheEdit) -> None:
        """Cache management on both sides."""
        super().command(edit)
        self._nodes.command(edit)

    def preprocess(self, entries: list[CallOrEdit]) -> int:
        """Refused."""
        raise ConfigError("preprocess: not before a split; want a model that runs wholly under its protocol")

    def release(self, handle: int) -> None:
        """Forget a handle on both sides with the next call."""
        super().release(handle)
        self._nodes.release(handle)

    def stop(self) -> None:
        """Tell parties and nodes that the session ends."""
        super().stop()
        self._nodes.stop()

    def costs(self, reset: bool = False) -> Costs:
        """Of parties, client and nodes."""
        first, rest = super().costs(reset), self._nodes.costs(reset)
        return Costs((*first.ledgers, *rest.ledgers[:-1]), first.helpers)  # the last ledger is the client's again


def split_forward(call: Call, step: NodeStep, parties: int) -> Forward:
    """What the parties before a split are asked: each CompNode after them gets its rows, and nothing is opened."""
    slices = tuple((parties + node, tuple(rows)) for node, rows in step.rows.items())
    return Forward(replace(call, outputs=()), slices=slices)
