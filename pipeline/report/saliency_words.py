"""What criteria and labels of keep lists mean, in words for people."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.experts.choice import Choice, Places
from pipeline.experts.criterion import Criterion
from pipeline.experts.honesty import Honesty

CRITERIA: Mapping[Criterion, str] = {
    Criterion.REAP: "mean of gate times output norm, over the tokens that used the expert",
    Criterion.EAN_MEAN: "mean of the output norm, over the tokens that used the expert",
    Criterion.EAN_SUM: "sum of the output norms",
    Criterion.WEIGHTED_EAN_SUM: "sum of gate times output norm",
    Criterion.FREQUENCY: "number of tokens that used the expert",
    Criterion.WEIGHTED_FREQUENCY: "sum of the gates",
}
"""What an expert's score is."""

LABELS: Mapping[Honesty, str] = {
    Honesty.TRUE_GATE: "measured with the gates that the model applies",
    Honesty.UNNORMALISED_GATE: "measured with the model's own gates before they are normalised",
    Honesty.SOFTMAX_GATE: "measured with a softmax of the router's logits, not the model's gates",
    Honesty.RECOVERED: "read back from a published checkpoint; the scores are not known",
    Honesty.LIST_ONLY: "as its author wrote it; the scores are not known",
    Honesty.PROXY: "numbers that stand in for REAP and do not measure it",
}
"""How near to REAP a list comes."""

UNKNOWN_CRITERION = "not known"


def label_words(honesty: Honesty) -> str:
    """A label and what it means."""
    return f"{honesty} ({LABELS[honesty]})"


def criterion_words(criterion: Criterion | None) -> str:
    """A criterion and what it means."""
    return UNKNOWN_CRITERION if criterion is None else f"{criterion} ({CRITERIA[criterion]})"


def is_reap(choice: Choice) -> bool:
    """Whether a choice may be called REAP: its criterion, by the gates that the model applies."""
    return choice.honesty is Honesty.TRUE_GATE and choice.criterion is Criterion.REAP


def place_words(places: Places) -> str:
    """Experts by layer: ``layer 3: 7, 12; layer 5: 0``."""
    layers = dict.fromkeys(layer for layer, _ in places)
    return "; ".join(
        f"layer {layer}: {', '.join(str(e) for at, e in places if at == layer)}" for layer in layers
    )
