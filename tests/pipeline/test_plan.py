"""Plans: what lies where in which shard, and headers that read back as planned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PlanError
from pipeline.files import truncate, write_whole
from pipeline.gguf.header import ALIGNMENT_KEY
from pipeline.gguf.keys import ValueType, array, i32, text, u16
from pipeline.gguf.model_file import read_model
from pipeline.gguf.reader import GgufFile, read_gguf
from pipeline.miniature.checkpoint import miniature_blueprint
from pipeline.miniature.size import MiniatureSize
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.form import V41_FORK
from pipeline.model.layout import Layout
from pipeline.model.roles import Role
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_form, target_tensors
from pipeline.plan import (
    PAGE,
    Plan,
    PlannedShard,
    PlannedTensor,
    Transform,
    make_plan,
    per_token_nbytes,
    transform_of,
)
from pipeline.quant.types import TYPES, GgmlType
from tests.pipeline.released_plans import released_config, released_plan

FORK, MAINLINE = Layout.FORK, Layout.MAINLINE
WORDS = tuple(f"word {n}" for n in range(3000))
KEY_VALUES = (
    text("general.architecture", "deepseek41"),
    array("tokenizer.ggml.tokens", ValueType.STRING, WORDS),
)
N_LAYERS = 20
"""Of the small plan: enough that a header of all their stacks takes more than a page."""


def types_of(targets: Sequence[TargetTensor]) -> dict[str, GgmlType]:
    """Q8_0 wherever a matrix may be quantized: sizes with and without whole pages."""
    return {t.name: TYPES[t.only_type or "Q8_0"] for t in targets}


@cache
def small_config() -> ModelConfig:
    blueprint = miniature_blueprint(MiniatureSize(n_layers=N_LAYERS), seed=0)
    return read_config(json.loads(blueprint.config))


@cache
def small_targets(layout: Layout) -> tuple[TargetTensor, ...]:
    return target_tensors(small_config(), layout)


@cache
def small_plan(layout: Layout = FORK, shard_nbytes: int = 20_000_000) -> Plan:
    targets = small_targets(layout)
    return make_plan(
        name="small",
        form=target_form(small_config(), layout),
        config=small_config(),
        targets=targets,
        types=types_of(targets),
        key_values=KEY_VALUES,
        shard_nbytes=shard_nbytes,
    )


PLANS: dict[str, Callable[[], Plan]] = {
    "small fork": lambda: small_plan(),
    "small mainline": lambda: small_plan(MAINLINE),
    "released fork": lambda: released_plan("published-q3_k_m"),
    "released mainline": lambda: released_plan("native", MAINLINE),
}


@pytest.fixture(params=list(PLANS))
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[str(request.param)]()


def write_hollow(plan: Plan, folder: Path) -> list[Path]:
    """The plan's files with true headers and holes for data."""
    paths = [folder / shard.file_name for shard in plan.shards]
    for path, shard in zip(paths, plan.shards, strict=True):
        write_whole(path, shard.header)
        truncate(path, shard.nbytes)
    return paths


def names(shard: PlannedShard) -> list[str]:
    return [tensor.name for tensor in shard.tensors]


def padded(nbytes: int) -> int:
    return (nbytes + 31) // 32 * 32


def expert_shards(plan: Plan) -> list[PlannedShard]:
    return [shard for shard in plan.shards if shard.kind == "experts"]


def layers_of(shard: PlannedShard) -> list[int]:
    return [t.target.layer for t in shard.tensors if t.target.layer is not None]


# --- what is written reads back ---------------------------------------------------------------


def stored(file: GgufFile) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    return [(t.name, t.type.name, t.ne, t.offset, t.nbytes) for t in file.tensors.values()]


def planned(tensors: Sequence[PlannedTensor]) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    return [(t.name, t.type.name, t.target.shape[::-1], t.offset, t.nbytes) for t in tensors]


def test_headers_read_back_as_planned(plan: Plan, tmp_path: Path) -> None:
    for path, shard in zip(write_hollow(plan, tmp_path), plan.shards, strict=True):
        file = read_gguf(path)
        assert stored(file) == planned(shard.tensors)
        assert file.data_offset == len(shard.header)
        assert file.nbytes == shard.nbytes == path.stat().st_size


