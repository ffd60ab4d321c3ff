"""Roles, sub-roles and reading modes of the released model's tensors, by their GGUF names."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

from pipeline.model.layout import Layout
from pipeline.model.roles import (
    ROLE_TITLES,
    TARGET_ROLES,
    ReadMode,
    Role,
    SubRole,
    read_mode_of,
    role_of,
    sub_role_of,
)
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from tests.pipeline.released_plans import released_config

FORK, MAINLINE = Layout.FORK, Layout.MAINLINE


@cache
def targets(layout: Layout) -> tuple[TargetTensor, ...]:
    return target_tensors(released_config(), layout)


@pytest.mark.parametrize(("layout", "n_engram", "total"), [(FORK, 8, 1046), (MAINLINE, 5, 1043)])
def test_the_five_roles_are_counted_as_in_the_published_files(
    layout: Layout, n_engram: int, total: int
) -> None:
    assert Counter(t.role for t in targets(layout)) == {
        Role.ROUTED: 120,
        Role.ENGRAM: n_engram,
        Role.ATTENTION: 623,
        Role.EMBEDDING: 175,
        Role.SHARED: 120,
    }
    assert len({t.name for t in targets(layout)}) == total


@pytest.mark.parametrize(
    ("layout", "engram"),
    [
        (FORK, {SubRole.ENGRAM_TABLE: 2, SubRole.ENGRAM_DENSE: 2, SubRole.ENGRAM_GATE: 4}),
        (MAINLINE, {SubRole.ENGRAM_TABLE: 1, SubRole.ENGRAM_DENSE: 2, SubRole.ENGRAM_GATE: 2}),
    ],
)
def test_sub_roles_are_counted_by_the_tables_of_the_format(
    layout: Layout, engram: dict[SubRole, int]
) -> None:
    assert Counter(t.sub_role for t in targets(layout)) == engram | {
        SubRole.ROUTED_GATE: 40,
        SubRole.ROUTED_UP: 40,
        SubRole.ROUTED_DOWN: 40,
        # five projections and the sinks
        SubRole.ATTENTION: 6 * 40,
        # keys of 4 layers; queries and projections of 8
        SubRole.INDEXER: 4 + 2 * 8,
        SubRole.COMPRESSOR: 4 + 3,
        SubRole.HYPER_CONNECTION: 6 * 40,
        SubRole.TOKEN_EMBD: 1,
        SubRole.OUTPUT: 1,
        SubRole.ROUTER: 40,
        # four of every layer, the compressors' and index keys', the last one
        SubRole.NORM: 4 * 40 + 4 + 4 + 1,
        SubRole.BIAS: 2 * 40,
        SubRole.SHARED_GATE: 40,
        SubRole.SHARED_UP: 40,
        SubRole.SHARED_DOWN: 40,
    }


NAMES = {
    "token_embd.weight": (Role.EMBEDDING, SubRole.TOKEN_EMBD, ReadMode.ROWS),
    "output.weight": (Role.EMBEDDING, SubRole.OUTPUT, ReadMode.FULL),
    "output_norm.weight": (Role.EMBEDDING, SubRole.NORM, ReadMode.FULL),
    # No "engram" in the name and a "token_embd": 85 to 209 GB that are easily filed wrong.
    "per_layer_token_embd.weight": (Role.ENGRAM, SubRole.ENGRAM_TABLE, ReadMode.ROWS),
    "blk.1.engram_embd.weight": (Role.ENGRAM, SubRole.ENGRAM_TABLE, ReadMode.ROWS),
    "blk.1.engram_wkv.weight": (Role.ENGRAM, SubRole.ENGRAM_DENSE, ReadMode.FULL),
    "blk.1.engram_kv.weight": (Role.ENGRAM, SubRole.ENGRAM_DENSE, ReadMode.FULL),
    "blk.1.engram_q.weight": (Role.ENGRAM, SubRole.ENGRAM_GATE, ReadMode.FULL),
    "blk.1.engram_k.weight": (Role.ENGRAM, SubRole.ENGRAM_GATE, ReadMode.FULL),
    "blk.1.engram_gate.weight": (Role.ENGRAM, SubRole.ENGRAM_GATE, ReadMode.FULL),
    "blk.3.ffn_gate_exps.weight": (Role.ROUTED, SubRole.ROUTED_GATE, ReadMode.SPARSE),
    "blk.3.ffn_up_exps.weight": (Role.ROUTED, SubRole.ROUTED_UP, ReadMode.SPARSE),
    "blk.3.ffn_down_exps.weight": (Role.ROUTED, SubRole.ROUTED_DOWN, ReadMode.SPARSE),
    "blk.3.ffn_gate_shexp.weight": (Role.SHARED, SubRole.SHARED_GATE, ReadMode.FULL),
    "blk.3.ffn_up_shexp.weight": (Role.SHARED, SubRole.SHARED_UP, ReadMode.FULL),
    "blk.3.ffn_down_shexp.weight": (Role.SHARED, SubRole.SHARED_DOWN, ReadMode.FULL),
    "blk.3.ffn_gate_inp.weight": (Role.EMBEDDING, SubRole.ROUTER, ReadMode.FULL),
    "blk.3.ffn_norm.weight": (Role.EMBEDDING, SubRole.NORM, ReadMode.FULL),
    "blk.3.exp_probs_b.bias": (Role.EMBEDDING, SubRole.BIAS, ReadMode.FULL),
    "blk.3.exp_probs_b_vl.bias": (Role.EMBEDDING, SubRole.BIAS, ReadMode.NONE),
    "blk.3.attn_q_a.weight": (Role.ATTENTION, SubRole.ATTENTION, ReadMode.FULL),
    "blk.3.attn_sinks.weight": (Role.ATTENTION, SubRole.ATTENTION, ReadMode.FULL),
    "blk.3.attn_q_a_norm.weight": (Role.ATTENTION, SubRole.NORM, ReadMode.FULL),
    "blk.2.attn_compressor_kv.weight": (Role.ATTENTION, SubRole.COMPRESSOR, ReadMode.FULL),
    "blk.2.attn_compressor_norm.weight": (Role.ATTENTION, SubRole.NORM, ReadMode.FULL),
    "blk.2.indexer.attn_q_b.weight": (Role.ATTENTION, SubRole.INDEXER, ReadMode.FULL),
    "blk.2.indexer.attn_k.weight": (Role.ATTENTION, SubRole.INDEXER, ReadMode.FULL),
    # The published count files these two under the rest; a recipe's indexer means the first.
    "blk.2.indexer.proj.weight": (Role.EMBEDDING, SubRole.INDEXER, ReadMode.FULL),
    "blk.2.indexer.k_norm.weight": (Role.EMBEDDING, SubRole.NORM, ReadMode.FULL),
    "blk.3.hc_attn_fn.weight": (Role.ATTENTION, SubRole.HYPER_CONNECTION, ReadMode.FULL),
    "blk.3.hc_ffn_base.weight": (Role.ATTENTION, SubRole.HYPER_CONNECTION, ReadMode.FULL),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_role_sub_role_and_reading(name: str) -> None:
    assert (role_of(name), sub_role_of(name), read_mode_of(name)) == NAMES[name]


def test_every_kind_of_target_name_is_in_the_table_above() -> None:
    kinds = {
        re.sub(r"\d+", "N", t.name).replace("hc_ffn", "hc_attn")
        for layout in Layout
        for t in targets(layout)
        if t.sub_role not in (SubRole.ATTENTION, SubRole.HYPER_CONNECTION, SubRole.COMPRESSOR)
        and "_norm." not in t.name
    }
    assert kinds <= {re.sub(r"\d+", "N", name) for name in NAMES}


def test_an_unknown_name_has_no_sub_role() -> None:
    with pytest.raises(KeyError, match=r"blk\.0\.rope_freqs"):
        sub_role_of("blk.0.rope_freqs.weight")


def test_every_role_has_a_title_and_a_recipe_gives_types_to_five() -> None:
    assert set(ROLE_TITLES) == set(Role)
    assert set(Role) - set(TARGET_ROLES) == {Role.DRAFT, Role.VISION}
