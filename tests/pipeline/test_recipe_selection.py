"""Overrides and grafts that speak of roles, sub-roles and layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from pipeline.errors import Problems, QuantmillError
from pipeline.model.layout import Layout
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from pipeline.recipe.choose import graft_of
from pipeline.recipe.ranges import as_pattern, as_ranges
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, parse_recipe
from tests.pipeline.released_plans import released_config

ROLES = "[roles]\n" + "".join(
    f'{role} = "BF16"\n' for role in ("routed", "engram", "attention", "embedding", "shared")
)
LEAST = 'allow = ["larger_than_fp4", "below_bf16"]\n' + ROLES


@cache
def targets() -> tuple[TargetTensor, ...]:
    return target_tensors(released_config(), Layout.FORK)


def recipe(lines: str) -> Recipe:
    return parse_recipe((LEAST + lines).encode(), Path("r.toml"))


def overriding(selection: str, type_name: str = "Q8_0") -> Recipe:
    return recipe(f'[[override]]\n{selection}\ntype = "{type_name}"\n')


def reached(made: Recipe, type_name: str = "Q8_0") -> set[str]:
    types = resolve_types(made, targets())
    return {name for name, found in types.items() if found.name == type_name}


def names(*tails: str, layers: range) -> set[str]:
    return {f"blk.{n}.{tail}.weight" for n in layers for tail in tails}


STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ('roles = ["routed"]\nlayers = "0-1"', names(*STACKS, layers=range(2))),
        ('sub_roles = ["routed_down"]\nlayers = "38-"', names(STACKS[2], layers=range(38, 40))),
        ("match = 'up_exps'\nlayers = \"7\"", names(STACKS[1], layers=range(7, 8))),
        (
            'sub_roles = ["shared_up", "routed_up"]\nroles = ["shared"]\nlayers = "3,5"',
            {"blk.3.ffn_up_shexp.weight", "blk.5.ffn_up_shexp.weight"},
        ),
        ('sub_roles = ["token_embd"]', {"token_embd.weight"}),
    ],
)
def test_all_that_is_said_must_hold(selection: str, expected: set[str]) -> None:
    assert reached(overriding(selection)) == expected


def test_a_range_holds_both_its_ends_and_blanks_do_not_count() -> None:
    made = overriding('sub_roles = ["routed_down"]\nlayers = "0 - 1, 5, 30-"')
    assert made.override[0].layers == "0-1,5,30-"
    layers = {int(name.split(".")[1]) for name in reached(made)}
    assert layers == {0, 1, 5, *range(30, 40)}


def test_roles_and_layers_pass_over_what_has_one_type_only() -> None:
    found = reached(overriding('roles = ["attention"]\nlayers = "0"'))
    assert "blk.0.attn_q_a.weight" in found
    assert not {name for name in found if "norm" in name or "sinks" in name or "base" in name}


def test_a_sub_role_of_norms_means_norms() -> None:
    with pytest.raises(QuantmillError, match="nothing but F32"):
        reached(overriding('sub_roles = ["norm"]'))


def test_a_pattern_with_roles_passes_over_norms_too() -> None:
    with pytest.raises(QuantmillError, match="nothing but F32"):
        reached(overriding("match = '^blk.0.attn_q'"))
    found = reached(overriding("match = '^blk.0.attn_q'\nroles = [\"attention\"]"))
    assert found == {"blk.0.attn_q_a.weight", "blk.0.attn_q_b.weight"}


@pytest.mark.parametrize(
    ("layers", "found"),
    [("", '""'), ("1-0", '"1-0"'), ("-3", '"-3"'), ("0,,1", '"0,,1"'), ("a", '"a"')],
)
def test_layers_that_are_none(layers: str, found: str) -> None:
    with pytest.raises(QuantmillError, match=r"^override 1, layers: not layers") as caught:
        overriding(f'layers = "{layers}"')
    assert caught.value.found == found


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('roles = ["router"]', "override 1, roles 1: no role of a target"),
        ('sub_roles = ["routed"]', "override 1, sub_roles 1: no sub-role of a target"),
        ('sub_roles = ["markov"]', "override 1, sub_roles 1: no sub-role of a target"),
        ("roles = []", "override 1, roles: an empty list selects nothing"),
        ("layers = 3", "override 1, layers: not text"),
        ('roles = "routed"', "override 1, roles: not a list"),
    ],
)
def test_words_that_select_nothing(line: str, what: str) -> None:
    with pytest.raises(QuantmillError) as caught:
        overriding(line)
    assert caught.value.what == what


def test_an_override_for_layers_that_are_not_there() -> None:
    with pytest.raises(QuantmillError) as caught:
        reached(overriding('roles = ["routed"]\nlayers = "40-"'))
    assert str(caught.value) == (
        "recipe r: override 1 (routed in layers 40-) matches no tensor. All that is said of an "
        "entry must hold together, for a tensor whose type is free."
    )


def test_an_override_that_another_leaves_nothing_for() -> None:
    made = recipe(
        '[[override]]\nroles = ["routed"]\ntype = "Q8_0"\n'
        '[[override]]\nsub_roles = ["routed_up"]\nlayers = "0-3"\ntype = "Q6_K"\n'
    )
    with pytest.raises(QuantmillError, match="never reached") as caught:
        reached(made)
    assert caught.value.what == (
        "recipe r: override 2 (routed_up in layers 0-3) is never reached: "
        "override 1 (routed) wins first"
    )


def test_an_optional_override_may_be_left_nothing() -> None:
    made = recipe(
        '[[override]]\nroles = ["routed"]\ntype = "Q8_0"\n'
        "[[override]]\nmatch = 'nowhere'\noptional = true\ntype = \"Q6_K\"\n"
        '[[override]]\nsub_roles = ["routed_up"]\noptional = true\ntype = "Q6_K"\n'
    )
    assert reached(made) == {t.name for t in targets() if t.role == "routed"}


GRAFTS = """
[[graft]]
from = "original"
sub_roles = ["indexer"]
[[graft]]
from = "other.gguf"
roles = ["attention", "embedding"]
layers = "2"
"""


def test_the_first_graft_that_selects_a_tensor_takes_it() -> None:
    by_name = {target.name: graft_of(recipe(GRAFTS), target) for target in targets()}
    assert by_name["blk.2.indexer.proj.weight"] == "original"
    assert by_name["blk.2.attn_q_a.weight"] == by_name["blk.2.attn_norm.weight"] == "other.gguf"
    assert by_name["blk.3.attn_q_a.weight"] is by_name["blk.2.ffn_up_exps.weight"] is None


def test_a_graft_that_nothing_is_left_for_is_told_with_the_overrides() -> None:
    made = recipe(
        GRAFTS + "[[graft]]\nfrom = 'x'\nmatch = '2\\.indexer\\.proj'\n"
        "[[graft]]\nfrom = 'x'\nmatch = 'nowhere'\n"
        "[[override]]\nmatch = 'nowhere'\ntype = \"F32\"\n"
    )
    with pytest.raises(Problems) as caught:
        resolve_types(made, targets())
    assert [error.what for error in caught.value.problems] == [
        "recipe r: override 1 (nowhere) matches no tensor",
        r"recipe r: graft 3 (2\.indexer\.proj) is never reached: graft 1 (indexer) wins first",
        "recipe r: graft 4 (nowhere) matches no tensor",
    ]


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ('[[graft]]\nroles = ["routed"]\n', "the key graft 1, from is missing"),
        ('[[graft]]\nfrom = "x"\n', "graft 1: nothing says which tensors are meant"),
        ('[[graft]]\nfrom = ""\nlayers = "1"\n', "graft 1, from: empty"),
        ('[[graft]]\nfrom = "x"\ntype = "F32"\n', "unknown key graft 1, type"),
        ('[graft]\nfrom = "x"\n', "graft: not a list of tables"),
    ],
)
def test_grafts_that_are_none(lines: str, what: str) -> None:
    with pytest.raises(QuantmillError) as caught:
        recipe(lines)
    error = caught.value
    first = error.problems[0] if isinstance(error, Problems) else error
    assert first.what == what


@pytest.mark.parametrize(
    ("wanted", "present", "ranges", "pattern"),
    [
        ({0, 1, 2}, range(5), "0-2", "(0|1|2)"),
        ({4}, range(5), "4", "4"),
        ({2, 4, 8}, (2, 4, 6, 8), "2-4,8", "(2|4|8)"),
        (range(5), range(5), "0-4", "[0-9]+"),
        ({1, 3}, range(5), "1,3", "(1|3)"),
    ],
)
def test_layers_are_written_briefly(wanted, present, ranges: str, pattern: str) -> None:
    assert as_ranges(set(wanted), set(present)) == ranges
    assert as_pattern(set(wanted), set(present)) == pattern
