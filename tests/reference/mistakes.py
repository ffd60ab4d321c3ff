"""Wrong rules, each one function or constant in place of the right one.

They are what ports of this architecture get wrong, V4 habits first; a test that compares logits is
worth what it sees of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from tests.reference.norm import rms

Replacement = tuple[ModuleType, str, Callable[..., Any]]
Constants = dict[str, Any]

NO_LIMIT = (np.inf,) * 99


def wrapped(module: ModuleType, name: str, make: Callable[..., Any]) -> Replacement:
    """``make(right)`` in the place of a function, ``right`` being that function."""
    return module, name, make(getattr(module, name))


def unlagged(streams, pre, layer, attention_of, experts_of):
    for name, sublayer in (("attn", attention_of), ("ffn", experts_of)):
        mix = hyper_connection.mixes(streams, layer, name)
        collapsed = hyper_connection.collapse(streams, mix.pre)
        y = sublayer(rms(collapsed, layer.h.rms_eps, layer(f"{name}_norm.weight")))
        streams, pre = hyper_connection.expand(y, streams, mix), mix.pre
    return streams, pre


def transposed(expand):
    def wrong(y, streams, mix):
        return expand(y, streams, mix._replace(comb=mix.comb.swapaxes(1, 2)))

    return wrong


def rows_last(sinkhorn):
    def wrong(logits, h):
        comb = sinkhorn(logits, h)
        return comb / (comb.sum(axis=-1, keepdims=True) + h.hc_eps)

    return wrong


def norm_per_stream(streams, eps):
    return rms(streams, eps).reshape(len(streams), -1)


def start_with(pre_of_one):
    def make(start):
        def wrong(embedded, n_streams):
            streams, pre = start(embedded, n_streams)
            return streams, np.full_like(pre, pre_of_one)

        return wrong

    return make


def norm_after_heads(queries):
    return lambda low, layer: rms(queries(low, layer), layer.h.rms_eps)


def halves(x, cos, sin):
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def at_the_start(rotate):
    def wrong(x, positions, rates, *, inverse=False):
        n = 2 * len(rates)
        return np.roll(rotate(np.roll(x, -n, -1), positions, rates, inverse=inverse), n, -1)

    return wrong


def never_back(rotate):
    def wrong(x, positions, rates, *, inverse=False):
        return x if inverse else rotate(x, positions, rates)

    return wrong


def keys_of_rotated(keys):
    def wrong(latents, positions, layer, rates):
        return keys(rope.rotate(latents, positions, rates), positions, layer, rates)

    return wrong


def unrotated_keys(latents, positions, layer, rates):
    plain = latents @ layer("indexer.attn_k.weight").T
    return rms(plain, layer.h.rms_eps, layer("indexer.k_norm.weight"))


def readers_see_all(attention_of):
    def wrong(x, positions, layer, memory, shared):
        if layer.ratio and layer.number not in layer.h.index_sources:
            everything = compression.finished(positions, len(shared.rows), layer.ratio)
            shared = replace(shared, pick=everything)
        return attention_of(x, positions, layer, memory, shared)

    return wrong


def pool_over_channels(rows, gates):
    return (rows * hyper_connection.softmax(gates)).sum(axis=1)


def nope_scale(attend):
    def wrong(q, rows, seen, sinks):
        n_still = q.shape[-1] - 64
        return attend(q * np.sqrt(q.shape[-1] / n_still), rows, seen, sinks)

    return wrong


def interleaved(project):
    def wrong(gathered, layer):
        n_tokens, n_heads, width = gathered.shape
        grouped = gathered.reshape(n_tokens, n_heads // layer.h.o_groups, layer.h.o_groups, width)
        return project(grouped.swapaxes(1, 2).reshape(gathered.shape), layer)

    return wrong


def bias_in_gates(x, layer, masked=()):
    scores = moe.affinities(x @ layer("ffn_gate_inp.weight").T) + layer("exp_probs_b.bias")
    chosen = moe.choose(scores, np.zeros(scores.shape[-1]), layer.h.n_experts_used)
    return moe.Route(chosen, moe.gates_of(scores, chosen, layer.h))


def both_sides(gate, up, clamp):
    return moe.silu(np.clip(gate, -clamp, clamp)) * np.clip(up, -clamp, clamp)


def up_from_above(gate, up, clamp):
    return moe.silu(np.minimum(gate, clamp)) * np.minimum(up, clamp)


def after_silu(gate, up, clamp):
    return np.minimum(moe.silu(gate), clamp) * np.clip(up, -clamp, clamp)


def first_stream_only(written):
    def wrong(streams, memories, layer):
        changed = written(streams, memories, layer)
        return np.concatenate([changed[:, :1], streams[:, 1:]], axis=1)

    return wrong


def value_first(projected, n_streams):
    parts = projected.reshape(len(projected), n_streams + 1, -1)
    return parts[:, 1:], parts[:, 0]


def joint_norm(x, eps):
    return x / np.sqrt((x * x).mean(axis=(-2, -1), keepdims=True) + eps)


def after_the_block() -> list[Replacement]:
    waiting = {}

    def hold(streams, memories, layer):
        waiting[layer.number] = memories
        return streams

    def make(run, written=engram.written):
        def wrong(streams, pre, layer, *sublayers):
            streams, pre = run(streams, pre, layer, *sublayers)
            if layer.number in waiting:
                streams = written(streams, waiting.pop(layer.number), layer)
            return streams, pre

        return wrong

    return [(engram, "written", hold), wrapped(block, "run", make)]


def changed(module: ModuleType, name: str, wrong: Callable[..., Any]) -> list[Replacement]:
    return [(module, name, wrong)]


def around(module: ModuleType, name: str, make: Callable[..., Any]) -> list[Replacement]:
    return [wrapped(module, name, make)]


def sigmoid(x: Any) -> Any:
    return hyper_connection.sigmoid(x)


MISTAKES: dict[str, tuple[float, Sequence[Replacement] | Constants]] = {
    "mixes without lag": (0.1, changed(block, "run", unlagged)),
    "comb transposed": (0.1, around(hyper_connection, "expand", transposed)),
    "sinkhorn ends with rows": (1e-6, around(hyper_connection, "sinkhorn", rows_last)),
    "sinkhorn of 10 passes": (1e-6, {"sinkhorn_passes": 10}),
    "softmax for sinkhorn": (
        0.03,
        changed(hyper_connection, "sinkhorn", lambda logits, h: hyper_connection.softmax(logits)),
    ),
    "post without 2": (0.1, changed(hyper_connection, "post_weights", sigmoid)),
    "hc norm per stream": (0.03, changed(hyper_connection, "flat_norm", norm_per_stream)),
    "final collapse is a mean": (1e-3, changed(block, "final", lambda x, pre: x.mean(axis=1))),
    "final collapse is a stream": (0.03, changed(block, "final", lambda x, pre: x[:, 0])),
    "norm on query heads": (0.1, around(attention, "queries", norm_after_heads)),
    "pairs from halves": (0.1, changed(rope, "turn_pairs", halves)),
    "rotary channels first": (0.1, around(rope, "rotate", at_the_start)),
    "no rotation back": (0.1, around(rope, "rotate", never_back)),
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
    "index keys from rotated latents": (0.03, around(indexer, "keys", keys_of_rotated)),
    "index keys not rotated": (0.03, changed(indexer, "keys", unrotated_keys)),
    "index scores without relu": (
        0.03,
        changed(indexer, "affinity", lambda q, k: np.einsum("thd,nd->thn", q, k)),
    ),
    "no top-k": (0.03, changed(indexer, "best", lambda wanted, allowed, count: allowed)),
    "no candidates": (0.03, {"candidates": None}),
    "readers see all rows": (0.03, around(trunk, "attention", readers_see_all)),
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
    "pooling over channels": (0.03, changed(compression, "pool", pool_over_channels)),
    "window one shorter": (0.03, {"window": 7}),
    "no sinks": (
        0.1,
        around(
            attention,
            "attend",
            lambda right: lambda q, rows, seen, sinks: right(q, rows, seen, sinks - np.inf),
        ),
    ),
    "scale of the still channels": (0.03, around(attention, "attend", nope_scale)),
    "output groups interleaved": (0.1, around(attention, "project", interleaved)),
    "sigmoid router": (0.03, changed(moe, "affinities", sigmoid)),
    "bias in the gates": (0.03, changed(moe, "route", bias_in_gates)),
    "no selection bias": (
        0.03,
        around(moe, "choose", lambda right: lambda scores, bias, n: right(scores, 0 * bias, n)),
    ),
    "gates not normalised": (0.1, {"normalise_weights": False}),
    "gates not scaled": (0.1, {"weights_scale": 1.0}),
    "gate clamped on both sides": (0.03, changed(moe, "activation", both_sides)),
    "up clamped from above": (0.1, changed(moe, "activation", up_from_above)),
    "no clamp": (0.1, {"clamps": NO_LIMIT}),
    "clamp after silu": (0.03, changed(moe, "activation", after_silu)),
    "shared expert not clamped": (0.1, {"shared_clamps": NO_LIMIT}),
    "shared expert scaled": (
        0.1,
        around(moe, "shared_expert", lambda right: lambda x, layer: 1.5 * right(x, layer)),
    ),
    "engram gate without root": (0.03, changed(engram, "gate", sigmoid)),
    "engram norm over all streams": (1e-4, changed(engram, "stream_norm", joint_norm)),
    "engram product not scaled": (
        0.03,
        around(engram, "gate", lambda right: lambda dot: right(dot * 16)),
    ),
    "engram after the block": (0.1, after_the_block()),
    "engram in one stream": (0.1, around(engram, "written", first_stream_only)),
    "engram value first": (0.1, changed(engram, "keys_and_value", value_first)),
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
    "first collapse is a mean": (1e-9, around(block, "start", start_with(0.25))),
    "first collapse is a sum": (1e-9, around(block, "start", start_with(1.0))),
}
"""What cannot be seen in this model, and the most that it changes.

The first collapse matters where streams differ before the first attention: with an engram there.
"""
