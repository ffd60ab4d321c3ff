"""The byte budget: sums over what a step holds, one shape for every step.

    source    the checkpoint as released
    plan      the output before a byte of it exists
    written   the shards that are whole so far
    final     the finished files, read back from their own headers

A step counts all files of an output, target and draft. Bytes per token are the target's: a draft is
read once per drafted block, which engines choose.

A step becomes a list of `Item`, one per tensor; everything else is addition. Lines of different
steps compare because role and sub-role come from one rule on GGUF names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import VerifyError
from pipeline.gguf.model_file import GgufModel
from pipeline.model.config import ModelConfig
from pipeline.model.roles import Role, SubRole
from pipeline.model.targets.tensor import TargetTensor, carried_names
from pipeline.plan import Plan, PlannedTensor, per_token_nbytes
from pipeline.source.spec import DTYPE_NBYTES, TensorSpec


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of a step. ``per_token`` is the number of bytes that one text token reads."""

    name: str
    role: Role
    sub_role: SubRole
    type: str
    n_params: int
    nbytes: int
    per_token: int


@dataclass(frozen=True, slots=True)
class Line:
    """Sums over the items of one role or sub-role; ``types`` counts tensors and bytes per type."""

    role: Role
    sub_role: SubRole | None
    n_tensors: int
    n_params: int
    nbytes: int
    per_token: int
    types: Mapping[str, tuple[int, int]]

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per weight, or nothing where there are no weights."""
        return self.nbytes * 8 / self.n_params if self.n_params else None


@dataclass(frozen=True, slots=True)
class Budget:
    """One step's lines: by role, and by role and sub-role."""

    step: str
    roles: tuple[Line, ...]
    sub_roles: tuple[Line, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of this step."""
        return sum(line.nbytes for line in self.roles)

    @property
    def n_tensors(self) -> int:
        """Tensors of this step."""
        return sum(line.n_tensors for line in self.roles)

    @property
    def n_params(self) -> int:
        """Weights of this step."""
        return sum(line.n_params for line in self.roles)

    @property
    def per_token(self) -> int:
        """Bytes that one text token reads."""
        return sum(line.per_token for line in self.roles)

    def line(self, role: Role) -> Line | None:
        """The line of one role, if the step has it."""
        return next((line for line in self.roles if line.role is role), None)


def budget_of(step: str, items: Iterable[Item]) -> Budget:
    """Sum ``items`` by role and by sub-role, in the order of the role tables."""
    items = list(items)
    roles = [_line(role, None, [i for i in items if i.role is role]) for role in Role]
    sub_roles = [
        _line(role, sub, [i for i in items if i.role is role and i.sub_role is sub])
        for role in Role
        for sub in SubRole
    ]
    return Budget(
        step,
        tuple(line for line in roles if line.n_tensors),
        tuple(line for line in sub_roles if line.n_tensors),
    )


def _line(role: Role, sub_role: SubRole | None, items: Sequence[Item]) -> Line:
    counts: Counter[str] = Counter(item.type for item in items)
    sizes: Counter[str] = Counter()
    for item in items:
        sizes[item.type] += item.nbytes
    return Line(
        role,
        sub_role,
        len(items),
        sum(item.n_params for item in items),
        sum(item.nbytes for item in items),
        sum(item.per_token for item in items),
        {name: (counts[name], sizes[name]) for name in sorted(counts)},
    )


def source_items(
    config: ModelConfig, specs: Sequence[TensorSpec], targets: Sequence[TargetTensor]
) -> list[Item]:
    """The checkpoint's stored tensors; scales have bytes but no parameters.

    What no file carries is a routed expert that was cut, a part of the draft, or vision.
    """
    owners = {name: target for target in targets for name in target.source_names}
    return [_source_item(config, spec, owners.get(spec.name)) for spec in specs]


def _source_item(config: ModelConfig, spec: TensorSpec, owner: TargetTensor | None) -> Item:
    n_params = 0 if spec.dtype == "F8_E8M0" else spec.nbytes // DTYPE_NBYTES[spec.dtype]
    if spec.dtype == "I8":
        n_params *= 2
    role, sub_role = (owner.role, owner.sub_role) if owner else _left_out(spec.name)
    per_token = _source_per_token(config, spec, role, owner)
    return Item(spec.name, role, sub_role, spec.dtype, n_params, spec.nbytes, per_token)


_LEFT_OUT = (
    (r"mtp\.", Role.DRAFT, SubRole.DRAFT),
    (r"layers\.\d+\.ffn\.experts\.\d+\.w1\.", Role.ROUTED, SubRole.ROUTED_GATE),
    (r"layers\.\d+\.ffn\.experts\.\d+\.w2\.", Role.ROUTED, SubRole.ROUTED_DOWN),
    (r"layers\.\d+\.ffn\.experts\.\d+\.w3\.", Role.ROUTED, SubRole.ROUTED_UP),
    (r"", Role.VISION, SubRole.VISION),
)
"""What a stored tensor is that no file carries; the first pattern for its name's start wins."""


def _left_out(name: str) -> tuple[Role, SubRole]:
    return next((role, sub) for rule, role, sub in _LEFT_OUT if re.match(rule, name))


def _source_per_token(
    config: ModelConfig, spec: TensorSpec, role: Role, owner: TargetTensor | None
) -> int:
    if role is Role.ROUTED:
        # Stored expert by expert: on average used/all of each.
        return spec.nbytes * config.n_experts_used // config.n_experts
    if owner is None or owner.is_draft:
        return 0
    if owner.is_table and config.engram:
        return spec.nbytes // spec.shape[0] * config.engram.n_columns
    return per_token_nbytes(owner, spec.nbytes, config)


def plan_items(plan: Plan) -> list[Item]:
    """The tensors of one file as planned."""
    return [_planned_item(plan.config, tensor) for tensor in plan.tensors]


def written_items(plan: Plan, written: Iterable[int]) -> list[Item]:
    """The tensors of the shards numbered in ``written``, as planned and since confirmed whole."""
    whole = set(written)
    return [_planned_item(plan.config, tensor) for tensor in plan.tensors if tensor.shard in whole]


def _planned_item(config: ModelConfig, tensor: PlannedTensor) -> Item:
    return _item(config, tensor.target, tensor.type.name, tensor.nbytes)


def _item(config: ModelConfig, target: TargetTensor, type_name: str, nbytes: int) -> Item:
    return Item(
        name=target.name,
        role=target.role,
        sub_role=target.sub_role,
        type=type_name,
        n_params=target.n_params,
        nbytes=nbytes,
        per_token=0 if target.is_draft else per_token_nbytes(target, nbytes, config),
    )


def final_items(plan: Plan, model: GgufModel) -> list[Item]:
    """The tensors that the finished files' own headers name, with the bytes they say.

    Raises:
        VerifyError: The files hold a tensor that the plan does not know.
    """
    targets = {tensor.name: tensor.target for tensor in plan.tensors}
    items = []
    for name, (shard, stored) in model.tensors.items():
        if name not in targets:
            raise VerifyError(
                "the files hold a tensor that is not in their plan",
                file=model.files[shard].path,
                tensor=name,
                next_step="Make the files again: loaders refuse a tensor too many.",
            )
        items.append(_item(plan.config, targets[name], stored.type.name, stored.nbytes))
    return items


@dataclass(frozen=True, slots=True)
class NotCarried:
    """What the files leave out of the checkpoint, per role."""

    role: Role
    n_tensors: int
    nbytes: int


def not_carried(
    specs: Sequence[TensorSpec], targets: Sequence[TargetTensor]
) -> tuple[NotCarried, ...]:
    """What no file carries: cut experts, draft and vision, whole or in part."""
    carried = carried_names(targets)
    left: dict[Role, list[int]] = {role: [] for role in Role}
    for spec in specs:
        if spec.name not in carried:
            left[_left_out(spec.name)[0]].append(spec.nbytes)
    return tuple(NotCarried(role, len(sizes), sum(sizes)) for role, sizes in left.items() if sizes)
