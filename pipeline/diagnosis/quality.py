"""Types that a file would be better without: small tensors that were quantized, bytes for nothing.

Hyper-connection mixes, routers and the engram's q and k are small and decide what everything else
computes; requantizers without a rule for them (llama-quantize has none) store them like the rest.
FP4 experts are held exactly by MXFP4, so that a type as large or larger buys nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pipeline.diagnosis.case import Case
from pipeline.diagnosis.finding import Finding, Graft, Severity, counted, spread
from pipeline.gguf.reader import GgufTensor
from pipeline.model.roles import SubRole, sub_role_of
from pipeline.quant.types import find_type

_KEPT = {
    SubRole.HYPER_CONNECTION: "F32",
    SubRole.ROUTER: "BF16",
    SubRole.ENGRAM_GATE: "F32",
}
"""Sub-roles to keep whole, and the type that the checkpoint is kept in."""

_TITLES = {
    SubRole.HYPER_CONNECTION: "hyper-connection matrices",
    SubRole.ROUTER: "router matrices",
    SubRole.ENGRAM_GATE: "engram q/k vectors",
}

_REASONS = {
    SubRole.HYPER_CONNECTION: "in BF16 already their projection is off by 1e-2, in F32 by 1e-6",
    SubRole.ROUTER: "tokens go to other experts",
    SubRole.ENGRAM_GATE: "llama.cpp's pull request 28696 aborts on anything but F32; other forks "
    "decode them first",
}

_WHOLE: Mapping[SubRole, frozenset[str]] = {
    SubRole.HYPER_CONNECTION: frozenset({"F32"}),
    SubRole.ROUTER: frozenset({"F32", "BF16", "F16", "I32"}),
    SubRole.ENGRAM_GATE: frozenset({"F32", "BF16", "F16"}),
}
"""Types that lose nothing, or nothing that counts."""

_EXPERTS = (SubRole.ROUTED_GATE, SubRole.ROUTED_UP, SubRole.ROUTED_DOWN)
_EXACT = find_type("MXFP4")
_LOSSLESS = frozenset({"F32", "BF16", "MXFP4"})
"""Types that hold FP4 weights bit for bit."""


def check_quality(case: Case) -> Iterator[Finding]:
    """Findings about types that cost accuracy or bytes; engines run the file all the same."""
    by_sub_role: dict[SubRole, list[GgufTensor]] = {}
    for tensor in case.tensors.values():
        by_sub_role.setdefault(_sub_role(tensor.name), []).append(tensor)
    for sub_role in _KEPT:
        lossy = [t for t in by_sub_role.get(sub_role, ()) if t.type.name not in _WHOLE[sub_role]]
        if lossy:
            yield _quantized(case, sub_role, lossy)
    yield from _engram_gates(case, by_sub_role.get(SubRole.ENGRAM_GATE, ()))
    yield from _wasteful(case, by_sub_role)


def _sub_role(name: str) -> SubRole:
    try:
        return sub_role_of(name)
    except KeyError:
        return SubRole.NORM


def _quantized(case: Case, sub_role: SubRole, lossy: Sequence[GgufTensor]) -> Finding:
    types = sorted({tensor.type.name for tensor in lossy})
    return Finding(
        Severity.LOSES,
        f"{counted(len(lossy), 'tensor')} of the {_TITLES[sub_role]} stored as "
        f"{', '.join(types)}: {_REASONS[sub_role]}",
        (spread(tensor.name for tensor in lossy),),
        case.grafted(
            "Take them back from the checkpoint, a few MB of it",
            (Graft(sub_role, _KEPT[sub_role]),),
        ),
    )


def _engram_gates(case: Case, tensors: Sequence[GgufTensor]) -> Iterator[Finding]:
    half = [tensor for tensor in tensors if tensor.type.name in ("BF16", "F16")]
    if half:
        yield Finding(
            Severity.NOTE,
            f"engram q/k in {half[0].type.name}: {_REASONS[SubRole.ENGRAM_GATE]}",
            (spread(tensor.name for tensor in half),),
            case.grafted("As F32 they suit all", (Graft(SubRole.ENGRAM_GATE, "F32"),)),
        )


def _wasteful(case: Case, by_sub_role: Mapping[SubRole, Sequence[GgufTensor]]) -> Iterator[Finding]:
    """Expert stacks in a type no smaller than MXFP4."""
    wasteful = {
        sub_role: [t for t in by_sub_role.get(sub_role, ()) if _is_wasteful(t)]
        for sub_role in _EXPERTS
    }
    tensors = [tensor for members in wasteful.values() for tensor in members]
    if not tensors:
        return
    saved = sum(tensor.nbytes - _exact_nbytes(tensor) for tensor in tensors)
    types = sorted({tensor.type.name for tensor in tensors})
    lossy = "" if all(t in _LOSSLESS for t in types) else " and lost accuracy"
    yield Finding(
        Severity.WASTES,
        f"MXFP4 holds the released FP4 experts bit for bit; {counted(len(tensors), 'stack')} in "
        f"{', '.join(types)} take {saved:,} bytes more{lossy}",
        (spread(tensor.name for tensor in tensors),),
        case.grafted(
            f"MXFP4 from the checkpoint saves {saved:,} bytes and is exact",
            tuple(
                Graft(sub_role, _EXACT.name, _layers(members, by_sub_role[sub_role]))
                for sub_role, members in wasteful.items()
                if members
            ),
        ),
    )


def _is_wasteful(tensor: GgufTensor) -> bool:
    if tensor.type == _EXACT or tensor.ne[0] % _EXACT.block or not tensor.type.block_nbytes:
        return False
    exact = _exact_nbytes(tensor)
    return tensor.nbytes > exact or (tensor.nbytes == exact and tensor.type.name not in _LOSSLESS)


def _exact_nbytes(tensor: GgufTensor) -> int:
    n_weights = 1
    for n in tensor.ne:
        n_weights *= n
    return n_weights // _EXACT.block * _EXACT.block_nbytes


def _layers(members: Sequence[GgufTensor], of: Sequence[GgufTensor]) -> tuple[int, ...] | None:
    """The layers of ``members``; nothing where these are all there are."""
    if len(members) == len(of):
        return None
    found = (re.match(r"blk\.(\d+)\.", tensor.name) for tensor in members)
    return tuple(sorted(int(match[1]) for match in found if match))
