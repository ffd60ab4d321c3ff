"""Which tensors of a target have an entry per routed expert, and whether it can lose some.

In GGUF order the last dimension counts the experts, so expert ``e`` is the ``e``-th of equal byte
ranges: of a stack, of the router's rows, or of a vector. Names: llama.cpp ``src/llama-arch.cpp``;
merged stacks and scales per expert are written by some makers of other models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from pipeline.cut.file_plan import model_of_plan
from pipeline.errors import FormatError, PlanError, raise_problems
from pipeline.experts.keep import KeepList
from pipeline.gguf.reader import GgufTensor
from pipeline.model.contract.sizes import read_sizes
from pipeline.model.contract.tensors import expected_ne
from pipeline.model.metadata.header_keys import HeaderKeys
from pipeline.plan import Plan

_PER_EXPERT = re.compile(
    r"blk\.(?P<layer>\d+)\.(ffn_(gate|up|down|gate_up)_exps|ffn_gate_inp|exp_probs_b(_vl)?)"
    r"\.(?P<part>weight|bias|scale|input_scale)"
)
_MAYBE_ONE = ("scale", "input_scale")
"""Parts that may also be one number for the whole stack."""

_HASHED = "ffn_gate_tid2eid"


def expert_tensors(plan: Plan) -> frozenset[str]:
    """The tensors of ``plan``, which is of finished files, that have an entry per routed expert.

    Raises:
        PlanError: The model cannot lose experts.
        FormatError: A tensor has another number of entries than there are experts, or has as many
            and nobody knows whether it must lose some; several raise `Problems`.
    """
    raise_problems(plan.name, list(_refusals(plan)))
    model = model_of_plan(plan)
    known = expected_ne(read_sizes(model, plan.form), plan.form)
    found: set[str] = set()
    problems: list[FormatError] = []
    for _, tensor in model.tensors.values():
        match = _PER_EXPERT.fullmatch(tensor.name)
        is_full = tensor.ne[-1] == plan.config.n_experts
        if match and int(match["layer"]) < plan.config.n_layers:
            if is_full and (len(tensor.ne) > 1 or tensor.type.block == 1):
                found.add(tensor.name)
            elif match["part"] not in _MAYBE_ONE:
                problems.append(_miscounted(tensor, plan.config.n_experts))
        elif is_full and tensor.name not in known:
            problems.append(_unknown(tensor))
    raise_problems(plan.name, problems)
    return frozenset(found)


def check_groups(plan: Plan, keep: KeepList) -> None:
    """Whether expert groups stay groups: each keeps as many as any other.

    Raises:
        PlanError: The model has groups, and they do not.
    """
    n_groups = model_keys(plan).find_number("expert_group_count") or 1
    size = keep.n_experts // n_groups
    for layer, ids in enumerate(keep.layers):
        counts = Counter(expert // size for expert in ids)
        if n_groups > 1 and {counts[group] for group in range(n_groups)} != {len(ids) / n_groups}:
            raise PlanError(
                f"layer {layer} would keep unlike numbers of experts in its {n_groups} groups",
                file=plan.name,
                expected=f"{len(ids) / n_groups:g} of every {size}",
                found=", ".join(str(counts[group]) for group in range(n_groups)),
                next_step="Engines divide the experts that stay into groups of equal size.",
            )


def model_keys(plan: Plan) -> HeaderKeys:
    """The metadata of a plan's model."""
    return HeaderKeys({entry.key: entry for entry in plan.key_values}, plan.form.architecture)


def _refusals(plan: Plan) -> Iterator[PlanError]:
    if plan.form.is_draft:
        yield PlanError(
            "a draft does not lose experts: they are not those of its target",
            file=plan.name,
            next_step="Name the target; the draft beside it is carried along as it is.",
        )
    hashed = [tensor.name for tensor in plan.tensors if _HASHED in tensor.name]
    if hashed or plan.config.n_hash_layers:
        yield PlanError(
            "this model cannot lose experts: its first layers look them up by token id, in a table "
            "that would name lost ones",
            file=plan.name,
            tensor=hashed[0] if hashed else None,
            expected="no hash-routed layer",
            found=f"{max(plan.config.n_hash_layers, len(hashed))}",
        )


def _miscounted(tensor: GgufTensor, n_experts: int) -> FormatError:
    return FormatError(
        "the tensor does not have an entry of its own for each expert",
        tensor=tensor.name,
        expected=f"{n_experts} as the last dimension",
        found=f"{tensor.type.name} {tensor.ne}",
    )


def _unknown(tensor: GgufTensor) -> FormatError:
    return FormatError(
        "the tensor has as many entries as there are experts, and it is not known whether they are "
        "the experts'",
        tensor=tensor.name,
        found=tensor.ne,
        next_step="Cut so, the model might run wrong without a word; no loader of this form knows "
        "the tensor.",
    )