def test_the_files_are_one_model(plan: Plan, tmp_path: Path) -> None:
    model = read_model(write_hollow(plan, tmp_path)[0])
    assert len(model.files) == len(plan.shards)
    assert {name: no for name, (no, _) in model.tensors.items()} == {
        tensor.name: tensor.shard for tensor in plan.tensors
    }
    assert model.key_values["general.architecture"].value == "deepseek41"


def test_metadata_stands_in_the_first_shard_only(tmp_path: Path) -> None:
    first, *others = (read_gguf(path) for path in write_hollow(small_plan(), tmp_path))
    assert first.key_values["tokenizer.ggml.tokens"].value == WORDS
    # A vocabulary needs more than one page, so padding is not all there is to a header.
    assert first.data_offset > 10 * PAGE
    own = {"split.no", "split.count", "split.tensors.count", "quantmill.header_pad"}
    assert all(set(file.key_values) <= own for file in others)


def test_split_keys_number_the_shards(plan: Plan, tmp_path: Path) -> None:
    count, n_tensors = len(plan.shards), len(plan.tensors)
    for no, path in enumerate(write_hollow(plan, tmp_path)):
        found = read_gguf(path).key_values
        assert path.name.endswith(f"-{no + 1:05d}-of-{count:05d}.gguf")
        kind = plan.shards[no].kind
        wanted = {"split.no": u16("split.no", no)}
        if kind != "engram":  # one file for recipes with other numbers of shards
            wanted["split.count"] = u16("split.count", count)
        if kind == "dense":  # the others are shared by layouts with other numbers of tensors
            wanted["split.tensors.count"] = i32("split.tensors.count", n_tensors)
        assert {key: entry for key, entry in found.items() if key.startswith("split.")} == wanted


def test_alignment_stays_at_its_default(plan: Plan, tmp_path: Path) -> None:
    for path in write_hollow(plan, tmp_path):
        file = read_gguf(path)
        assert ALIGNMENT_KEY not in file.key_values
        assert (file.alignment, file.data_offset % PAGE) == (32, 0)


# --- offsets ----------------------------------------------------------------------------------


def test_tensors_follow_each_other_without_overlap_or_hole(plan: Plan) -> None:
    for shard in plan.shards:
        end = len(shard.header)
        for tensor in shard.tensors:
            assert tensor.offset == end
            end += padded(tensor.nbytes)
        assert end == shard.nbytes


def test_offsets_are_aligned_and_whole_pages_come_first(plan: Plan) -> None:
    for shard in plan.shards:
        is_whole = [tensor.nbytes % PAGE == 0 for tensor in shard.tensors]
        assert is_whole == sorted(is_whole, reverse=True)
        assert all(tensor.offset % 32 == 0 for tensor in shard.tensors)
        assert all(t.offset % PAGE == 0 for t in shard.tensors if t.nbytes % PAGE == 0)


def test_both_kinds_of_size_are_in_the_small_plan() -> None:
    first = small_plan().shards[0]
    assert {tensor.nbytes % PAGE == 0 for tensor in first.tensors} == {True, False}


def test_sums(plan: Plan) -> None:
    assert plan.nbytes == sum(shard.nbytes for shard in plan.shards)
    assert plan.data_nbytes == sum(tensor.nbytes for tensor in plan.tensors)
    for tensor in plan.tensors:
        assert tensor.nbytes == tensor.target.n_rows * tensor.row_nbytes
    for shard in plan.shards:
        padding = sum(padded(t.nbytes) - t.nbytes for t in shard.tensors)
        assert shard.nbytes == len(shard.header) + shard.data_nbytes + padding


def test_a_shard_without_tensors_is_its_header() -> None:
    assert replace(small_plan().shards[0], tensors=()).nbytes == len(small_plan().shards[0].header)


# --- which shard ------------------------------------------------------------------------------


