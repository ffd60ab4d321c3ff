"""Mixture of experts: a router, gated experts, and one expert that every token shares.

Source: DeepSeek-V4.1-Flash inference/model.py (classes Gate, Expert, MoE).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from tests.reference.arrays import Floats, Ints
from tests.reference.hyperparameters import Hyperparameters
from tests.reference.layer import Layer

Observer = Callable[[int, int, Ints, Floats, Floats], None]
"""Told layer, expert, the positions that use it, their gates ``[n]`` and, before the gates, the
expert's outputs ``[n, D]``."""


class Route(NamedTuple):
    """Chosen experts and their gates, both ``[T, n_experts_used]``."""

    experts: Ints
    gates: Floats


def affinities(logits: Floats) -> Floats:
    """sqrt(softplus(logits))."""
    return np.sqrt(np.logaddexp(0, logits))


def choose(scores: Floats, bias: Floats, count: int) -> Ints:
    """The ``count`` best experts of each token; the bias chooses and never weighs."""
    return np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :count]


def gates_of(scores: Floats, chosen: Ints, h: Hyperparameters) -> Floats:
    """Weights of the chosen experts.

    Engines of the GGUF family clamp the sum from below where the official code adds 1e-20 to it:
    the same for any trained router. They also normalise a single expert, which the official code
    leaves alone.
    """
    gates = np.take_along_axis(scores, chosen, axis=-1)
    if h.normalise_weights and h.n_experts_used > 1:
        gates = gates / (gates.sum(axis=-1, keepdims=True) + 1e-20)
    return gates * h.weights_scale


def route(x: Floats, layer: Layer, masked: Collection[int] = ()) -> Route:
    """Which experts the tokens ``[T, D]`` use; ``masked`` ones are never chosen."""
    scores = affinities(x @ layer("ffn_gate_inp.weight").T)
    bias = layer("exp_probs_b.bias").copy()
    bias[list(masked)] = -np.inf
    chosen = choose(scores, bias, layer.h.n_experts_used)
    return Route(chosen, gates_of(scores, chosen, layer.h))


def expert(x: Floats, gate: Floats, up: Floats, down: Floats, clamp: float) -> Floats:
    """One gated expert's output ``[T, D]``."""
    return activation(x @ gate.T, x @ up.T, clamp) @ down.T


def activation(gate: Floats, up: Floats, clamp: float) -> Floats:
    """silu(gate) * up: the gate limited from above only, the other on both sides."""
    return silu(np.minimum(gate, clamp)) * np.clip(up, -clamp, clamp)


def silu(x: Floats) -> Floats:
    """x * sigmoid(x)."""
    return x * np.exp(-np.logaddexp(0, -x))


def shared_expert(x: Floats, layer: Layer) -> Floats:
    """The expert of all tokens: clamped like the others, not weighed."""
    gate, up, down = (layer(f"ffn_{part}_shexp.weight") for part in ("gate", "up", "down"))
    return expert(x, gate, up, down, layer.h.shared_clamps[layer.number])


def mixture(
    x: Floats,
    positions: Ints,
    layer: Layer,
    *,
    masked: Collection[int] = (),
    observer: Observer | None = None,
) -> Floats:
    """Routed and shared experts together, ``[T, D]``."""
    chosen, gates = route(x, layer, masked)
    gate, up, down = (layer(f"ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
    clamp = layer.h.clamps[layer.number]
    y = shared_expert(x, layer)
    for number in np.unique(chosen):
        tokens, places = np.nonzero(chosen == number)
        weights = gates[tokens, places]
        outputs = expert(x[tokens], gate[number], up[number], down[number], clamp)
        if observer:
            observer(layer.number, int(number), positions[tokens], weights, outputs)
        y[tokens] += weights[:, None] * outputs
    return y
