"""Budgets: sums of every step, against the released checkpoint's and the published files' bytes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pipeline.budget import (
    Budget,
    Item,
    Line,
    NotCarried,
    budget_of,
    final_items,
    not_carried,
    plan_items,
    source_items,
    written_items,
)
from pipeline.errors import VerifyError
from pipeline.files import truncate, write_whole
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.layout import Layout
from pipeline.model.roles import Role, SubRole
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from pipeline.plan import Plan
from pipeline.source.spec import TensorSpec
from tests.pipeline.released_plans import plan_budget, released_config, released_plan, source_budget

Q3, SERVED = "published-q3_k_m", "served"

SOURCE_ROLES = {
    Role.ROUTED: (92_160, 288_777_830_400),
    Role.ENGRAM: (12, 203_073_076_240),
    Role.ATTENTION: (831, 5_306_638_784),
    Role.EMBEDDING: (175, 2_808_105_984),
    Role.SHARED: (240, 1_416_960_000),
    Role.DRAFT: (2_401, 7_932_874_632),
    Role.VISION: (266, 970_536_960),
}


@cache
def specs() -> tuple[TensorSpec, ...]:
    return expected_tensors(released_config())


@cache
def targets(layout: Layout) -> tuple[TargetTensor, ...]:
    return target_tensors(released_config(), layout)


@cache
def released_source(layout: Layout) -> dict[str, Item]:
    items = source_items(released_config(), specs(), targets(layout))
    return {item.name: item for item in items}


@pytest.mark.parametrize("layout", Layout)
def test_the_source_has_the_released_bytes_by_role(layout: Layout) -> None:
    budget = budget_of("source", released_source(layout).values())
    assert {line.role: (line.n_tensors, line.nbytes) for line in budget.roles} == SOURCE_ROLES
    assert (budget.nbytes, budget.n_tensors) == (510_286_023_000, 96_085)


@pytest.mark.parametrize(
    ("sub_role", "nbytes"),
    [
        (SubRole.ENGRAM_TABLE, 202_758_032_400),
        (SubRole.HYPER_CONNECTION, 157_295_040),
        (SubRole.TOKEN_EMBD, 1_323_827_200),
        (SubRole.OUTPUT, 1_323_827_200),
    ],
)
def test_the_source_has_the_released_bytes_by_sub_role(sub_role: SubRole, nbytes: int) -> None:
    lines = {line.sub_role: line for line in source_budget()[0].sub_roles}
    assert lines[sub_role].nbytes == nbytes


def test_source_weights_are_counted_without_scales_and_two_to_an_fp4_byte() -> None:
    items = released_source(Layout.FORK)
    stem = "layers.0.ffn.experts.0.w1"
    assert items[f"{stem}.weight"].n_params == 2304 * 5120
    assert items[f"{stem}.weight"].nbytes == 2304 * 5120 // 2
    assert (items[f"{stem}.scale"].n_params, items[f"{stem}.scale"].nbytes) == (0, 368_640)
    assert items["embed.weight"].n_params == 129_280 * 5120


def test_weights_are_as_many_before_and_after() -> None:
    source, plan = source_budget()[0], plan_budget(Q3)
    for role in (Role.ROUTED, Role.ENGRAM, Role.ATTENTION, Role.EMBEDDING, Role.SHARED):
        assert source.line(role).n_params == plan.line(role).n_params  # type: ignore[union-attr]
    assert plan.line(Role.ROUTED).n_params == 543_581_798_400  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        # full; a scale belongs to what it scales
        ("layers.0.attn.wq_a.weight", 1280 * 5120),
        ("layers.0.attn.wq_a.scale", 40 * 160),
        # 6 of 384 experts, spread evenly over all of them
        ("layers.0.ffn.experts.5.w2.weight", 5120 * 2304 // 2 // 64),
        ("layers.0.ffn.experts.5.w2.scale", 5120 * 2304 // 32 // 64),
        # one row; 24 rows of each table
        ("embed.weight", 2 * 5120),
        ("layers.1.engram.embed.weight", 24 * 256),
        ("layers.14.engram.embed.scale", 24 * 8),
        ("layers.0.ffn.gate.bias", 4 * 384),
        # not read for text; not in the target file
        ("layers.0.ffn.gate.bias_vl", 0),
        ("mtp.0.attn.wq_a.weight", 0),
        ("vision.norm.weight", 0),
    ],
)
@pytest.mark.parametrize("layout", Layout)
def test_bytes_of_the_source_that_one_token_reads(
    name: str, per_token: int, layout: Layout
) -> None:
    assert released_source(layout)[name].per_token == per_token


def test_a_token_reads_used_over_all_of_the_source_experts_and_48_rows() -> None:
    source = source_budget()[0]
    lines = {line.sub_role: line.per_token for line in source.sub_roles}
    routed = source.line(Role.ROUTED)
    assert routed is not None
    assert routed.per_token == 288_777_830_400 * 6 // 384
    assert lines[SubRole.ENGRAM_TABLE] == 48 * 264


PLAN_LINES = {
    Role.ROUTED: (120, 258_767_585_280, 4_043_243_520),
    Role.ENGRAM: (8, 84_617_716_700, 135_203_200 + 48 * 110),
    Role.ATTENTION: (623, 2_220_253_632, 2_220_253_632),
    Role.EMBEDDING: (175, 986_206_208, 986_206_208 - 284_416_000 + 2_200 - 61_440),
    Role.SHARED: (120, 673_873_920, 673_873_920),
}


def test_the_published_file_by_role() -> None:
    budget = plan_budget(Q3)
    assert {
        line.role: (line.n_tensors, line.nbytes, line.per_token) for line in budget.roles
    } == PLAN_LINES
    assert (budget.n_tensors, budget.nbytes) == (1046, 347_265_635_740)
    assert round(budget.line(Role.ROUTED).bits_per_weight or 0, 4) == 3.8083  # type: ignore[union-attr]


def test_dense_bytes_per_token_of_the_served_file() -> None:
    """As its planner counts: resident, neither expert nor looked up, the engram's own left out.

    It counts the image tokens' biases too, which no text token reads.
    """
    apart = (Role.ROUTED, Role.ENGRAM)
    items = [item for item in plan_items(released_plan(SERVED)) if item.role not in apart]
    dense = [item for item in items if item.sub_role is not SubRole.TOKEN_EMBD]
    assert sum(item.nbytes for item in dense) == 7_657_593_280
    assert sum(item.per_token for item in dense) == 7_657_593_280 - 40 * 384 * 4


@pytest.mark.parametrize("layout", Layout)
def test_a_token_reads_48_engram_rows_in_both_layouts(layout: Layout) -> None:
    lines = {line.sub_role: line for line in plan_budget(SERVED, layout).sub_roles}
    assert lines[SubRole.ENGRAM_TABLE].per_token == 48 * 272
    assert lines[SubRole.ENGRAM_TABLE].nbytes == 768_022_850 * 272


BUDGETS = {
    "source": lambda: source_budget()[0],
    "published": lambda: plan_budget(Q3),
    "mainline": lambda: plan_budget("native", Layout.MAINLINE),
}


@pytest.mark.parametrize("which", BUDGETS)
def test_lines_add_up_to_the_totals(which: str) -> None:
    budget = BUDGETS[which]()
    for lines in (budget.roles, budget.sub_roles):
        assert sum(line.n_tensors for line in lines) == budget.n_tensors
        assert sum(line.n_params for line in lines) == budget.n_params
        assert sum(line.nbytes for line in lines) == budget.nbytes
        assert sum(line.per_token for line in lines) == budget.per_token
    for line in budget.roles:
        parts = [part for part in budget.sub_roles if part.role is line.role]
        assert sum(part.nbytes for part in parts) == line.nbytes
        assert sum((Counter(counts(part)) for part in parts), Counter()) == counts(line)
    for line in (*budget.roles, *budget.sub_roles):
        assert sum(n for n, _ in line.types.values()) == line.n_tensors
        assert sum(nbytes for _, nbytes in line.types.values()) == line.nbytes


def counts(line: Line) -> dict[str, int]:
    return {name: n for name, (n, _) in line.types.items()}


def test_a_budget_of_hand_made_items() -> None:
    """Two roles, one of them in two sub-roles and types; roles without tensors have no line."""
    up, down = SubRole.SHARED_UP, SubRole.SHARED_DOWN
    items = [
        Item("c", Role.SHARED, up, "Q8_0", 64, 68, 68),
        Item("a", Role.ROUTED, SubRole.ROUTED_UP, "MXFP4", 64, 34, 5),
        Item("b", Role.SHARED, down, "F32", 10, 40, 40),
        Item("d", Role.SHARED, down, "F32", 0, 4, 0),
    ]
    budget = budget_of("written", iter(items))
    routed = Line(Role.ROUTED, None, 1, 64, 34, 5, {"MXFP4": (1, 34)})
    shared = Line(Role.SHARED, None, 3, 74, 112, 108, {"F32": (2, 44), "Q8_0": (1, 68)})
    assert budget == Budget(
        "written",
        (routed, shared),
        (
            replace(routed, sub_role=SubRole.ROUTED_UP),
            Line(Role.SHARED, up, 1, 64, 68, 68, {"Q8_0": (1, 68)}),
            Line(Role.SHARED, down, 2, 10, 44, 40, {"F32": (2, 44)}),
        ),
    )
    assert (budget.n_tensors, budget.nbytes, budget.n_params, budget.per_token) == (
        4,
        146,
        138,
        113,
    )
    assert (budget.line(Role.SHARED), budget.line(Role.DRAFT)) == (shared, None)
    assert routed.bits_per_weight == 4.25


def test_no_weights_have_no_bits() -> None:
    assert Line(Role.DRAFT, None, 1, 0, 4, 0, {}).bits_per_weight is None
    assert budget_of("written", []).nbytes == 0


@pytest.mark.parametrize("layout", Layout)
def test_draft_and_vision_are_not_carried(layout: Layout) -> None:
    assert not_carried(specs(), targets(layout)) == tuple(
        NotCarried(role, *SOURCE_ROLES[role]) for role in (Role.DRAFT, Role.VISION)
    )
    trunk = [spec for spec in specs() if not re.match("mtp|vision|aligner|image", spec.name)]
    assert not_carried(trunk, targets(layout)) == ()


def test_written_is_the_plan_of_the_whole_shards() -> None:
    plan = released_plan(Q3)
    assert written_items(plan, []) == []
    found = budget_of("written", written_items(plan, iter([1, 3])))
    assert [line.role for line in found.roles] == [Role.ROUTED, Role.ENGRAM]
    assert found.nbytes == plan.shards[1].data_nbytes + plan.shards[3].data_nbytes
    everything = written_items(plan, range(len(plan.shards)))
    assert everything == plan_items(plan)


def read_back(plan: Plan, folder: Path) -> GgufModel:
    """The model that the plan's headers, over holes, are read as."""
    for shard in plan.shards:
        write_whole(folder / shard.file_name, shard.header)
        truncate(folder / shard.file_name, shard.nbytes)
    return read_model(folder)


@pytest.mark.parametrize("layout", Layout)
def test_final_is_what_the_files_say_and_equals_the_plan(layout: Layout, tmp_path: Path) -> None:
    plan = released_plan(Q3, layout)
    assert final_items(plan, read_back(plan, tmp_path)) == plan_items(plan)


def test_final_shows_what_the_files_say_where_the_plan_says_otherwise(tmp_path: Path) -> None:
    plan, other = released_plan(Q3), released_plan(SERVED)
    found = final_items(plan, read_back(other, tmp_path))
    assert budget_of("final", found) == budget_of("final", plan_items(other))


def test_a_tensor_that_no_plan_knows_is_named(tmp_path: Path) -> None:
    fork, mainline = released_plan(Q3), released_plan(Q3, Layout.MAINLINE)
    with pytest.raises(
        VerifyError, match=r"not in their plan; file .*-00002-of-.*; tensor per_lay"
    ):
        final_items(fork, read_back(mainline, tmp_path))
