"""Keep lists: for every layer the experts that stay, by their ids in the model that is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.errors import PlanError, raise_problems
from pipeline.experts.choice import Choice
from pipeline.experts.honesty import Honesty, weakest
from pipeline.experts.routing import Routing

_MOST_SHOWN = 8

_UNIFORM = "Loaders know one expert count for the whole model: keep the same number everywhere."


@dataclass(frozen=True, slots=True)
class KeepList:
    """The experts that stay, layer by layer, ascending; expert i of the cut model is the i-th.

    ``choices`` tell how the list came about, one for each cut, the first cut first.

    Raises:
        PlanError: A layer breaks a rule (ids unique, ascending, in range, at least ``top_k``, the
            same number everywhere); several raise `Problems`.
    """

    n_experts: int
    top_k: int
    layers: tuple[tuple[int, ...], ...]
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        raise_problems("keep list", list(_problems(self)))

    @property
    def n_layers(self) -> int:
        """Layers of the trunk."""
        return len(self.layers)

    @property
    def n_kept(self) -> int:
        """Experts that stay in each layer."""
        return len(self.layers[0])

    @property
    def honesty(self) -> Honesty:
        """What the list may be called."""
        return weakest(choice.honesty for choice in self.choices)


def check_fits(keep: KeepList, routing: Routing) -> None:
    """Whether ``keep`` was made for a model with this routing.

    Raises:
        PlanError: Layers are missing or too many, or expert counts differ; several as `Problems`.
    """
    raise_problems("keep list and model", list(_misfits(keep, routing)))


def compose(first: KeepList, second: KeepList) -> KeepList:
    """The list that cuts at once what ``first`` and then ``second`` cut, in the first's ids.

    Raises:
        PlanError: ``second`` was not made for what ``first`` leaves.
    """
    check_fits(second, Routing(first.n_layers, first.n_kept, first.top_k))
    layers = (
        tuple(before[expert] for expert in after)
        for before, after in zip(first.layers, second.layers, strict=True)
    )
    return KeepList(first.n_experts, first.top_k, tuple(layers), (*first.choices, *second.choices))


def shown(ids: Iterable[int]) -> str:
    """Expert ids for a message, the first few of them."""
    listed = sorted(ids)
    more = f" and {len(listed) - _MOST_SHOWN:,} more" if len(listed) > _MOST_SHOWN else ""
    return ", ".join(map(str, listed[:_MOST_SHOWN])) + more


def _problems(keep: KeepList) -> Iterator[PlanError]:
    if not keep.layers or not keep.choices:
        yield PlanError("the keep list is empty", expected="every layer, and how it was chosen")
        return
    usual = Counter(map(len, keep.layers)).most_common(1)[0][0]
    for layer, ids in enumerate(keep.layers):
        yield from _layer_problems(layer, ids, keep)
        if len(ids) != usual:
            yield PlanError(
                f"layer {layer} keeps another number of experts than the other layers",
                expected=usual,
                found=len(ids),
                next_step=_UNIFORM,
            )


def _layer_problems(layer: int, ids: Sequence[int], keep: KeepList) -> Iterator[PlanError]:
    twice = [expert for expert, n in Counter(ids).items() if n > 1]
    outside = {expert for expert in ids if not 0 <= expert < keep.n_experts}
    if twice:
        yield PlanError(f"layer {layer} keeps an expert twice", found=shown(twice))
    elif list(ids) != sorted(ids):
        yield PlanError(f"the experts that layer {layer} keeps are not in ascending order")
    if outside:
        yield PlanError(
            f"layer {layer} keeps an expert that the model does not have",
            expected=f"0 to {keep.n_experts - 1}",
            found=shown(outside),
        )
    if len(set(ids)) < keep.top_k:
        yield PlanError(
            f"layer {layer} keeps fewer experts than a token uses",
            expected=f"at least {keep.top_k}",
            found=len(set(ids)),
        )


def _misfits(keep: KeepList, routing: Routing) -> Iterator[PlanError]:
    if keep.n_layers < routing.n_layers:
        yield PlanError(
            f"the keep list has no layer {keep.n_layers}",
            expected=f"{routing.n_layers:,} layers",
            found=f"{keep.n_layers:,}",
            next_step="A layer without a list is not kept whole: measure it too.",
        )
    if keep.n_layers > routing.n_layers:
        yield PlanError(
            f"the keep list goes beyond the model: layer {routing.n_layers} is not in its trunk",
            expected=f"{routing.n_layers:,} layers",
            found=f"{keep.n_layers:,}",
            next_step="A draft's experts are never cut; leave its layers out.",
        )
    counts = {
        "experts in a layer": (routing.n_experts, keep.n_experts),
        "experts used by a token": (routing.top_k, keep.top_k),
    }
    for what, (expected, found) in counts.items():
        if expected != found:
            yield PlanError(
                f"the keep list was made for another number of {what}",
                expected=expected,
                found=found,
                next_step="Use a list that was made for this model, uncut or cut as it is.",
            )
