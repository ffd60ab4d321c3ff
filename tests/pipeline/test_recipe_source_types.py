"""The type word "source", what a finished file may keep, and what needs importance."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pipeline.errors import Problems, QuantmillError, RecipeError
from pipeline.model.layout import Layout
from pipeline.model.roles import ReadMode
from pipeline.model.targets.draft import draft_tensors
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from pipeline.quant.guard import NEEDS_IMPORTANCE
from pipeline.quant.types import TYPES
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, parse_recipe
from pipeline.source.spec import Codec, MatrixRef
from tests.pipeline.released_plans import released_config

SAFE = '[sub_roles]\nengram_gate = "BF16"\nhyper_connection = "F32"\nrouter = "BF16"\n'


@cache
def targets(layout: Layout = Layout.FORK) -> tuple[TargetTensor, ...]:
    return target_tensors(released_config(), layout)


def one(name: str) -> TargetTensor:
    return next(target for target in targets() if target.name == name)


def recipe(types: dict[str, str] | None = None, lines: str = SAFE) -> Recipe:
    usual = dict.fromkeys(("routed", "engram", "attention", "embedding", "shared"), "Q2_K")
    given = "".join(f'{key} = "{name}"\n' for key, name in {**usual, **(types or {})}.items())
    return parse_recipe(f"[roles]\n{given}{lines}".encode(), Path("r.toml"))


def stored_as(target: TargetTensor, *type_names: str) -> TargetTensor:
    """``target`` as a GGUF holds it, in one piece or several."""
    matrices = tuple(
        MatrixRef(Codec.GGML, target.name, None, target.n_rows, target.n_cols, ggml_type=name)
        for name in type_names
    )
    return replace(target, matrices=matrices)


def error_of(made: Recipe, *tensors: TargetTensor) -> QuantmillError:
    with pytest.raises(QuantmillError) as caught:
        resolve_types(made, tensors)
    assert not isinstance(caught.value, Problems)
    return caught.value


def test_source_is_a_type_for_what_ggml_can_hold_as_it_is() -> None:
    made = recipe({"routed": "source"}, SAFE + 'token_embd = "Source"\nindexer = "BF16"\n')
    types = resolve_types(made, targets())
    assert {types[t.name].name for t in targets() if t.role == "routed"} == {"MXFP4"}
    stored = one("token_embd.weight").matrices[0].codec
    assert stored is Codec.BF16
    assert types["token_embd.weight"].name == "BF16"
    assert made.sub_roles.token_embd == "source"


def test_source_is_no_type_for_fp8_and_the_message_says_why() -> None:
    error = error_of(recipe({"shared": "source"}), *targets())
    assert type(error) is RecipeError
    assert error.what == (
        "recipe r: roles.shared asks for the type in the source, but ggml has none that holds FP8 "
        "with its scales as it is"
    )
    assert str(error.tensor).startswith("blk.0.ffn_gate_shexp.weight [2304 x 5120], ")
    # Eight bits and a quarter: the nearest comes first.
    assert str(error.next_step).startswith("Types that fit: Q8_0 (1,504,051,200 bytes), Q6_K")


@pytest.mark.parametrize("name", ["Q3_K", "IQ4_KS", "IQ1_S", "F8_E4M3"])
def test_source_is_the_type_that_a_gguf_has(name: str) -> None:
    stack = stored_as(one("blk.0.ffn_up_exps.weight"), name)
    assert resolve_types(recipe({"routed": "source"}), [stack])[stack.name].name == name


def test_source_of_tensors_that_are_joined_needs_one_type() -> None:
    table = one("blk.1.engram_embd.weight")
    made = recipe({"engram": "source"})
    same = stored_as(table, "Q4_K", "Q4_K")
    assert resolve_types(made, [same])[table.name].name == "Q4_K"
    error = error_of(made, stored_as(table, "Q8_0", "Q3_K"))
    assert error.what == (
        "recipe r: roles.engram asks for the type in the source, but it is joined from several: "
        "Q3_K, Q8_0"
    )


def test_source_by_name_leaves_f32_where_nothing_else_loads() -> None:
    made = recipe(lines=SAFE + "[[override]]\nmatch = 'attn_norm'\ntype = \"source\"\n")
    assert one("blk.0.attn_norm.weight").matrices[0].codec is Codec.BF16
    assert resolve_types(made, targets())["blk.0.attn_norm.weight"].name == "F32"


def test_a_draft_and_candidates_have_no_source_type() -> None:
    for lines in ('[draft]\nrouted = "source"\n', '[budget]\ncandidates = ["source"]\n'):
        with pytest.raises(QuantmillError, match="no ggml type has this name"):
            recipe(lines=SAFE + lines)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("blk.1.engram_q.weight", "Q3_K"),
        ("blk.0.hc_attn_fn.weight", "Q2_K"),
        ("blk.0.ffn_up_exps.weight", "Q6_K"),
        ("blk.0.ffn_up_exps.weight", "IQ2_XXS"),
        ("token_embd.weight", "IQ1_S"),
        ("output.weight", "F8_E4M3"),
    ],
)
def test_a_finished_file_may_keep_what_a_new_one_may_not_have(tensor: str, name: str) -> None:
    made = recipe(lines=f"[[override]]\nmatch = '.'\ntype = \"{name}\"\n")
    target = one(tensor)
    assert resolve_types(made, [stored_as(target, name)])[tensor].name == name
    other = stored_as(target, "MXFP4" if "exps" in tensor else "Q5_K")
    assert error_of(made, other).what.startswith(f"recipe r: override 1 (.) asks for {name}, ")


def test_what_engines_take_in_f32_only_is_not_kept_in_another_type() -> None:
    made = recipe(lines="[[override]]\nmatch = 'base'\ntype = \"Q8_0\"\n")
    base = stored_as(one("blk.0.hc_attn_base.weight"), "Q8_0")
    assert "nothing but F32" in error_of(made, base).what
    made = recipe(lines="[[override]]\nmatch = 'base'\ntype = \"source\"\n")
    assert resolve_types(made, [base])[base.name].name == "F32"


def test_experts_that_a_gguf_holds_as_mxfp4_are_held_against_it_too() -> None:
    stack = one("blk.0.ffn_up_exps.weight")
    made = recipe({"routed": "Q5_K"})
    assert "MXFP4 keeps experts" in error_of(made, stored_as(stack, "MXFP4")).what
    assert resolve_types(made, [stored_as(stack, "Q6_K")])[stack.name].name == "Q5_K"


@pytest.mark.parametrize("name", sorted(NEEDS_IMPORTANCE))
def test_types_that_need_importance_are_taken_where_there_is_some(name: str) -> None:
    stacks = [t for t in targets() if t.role == "routed"]

    def weighted(target: TargetTensor) -> bool:
        return not target.name.startswith("blk.3.")

    types = resolve_types(recipe({"routed": name}), stacks, weighted=lambda _: True)
    assert set(types.values()) == {TYPES[name]}
    with pytest.raises(RecipeError, match=NEEDS_IMPORTANCE[name]) as caught:
        resolve_types(recipe({"routed": name}), stacks, weighted=weighted)
    assert str(caught.value.tensor).count("blk.") == str(caught.value.tensor).count("blk.3.") == 3


_KT = NEEDS_IMPORTANCE["IQ2_KT"]


@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.1.engram_embd.weight"])
def test_lookup_tables_take_no_type_that_needs_importance(tensor: str) -> None:
    table = one(tensor)
    assert table.read_mode is ReadMode.ROWS
    made = recipe({"engram": "IQ2_KT", "embedding": "IQ2_KT"})
    with pytest.raises(RecipeError) as caught:
        resolve_types(made, [table], weighted=lambda _: True)
    why = f"a table that is looked up by row gets no importance matrix, and {_KT}"
    assert why in caught.value.what


def test_a_draft_takes_no_type_that_needs_importance() -> None:
    draft = draft_tensors(released_config())
    made = recipe(lines=SAFE + '[draft]\nrouted = "IQ2_XXS"\n')
    with pytest.raises(RecipeError) as caught:
        resolve_types(made, draft, weighted=lambda _: True)
    assert caught.value.what == (
        "recipe r: draft.routed asks for IQ2_XXS, which needs an importance matrix, and a draft "
        f"has none: {NEEDS_IMPORTANCE['IQ2_XXS']}"
    )
    assert "--imatrix" not in str(caught.value.next_step)


def test_ik_types_are_offered_to_those_who_use_them_only() -> None:
    wide = one("blk.0.ffn_up_exps.weight")
    mainline = error_of(recipe({"routed": "Q6_K"}), wide)
    assert "IQ4_KSS" not in str(mainline.next_step)
    ik = error_of(recipe({"routed": "IQ6_K"}), wide)
    assert "IQ4_KSS" in str(ik.next_step)
