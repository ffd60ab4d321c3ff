"""Raw token id to the engram's own id, from tokenizer.json alone: tokens alike in text are one.

Rule: DeepSeek-V4.1-Flash inference/engram.py (CompressedTokenizer). Written out here over `json`
and `unicodedata`, without the tokenizers library that the rule is usually expressed with.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)
}
"""How byte-level BPE writes bytes as characters (openai/gpt-2, src/encoder.py)."""


def token_map(tokenizer_json: Path, vocab_size: int) -> list[int]:
    """Compressed id of every raw id; new ids count up in the order in which texts first appear."""
    spelled = dict(_spellings(json.loads(tokenizer_json.read_bytes())))
    seen: dict[str, int] = {}
    return [seen.setdefault(_key(spelled.get(n, "")), len(seen)) for n in range(vocab_size)]


def _spellings(tokenizer: dict) -> Iterator[tuple[int, str]]:
    for token, number in tokenizer["model"]["vocab"].items():
        yield number, token
    for added in tokenizer["added_tokens"]:
        yield added["id"], added["content"]


def _key(token: str) -> str:
    text = _decoded(token)
    return token if "\ufffd" in text else (normalised(text) or text)


def _decoded(token: str) -> str:
    if all(character in BYTES for character in token):
        return bytes(BYTES[character] for character in token).decode(errors="replace")
    return token


def normalised(text: str) -> str:
    """Without case, accents, and differences of blanks; a lone blank stays one."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c.lower() for c in text if not unicodedata.category(c).startswith("M"))
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip(_BLANKS)


_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""White space as Unicode has it; `str.strip` takes a few control characters more."""
