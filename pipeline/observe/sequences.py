"""A calibration text as the model reads it: sequences of tokens, each of one document only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Tokens of every sequence, and how many documents they come from."""

    tokens: tuple[Tokens, ...]
    n_documents: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every sequence."""
        return tuple(map(len, self.tokens))

    @property
    def n_tokens(self) -> int:
        """Tokens of all of them."""
        return sum(self.lengths)

    @property
    def sha256(self) -> str:
        """Digest of the token stream: for each sequence its length, then its ids, uint32 LE."""
        digest = sha256()
        for one in self.tokens:
            digest.update(np.array([len(one), *one], "<u4").tobytes())
        return digest.hexdigest()


def packed(documents: Iterable[Sequence[int]], *, bos: int, longest: int, most: int) -> Sequences:
    """Documents cut into sequences, in their order, until ``most`` tokens are there.

    A sequence never holds tokens of two documents, whose contexts would mix: a long document
    becomes several sequences, the last of which may be short, and a short one becomes a short
    sequence. Every sequence begins with the token that every prompt begins with, which counts. A
    sequence of that alone is left out.

    Args:
        documents: Token ids.
        bos: The token at the beginning; where a document has it itself, it is not doubled.
        longest: Tokens of a sequence at most.
        most: Tokens of all sequences at most; the last one is cut short.
    """
    assert longest > 1
    left, tokens, n_documents = most, list[Tokens](), 0
    for document in documents:
        if left < 2:
            break
        own = [*_cut(document, bos, longest, left)]
        left -= sum(map(len, own))
        tokens += own
        n_documents += bool(own)
    return Sequences(tuple(tokens), n_documents)


def _cut(document: Sequence[int], bos: int, longest: int, most: int) -> Iterator[Tokens]:
    text = document[1:] if document and document[0] == bos else document
    at = 0
    while at < len(text) and most > 1:
        piece = text[at : at + min(longest, most) - 1]
        yield np.array([bos, *piece], np.int64)
        at += len(piece)
        most -= len(piece) + 1