def test_fork_has_dense_then_a_table_each_then_experts() -> None:
    plan = released_plan("published-q3_k_m")
    kinds = [shard.kind for shard in plan.shards]
    assert kinds == ["dense", "engram", "engram", *["experts"] * 7]
    assert names(plan.shards[1]) == ["blk.1.engram_embd.weight"]
    assert names(plan.shards[2]) == ["blk.14.engram_embd.weight"]
    assert len(plan.shards[0].tensors) == 1046 - 2 - 120
    assert "blk.1.engram_wkv.weight" in names(plan.shards[0])


def test_mainline_has_the_joined_table_and_the_engrams_rest_apart() -> None:
    plan = released_plan("published-q3_k_m", MAINLINE)
    kinds = [shard.kind for shard in plan.shards]
    assert kinds == ["dense", "engram", "engram", *["experts"] * 7]
    assert names(plan.shards[1]) == ["per_layer_token_embd.weight"]
    assert sorted(names(plan.shards[2])) == [
        f"blk.{n}.engram_{x}.weight" for n in (1, 14) for x in ("gate", "kv")
    ]
    assert len(plan.shards[0].tensors) == 1043 - 5 - 120


@pytest.mark.parametrize("recipe", ["published-q3_k_m", "native", "lowbit-q2_k"])
def test_expert_files_are_the_same_in_both_layouts(recipe: str) -> None:
    fork, mainline = (expert_shards(released_plan(recipe, layout)) for layout in (FORK, MAINLINE))
    assert [shard.header for shard in fork] == [shard.header for shard in mainline]
    assert [(shard.no, shard.file_name, shard.tensors) for shard in fork] == [
        (shard.no, shard.file_name, shard.tensors) for shard in mainline
    ]


def test_table_files_do_not_depend_on_the_experts_types() -> None:
    one, other = released_plan("served"), served_with_other_experts()
    assert [s.tensors for s in one.shards[1:3]] == [s.tensors for s in other.shards[1:3]]


def served_with_other_experts() -> Plan:
    served = released_plan("served")
    return make_plan(
        name="other",
        form=V41_FORK,
        config=served.config,
        targets=[t.target for t in sorted(served.tensors, key=lambda t: t.target.layer or 0)],
        types={
            t.name: TYPES["Q2_K"] if t.target.role is Role.ROUTED else t.type
            for t in served.tensors
        },
        key_values=KEY_VALUES,
        shard_nbytes=45_000_000_000,
    )


def test_experts_lie_in_layer_order_with_a_layers_stacks_together(plan: Plan) -> None:
    layers = [layer for shard in expert_shards(plan) for layer in layers_of(shard)]
    n_layers = plan.config.n_layers
    assert layers == [layer for layer in range(n_layers) for _ in range(3)]
    assert all(len(shard.tensors) % 3 == 0 for shard in expert_shards(plan))


def test_the_size_limit_holds_to_the_byte(plan: Plan) -> None:
    limit = 20_000_000 if plan.name == "small" else 45_000_000_000
    shards = expert_shards(plan)
    assert all(shard.nbytes <= limit for shard in shards)
    # Not one of them could have taken the next layer too.
    for shard, following in pairwise(shards):
        layer = following.tensors[:3]
        assert shard.nbytes + sum(padded(t.nbytes) for t in layer) > limit - PAGE


@pytest.mark.parametrize(("n_layers", "header"), [(1, PAGE), (4, PAGE), (N_LAYERS, 2 * PAGE)])
def test_a_limit_of_just_so_many_layers(n_layers: int, header: int) -> None:
    """Headers count too."""
    stacks = [t for t in small_plan().tensors if t.target.role is Role.ROUTED]
    limit = header + sum(padded(t.nbytes) for t in stacks[: 3 * n_layers])
    exact, short = (expert_shards(small_plan(FORK, most))[0] for most in (limit, limit - 1))
    assert (len(exact.tensors), exact.nbytes) == (3 * n_layers, limit)
    assert len(short.tensors) == 3 * max(1, n_layers - 1)


def test_a_layer_larger_than_the_limit_stands_alone() -> None:
    shards = expert_shards(small_plan(shard_nbytes=1 << 20))
    assert [layers_of(shard) for shard in shards] == [[layer] * 3 for layer in range(N_LAYERS)]
    assert all(shard.nbytes > 1 << 20 for shard in shards)


