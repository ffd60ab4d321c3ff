"""Functions that are wrong, or that make a right one wrong.

The latter take the right function and give the wrong one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.reference import compression, hyper_connection, moe, rope
from tests.reference.norm import rms


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
