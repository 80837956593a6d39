"""What lookups and the client's messages cost, by formula: no choice of a way depends on it."""

from __future__ import annotations

from private_llm.net.ledger import Cost
from private_llm.net.transport import CLIENT
from private_llm.protocols.quad.client import DIGEST_BYTES
from private_llm.protocols.registry import dealer_prices, quad_prices, trio_prices
from private_llm.ring.dpf import key_words
from private_llm.ring.ring import Ring

_PRICES = {"trio": trio_prices, "dealer": dealer_prices, "quad": quad_prices}


def lookup_price(protocol: str, ring: Ring, count: int, width: int, public: bool = False) -> Cost:
    """`lookup` of `count` indices in a table of `width` columns: one finish; one-hot rows of a public one are local."""
    if protocol == "plain" or (protocol == "dealer" and public):
        return Cost()
    return _PRICES[protocol].finish(ring, count * width, 0, helped=not public)


def index_price(protocol: str, ring: Ring, count: int, domain: int) -> Cost:
    """`receive_index`: keys of point functions to each party, one-hot rows to two, or in the clear."""
    if protocol == "plain":
        return Cost({(CLIENT, 0): 8 * count})
    if protocol == "dealer":
        return Cost({(CLIENT, party): count * domain * ring.bytes for party in (1, 2)})
    keys, parties = {"trio": (2, 3), "quad": (4, 4)}[protocol]
    return Cost({(CLIENT, party): keys * 8 * count * key_words(domain) for party in range(parties)})


def reveal_price(protocol: str, ring: Ring, count: int) -> Cost:
    """`reveal_to_client`: an element from each of two parties; in quad `verify` first, and two digests."""
    if protocol == "trio":
        return Cost({(1, CLIENT): count * ring.bytes, (2, CLIENT): count * ring.bytes})
    opened = {(party, CLIENT): count * ring.bytes for party in (0, 1)}
    return quad_prices.verify() + Cost({**opened, (2, CLIENT): DIGEST_BYTES, (3, CLIENT): DIGEST_BYTES})
