"""What a file says of experts that it has lost already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.errors import FormatError
from pipeline.experts.choice import Choice
from pipeline.experts.criterion import Criterion
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList, compose
from pipeline.experts.keys import PREFIX, has_keep_keys
from pipeline.experts.origin import Origin
from pipeline.experts.routing import Routing, routing_of
from pipeline.gguf.keys import KeyValue, Scalar
from pipeline.plan import Plan

KIND = "earlier-cut"
UNKNOWN = "unknown"
"""Stands for a criterion that was not known."""


def told_keep(plan: Plan, keep: KeepList) -> KeepList:
    """``keep``, which is in the numbering of ``plan``'s model, in that of the first model.

    They are the same where the model was not cut before.

    Raises:
        FormatError: Keys of an earlier cut are damaged.
        PlanError: Earlier list and ``keep`` do not go together; several raise `Problems`.
    """
    entries = {entry.key: entry for entry in plan.key_values}
    earlier = earlier_keep(entries, routing_of(plan.config))
    return keep if earlier is None else compose(earlier, keep)


def earlier_keep(entries: Mapping[str, KeyValue], routing: Routing) -> KeepList | None:
    """The keep list by which the file of these keys was cut; nothing where none is named.

    Of how the experts were chosen only criterion and label are in a file. The list's own digest
    stands for the rest.

    Args:
        entries: The file's metadata.
        routing: Of the model in the file, after that cut.

    Raises:
        FormatError: The keys are damaged, or are not those of this model.
        PlanError: The list that they tell breaks a rule; several raise `Problems`.
    """
    if not has_keep_keys(entries):
        return None
    try:
        kept = _integers(_value(entries, "kept"))
        n_experts = _integers((_value(entries, "source_count"),))[0]
        choices = tuple(_choices(entries, n_experts, routing.n_experts))
        if not choices or len(kept) != routing.n_layers * routing.n_experts:
            raise ValueError(f"{len(kept)} ids, {len(choices)} choices")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"the keys {PREFIX}* are damaged, or are another model's",
            expected=f"{routing.n_layers} layers of {routing.n_experts} experts",
            found=str(error),
            next_step="Cut the model that this one was made from.",
        ) from None
    starts = range(0, len(kept), routing.n_experts)
    layers = tuple(kept[at : at + routing.n_experts] for at in starts)
    return KeepList(n_experts, routing.top_k, layers, choices)


def _choices(entries: Mapping[str, KeyValue], n_experts: int, n_kept: int) -> Iterator[Choice]:
    """One for each cut. How many experts there were between two cuts is not in the file."""
    digest, criteria, labels = (
        _value(entries, name) for name in ("keep_sha256", "criterion", "honesty")
    )
    if not isinstance(criteria, tuple) or not isinstance(labels, tuple):
        raise TypeError("criterion and honesty are no arrays")
    for criterion, label in zip(criteria, labels, strict=True):
        yield Choice(
            kind=KIND,
            honesty=Honesty(str(label)),
            criterion=None if criterion == UNKNOWN else Criterion(str(criterion)),
            n_experts=n_experts,
            n_kept=n_kept,
            origins=(Origin(str(digest), f"{PREFIX}keep_sha256"),),
        )


def _value(entries: Mapping[str, KeyValue], name: str) -> Scalar | tuple[Scalar, ...]:
    return entries[PREFIX + name].value


def _integers(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int for value in values):
        raise TypeError(f"{str(values)[:80]} are no integers")
    return values
