"""How fast this device multiplies and this host decodes: two small trials, for the estimate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipeline.model.config import ModelConfig
from pipeline.observe.arithmetic import Arithmetic
from pipeline.observe.plan import ObservationPlan
from pipeline.observe.weights import ExpertStream, WeightLoader

_N_ROWS = 512
"""About the tokens that an expert of the released model gets of a usual text."""

_LEAST_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Speed:
    """``flops`` per second in products of an expert's shape; ``expert_seconds`` to decode one.

    The latter with reading it, one after the other, as many at a time as are decoded ahead.
    """

    flops: float
    expert_seconds: float

    def seconds(self, plan: ObservationPlan, config: ModelConfig) -> float:
        """How long the plan takes: products and decoding one after the other.

        They overlap in part, so that this is rather too much; attention and norms are slower than
        products, so that it may be too little.
        """
        n_decoded = len(plan.chunks) * config.n_layers * config.n_experts
        return plan.flops / self.flops + n_decoded * self.expert_seconds


def measure(
    loader: WeightLoader, config: ModelConfig, arithmetic: Arithmetic, n_ahead: int
) -> Speed:
    """Both trials; they take a second or two, and read a few experts of layer 0."""
    n_experts = min(config.n_experts, 2 * (n_ahead + 1))
    stream = ExpertStream(loader, config, n_ahead=n_ahead)

    def decode() -> None:
        for _ in stream.decoded(0, range(n_experts)):
            pass

    x = torch.rand(_N_ROWS, config.hidden, device=arithmetic.device).to(arithmetic.matrices)
    weight = torch.rand(2 * config.expert_ff, config.hidden, device=arithmetic.device).to(x.dtype)

    def multiply() -> None:
        torch.mm(x, weight.mT)
        if not arithmetic.is_cpu:
            torch.cuda.synchronize(arithmetic.device)

    return Speed(2 * x.numel() * len(weight) / _seconds(multiply), _seconds(decode) / n_experts)


def _seconds(trial: Callable[[], None]) -> float:
    """Mean time of a trial, after one that does not count."""
    trial()
    n_trials, begin = 0, time.perf_counter()
    while True:
        trial()
        n_trials += 1
        taken = time.perf_counter() - begin
        if taken >= _LEAST_SECONDS:
            return taken / n_trials
