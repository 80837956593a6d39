"""What is known of each protocol without importing its code: one table of numbers, names and threat entries.

Settings, names of endpoints, the command line and the threat model read it; the code of a protocol stands in
`private_llm/protocols/registry.py`, whose `register` adds to both. Token sharding ("cascade")
and servers of products ("assisted") run no computation on shares: they have names that no protocol may take, and no
entry here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from private_llm.errors import ConfigError

CASCADE, ASSISTED = "cascade", "assisted"  # the names of token sharding, and of servers that multiply by public weights
CLIENT = 255  # endpoint number of the user's process


@dataclass(frozen=True)
class Threat:
    """One protocol or shortcut.

    kind: "protocol" or "shortcut". corrupt: who may be corrupt, and how. learns: (role, what that role learns).
    source: whose construction and proof, and which part is argued in this repository only. setting: how it is chosen.
    """

    name: str
    kind: str
    corrupt: str
    learns: tuple[tuple[str, str], ...]
    source: str
    setting: str


def threat(text: str) -> Threat:
    """An entry from text like its part of docs/threat-model.md: "NAME (KIND)", then paragraphs "Chosen by: ...",
    "May be corrupt: ..." (default: as the protocol), "- ROLE: WHAT" and "Source: ...", which go on in indented lines.
    """
    head, *paragraphs = re.split(r"\n(?! )", text.strip())
    told = [re.sub(r"\s*\n\s*", " ", each).partition(": ")[::2] for each in paragraphs]
    said = dict(told)
    name, kind = head.removesuffix(")").rsplit(" (", 1)
    learns = tuple((role[2:], what) for role, what in told if role.startswith("- "))
    corrupt = said.get("May be corrupt", "as the protocol")
    return Threat(name, kind, corrupt, learns, said["Source"], said["Chosen by"])


@dataclass(frozen=True)
class ProtocolFacts:
    """One protocol as its users choose it. Raises ConfigError for facts that contradict each other.

    parties: computing endpoints, a helper among them; not the client. threat: its entry in the threat model.
    helper: the party that works in preprocessing only. offline_receivers: who receives, and stores, what the helper
    sends ahead of a call. rings: sizes in bits of the rings that it works in.
    hides: False for a reference without secrecy, which needs insecure=True and hides nothing before a split.
    checks_ranges: knows debug_ranges=True, with which its end is a `CheckedPlain`. remasks: knows matmul="remask".
    key_receivers: who receives comparison keys from the helper (adder="keys"); () if the protocol has none.
    equal_parties: roles may be permuted from parallel session to parallel session. dealer: the helper stands outside
    (it is party 0, gets nothing of anybody's data, not even keys, and is called "the dealer").
    """

    name: str
    parties: int
    threat: Threat
    helper: int | None = None
    offline_receivers: tuple[int, ...] = ()
    rings: tuple[int, ...] = (64, 32)
    hides: bool = True
    checks_ranges: bool = False
    remasks: bool = False
    key_receivers: tuple[int, ...] = ()
    equal_parties: bool = False
    dealer: bool = False

    def __post_init__(self) -> None:
        if self.parties < 1:
            raise ConfigError(f"protocol {self.name!r}: got {self.parties} parties; want at least 1")
        if (self.threat.name, self.threat.kind) != (self.name, "protocol"):
            raise ConfigError(
                f"protocol {self.name!r}: its threat entry is that of {self.threat.kind} {self.threat.name!r}"
            )
        for name, receivers in (("offline_receivers", self.offline_receivers), ("key_receivers", self.key_receivers)):
            ahead, alone = (self.helper, *receivers), self.helper is None and receivers
            if alone or len(set(ahead)) < len(ahead) or not set(ahead) - {None} <= set(range(self.parties)):
                raise ConfigError(
                    f"protocol {self.name!r}: got helper {self.helper}, {name} {receivers}; want different parties of "
                    f"0 to {self.parties - 1}, and no receivers without a helper"
                )
        if self.dealer and self.helper != 0:
            raise ConfigError(f"protocol {self.name!r}: got dealer=True, helper {self.helper}; a dealer is party 0")


_TRIO = threat("""trio (protocol)
Chosen by: protocol='trio' (default)
May be corrupt: any one of the three parties, semi-honest (it follows the protocol and keeps everything it sees)
- party 0: shapes, the public shortcuts below; of values it receives only seeds of masks and keys of point functions
- party 1 or party 2: shapes, the public shortcuts below; uniformly random ring elements and bits, and keys of point
  functions
- two parties together: everything: weights, prompt and output
- a party that deviates: may change results unnoticed; privacy and correctness are then not promised
- the client: what it asked for: logits or hidden states, or only tokens or classes
- a wiretapper: frame sizes and times if links are TLS; on unencrypted links possibly everything
Source: Three-party masked sharing and its product: the Trio protocol of PIGEON (Harth-Kitzerow, Wang, Carle).
  Comparison by three-bit blocks and the two-round truncation are variants written here; the argument that each message
  is masked by a stream that its receiver lacks is in the headers of private_llm/protocols/trio/; tests check that what
  a party receives, from the client too, is uniform, that no mask comes twice and that no party holds two keys of a
  pair. No outside review yet.
""")

_QUAD = threat("""quad (protocol)
Chosen by: protocol='quad'
May be corrupt: any one of the four parties, malicious (it may send anything at any time). Security with abort: the
  others notice before anything is opened, and the client gets the right result or none
- party 0, 1 or 2: shapes, the public shortcuts below; uniformly random ring elements, bits and point keys
- party 3: shapes, the public shortcuts below; of values it receives only keys of point functions
- a party that deviates: that the session ends, which it knew beforehand: there is one verdict, which never says what
  differed. Any party can end the session, or refuse to take part
- two parties together: everything: weights, prompt and output
- the client: as in trio, also with one party's help: parties compare what they were told and got before they run it.
  Malformed keys of point functions are not noticed, which make an input that is no token. The model owner is trusted to
  share its weights properly
- a wiretapper: as in trio
Source: Trio with a second helper: the Quad protocol of PIGEON (Harth-Kitzerow, Wang, Carle). Its comparisons run here
  before every opening, on one-time authentication tags, with fresh keys and a single verdict. The check of each step
  (Trio's run mirrored between the two holders of the masks) is written here; the argument that a first lie makes two
  honest records differ, whatever the secrets are, is in the headers of private_llm/protocols/quad/; tests alter
  messages of every step and party. No outside review yet.
""")

_DEALER = threat("""dealer (protocol)
Chosen by: protocol='dealer'
May be corrupt: any one of the two parties and the dealer, semi-honest; the dealer colludes with neither party
- the dealer: masks, which it knows by design, and shapes and the public shortcuts below; no weight, token, activation
  or logit reaches it, not even masked or as a key (token lookups use one-hot rows, not the keys that trio's party 0
  gets). The shortcuts are facts about the prompt and the output, too: lengths, which beams survive, how far a cache is
  cut back, when generation stops. Of calls that were preprocessed it learns nothing but their plan
- party 1 or party 2: shapes, the public shortcuts below; uniformly random ring elements and bits
- the two parties together, or the dealer with one of them: everything: weights, prompt and output
- an endpoint that deviates: may change results unnoticed; privacy and correctness are then not promised
- the client: as in trio
- a wiretapper: frame sizes and times if links are TLS; on unencrypted links possibly everything
Source: Multiplication with the help of a dealer: Beaver (CRYPTO 1991); function-dependent masks: ASTRA and Trio, whose
  party 0 is this dealer. The dealer is a process of its own: where one of two computing parties deals (the 'trusted
  first party' of other libraries), that party knows all masks and sees all masked values, hence all data.
""")

_PLAIN = threat("""plain (protocol)
Chosen by: protocol='plain', refused without insecure=True
May be corrupt: nobody: the single party sees everything
- the party: weights, prompt and output in clear
Source: a reference with the same fixed-point arithmetic, for tests and for range checks
""")


_TABLE: dict[str, ProtocolFacts] = {}


def may_take_keys(adder: str, bandwidth_mbit: float | None) -> bool:
    """Whether these settings of `PrivateConfig` ever choose comparison keys, under a protocol that has them."""
    return adder == "keys" or (adder == "auto" and bandwidth_mbit is not None)


def protocol_names() -> tuple[str, ...]:
    """Names of all protocols that are registered."""
    return tuple(_TABLE)


def protocol_facts(name: str) -> ProtocolFacts:
    """What is known of one protocol. Raises ConfigError, with the names there are, for any other."""
    if name not in protocol_names():
        wanted = ", ".join(map(repr, (*protocol_names(), CASCADE, ASSISTED)))
        raise ConfigError(f"protocol: got {name!r}; want one of {wanted}")
    return _TABLE[name]


def hides(name: str) -> bool:
    """Whether a protocol protects anything: all do but references. Raises ConfigError for an unknown one."""
    return name in (CASCADE, ASSISTED) or protocol_facts(name).hides


def names_where(holds: Callable[[ProtocolFacts], bool]) -> str:
    """The protocols of which something holds, for messages: "'trio', 'quad' or 'dealer'"."""
    names = [repr(facts.name) for facts in _TABLE.values() if holds(facts)]
    return " or ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def add_facts(facts: ProtocolFacts) -> None:
    """Put a protocol into the table. Raises ConfigError for a name that is taken."""
    if facts.name in (*_TABLE, CASCADE, ASSISTED):
        raise ConfigError(f"protocol {facts.name!r} is registered already; want another name")
    _TABLE[facts.name] = facts


def remove_facts(name: str) -> None:
    """Take a protocol out of the table. Raises ConfigError for an unknown one."""
    del _TABLE[protocol_facts(name).name]


for _facts in (
    ProtocolFacts("trio", 3, _TRIO, helper=0, offline_receivers=(2,), key_receivers=(1, 2), equal_parties=True),
    ProtocolFacts("quad", 4, _QUAD, helper=3, offline_receivers=(0, 2), equal_parties=True),
    ProtocolFacts(
        "dealer", 3, _DEALER, helper=0, offline_receivers=(2,), key_receivers=(1, 2), remasks=True, dealer=True
    ),
    ProtocolFacts("plain", 1, _PLAIN, hides=False, checks_ranges=True),
):
    add_facts(_facts)
