"""The inventory: the planner's array unchanged, and offsets that lead to the right bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from pipeline.digest import canonical_json, sha256
from pipeline.errors import VerifyError
from pipeline.model.layout import Layout
from pipeline.plan import Plan
from pipeline.report.inventory import inventory, planner_array
from tests.pipeline.released_plans import released_plan

Q3 = "published-q3_k_m"
LAYOUTS = pytest.mark.parametrize("layout", list(Layout))


def digests_of(plan: Plan) -> dict[str, str]:
    return {tensor.name: sha256(tensor.name.encode()) for tensor in plan.tensors}


@cache
def document(layout: Layout) -> Mapping[str, Any]:
    """The inventory of the published recipe, as it comes back from JSON."""
    plan = released_plan(Q3, layout)
    shard_digests = [sha256(shard.file_name.encode()) for shard in plan.shards]
    made = inventory(
        plan, digests_of(plan), shard_digests, source={"revision": "r"}, recipe={"name": Q3}
    )
    return json.loads(canonical_json(made))  # type: ignore[no-any-return]


def named(layout: Layout, name: str) -> dict[str, Any]:
    return next(t for t in document(layout)["tensors"] if t["name"] == name)


def test_planner_array_has_exactly_the_six_keys() -> None:
    array = planner_array(released_plan(Q3))
    assert len(array) == 1046
    assert {tuple(entry) for entry in array} == {("block", "name", "dims", "ty", "bytes", "shard")}
    assert sum(int(str(entry["bytes"])) for entry in array) == 347_265_635_740
    table = next(entry for entry in array if entry["name"] == "blk.1.engram_embd.weight")
    assert table == {
        "block": 1,
        "name": "blk.1.engram_embd.weight",
        "dims": [256, 384_006_168],
        "ty": "q3_K",
        "bytes": 42_240_678_480,
        "shard": 1,
    }


def test_order_is_block_then_name_and_blockless_last() -> None:
    array = planner_array(released_plan(Q3))
    assert [entry["block"] for entry in array[-3:]] == [None] * 3
    assert [entry["name"] for entry in array[-3:]] == [
        "output.weight",
        "output_norm.weight",
        "token_embd.weight",
    ]
    blocks = [(entry["block"], entry["name"]) for entry in array[:-3]]
    assert blocks == sorted(blocks)
    assert blocks[-1][0] == 39


@LAYOUTS
def test_it_is_a_superset_of_the_planner_s_array(layout: Layout) -> None:
    keys = ("block", "name", "dims", "ty", "bytes", "shard")
    entries = [{key: entry[key] for key in keys} for entry in document(layout)["tensors"]]
    assert entries == planner_array(released_plan(Q3, layout))


@LAYOUTS
def test_tensors_lie_in_their_shards_without_overlap(layout: Layout) -> None:
    shards = document(layout)["shards"]
    for shard in shards:
        inside = [t for t in document(layout)["tensors"] if t["shard"] == shard["no"]]
        assert len(inside) == shard["n_tensors"]
        end = shard["data_offset"]
        for tensor in sorted(inside, key=lambda t: t["offset"]):
            assert 0 <= tensor["offset"] - end < shard["alignment"]
            end = tensor["offset"] + tensor["bytes"]
        assert 0 <= shard["nbytes"] - end < shard["alignment"]
    assert sum(shard["nbytes"] for shard in shards) == document(layout)["file_bytes"]


@LAYOUTS
def test_sizes_of_every_tensor_agree(layout: Layout) -> None:
    for tensor in document(layout)["tensors"]:
        assert tensor["rows"] * tensor["row_bytes"] == tensor["bytes"]
        assert tensor["page_aligned"] == (tensor["offset"] % 4096 == 0)
        if "expert_bytes" in tensor:
            assert tensor["dims"][2] == tensor["n_expert"] == 384
            assert tensor["n_expert"] * tensor["expert_bytes"] == tensor["bytes"]
            assert tensor["expert_rows"] == tensor["dims"][1]
            assert tensor["expert_rows"] * tensor["row_bytes"] == tensor["expert_bytes"]


def test_every_stack_can_be_read_by_expert_and_by_page() -> None:
    stacks = [t for t in document(Layout.FORK)["tensors"] if "expert_bytes" in t]
    assert len(stacks) == 120
    assert all(t["page_aligned"] and t["read"] == "sparse" for t in stacks)
    gate = named(Layout.FORK, "blk.7.ffn_gate_exps.weight")
    assert (gate["type"], gate["type_id"], gate["row_bytes"]) == ("Q3_K", 11, 5120 // 256 * 110)
    assert gate["expert_bytes"] == 5_068_800
    assert gate["per_token_bytes"] == 6 * 5_068_800
    assert gate["offset"] + 384 * gate["expert_bytes"] == gate["offset"] + gate["bytes"]


def test_a_vector_and_an_unread_bias() -> None:
    norm = named(Layout.FORK, "output_norm.weight")
    assert (norm["dims"], norm["rows"], norm["row_bytes"]) == ([5120], 1, 20_480)
    assert (norm["role"], norm["sub_role"], norm["read"]) == ("embedding", "norm", "full")
    bias = named(Layout.FORK, "blk.0.exp_probs_b_vl.bias")
    assert (bias["read"], bias["per_token_bytes"]) == ("none", 0)


def test_engram_rows_are_found_the_same_way_in_both_layouts() -> None:
    fork, mainline = document(Layout.FORK)["engram"], document(Layout.MAINLINE)["engram"]
    assert [(part["tensor"], part["first_row"], part["rows"]) for part in fork] == [
        ("blk.1.engram_embd.weight", 0, 384_006_168),
        ("blk.14.engram_embd.weight", 0, 384_016_682),
    ]
    assert [(part["tensor"], part["first_row"], part["rows"]) for part in mainline] == [
        ("per_layer_token_embd.weight", 0, 384_006_168),
        ("per_layer_token_embd.weight", 384_006_168, 384_016_682),
    ]
    for layout in Layout:
        for part in document(layout)["engram"]:
            table = named(layout, part["tensor"])
            assert (part["row_bytes"], part["rows_per_token"]) == (110, 24)
            assert (part["shard"], part["row_bytes"]) == (table["shard"], table["row_bytes"])
            assert part["offset"] == table["offset"] + part["first_row"] * part["row_bytes"]
            assert part["first_row"] + part["rows"] <= table["rows"]


@LAYOUTS
def test_top_level_says_what_the_files_are(layout: Layout) -> None:
    made = document(layout)
    assert (made["schema"], made["name"], made["layout"]) == (1, f"model-{Q3}", layout.value)
    assert (made["arch"], made["source"], made["recipe"]) == (
        "deepseek41",
        {"revision": "r"},
        {"name": Q3},
    )
    wanted = {"n_layer": 40, "n_expert": 384, "n_expert_used": 6, "n_embd": 5120, "n_ff_exp": 2304}
    assert wanted.items() <= made["hparams"].items()
    assert made["n_tensors"] == {Layout.FORK: 1046, Layout.MAINLINE: 1043}[layout]


def test_digests_are_those_given() -> None:
    made = document(Layout.FORK)
    assert all(t["sha256"] == sha256(t["name"].encode()) for t in made["tensors"])
    assert all(s["sha256"] == sha256(s["file"].encode()) for s in made["shards"])


def test_a_plan_that_is_not_filled_has_no_digests() -> None:
    made = json.loads(canonical_json(inventory(released_plan(Q3))))
    assert {entry["sha256"] for entry in (*made["tensors"], *made["shards"])} == {None}


def test_digests_of_something_else_are_refused() -> None:
    plan = released_plan(Q3)
    digests = digests_of(plan)
    del digests["output.weight"]
    with pytest.raises(VerifyError, match=r"tensor output\.weight"):
        inventory(plan, digests)
    with pytest.raises(VerifyError, match="shard digests"):
        inventory(plan, digests_of(plan), ["one"])
