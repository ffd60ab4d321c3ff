"""What is free, what is fixed, and what a group may become."""

import pytest

from pipeline.errors import RecipeError
from pipeline.model.roles import Role
from pipeline.solve.candidates import free_types, groups_of
from tests.pipeline.solve.asking import recipe, rule_of, targets

BUDGET = """
file_nbytes = 1_000_000_000
candidates = ["Q3_K", "Q8_0"]
[budget.types]
"""


def free_of(asked, name):
    return free_types(asked, next(t for t in targets() if t.name == name))


def titles(asked):
    return [group.title for group in groups_of(asked, targets(), rule_of(asked))]


PRECEDENCE = {
    "role": ('routed = ["Q2_K"]', "", "blk.0.ffn_up_exps.weight", ("Q2_K",)),
    "empty list": ("routed = []", "", "blk.0.ffn_up_exps.weight", ("Q3_K", "Q8_0")),
    "not named": ('routed = ["Q2_K"]', "", "blk.0.ffn_up_shexp.weight", None),
    "one type only": ('attention = ["Q2_K"]', "", "blk.0.attn_norm.weight", None),
    "sub-role has a type": (
        'routed = ["Q2_K"]',
        'routed_up = "Q4_K"',
        "blk.0.ffn_up_exps.weight",
        ("Q2_K",),
    ),
    "only a sub-role named": ('routed_up = ["Q2_K"]', "", "blk.0.ffn_gate_exps.weight", None),
    "sensitive, role named": ('attention = ["Q8_0"]', "", "blk.0.hc_attn_fn.weight", None),
    "sensitive, named": (
        'hyper_connection = ["Q8_0"]',
        "",
        "blk.0.hc_attn_fn.weight",
        ("Q8_0",),
    ),
    "router, role named": ('embedding = ["Q8_0"]', "", "blk.0.ffn_gate_inp.weight", None),
    "sub-role named": (
        'routed = ["Q2_K"]\nrouted_up = ["Q6_K"]',
        'routed_up = "Q4_K"',
        "blk.0.ffn_up_exps.weight",
        ("Q6_K",),
    ),
    "attention is the role": (
        'attention = ["Q2_K"]',
        'attention = "Q4_K"',
        "blk.0.attn_q_a.weight",
        ("Q2_K",),
    ),
    "override": ('routed = ["Q2_K"]', "", "blk.3.ffn_up_exps.weight", None),
}


@pytest.mark.parametrize(
    ("types", "sub_roles", "name", "wanted"), PRECEDENCE.values(), ids=PRECEDENCE
)
def test_who_is_free(types, sub_roles, name, wanted):
    more = "[[override]]\nmatch = '^blk.3.ffn_up_exps'\ntype = \"Q4_K\"\n"
    assert free_of(recipe(BUDGET + types, sub_roles=sub_roles, more=more), name) == wanted


GRAIN = {
    "sub_role": ["routed_gate", "routed_up", "routed_down"],
    "layers": [
        f"routed_{part}, layers {first}-{first + 3}"
        for first in (0, 4)
        for part in ("gate", "up", "down")
    ],
    "tensor": [t.name for t in targets() if t.role is Role.ROUTED],
}


@pytest.mark.parametrize("word", GRAIN)
def test_groups_are_as_fine_as_asked(word):
    asked = recipe(f'granularity = "{word}"\n{BUDGET}routed = []')
    assert titles(asked) == GRAIN[word]


def test_single_layers_are_called_so():
    asked = recipe(f'granularity = "layers"\nlayers_per_group = 1\n{BUDGET}routed_up = []')
    assert titles(asked) == [f"routed_up, layer {n}" for n in range(6)]


def test_types_that_some_tensor_may_not_have_are_left_out_and_the_others_come_smallest_first():
    asked = recipe(BUDGET + 'routed_up = ["Q8_0", "IQ2_XXS", "Q3_K", "Q8_0"]')
    (group,) = groups_of(asked, targets(), rule_of(asked))
    assert [t.name for t in group.types] == ["Q3_K", "Q8_0"]
    ((refused, why),) = group.refused
    assert (refused.name, why) == ("IQ2_XXS", "importance")
    assert group.nbytes(group.types[0]) < group.nbytes(group.types[1])


def test_a_group_without_a_type_is_told_with_the_reasons():
    asked = recipe(BUDGET + 'routed_up = ["IQ2_XXS", "Q2_K"]')
    with pytest.raises(RecipeError) as raised:
        groups_of(asked, targets(), lambda _, ggml_type: f" {ggml_type.name} is too red")
    assert "routed_up may become none of the types" in str(raised.value)
    assert "IQ2_XXS is too red; Q2_K is too red" in str(raised.value)


def test_a_budget_that_everything_is_fixed_against_is_refused():
    asked = recipe(BUDGET + "routed_up = []", more="[[override]]\nmatch='_exps'\ntype='Q4_K'\n")
    with pytest.raises(RecipeError, match="free to choose"):
        groups_of(asked, targets(), rule_of(asked))
