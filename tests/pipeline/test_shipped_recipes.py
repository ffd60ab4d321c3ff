"""The recipes that come along, at the released model's full size, to the byte."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from pipeline.budget import budget_of, plan_items
from pipeline.errors import QuantmillError
from pipeline.files import truncate, write_whole
from pipeline.gguf.model_file import read_model
from pipeline.model.layout import Layout
from pipeline.model.roles import Role, SubRole
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from pipeline.plan import Plan
from pipeline.quant.guard import NEEDS_IMPORTANCE
from pipeline.quant.types import GgmlType
from pipeline.recipe.choose import graft_of
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, load_recipe, parse_recipe
from tests.pipeline.released_plans import (
    ROOT,
    config_for,
    released_draft_plan,
    released_plan,
)

FORK, MAINLINE = Layout.FORK, Layout.MAINLINE

TENSOR_BYTES = {
    # Two published uploads and a file described tensor by tensor in public.
    "published-q3_k_m": (FORK, 347_265_635_740),
    "published-q2_k": (FORK, 264_509_443_176),
    "served": (FORK, 476_985_618_400),
    "served-lean": (FORK, 352_719_078_428),
    "native": (MAINLINE, 507_948_390_368),
    "lowbit-q2_k": (MAINLINE, 316_369_155_808),
    "reap-256-native": (MAINLINE, 411_636_643_808),
    "reap-256-q3": (FORK, 266_410_746_908),
    "reap-320-q3": (FORK, 309_564_912_668),
    "v4-native": (MAINLINE, 156_373_008_732),
    "v4-q3_k": (MAINLINE, 140_367_503_708),
    "served-graft": (FORK, 476_985_618_400),
    "bpw-3.0": (FORK, 292_341_224_860),
    "bpw-3.0-mainline": (MAINLINE, 292_164_406_300),
    "bpw-2.4": (FORK, 251_572_589_980),
    "bpw-2.4-mainline": (MAINLINE, 251_572_718_620),
    "q4-class": (MAINLINE, 434_218_196_768),
    "reap-256-bpw-3.0": (FORK, 224_341_030_300),
    "reap-256-bpw-3.0-mainline": (MAINLINE, 224_223_194_140),
    "reap-256-bpw-2.4": (FORK, 197_161_940_380),
    "reap-256-bpw-2.4-mainline": (MAINLINE, 197_162_069_020),
    "reap-256-q4-class": (MAINLINE, 337_906_450_208),
}
DRAFT_BYTES = {
    # The published drafts: MXFP4 experts, Q8_0 matrices, BF16 router, Markov pair and confidence.
    "draft": 7_967_705_480,
    "reap-256-native": 7_967_705_480,
    "reap-256-q3": 7_967_705_480,
    "reap-320-q3": 7_967_705_480,
    "native": 7_967_705_480,
    "served": 7_967_705_480,
    "served-lean": 7_967_705_480,
    "lowbit-q2_k": 7_967_705_480,
    "v4-native": 10_890_804_124,
    "v4-q3_k": 10_890_804_124,
    "bpw-3.0-mainline": 7_967_705_480,
    "bpw-2.4-mainline": 7_967_705_480,
    "q4-class": 7_967_705_480,
    "reap-256-bpw-3.0-mainline": 7_967_705_480,
    "reap-256-bpw-2.4-mainline": 7_967_705_480,
    "reap-256-q4-class": 7_967_705_480,
}
FOR_V41 = [name for name in TENSOR_BYTES if not name.startswith("v4-")]
SHIPPED = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
OF_A_FILE = "as-is"
"""Says nothing of a checkpoint: its types are those of the file that it is used on."""
MAKE_A_TARGET = [name for name in SHIPPED if name not in ("draft", OF_A_FILE)]


@cache
def targets_of(name: str, layout: Layout) -> tuple[TargetTensor, ...]:
    return target_tensors(config_for(name), layout)


def shipped(name: str) -> Recipe:
    return load_recipe(ROOT / f"recipes/{name}.toml")


def own_plan(name: str) -> Plan:
    return released_plan(name, shipped(name).output.layout)


def resolved(recipe: Recipe, targets: Sequence[TargetTensor]) -> dict[str, GgmlType]:
    """Its types, with an importance matrix only where the recipe asks for one."""
    return resolve_types(recipe, targets, weighted=lambda _: recipe.imatrix.required)


def routed_nbytes(plan: Plan) -> int:
    return sum(t.nbytes for t in plan.tensors if t.target.role is Role.ROUTED)


def test_every_shipped_recipe_has_its_bytes_here() -> None:
    assert set(MAKE_A_TARGET) == set(TENSOR_BYTES)
    assert set(SHIPPED) == {*TENSOR_BYTES, *DRAFT_BYTES, OF_A_FILE}


@pytest.mark.parametrize("name", MAKE_A_TARGET)
def test_tensor_bytes_in_the_recipes_own_layout(name: str) -> None:
    assert (shipped(name).output.layout, own_plan(name).data_nbytes) == TENSOR_BYTES[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_draft_is_kept_but_where_a_published_file_has_none(name: str) -> None:
    assert (shipped(name).draft.mode != "drop") == (name in DRAFT_BYTES)


@pytest.mark.parametrize("name", DRAFT_BYTES)
def test_tensor_bytes_of_the_draft(name: str) -> None:
    plan = released_draft_plan(name)
    assert (plan.data_nbytes, len(plan.shards)) == (DRAFT_BYTES[name], 1)


@pytest.mark.parametrize("name", FOR_V41)
@pytest.mark.parametrize("layout", Layout)
def test_every_v41_recipe_resolves_in_both_layouts(name: str, layout: Layout) -> None:
    targets = targets_of(name, layout)
    assert len(resolved(shipped(name), targets)) == len(targets)


PRUNED = {
    "reap-256-native": ("native", 256, 192_518_553_600),
    "reap-256-q3": ("served-lean", 256, 172_511_723_520),
    "reap-320-q3": ("served-lean", 320, 215_639_654_400),
    "reap-256-bpw-3.0": ("bpw-3.0", 256, 135_895_449_600),
    "reap-256-bpw-3.0-mainline": ("bpw-3.0-mainline", 256, 135_777_484_800),
    "reap-256-bpw-2.4": ("bpw-2.4", 256, 108_716_359_680),
    "reap-256-bpw-2.4-mainline": ("bpw-2.4-mainline", 256, 108_716_359_680),
    "reap-256-q4-class": ("q4-class", 256, 192_518_553_600),
}


@pytest.mark.parametrize(("name", "rest"), PRUNED.items())
def test_a_pruned_recipe_is_its_whole_one_less_experts_and_router_rows(
    name: str, rest: tuple[str, int, int]
) -> None:
    whole_name, n_kept, store_nbytes = rest
    pruned, whole = own_plan(name), released_plan(whole_name, shipped(name).output.layout)
    sizes = {t.name: (t.target.role, t.nbytes) for t in pruned.tensors}
    before = {t.name: (t.target.role, t.nbytes) for t in whole.tensors}
    cut = [n for n in sizes if re.search(r"_exps\.|ffn_gate_inp\.|exp_probs_b", n)]
    assert {n: sizes[n] for n in sizes if n not in cut} == {
        n: before[n] for n in before if n not in cut
    }
    assert all(sizes[n][1] * 384 == before[n][1] * n_kept for n in cut)
    assert routed_nbytes(pruned) == store_nbytes
    assert budget_of("", plan_items(pruned)).line(Role.ROUTED).per_token == (
        budget_of("", plan_items(whole)).line(Role.ROUTED).per_token
    )


@pytest.mark.parametrize("name", MAKE_A_TARGET)
def test_p9_size_told_before_is_size_on_disk(name: str, tmp_path: Path) -> None:
    plan = own_plan(name)
    for shard in plan.shards:
        write_whole(tmp_path / shard.file_name, shard.header)
        truncate(tmp_path / shard.file_name, shard.nbytes)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == plan.nbytes
    # A reader that adds tensor sizes up itself finds the end of each file where it is.
    stored = read_model(tmp_path).tensors.values()
    assert sum(tensor.nbytes for _, tensor in stored) == plan.data_nbytes


@pytest.mark.parametrize("name", SHIPPED)
def test_every_recipe_says_what_it_makes(name: str) -> None:
    assert shipped(name).name == name
    assert re.fullmatch(r"[A-Z].{20,}\.", shipped(name).description)


@pytest.mark.parametrize("name", MAKE_A_TARGET)
def test_no_allowance_is_given_that_the_recipe_does_not_need(name: str) -> None:
    recipe = shipped(name)
    targets = targets_of(name, MAINLINE if name.startswith("v4-") else FORK)
    for allowance in recipe.allow:
        less = tuple(other for other in recipe.allow if other != allowance)
        with pytest.raises(QuantmillError, match=rf'add "{allowance}" to allow'):
            resolved(recipe.model_copy(update={"allow": less}), targets)


STORES = {
    # 543,581,798,400 weights at 3.0 and at 2.4 bits: what no store may go beyond.
    "bpw-3.0": (203_843_174_400, 203_843_174_400),
    "bpw-3.0-mainline": (203_666_227_200, 203_843_174_400),
    "bpw-2.4": (163_074_539_520, 163_074_539_520),
    "bpw-2.4-mainline": (163_074_539_520, 163_074_539_520),
}


@pytest.mark.parametrize(("name", "sizes"), STORES.items())
def test_the_expert_store_is_just_below_its_mean_and_all_else_is_the_published_files(
    name: str, sizes: tuple[int, int]
) -> None:
    plan, layout = own_plan(name), shipped(name).output.layout
    store, limit = sizes
    assert limit * 0.999 < routed_nbytes(plan) == store <= limit
    published = released_plan("published-q3_k_m", layout).tensors
    others = {t.name: t.type for t in published if t.target.role is not Role.ROUTED}
    assert {t.name: t.type for t in plan.tensors if t.target.role is not Role.ROUTED} == others


def test_the_files_that_are_planned_with_are_of_their_size() -> None:
    # Fork layout: 88,498,050,460 bytes beside the experts.
    assert {
        name: round(own_plan(name).data_nbytes / 1e9, 1) for name in ("bpw-3.0", "bpw-2.4")
    } == {
        "bpw-3.0": 292.3,
        "bpw-2.4": 251.6,
    }
    q4, draft = own_plan("q4-class"), released_draft_plan("q4-class")
    assert q4.data_nbytes + draft.data_nbytes < 445_000_000_000
    # One engram table at the next type up would already be too much.
    larger = next(t for t in q4.tensors if t.target.is_table)
    rows = larger.target.n_rows // 2
    assert q4.data_nbytes + rows * (210 - 176) > 445_000_000_000


@pytest.mark.parametrize("name", MAKE_A_TARGET)
def test_only_what_ik_llama_cpp_alone_reads_has_its_types(name: str) -> None:
    ik = {t.type.name for t in own_plan(name).tensors if t.type.family == "ik"}
    expected = {
        "bpw-3.0": {"IQ2_KL", "IQ3_KS", "IQ3_K"},
        "bpw-2.4": {"IQ2_KS", "IQ2_KL", "IQ3_K"},
    }
    assert ik == expected.get(name.removeprefix("reap-256-"), set())


@pytest.mark.parametrize("name", MAKE_A_TARGET)
def test_an_importance_matrix_is_asked_for_where_types_need_one(name: str) -> None:
    needing = {t.type.name for t in own_plan(name).tensors} & set(NEEDS_IMPORTANCE)
    assert bool(needing) == shipped(name).imatrix.required == ("bpw-2.4-mainline" in name)


def test_the_served_file_is_the_upload_with_what_has_more_bits_from_the_original() -> None:
    graft, upload = shipped("served-graft"), released_plan("published-q3_k_m").tensors
    before = {t.name: t.type for t in upload}
    served = released_plan("served").tensors
    assert {t.name: t.type for t in released_plan("served-graft").tensors} == {
        t.name: t.type for t in served
    }
    changed = {t.name for t in served if t.type != before[t.name]}
    grafted = {t.name for t in served if graft_of(graft, t.target) == "original"}
    # Norms and sinks are F32 in both.
    assert changed <= grafted
    assert {before[name].name for name in grafted - changed} == {"F32"}


def census(plan: Plan) -> Counter[str]:
    return Counter(tensor.type.planner_name for tensor in plan.tensors)


@pytest.mark.parametrize(
    ("name", "types"),
    [
        (
            "published-q3_k_m",
            {"q3_K": 476, "f32": 449, "q4_K": 76, "bf16": 40, "q5_K": 4, "q6_K": 1},
        ),
        ("published-q2_k", {"q2_K": 476, "f32": 449, "q3_K": 80, "bf16": 40, "q6_K": 1}),
    ],
)
def test_types_of_the_published_files_are_counted_alike(name: str, types: dict[str, int]) -> None:
    assert census(released_plan(name)) == types


EXPECTED_TYPES = {
    ("published-q3_k_m", "blk.1.ffn_down_exps.weight"): "Q5_K",
    ("published-q3_k_m", "blk.2.ffn_down_exps.weight"): "Q4_K",
    ("published-q3_k_m", "blk.1.ffn_down_shexp.weight"): "Q5_K",
    ("published-q3_k_m", "blk.1.engram_q.weight"): "Q3_K",
    ("served", "blk.1.ffn_down_exps.weight"): "Q5_K",
    ("served", "blk.1.ffn_down_shexp.weight"): "Q8_0",
    ("served", "blk.1.engram_embd.weight"): "Q8_0",
    ("served", "blk.1.engram_q.weight"): "BF16",
    ("served", "blk.2.indexer.attn_q_b.weight"): "Q8_0",
    ("served", "blk.2.indexer.attn_k.weight"): "Q3_K",
    ("served", "token_embd.weight"): "BF16",
    ("served-lean", "blk.1.engram_embd.weight"): "Q3_K",
    ("native", "blk.1.ffn_up_exps.weight"): "MXFP4",
    ("native", "output.weight"): "BF16",
    ("native", "blk.2.indexer.proj.weight"): "BF16",
    ("lowbit-q2_k", "blk.1.engram_embd.weight"): "Q4_K",
    ("lowbit-q2_k", "blk.1.ffn_down_exps.weight"): "Q3_K",
    ("v4-native", "blk.2.attn_compressor_kv.weight"): "BF16",
    ("v4-native", "blk.2.indexer_compressor_gate.weight"): "BF16",
    ("v4-native", "blk.2.indexer.attn_q_b.weight"): "Q8_0",
    ("v4-native", "blk.2.ffn_gate_tid2eid.weight"): "I32",
    ("v4-q3_k", "blk.1.ffn_down_exps.weight"): "Q5_K",
}


@pytest.mark.parametrize(("name", "tensor"), EXPECTED_TYPES)
def test_type_of_one_tensor(name: str, tensor: str) -> None:
    plan = own_plan(name) if name.startswith("v4-") else released_plan(name)
    found = {t.name: t.type.name for t in plan.tensors}
    assert found[tensor] == EXPECTED_TYPES[name, tensor]


def test_our_own_recipes_keep_small_sensitive_matrices_at_16_bits_or_more() -> None:
    sensitive = {SubRole.ENGRAM_GATE, SubRole.HYPER_CONNECTION, SubRole.ROUTER, SubRole.NORM}
    for name in ("native", "served-lean", "lowbit-q2_k", "v4-native", "v4-q3_k"):
        found = [t for t in own_plan(name).tensors if t.target.sub_role in sensitive]
        assert min(t.type.bpw for t in found) >= 16


def test_published_recipes_reach_nothing_that_engines_would_not_read() -> None:
    """The one engine that reads these files only, by its documentation."""
    known = {"f32", "bf16", "q8_0", "q3_K", "q4_K", "q5_K", "q6_K"}
    assert set(census(released_plan("served"))) <= known
    assert set(census(released_plan("published-q3_k_m"))) <= known


P10 = {
    "unknown key": ("[roles]", "[rules]", "unknown key rules"),
    "missing role": ('shared = "Q3_K"\n', "", "the key roles.shared is missing"),
    "unknown type": ('engram = "Q3_K"', 'engram = "Q3_KM"', "roles.engram: no ggml type"),
    "unmatched override": (r"^blk\.[01]\.", r"^blk\.40\.", "override 1 (^blk\\.40\\."),
    "allowance withdrawn": ('"below_bf16", ', "", "too coarse for these small sensitive matrices"),
}


@pytest.mark.parametrize(("said", "changed", "answer"), P10.values(), ids=P10)
def test_p10_a_wrong_recipe_fails_before_anything_is_read(
    said: str, changed: str, answer: str
) -> None:
    content = (ROOT / "recipes/published-q3_k_m.toml").read_text()
    assert said in content
    with pytest.raises(QuantmillError, match=re.escape(answer)):
        resolve_types(
            parse_recipe(content.replace(said, changed, 1).encode(), Path("published-q3_k_m.toml")),
            targets_of("published-q3_k_m", FORK),
        )
