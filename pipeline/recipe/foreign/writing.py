"""Resolved types as a short list of anchored rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.recipe.derive import alternatives
from pipeline.recipe.foreign.rules import Rule
from pipeline.recipe.ranges import as_pattern

_BLOCK = re.compile(r"blk\.\d+\.")


def rules_of(targets: Sequence[TargetTensor], types: Mapping[str, GgmlType]) -> tuple[Rule, ...]:
    r"""Rules that give every tensor whose type is a choice the type it has in ``types``.

    They are disjoint and hold whole names, layers as ``blk\.(0|1|2)\.``, so that neither their
    order nor what else a tool has in mind makes a difference. Tensors that are of one type
    everywhere are left out: the tools keep them as they find them.

    Args:
        targets: All tensors of a target.
        types: The type of each by name.
    """
    free = [target for target in targets if target.only_type is None]
    return tuple(sorted(_rules(free, types), key=lambda rule: rule.line))


def _rules(free: Sequence[TargetTensor], types: Mapping[str, GgmlType]) -> Iterator[Rule]:
    layers: dict[tuple[str, str], list[int]] = {}
    present: dict[str, list[int]] = {}
    place: dict[str, int] = {}
    for number, target in enumerate(free):
        tail = _BLOCK.sub("", target.name, count=1)
        if target.layer is None:
            yield Rule(f"^{re.escape(tail)}$", types[target.name], number)
            continue
        place.setdefault(tail, number)
        present.setdefault(tail, []).append(target.layer)
        layers.setdefault((tail, types[target.name].name), []).append(target.layer)
    together: dict[tuple[str, str], list[str]] = {}
    for (tail, type_name), wanted in layers.items():
        together.setdefault((as_pattern(wanted, present[tail]), type_name), []).append(tail)
    by_name = {t.name: t for t in types.values()}
    for (pattern, type_name), tails in together.items():
        whole = rf"^blk\.{pattern}\.{alternatives(tails)}$"
        yield Rule(whole, by_name[type_name], place[tails[0]])
