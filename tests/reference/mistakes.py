"""Wrong rules, each one function or constant in place of the right one.

They are what ports of this architecture get wrong, V4 habits first; a test that compares logits is
worth what it sees of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from tests.reference import (
    attention,
    block,
    compression,
    engram,
    engram_rows,
    hyper_connection,
    indexer,
    moe,
    rope,
    trunk,
)
from tests.reference import wrong_rules as wrong

Replacement = tuple[ModuleType, str, Callable[..., Any]]
Constants = dict[str, Any]

NO_LIMIT = (np.inf,) * 99


def wrapped(module: ModuleType, name: str, make: Callable[..., Any]) -> Replacement:
    """``make(right)`` in the place of a function, ``right`` being that function."""
    return module, name, make(getattr(module, name))


def after_the_block() -> list[Replacement]:
    waiting = {}

    def hold(streams, memories, layer):
        waiting[layer.number] = memories
        return streams

    def make(run, written=engram.written):
        def late(streams, pre, layer, *sublayers):
            streams, pre = run(streams, pre, layer, *sublayers)
            if layer.number in waiting:
                streams = written(streams, waiting.pop(layer.number), layer)
            return streams, pre

        return late

    return [(engram, "written", hold), wrapped(block, "run", make)]


def changed(module: ModuleType, name: str, function: Callable[..., Any]) -> list[Replacement]:
    return [(module, name, function)]


def around(module: ModuleType, name: str, make: Callable[..., Any]) -> list[Replacement]:
    return [wrapped(module, name, make)]


def sigmoid(x: Any) -> Any:
    return hyper_connection.sigmoid(x)


MISTAKES: dict[str, tuple[float, Sequence[Replacement] | Constants]] = {
    "mixes without lag": (0.1, changed(block, "run", wrong.unlagged)),
    "comb transposed": (0.1, around(hyper_connection, "expand", wrong.transposed)),
    "sinkhorn ends with rows": (1e-6, around(hyper_connection, "sinkhorn", wrong.rows_last)),
    "sinkhorn of 10 passes": (1e-6, {"sinkhorn_passes": 10}),
    "softmax for sinkhorn": (
        0.03,
        changed(hyper_connection, "sinkhorn", lambda logits, h: hyper_connection.softmax(logits)),
    ),
    "post without 2": (0.1, changed(hyper_connection, "post_weights", sigmoid)),
    "hc norm per stream": (0.03, changed(hyper_connection, "flat_norm", wrong.norm_per_stream)),
    "final collapse is a mean": (1e-3, changed(block, "final", lambda x, pre: x.mean(axis=1))),
    "final collapse is a stream": (0.03, changed(block, "final", lambda x, pre: x[:, 0])),
    "norm on query heads": (0.1, around(attention, "queries", wrong.norm_after_heads)),
    "pairs from halves": (0.1, changed(rope, "turn_pairs", wrong.halves)),
    "rotary channels first": (0.1, around(rope, "rotate", wrong.at_the_start)),
    "no rotation back": (0.1, around(rope, "rotate", wrong.never_back)),
    "no YaRN": (1e-4, {"yarn": None}),
    "plain base everywhere": (
        0.1,
        around(rope, "frequencies", lambda right: lambda h, ratio: right(h, 0)),
    ),
    "compressed base everywhere": (
        0.1,
        around(rope, "frequencies", lambda right: lambda h, ratio: right(h, 1)),
    ),
    "latents at the last token": (
        0.03,
        around(
            compression,
            "group_positions",
            lambda right: lambda first, n, ratio: right(first, n, ratio) + ratio - 1,
        ),
    ),
    "latents at the group's number": (
        0.03,
        changed(compression, "group_positions", lambda first, n, ratio: first + np.arange(n)),
    ),
    "index keys from rotated latents": (0.03, around(indexer, "keys", wrong.keys_of_rotated)),
    "index keys not rotated": (0.03, changed(indexer, "keys", wrong.unrotated_keys)),
    "index scores without relu": (
        0.03,
        changed(indexer, "affinity", lambda q, k: np.einsum("thd,nd->thn", q, k)),
    ),
    "no top-k": (0.03, changed(indexer, "best", lambda wanted, allowed, count: allowed)),
    "no candidates": (0.03, {"candidates": None}),
    "readers see all rows": (0.03, around(trunk, "attention", wrong.readers_see_all)),
    "groups seen early": (
        0.03,
        around(
            compression,
            "finished",
            lambda right: lambda at, n, ratio: right(at + ratio - 1, n, ratio),
        ),
    ),
    "groups seen late": (
        0.03,
        around(compression, "finished", lambda right: lambda at, n, ratio: right(at - 1, n, ratio)),
    ),
    "mean for pooling": (0.03, changed(compression, "pool", lambda x, gates: x.mean(axis=1))),
    "pooling over channels": (0.03, changed(compression, "pool", wrong.pool_over_channels)),
    "window one shorter": (0.03, {"window": 7}),
    "no sinks": (
        0.1,
        around(
            attention,
            "attend",
            lambda right: lambda q, rows, seen, sinks: right(q, rows, seen, sinks - np.inf),
        ),
    ),
    "scale of the still channels": (0.03, around(attention, "attend", wrong.nope_scale)),
    "output groups interleaved": (0.1, around(attention, "project", wrong.interleaved)),
    "sigmoid router": (0.03, changed(moe, "affinities", sigmoid)),
    "bias in the gates": (0.03, changed(moe, "route", wrong.bias_in_gates)),
    "no selection bias": (
        0.03,
        around(moe, "choose", lambda right: lambda scores, bias, n: right(scores, 0 * bias, n)),
    ),
    "gates not normalised": (0.1, {"normalise_weights": False}),
    "gates not scaled": (0.1, {"weights_scale": 1.0}),
    "gate clamped on both sides": (0.03, changed(moe, "activation", wrong.both_sides)),
    "up clamped from above": (0.1, changed(moe, "activation", wrong.up_from_above)),
    "no clamp": (0.1, {"clamps": NO_LIMIT}),
    "clamp after silu": (0.03, changed(moe, "activation", wrong.after_silu)),
    "shared expert not clamped": (0.1, {"shared_clamps": NO_LIMIT}),
    "shared expert scaled": (
        0.1,
        around(moe, "shared_expert", lambda right: lambda x, layer: 1.5 * right(x, layer)),
    ),
    "engram gate without root": (0.03, changed(engram, "gate", sigmoid)),
    "engram norm over all streams": (1e-4, changed(engram, "stream_norm", wrong.joint_norm)),
    "engram product not scaled": (
        0.03,
        around(engram, "gate", lambda right: lambda dot: right(dot * 16)),
    ),
    "engram after the block": (0.1, after_the_block()),
    "engram in one stream": (0.1, around(engram, "written", wrong.first_stream_only)),
    "engram value first": (0.1, changed(engram, "keys_and_value", wrong.value_first)),
    "n-grams padded with zero": (
        0.1,
        around(engram_rows, "padding", lambda right: lambda constants: 0 * right(constants)),
    ),
}
"""Name -> the least change of the logits (over the largest) that it makes, and the wrong rule."""

HARMLESS: dict[str, tuple[float, Sequence[Replacement] | Constants]] = {
    "no epsilon on pre": (1e-4, changed(hyper_connection, "pre_weights", lambda x, h: sigmoid(x))),
    "index scores without constant": (
        1e-12,
        around(indexer, "scores", lambda right: lambda *given: right(*given) * 64),
    ),
    "first collapse is a mean": (1e-9, around(block, "start", wrong.start_with(0.25))),
    "first collapse is a sum": (1e-9, around(block, "start", wrong.start_with(1.0))),
}
"""What cannot be seen in this model, and the most that it changes.

The first collapse matters where streams differ before the first attention: with an engram there.
"""
