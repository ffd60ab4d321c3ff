"""Blocks with another number of experts than config.json says: one fault, not one per tensor.

It shows in the router, which has a row per expert, and in experts that are missing or too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from pipeline.source.finding import EXPERTS, Finding
from pipeline.source.header import SourceTensor
from pipeline.source.spec import TensorSpec

_EXPERT = ".ffn.experts."
_ROUTER = (".ffn.gate.weight", ".ffn.gate.bias", ".ffn.gate.bias_vl")


def expert_findings(
    held: Mapping[str, SourceTensor], expected: Mapping[str, TensorSpec], explained: Set[str]
) -> Iterator[Finding]:
    """For each block whose experts are not as many as expected: the router's tensors and theirs.

    Tensors whose absence is ``explained`` already are left out.
    """
    for name, spec in expected.items():
        tensor = held.get(name) if name.endswith(_ROUTER) else None
        if tensor and _differ_in_rows(tensor.shape, spec.shape):
            yield _finding(name, name.partition(".ffn.")[0], spec.shape[0], tensor.shape[0])
    odd = (held.keys() ^ expected.keys()) - explained
    if any(_EXPERT in name for name in odd):
        yield from _counted(sorted(odd), _counts(expected), _counts(held))


def _counted(
    odd: Iterable[str], wanted: Mapping[str, int], found: Mapping[str, int]
) -> Iterator[Finding]:
    """The tensors of experts beyond the smaller of two counts."""
    for name in odd:
        block, expert = _expert(name)
        n_wanted, n_found = wanted.get(block, 0), found.get(block, 0)
        if n_wanted and n_found and expert >= min(n_wanted, n_found):
            yield _finding(name, block, n_wanted, n_found)


def _differ_in_rows(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes are alike but for the first dimension."""
    return len(one) == len(other) and one != other and one[1:] == other[1:]


def _finding(name: str, block: str, n_wanted: int, n_found: int) -> Finding:
    return Finding(
        EXPERTS,
        [name],
        expected=f"{n_wanted:,} experts (config.json)",
        found=f"{n_found:,} experts",
        group=block,
    )


def _counts(names: Iterable[str]) -> dict[str, int]:
    """Block -> number of its experts, where they are numbered from 0 without a gap."""
    experts: dict[str, set[int]] = {}
    for name in names:
        if _EXPERT in name:
            block, expert = _expert(name)
            experts.setdefault(block, set()).add(expert)
    return {block: len(ids) for block, ids in experts.items() if max(ids) == len(ids) - 1}


def _expert(name: str) -> tuple[str, int]:
    """Block and number of an expert's tensor; -1 where there is no number."""
    block, _, rest = name.partition(_EXPERT)
    number = rest.partition(".")[0]
    return block, int(number) if number.isdecimal() and number.isascii() else -1
