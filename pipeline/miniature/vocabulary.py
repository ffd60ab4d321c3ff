"""A byte-level BPE tokenizer.json of a chosen size, built by rule instead of training.

Words are strings of syllables, each the merge of two shorter tokens, so every word can be reached
by the merges. Capitalised words and words after a blank add tokens that the engram's compressed
vocabulary does not tell from the bare word: that is how both of its sizes are met exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from pipeline.errors import ConfigError
from pipeline.miniature.released import JsonObject
from pipeline.model.tokens.token_map import compress_vocabulary

RELEASED_VOCAB = 129_280
RELEASED_COMPRESSED = 99_092
"""Distinct compressed ids of the released tokenizers."""

_CONTROL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_FIRST_ADDED = 128_000

_NAMED = {
    128_800: "<｜fim▁hole｜>",
    128_801: "<｜fim▁begin｜>",
    128_802: "<｜fim▁end｜>",
    128_803: "<｜User｜>",
    128_804: "<｜Assistant｜>",
    128_821: "<think>",
    128_822: "</think>",
    128_825: "｜DSML｜",
}
"""Tokens with a meaning of their own in both releases, by their released id."""

_NAMED_BY_RELEASE = {
    "v4.1-flash": {128_799: "<｜System｜>", 129_264: "<｜deepseek_image｜>"},
    "v4-flash-0731": {
        128_799: "<｜place▁holder▁no▁799｜>",
        129_264: "<｜image2｜>",
        129_279: "<｜image｜>",
    },
}

_ROLES_BY_RELEASE = {
    "v4.1-flash": {"image": "<｜deepseek_image｜>", "draft_mask": "<｜System｜>"},
    "v4-flash-0731": {"draft_mask": "<｜place▁holder▁no▁799｜>"},
}
"""The named tokens whose ids stand in config.json."""

_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
        "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
        "\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
)
"""The pre-tokenizer of both releases: numbers, CJK runs, then words, marks and blanks."""

_BLANK = "Ġ"
"""How byte-level BPE writes a blank."""


def released_vocabulary(release: str) -> bytes:
    """A tokenizer.json with the released number of tokens, special ids and compressed ids."""
    named = _NAMED | _NAMED_BY_RELEASE[release]
    added = {
        token_id: named.get(token_id, f"<｜place▁holder▁no▁{token_id - _FIRST_ADDED}｜>")
        for token_id in range(_FIRST_ADDED, RELEASED_VOCAB)
    }
    return _meet_both_sizes(added)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer.json, and the ids that config.json names by their role.

    Roles: ``draft_mask``, and in V4.1 ``image``.
    """

    tokenizer: bytes
    ids: Mapping[str, int]


def small_vocabulary(vocab_size: int, release: str) -> Vocabulary:
    """``vocab_size`` tokens, the last of which are the named ones of ``release``.

    Raises:
        ConfigError: ``vocab_size`` does not hold the bytes and the named tokens.
    """
    names = [name for _, name in sorted((_NAMED | _NAMED_BY_RELEASE[release]).items())]
    first = vocab_size - len(names)
    n_merges = first - len(_CONTROL) - len(_byte_tokens())
    if n_merges < 0:
        raise ConfigError("vocab_size is too low for the bytes and the named tokens")
    added = dict(enumerate(names, first))
    ids = {name: token_id for token_id, name in added.items()}
    n_variants = n_merges // 4
    return Vocabulary(
        tokenizer=_tokenizer_json(added, n_merges - n_variants, n_variants),
        ids={role: ids[name] for role, name in _ROLES_BY_RELEASE[release].items()},
    )


def _meet_both_sizes(added: Mapping[int, str]) -> bytes:
    """Choose bare words and variants so that both the vocabulary and its compressed size fit."""
    n_before = len(_CONTROL) + len(_byte_tokens())
    n_without_words = n_before + len(added)
    bare = _tokenizer_json(dict(enumerate(added.values(), n_before)), 0, 0)
    n_distinct = int(compress_vocabulary(bare, n_without_words).max()) + 1
    n_words = RELEASED_COMPRESSED - n_distinct
    return _tokenizer_json(added, n_words, RELEASED_VOCAB - n_without_words - n_words)


def _tokenizer_json(added: Mapping[int, str], n_words: int, n_variants: int) -> bytes:
    merges = [*islice(_words(), n_words), *islice(_variants(), n_variants)]
    tokens = chain(_CONTROL, _byte_tokens(), (left + right for left, right in merges))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    document: JsonObject = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            *(_added_token(token_id, name) for token_id, name in enumerate(_CONTROL)),
            *(_added_token(token_id, name) for token_id, name in added.items()),
        ],
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pre_tokenizers()},
        "post_processor": _byte_level(trim_offsets=False),
        "decoder": _byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    return json.dumps(document, ensure_ascii=False, indent=2).encode()


def _byte_tokens() -> list[str]:
    """How byte-level BPE writes the 256 bytes: printable ones as themselves, the rest from U+0100.

    The table is that of the GPT-2 tokenizer (openai/gpt-2, src/encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    return [chr(byte) for byte in printable] + [chr(0x100 + n) for n in range(others)]


def _words() -> Iterator[tuple[str, str]]:
    """Merges of lower-case words, shorter ones first; both halves of each exist before it."""
    syllables = [(first, second) for first in "bcdfghjklmnprstvwz" for second in "aeiou"]
    yield from syllables
    tails = ["".join(syllable) for syllable in syllables]
    heads = tails
    while True:
        longer = [(head, tail) for head in heads for tail in tails]
        yield from longer
        heads = [head + tail for head, tail in longer]


def _variants() -> Iterator[tuple[str, str]]:
    """For each word in turn: the word after a blank, and the word with a capital."""
    for head, tail in _words():
        yield _BLANK, head + tail
        yield head.capitalize(), tail


def _pre_tokenizers() -> list[JsonObject]:
    splits: list[JsonObject] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in _SPLITS
    ]
    return [*splits, _byte_level(add_prefix_space=False, use_regex=False)]


def _byte_level(
    *, add_prefix_space: bool = True, trim_offsets: bool = True, use_regex: bool = True
) -> JsonObject:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": trim_offsets,
        "use_regex": use_regex,
    }


def _added_token(token_id: int, content: str) -> JsonObject:
    is_text = content in _NAMED.values()
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": is_text,
        "special": not is_text,
    }
