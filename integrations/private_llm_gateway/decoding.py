"""Tokens as bytes and as text: what each one adds, and where in a text it begins.

Tokenizers of bytes (GPT-2's kind) tell each token's bytes by its name. Others are asked what a token adds after
another one. A token may hold a part of a character only: the character shows with the token that completes it.
"""

import codecs
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenizers import decoders

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE = {chr(byte): byte for byte in _PRINTED}
_BYTE |= {chr(0x100 + at): byte for at, byte in enumerate(sorted({*range(0x100)} - {*_PRINTED}))}
"""The byte of each character in a token's name, as GPT-2 writes them."""
_UNKNOWN = "\ufffd"  # what stands in a text for bytes that are no character


class TokenTexts:
    """What each token of a tokenizer adds to a text. kept: special tokens whose names belong to it."""

    def __init__(self, tokenizer: Any, kept: frozenset[int] = frozenset()) -> None:  # noqa: ANN401
        self._tokenizer, self.kept = tokenizer, kept
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.of_bytes = isinstance(getattr(backend, "decoder", None), decoders.ByteLevel)
        self._bytes: dict[int, bytes | None] = {}

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones left out."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def bytes_of(self, token: int) -> bytes | None:
        """What a token adds to a text after another one; None for special tokens, and where nobody knows."""
        if token not in self._bytes:
            self._bytes[token] = None if token in self.special else self._find(token)
        return self._bytes[token]

    def name_of(self, token: int) -> str:
        """The text that a token adds; `bytes:\\xc3` for a part of a character, as OpenAI writes it; else its name."""
        added = self.bytes_of(token)
        if not added:
            return str(self._tokenizer.convert_ids_to_tokens(token) or f"<token {token}>")
        try:
            return added.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in added)

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are left out of texts."""
        flagged = getattr(self._tokenizer, "added_tokens_decoder", {})
        found = frozenset(self._tokenizer.all_special_ids) | {at for at, token in flagged.items() if token.special}
        return found - self.kept

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        return ids, self.decode(ids)

    def _find(self, token: int) -> bytes | None:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # models have more logits than their tokenizers have tokens
            return None
        if token in self.kept:
            return str(name).encode()
        if self.of_bytes:
            known = all(character in _BYTE for character in name)
            return bytes(_BYTE[character] for character in name) if known else str(name).encode()
        ids, before = self._anchor
        added = self.decode([*ids, token])[len(before) :]
        one = re.fullmatch(r"<0x([0-9A-F]{2})>", name)
        if one and added != name:
            return bytes.fromhex(one[1])
        return None if _UNKNOWN in added else added.encode()


class DecodedText:
    """The text of tokens while they come. text: all whole characters so far."""

    def __init__(self, texts: TokenTexts, tokens: Iterable[int] = ()) -> None:
        self.text = ""
        self._texts = texts
        self._codec = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []
        self._from = self._read = 0
        for token in tokens:
            self.take(token)

    def take(self, token: int) -> int:
        """The next token. Returns where its text begins: at the first character of which it holds a part."""
        if self._texts.of_bytes:
            return self._take_bytes(self._texts.bytes_of(token) or b"")
        if token in self._texts.kept:
            self.text += self._undecoded(whole=True)
            self._tokens, self._from, self._read = [], 0, 0
        at = len(self.text)
        if token in self._texts.kept:
            self.text += (self._texts.bytes_of(token) or b"").decode()
            return at
        self._tokens.append(token)
        self.text += self._undecoded(whole=False)
        return at

    def end(self) -> None:
        """No token follows: what is left of a character becomes a replacement character."""
        self.text += self._codec.decode(b"", final=True) if self._texts.of_bytes else self._undecoded(whole=True)

    def _take_bytes(self, added: bytes) -> int:
        at, begun, first = len(self.text), self._codec.getstate()[0], added[:1]
        found = self._codec.decode(first)
        broken = begun and found.startswith(_UNKNOWN) and begun + first != _UNKNOWN.encode()
        self.text += found + self._codec.decode(added[1:])
        return at + bool(broken)

    def _undecoded(self, whole: bool) -> str:
        """Text of tokens not decoded yet, after some that were (tokenizers strip). whole: half characters, too."""
        before = self._texts.decode(self._tokens[self._from : self._read])
        now = self._texts.decode(self._tokens[self._from :])
        if len(now) <= len(before) or (now.endswith(_UNKNOWN) and not whole):
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return now[len(before) :]
