"""Seeded changes of valid inputs: of bytes, as a list of edits that can be written down, and of JSON values.

Nothing here draws from anything but the `Random` that is passed, so a case is made again from its seed and number.
"""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

Edit = tuple[str, float, str]
"""What happens (see `edited`), where (0 to 1 of the length), and the bytes for it (hexadecimal)."""

_PLACES = ("flip", "set", "insert", "cut", "repeat", "drop", "number")
NUMBERS = (0, 1, -1, 2, 7, 8, 63, 64, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53, 1 << 62,
           (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**40, -(1 << 63), -(10**19))  # fmt: skip
TEXTS = ("", "\0", "\n", "\r\nforged line", "\x1b[2J", "\ud800", "\udfff", "é", "e\u0301", "\u202e", "\ufeff", "𝕏",
         "a" * 300, "[/x] [bold", "%s%n", "{}", "__class__", "../../etc/passwd", "NaN", "-0", "1e400", "true", "\u2028",
         "\U0010ffff")  # fmt: skip


def edits(random: Random, most: int = 3) -> list[Edit]:
    """None to `most` edits."""
    made = []
    for _ in range(random.randint(0, most)):
        kind = random.choice(_PLACES)
        body = random.randbytes(random.choice((1, 1, 2, 4, 8, 32, 100)))
        if kind == "number":
            body = struct.pack(random.choice((">Q", "<Q")), random.choice(NUMBERS) & (1 << 64) - 1)
        made.append((kind, random.random(), body.hex()))
    return made


def edited(raw: bytes, changes: list[Edit]) -> bytes:
    """`raw` after the changes: a bit flipped, bytes set, inserted, the rest cut off, a piece twice, or a piece less."""
    for kind, place, text in changes:
        body, at = bytes.fromhex(text), int(place * len(raw))
        if kind == "flip" and raw:
            raw = raw[:at] + bytes([raw[at] ^ 1 << body[0] % 8]) + raw[at + 1 :]
        elif kind in ("set", "number"):
            raw = raw[:at] + body + raw[at + len(body) :]
        elif kind == "insert":
            raw = raw[:at] + body + raw[at:]
        elif kind == "cut":
            raw = raw[:at]
        elif kind == "repeat":
            raw = raw[:at] + raw[at : at + 4 * len(body)] + raw[at:]
        elif kind == "drop":
            raw = raw[:at] + raw[at + len(body) :]
    return raw


def any_text(random: Random, most: int = 12) -> str:
    """A text of any characters, control characters and lone surrogates among them."""
    if random.random() < 0.5:
        return random.choice(TEXTS)
    tops = (0x80, 0x300, 0x3000, 0x10000, 0x110000)
    return "".join(chr(random.randrange(random.choice(tops))) for _ in range(random.randrange(most)))


def any_value(random: Random, depth: int = 3) -> object:
    """Any JSON value, `depth` levels deep at most."""
    kind = random.randrange(9 if depth else 6)
    if kind < 6:
        simple = (None, random.random() < 0.5, random.choice(NUMBERS), random.uniform(-1e9, 1e9), any_text(random))
        return simple[min(kind, 4)]
    inner = [any_value(random, depth - 1) for _ in range(random.randrange(4))]
    if kind == 8:
        return {"__tensor__": [random.choice(["int64", "int32", "bool", "float32"]), [len(inner)], inner]}
    return inner if kind == 6 else {any_text(random): value for value in inner}


_MANY = 100
"""Places of a value that grows no further by repetition: repeated repetitions would fill the memory."""


def changed(random: Random, value: object) -> object:
    """A JSON value with one place changed: another value there, a key or an item more or less, or a deep nest."""
    places = _places(value)
    holder, key = random.choice(places) if places else (None, None)
    if holder is None or random.random() < 0.03:
        return any_value(random)
    act = random.randrange(8)
    if act < 4:
        holder[key] = any_value(random)
    elif act == 4:
        del holder[key]
    elif act == 5 and isinstance(holder, dict):
        holder[any_text(random)] = any_value(random)
    elif act == 5:
        holder.extend([holder[key]] * random.choice((1, 3, 300 if len(places) < _MANY else 1)))
    elif act == 6:
        other, name = random.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    else:
        holder[key] = nested(random.choice((1, 5, 50, 500)), random.random() < 0.5)
    return value


def nested(depth: int, objects: bool = False) -> object:
    """Lists in lists, or objects in objects."""
    made: object = []
    for _ in range(depth):
        made = {"a": made} if objects else [made]
    return made


def _places(value: object) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and its key or number there."""
    found: list[tuple[Any, Any]] = []
    open_ = [value]
    while open_:
        each = open_.pop()
        pairs = each.items() if isinstance(each, dict) else enumerate(each) if isinstance(each, list) else ()
        for key, inner in pairs:
            found.append((each, key))
            open_.append(inner)
    return found


_WORDS = ("NaN", "-Infinity", "1e999", "-1e999", "1E+400", "9" * 400, "9" * 5000, "0.1e-400", "-0", "01", "1.", "+1",
          "tru", '"\\ud800"', '"\\u0000"', '"\\x"', "'a'", "[" * 2000, '{"a":' * 2000, "[,]", "{,}", "/**/1",
          "1e1e1")  # fmt: skip


def encoded(random: Random, value: object) -> bytes:
    """JSON as bytes: mostly proper, sometimes with words that JSON lacks, double keys, other encodings, or edited."""
    text = json.dumps(value, ensure_ascii=random.random() < 0.8, separators=random.choice(((",", ":"), (", ", ": "))))
    way = random.randrange(12)
    if way == 0:
        cuts = [at for at, letter in enumerate(text) if letter in ":,["]
        at = random.choice(cuts) + 1 if cuts else 0
        end = next((place for place in range(at, len(text)) if text[place] in ",]}"), len(text))
        text = text[:at] + random.choice(_WORDS) + text[end:]
    elif way == 1 and isinstance(value, dict) and value:
        key = random.choice(list(value))
        text = "{" + f"{json.dumps(key)}:{json.dumps(any_value(random))}," + text[1:]
    raw = text.encode("utf-16" if way == 2 else "utf-32" if way == 3 else "utf-8", "surrogatepass")
    return edited(raw, edits(random)) if way in (4, 5) else raw
