"""What choosing experts needs to know of a model: how many there are, how many a token uses."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import PlanError
from pipeline.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Routing:
    """The routed experts of a trunk: the same number in every layer.

    ``gate_sum`` is what the gates of one token add up to where the model normalises them (1.5 in
    V4.1-Flash), None where it does not.
    """

    n_layers: int
    n_experts: int
    top_k: int
    gate_sum: float | None = None


def routing_of(config: ModelConfig) -> Routing:
    """The routed experts of ``config``'s trunk; a draft's are its own and stay whole.

    Raises:
        PlanError: Some layers choose experts by token id: their tables would name lost experts.
    """
    if config.n_hash_layers:
        raise PlanError(
            "this model cannot lose experts: its first layers look them up by token id",
            expected="no hash-routed layer",
            found=f"{config.n_hash_layers:,} layers with a tid2eid table",
        )
    return Routing(
        n_layers=config.n_layers,
        n_experts=config.n_experts,
        top_k=config.n_experts_used,
        gate_sum=config.weights_scale if config.norm_weights else None,
    )
