"""Which rows of the engram tables a token reads: a hash of the last two, three and four tokens.

Source: DeepSeek-V4.1-Flash inference/engram.py; ported in ROCm/ATOM (atom/model_ops/engram.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from tests.reference.arrays import Ints
from tests.reference.hyperparameters import EngramHash


def primes_from(base: int, n_layers: int, n_orders: int, n_heads: int) -> list[list[int]]:
    """Bucket sizes per layer: each order takes the next free primes, counting from ``base``."""
    taken: set[int] = set()
    per_layer = []
    for _ in range(n_layers):
        of_layer = []
        for _ in range(n_orders):
            number = base - 1
            for _ in range(n_heads):
                number += 1
                while number in taken or not is_prime(number):
                    number += 1
                taken.add(number)
                of_layer.append(number)
        per_layer.append(of_layer)
    return per_layer


def is_prime(number: int) -> bool:
    """By trial division."""
    if number < 4:
        return number > 1
    return number % 2 > 0 and all(number % odd for odd in range(3, int(number**0.5) + 1, 2))


def multipliers_of(layer: int, n_compressed: int, max_ngram: int) -> list[int]:
    """Odd factors of a layer, one per position looked back."""
    bound = max(1, (2**63 - 1) // n_compressed // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, max_ngram, dtype=np.int64)
    return (drawn * 2 + 1).tolist()


def offsets_of(primes: Sequence[int]) -> list[int]:
    """First row of each bucket run, from the start of the layer's own table."""
    return [0, *accumulate(primes[:-1])]


def rows_of(tokens: Sequence[int], engram: EngramHash) -> Ints:
    """Table rows of every position of a text from its start, ``[n_layers, T, n_columns]``."""
    ids = np.asarray(engram.token_map, np.int64)[np.asarray(tokens, np.int64)]
    padded = np.concatenate([padding(engram), ids])
    n_orders = len(engram.multipliers[0])
    looked_back = [padded[n_orders - 1 - back :][: len(ids)] for back in range(n_orders)]
    return np.stack([_layer_rows(looked_back, engram, n) for n in range(len(engram.layers))])


def padding(engram: EngramHash) -> Ints:
    """What stands before the first token."""
    return np.full(len(engram.multipliers[0]) - 1, engram.pad, np.int64)


def _layer_rows(looked_back: list[Ints], engram: EngramHash, n: int) -> Ints:
    factors, primes = engram.multipliers[n], np.asarray(engram.primes[n], np.int64)
    mixed = looked_back[0] * factors[0]
    columns = []
    for order in range(1, len(factors)):
        mixed = mixed ^ (looked_back[order] * factors[order])
        sizes = primes[(order - 1) * engram.n_heads :][: engram.n_heads]
        columns.append(mixed[:, None] % sizes)
    return np.concatenate(columns, axis=1) + np.asarray(engram.offsets[n], np.int64)
