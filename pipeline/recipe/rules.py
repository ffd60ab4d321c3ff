"""What no recipe may ask for, by tensor and type, and how each refusal is worded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.model.roles import ReadMode, SubRole
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.fitness import TRAINED_FOR, why_not_lookup
from pipeline.quant.guard import NEEDS_IMPORTANCE
from pipeline.quant.types import TYPES, GgmlType
from pipeline.recipe.choose import is_copy
from pipeline.recipe.schema import Recipe
from pipeline.recipe.values import ALLOWANCES, MAINLINE_TYPES, WRITABLE_TYPES
from pipeline.source.spec import Codec

PROTECTED = frozenset({SubRole.ENGRAM_GATE, SubRole.HYPER_CONNECTION, SubRole.ROUTER})
"""Small and sensitive: a quantized hyper-connection mix alone costs four digits of precision."""

FP4_BPW = 4.25
"""Bits per weight of FP4 experts as stored and of MXFP4, which holds them exactly."""

_BYTE_BPW = 8.25
"""Bits per weight of FP8, about, for which ggml has no type with these scales."""

Weighted = Callable[[TargetTensor], bool]
"""Whether there is importance for a tensor."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for one recipe and what it is run with."""

    recipe: Recipe
    weighted: Weighted

    def broken(self, target: TargetTensor, ggml_type: GgmlType | None) -> str | None:
        """The first rule that ``target`` in ``ggml_type`` would break, if any."""
        if ggml_type is None:
            return "no_source_type"
        if target.only_type is not None:
            return None if ggml_type.name == target.only_type else f"only_{target.only_type}"
        if is_copy(target, ggml_type):
            # What a finished file has, it may keep.
            return None
        rules = {
            "family": ggml_type.name not in WRITABLE_TYPES,
            "lookup": target.read_mode is ReadMode.ROWS and why_not_lookup(ggml_type) is not None,
            "importance": ggml_type.name in NEEDS_IMPORTANCE and not self._has_importance(target),
            "block": target.n_cols % ggml_type.block != 0,
            "below_bf16": self._is_unallowed("below_bf16")
            and target.sub_role in PROTECTED
            and ggml_type.bpw < 16,
            "larger_than_fp4": self._is_unallowed("larger_than_fp4")
            and target.read_mode is ReadMode.SPARSE
            and is_fp4(target)
            and ggml_type.name != "MXFP4"
            and ggml_type.bpw >= FP4_BPW,
        }
        return next((name for name, broken in rules.items() if broken), None)

    def fitting(
        self, tensors: Sequence[TargetTensor], asked: GgmlType | None, most: int = 5
    ) -> Iterator[str]:
        """The types nearest in size that break no rule, with the bytes of ``tensors`` in each."""
        bpw = _BYTE_BPW if asked is None else asked.bpw
        # Who asks for a type that every engine reads is not offered one that few do.
        names = WRITABLE_TYPES if asked is not None and asked.family == "ik" else MAINLINE_TYPES
        types = [TYPES[name] for name in names if name not in TRAINED_FOR]
        near = sorted(
            (t for t in types if not any(self.broken(x, t) for x in tensors)),
            key=lambda t: (abs(t.bpw - bpw), t.bpw),
        )
        for t in near[:most]:
            nbytes = sum(x.n_rows * t.row_nbytes(x.n_cols) for x in tensors)
            yield f"{t.name} ({nbytes:,} bytes)"

    def _is_unallowed(self, allowance: str) -> bool:
        return allowance not in self.recipe.allow

    def _has_importance(self, target: TargetTensor) -> bool:
        # A draft's tensors have names of the target's, whose importance is not theirs.
        return not target.is_draft and self.weighted(target)


def is_fp4(target: TargetTensor) -> bool:
    """Whether the source holds ``target`` as FP4: in a checkpoint, or as MXFP4 in a GGUF."""
    first = target.matrices[0]
    return first.codec is Codec.FP4 or first.ggml_type == "MXFP4"


def wording(rule: str, target: TargetTensor, ggml_type: GgmlType | None) -> str:
    """The end of a sentence that begins with "<entry> asks for"."""
    if ggml_type is None:
        return f" the type in the source, but {_why_no_source_type(target)}"
    clause = {
        "lookup": f", but {why_not_lookup(ggml_type)}",
        "importance": f", which needs an importance matrix, and {_lacks(target)}: "
        f"{NEEDS_IMPORTANCE.get(ggml_type.name)}",
    }
    return f" {ggml_type.name}" + {**_WORDING, **clause}[rule]


def next_step(
    rules: Rules, rule: str, reason: str, tensors: Sequence[TargetTensor], asked: GgmlType | None
) -> str:
    """What the author can do about ``tensors``, which break ``rule``."""
    if rule.startswith("only_"):
        is_override = reason.startswith("override")
        only_type = tensors[0].only_type
        unasked = f"Remove {reason}: they stay {only_type} unasked."
        return "Narrow the pattern." if is_override else unasked
    step = f"Types that fit: {', '.join(rules.fitting(tensors, asked))}."
    if rule == "importance" and not tensors[0].is_draft:
        step += " Or give a matrix that has these tensors (--imatrix)."
    if rule in ALLOWANCES:
        step += f' To have it all the same, add "{rule}" to allow.'
    return step


_WORDING = {
    "only_F32": ", but engines accept nothing but F32 here",
    "only_I32": ", but engines accept nothing but I32 here",
    "block": ", whose block does not divide the rows",
    "family": ", which this version cannot write",
    "below_bf16": ", too coarse for these small sensitive matrices",
    "larger_than_fp4": ", but MXFP4 keeps experts that are stored as FP4 bit for bit and is no "
    "larger",
}


def _lacks(target: TargetTensor) -> str:
    return "a draft has none" if target.is_draft else "there is none for these tensors"


def _why_no_source_type(target: TargetTensor) -> str:
    kinds = sorted({matrix.ggml_type or matrix.codec.value.upper() for matrix in target.matrices})
    if len(kinds) > 1:
        return f"it is joined from several: {', '.join(kinds)}"
    return f"ggml has none that holds {kinds[0]} with its scales as it is"
