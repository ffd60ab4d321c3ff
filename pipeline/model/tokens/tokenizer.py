"""The tokenizer as a GGUF file carries it: token strings, their types, merges, special ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from pipeline.digest import sha256
from pipeline.errors import SourceError
from pipeline.model.tokens.tokenizer_json import FILE, as_kind, check_rules, parse_object

_CONFIG_FILE = "tokenizer_config.json"
_DEFAULT_CONFIG: Mapping[str, object] = {
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<｜end▁of▁sentence｜>",
}
"""What the released tokenizer_config.json says, for a folder that lacks it."""


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type`` (llama.h, ``llama_token_type``)."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A vocabulary by id, padded to the model's size, and how to join bytes into tokens.

    ``merges`` are "left right" pairs in rank order; ``pre`` is llama.cpp's name of the splitting
    rules; ``sha256`` is that of tokenizer.json.
    """

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    bos: int
    eos: int
    pad: int
    add_bos: bool
    add_eos: bool
    pre: str
    sha256: str


def read_tokenizer(
    tokenizer_json: bytes, tokenizer_config: bytes | None, vocab_size: int
) -> Tokenizer:
    """The tokenizer of a checkpoint, with ``vocab_size`` entries.

    Ids that have no token become ``[PADn]``, type unused. Token types follow llama.cpp's converter
    (convert_hf_to_gguf.py, ``get_vocab_base``).

    Args:
        tokenizer_json: The file of the tokenizers library.
        tokenizer_config: tokenizer_config.json; without it the released file's content is taken.
        vocab_size: Entries of the model's embedding.

    Raises:
        SourceError: A file is malformed, splits text by other rules than this model's, has ids at
            or above ``vocab_size``, or names a special token that it does not hold.
    """
    content = parse_object(tokenizer_json, FILE)
    pre = check_rules(content)
    model = as_kind(content.get("model"), dict, "model")
    entries = _entries(content, as_kind(model.get("vocab"), dict, "model.vocab"), vocab_size)
    config = (
        _DEFAULT_CONFIG
        if tokenizer_config is None
        else parse_object(tokenizer_config, _CONFIG_FILE)
    )
    ids = {text: token_id for token_id, (text, _) in entries.items()}
    eos = _special_id(config, "eos_token", ids)
    return Tokenizer(
        tokens=tuple(entries.get(n, (f"[PAD{n}]", 0))[0] for n in range(vocab_size)),
        token_types=tuple(
            int(entries.get(n, ("", TokenType.UNUSED))[1]) for n in range(vocab_size)
        ),
        merges=tuple(_merges(as_kind(model.get("merges"), list, "model.merges"))),
        bos=_special_id(config, "bos_token", ids),
        eos=eos,
        pad=eos if config.get("pad_token") is None else _special_id(config, "pad_token", ids),
        add_bos=_switch(config, "add_bos_token"),
        add_eos=_switch(config, "add_eos_token"),
        pre=pre,
        sha256=sha256(tokenizer_json),
    )


def _entries(
    content: Mapping[str, object], vocab: Mapping[str, object], vocab_size: int
) -> dict[int, tuple[str, TokenType]]:
    """Id -> (text, type). Added tokens stand over the model's own where they share an id."""
    entries: dict[int, tuple[str, TokenType]] = {}
    for text, token_id in vocab.items():
        at = _checked_id(token_id, text, vocab_size)
        if at in entries:
            raise _taken_twice(at, entries[at][0], text)
        entries[at] = (text, TokenType.NORMAL)
    added_ids: set[int] = set()
    for record in as_kind(content.get("added_tokens", []), list, "added_tokens"):
        added = as_kind(record, dict, "an entry of added_tokens")
        text = as_kind(added.get("content"), str, "the content of an added token")
        at = _checked_id(added.get("id"), text, vocab_size)
        known = entries.get(at)
        if at in added_ids or (known is not None and known[0] != text):
            raise _taken_twice(at, known[0] if known else text, text)
        added_ids.add(at)
        entries[at] = _added_entry(text, is_special=added.get("special") is True)
    return entries


def _added_entry(text: str, *, is_special: bool) -> tuple[str, TokenType]:
    looks_special = text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>"))
    if is_special or looks_special:
        return text, TokenType.CONTROL
    # The engine matches user-defined tokens against plain text, where a blank is a blank.
    return text.replace("▁", " "), TokenType.USER_DEFINED


def _checked_id(token_id: object, text: str, vocab_size: int) -> int:
    number = as_kind(token_id, int, f"the id of token {text!r}")
    if not 0 <= number < vocab_size:
        raise SourceError(
            f"token {text!r} has an id outside the model's vocabulary",
            file=FILE,
            expected=f"0 to {vocab_size - 1:,}",
            found=f"{number:,}",
            next_step="tokenizer.json and config.json must come from the same model.",
        )
    return number


def _taken_twice(token_id: int, first: str, second: str) -> SourceError:
    return SourceError(
        f"two tokens have id {token_id:,}", file=FILE, expected=repr(first), found=repr(second)
    )


def _merges(merges: list[object]) -> Iterator[str]:
    """Merges as "left right": older files store them so, newer ones as pairs."""
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(parts, list)
            or len(parts) != 2
            or not all(isinstance(part, str) and part and " " not in part for part in parts)
        ):
            raise SourceError(
                "a merge is not a pair of tokens",
                file=FILE,
                expected='"left right" or ["left", "right"]',
                found=repr(merge),
            )
        yield f"{parts[0]} {parts[1]}"


def _special_id(config: Mapping[str, object], key: str, ids: Mapping[str, int]) -> int:
    named = config.get(key)
    text = named.get("content") if isinstance(named, dict) else named
    if not isinstance(text, str) or text not in ids:
        raise SourceError(
            f"{key} names no token of tokenizer.json", file=_CONFIG_FILE, found=repr(text)
        )
    return ids[text]


def _switch(config: Mapping[str, object], key: str) -> bool:
    return as_kind(config.get(key, False), bool, key, _CONFIG_FILE)
