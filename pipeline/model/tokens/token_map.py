"""The engram's own, smaller vocabulary: tokens that differ only in case, accents or blanks are one.

Rule: the checkpoint's inference/engram.py (CompressedTokenizer); ported in ROCm/ATOM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, normalizers

from pipeline.errors import SourceError
from pipeline.model.tokens.tokenizer import TokenType

_LONE_BLANK = "\ue000"
"""A private character in place of a single blank, which `Strip` would otherwise take away."""

_NOT_TEXT = "\ufffd"
"""What a token decodes to where its bytes are no whole characters."""


def compress_vocabulary(tokenizer_json: bytes, vocab_size: int) -> NDArray[np.int32]:
    """Raw token id -> compressed id, int32 ``[vocab_size]``.

    Compressed ids count up in the order in which new keys appear, so they fill
    ``0 … max`` without a gap. Ids that the tokenizer lacks share one key.

    Raises:
        SourceError: tokenizer.json cannot be read, or its last id is not below ``vocab_size``.
    """
    tokenizer = _load(tokenizer_json)
    last_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if last_id >= vocab_size:
        raise SourceError(
            "the tokenizer has more tokens than the model",
            file="tokenizer.json",
            expected=f"ids up to {vocab_size - 1:,}",
            found=f"id {last_id:,}",
        )
    named = (
        (tokenizer.id_to_token(token_id), tokenizer.decode([token_id], skip_special_tokens=False))
        for token_id in range(vocab_size)
    )
    return _compressed(named, vocab_size)


def compress_tokens(tokens: Sequence[str], token_types: Sequence[int]) -> NDArray[np.int32]:
    """`compress_vocabulary` from a GGUF's own lists: the same map, where they are of that file.

    Args:
        tokens: ``tokenizer.ggml.tokens``: byte-level text, ids without a token among them.
        token_types: ``tokenizer.ggml.token_type``, which says of ids that they have no token.
    """
    decoder = decoders.ByteLevel()
    named = (
        (None, "") if kind == TokenType.UNUSED else (token, decoder.decode([token]))
        for token, kind in zip(tokens, token_types, strict=True)
    )
    return _compressed(named, len(tokens))


def _compressed(named: Iterable[tuple[str | None, str]], vocab_size: int) -> NDArray[np.int32]:
    """Each id's token and its text -> compressed ids, in the order in which keys are new."""
    normalizer = _normalizer()
    ids: dict[str, int] = {}
    mapped = np.empty(vocab_size, np.int32)
    for token_id, (token, text) in enumerate(named):
        is_text = _NOT_TEXT not in text
        key = (normalizer.normalize_str(text) if is_text else token) or text
        mapped[token_id] = ids.setdefault(key, len(ids))
    return mapped


def _load(tokenizer_json: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # the library raises bare Exception
        raise SourceError(
            "the tokenizers library cannot read the tokenizer",
            file="tokenizer.json",
            found=str(error),
            next_step="Fetch the file again.",
        ) from error


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_BLANK),
            normalizers.Strip(),
            normalizers.Replace(_LONE_BLANK, " "),
        ]
    )
