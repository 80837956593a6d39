"""Parallel sessions: independent sessions side by side, so that one computes while another sends or waits.

Each has links, keys and mask streams of its own, and with `rotate_roles` a role assignment: party p plays the role
assignment[p]. The first n assignments are rotations, so that after n parallel sessions every party has computed, sent
and received the same; after all n! every link has carried the same in both directions.

Security: what a party sees in one is masked by streams of that one alone, and weights are shared anew for every
assignment (in one sharing a party that played two roles would hold what two parties may not hold together). So a party
sees independent uniform values, as in sessions one after the other.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from private_llm.net.direct import BarrierEnd, End
from private_llm.net.transport import CLIENT, PassingTransport, Transport

RoleAssignment = tuple[int, ...]  # the role of each party, by its number


@functools.cache
def assignments(parties: int) -> tuple[RoleAssignment, ...]:
    """All assignments: for each order of the roles 1.. after role 0, its rotations."""
    found = []
    for rest in itertools.permutations(range(1, parties)):
        order = (0, *rest)
        found += [tuple(order[(party - turn) % parties] for party in range(parties)) for turn in range(parties)]
    return tuple(found)


def assignment(parties: int, parallel_session: int, rotate_roles: bool) -> RoleAssignment:
    """Who plays which role in a parallel session: with `rotate_roles` another assignment in each."""
    every = assignments(parties)
    return every[parallel_session % len(every)] if rotate_roles else tuple(range(parties))


class RoleTransport(PassingTransport):
    """Links addressed by role (`cast`: each endpoint's but the client's); `inner` has the numbers and the ledger."""

    def __init__(self, inner: Transport, cast: Mapping[int, int]) -> None:
        roles = {**cast, CLIENT: CLIENT}
        self._party = {role: party for party, role in roles.items()}
        super().__init__(inner, roles[inner.me], self._party.__getitem__)

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """As the interface says; booked under the party's own number."""
        self._inner.send(self._party[to], tag, payload)

    def ends(self, endpoint: int) -> Sequence[End]:
        """Those of the party that plays this role."""
        return self._inner.ends(self._party[endpoint]) if endpoint in self._party else ()

    def barrier_end(self) -> BarrierEnd | None:
        """As the inner transport; parties are numbered by their roles."""
        end = self._inner.barrier_end()
        if end is None:
            return None
        aside, silent, party = end.aside, end.silent, self._party
        return replace(end, me=self.me, aside=lambda role: aside(party[role]), silent=lambda role: silent(party[role]))

    def carries_device_tensors(self, to: int) -> bool:
        """Whether the party that plays this role takes them."""
        return self._inner.carries_device_tensors(self._party[to])


def parallel_session_links(transport: Transport, parties: int, parallel_session: int, rotate_roles: bool) -> Transport:
    """The links of one parallel session, addressed by role."""
    cast = assignment(parties, parallel_session, rotate_roles)
    links = transport.parallel_session(parallel_session)
    return links if cast == tuple(range(parties)) else RoleTransport(links, dict(enumerate(cast)))


def node_links(transport: Transport, parties: int, nodes: int) -> Transport:
    """The links among nodes that are numbered after `parties` parties, addressed by their own numbers from 0."""
    return RoleTransport(transport, {parties + node: node for node in range(nodes)}) if parties else transport