@settings(max_examples=30)
@given(limit=st.integers(1, 40_000_000), layout=st.sampled_from(Layout))
def test_any_limit_places_every_tensor_once(limit: int, layout: Layout) -> None:
    plan = small_plan(layout, limit)
    assert sorted(t.name for t in plan.tensors) == sorted(t.name for t in small_targets(layout))
    assert [shard.no for shard in plan.shards] == list(range(len(plan.shards)))
    assert all(t.shard == shard.no for shard in plan.shards for t in shard.tensors)
    for shard in expert_shards(plan):
        assert shard.nbytes <= limit or len(shard.tensors) == 3


# --- how tensors are made ---------------------------------------------------------------------


def transforms(plan: Plan, *roles: Role) -> set[Transform]:
    return {t.transform for t in plan.tensors if t.target.role in roles}


def test_fp4_experts_are_repacked_to_mxfp4_and_encoded_to_all_else() -> None:
    assert transforms(released_plan("native"), Role.ROUTED) == {Transform.REPACK}
    assert transforms(released_plan("published-q3_k_m"), Role.ROUTED) == {Transform.ENCODE}


@pytest.mark.parametrize(
    ("name", "type_name", "transform"),
    [
        ("token_embd.weight", "BF16", Transform.COPY),
        ("token_embd.weight", "F32", Transform.ENCODE),
        ("blk.0.hc_attn_fn.weight", "F32", Transform.COPY),
        ("blk.0.hc_attn_fn.weight", "BF16", Transform.ENCODE),
        ("blk.0.attn_norm.weight", "F32", Transform.ENCODE),
        ("blk.0.attn_sinks.weight", "F32", Transform.COPY),
        ("blk.0.attn_q_a.weight", "Q8_0", Transform.ENCODE),
        ("blk.0.attn_q_a.weight", "F8_E4M3", Transform.ENCODE),
        ("blk.0.ffn_up_exps.weight", "MXFP4", Transform.REPACK),
        ("blk.0.ffn_up_exps.weight", "NVFP4", Transform.ENCODE),
        ("blk.0.ffn_up_shexp.weight", "MXFP4", Transform.ENCODE),
        ("blk.1.engram_gate.weight", "F32", Transform.PRODUCT),
        ("per_layer_token_embd.weight", "Q8_0", Transform.ENCODE),
    ],
)
def test_the_way_from_stored_to_written(name: str, type_name: str, transform: Transform) -> None:
    target = next(t for t in small_targets(MAINLINE) if t.name == name)
    assert transform_of(target, TYPES[type_name]) is transform


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("blk.0.attn_q_a.weight", 5120 * 1280 // 256 * 110),
        ("blk.0.ffn_up_exps.weight", 6 * 5120 * 2304 // 256 * 110),
        ("token_embd.weight", 5120 // 256 * 110),
        ("blk.1.engram_embd.weight", 24 * 110),
        ("blk.1.engram_q.weight", 4 * 5120 // 256 * 110),
        ("blk.0.exp_probs_b.bias", 384 * 4),
        ("blk.0.exp_probs_b_vl.bias", 0),
    ],
)
def test_bytes_that_one_token_reads(name: str, per_token: int) -> None:
    tensor = next(t for t in released_plan("published-q3_k_m").tensors if t.name == name)
    assert per_token_nbytes(tensor.target, tensor.nbytes, released_config()) == per_token


def test_a_token_reads_48_rows_of_the_joined_table() -> None:
    tensor = released_plan("published-q3_k_m", MAINLINE).shards[1].tensors[0]
    assert per_token_nbytes(tensor.target, tensor.nbytes, released_config()) == 48 * 110


def test_tensors_without_a_type_are_named() -> None:
    targets = small_targets(FORK)
    types = types_of(targets)
    for name in ("output.weight", "blk.3.attn_kv.weight"):
        del types[name]
    with pytest.raises(
        PlanError,
        match=r"^tensors without a type; tensor output\.weight, blk\.3\.attn_kv\.weight$",
    ):
        make_plan(
            name="x",
            form=V41_FORK,
            config=small_config(),
            targets=targets,
            types=types,
            key_values=KEY_VALUES,
            shard_nbytes=1 << 30,
        )
