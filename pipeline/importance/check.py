"""Every mistake of an importance matrix, found before anything is made with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeline.errors import QuantmillError, SourceError, raise_problems
from pipeline.importance.fit import names_for
from pipeline.importance.weights import Weights
from pipeline.model.targets.tensor import TargetTensor

_TITLE = "importance matrix"


def check_heads(weights: Weights, targets: Iterable[TargetTensor]) -> None:
    """Refuse a matrix of another model; reads names and sizes only.

    Raises:
        SourceError: No entry is of any of ``targets``, or one is of another width or of another
            number of experts; several as `Problems`.
    """
    measured = [target for target in targets if weights.has(target)]
    if not measured:
        raise SourceError(
            "the importance matrix knows none of the model's tensors",
            file=weights.matrix.path,
            expected="entries blk.N.attn_q_a.weight and the like",
            found=", ".join(weights.matrix.names[:3]),
            next_step="Use the matrix of this very model, or of the one that it was cut from.",
        )
    _raise_all(weights.check_fit, measured)


def check_values(weights: Weights, targets: Iterable[TargetTensor]) -> None:
    """Refuse values that no weights can be made of; reads the whole matrix.

    Raises:
        SourceError: A NaN, an infinity, a number below zero, an entry of zeros only, or one whose
            experts saw no token; several as `Problems`. Also what `check_heads` raises.
    """
    targets = tuple(targets)
    check_heads(weights, targets)
    _raise_all(weights.of, targets)


def unused_names(weights: Weights, targets: Iterable[TargetTensor]) -> tuple[str, ...]:
    """Entries that are of none of ``targets``: of another layout of experts, or of a draft."""
    entries = (weights.entry_of(target) for target in targets)
    used = {entry.name for entry in entries if entry is not None}
    return tuple(name for name in weights.matrix.names if name not in used)


def unmeasured_names(weights: Weights, targets: Iterable[TargetTensor]) -> tuple[str, ...]:
    """Matrices among ``targets`` that are given a type freely and have no entry."""
    return tuple(
        target.name
        for target in targets
        if target.only_type is None and names_for(target) and not weights.has(target)
    )


def _raise_all(check: Callable[[TargetTensor], object], targets: Iterable[TargetTensor]) -> None:
    problems: list[QuantmillError] = []
    for target in targets:
        try:
            check(target)
        except SourceError as error:
            problems.append(error)
    raise_problems(_TITLE, problems)
