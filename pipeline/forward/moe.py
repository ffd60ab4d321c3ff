"""Mixture of experts: a router, gated experts, and one expert that every token shares.

Source: DeepSeek-V4.1-Flash inference/model.py (classes Gate, Expert, MoE).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import silu

from pipeline.forward.linear import linear
from pipeline.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """``weight`` ``[E, D]``; ``bias`` ``[E]``, that of text tokens."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """``gate_up`` ``[2 * ff, D]``: w1 above w3; ``down`` ``[D, ff]``: w2."""

    gate_up: Tensor
    down: Tensor


class Route(NamedTuple):
    """Chosen experts and the gates that multiply their outputs, both ``[T, n_experts_used]``."""

    experts: Tensor
    gates: Tensor


def route(x: Tensor, weights: RouterWeights, config: ModelConfig) -> Route:
    """Which experts the tokens ``[T, D]`` use.

    The bias chooses and never weighs; of equal scores the lower number is chosen.
    """
    scores = linear(x, weights.weight).logaddexp(x.new_zeros(())).sqrt()
    ranked = (scores + weights.bias).argsort(dim=-1, descending=True, stable=True)
    chosen = ranked[:, : config.n_experts_used]
    gates = scores.gather(1, chosen)
    if config.norm_weights and config.n_experts_used > 1:
        gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
    return Route(chosen, gates * config.weights_scale)


def expert(x: Tensor, weights: ExpertWeights, limit: float) -> Tensor:
    """One gated expert's output ``[T, D]``, before the gate of the router.

    The gate is limited by ``limit`` from above only, the other factor on both sides.
    """
    gate, up = linear(x, weights.gate_up).chunk(2, dim=-1)
    return linear(silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit)), weights.down)
