"""Type lists of llama-quantize, of ik's llama-quantize and of Thireus' tools, in and out."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from pipeline.errors import Problems, QuantmillError, RecipeError
from pipeline.model.layout import Layout
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from pipeline.recipe.foreign.reading import import_rules
from pipeline.recipe.foreign.rules import Dialect, Rule, read_rules, write_rules
from pipeline.recipe.foreign.writing import rules_of
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, load_recipe, parse_recipe
from tests.pipeline.released_plans import ROOT, config_for

V41, V4 = "served", "v4-native"


@cache
def targets_of(name: str, layout: Layout) -> tuple[TargetTensor, ...]:
    return target_tensors(config_for(name), layout)


def recipe(name: str, **changes: object) -> Recipe:
    return load_recipe(ROOT / f"recipes/{name}.toml").model_copy(update=changes)


def types_of(made: Recipe, targets: tuple[TargetTensor, ...]) -> dict[str, str]:
    return {n: t.name for n, t in resolve_types(made, targets, weighted=lambda _: True).items()}


def pairs(text: str) -> list[tuple[str, str, int]]:
    return [(rule.pattern, rule.type.name, rule.line) for rule in read_rules(text)]


ROUND = [
    (name, dialect)
    for name in ("published-q3_k_m", "served", "native", "lowbit-q2_k", "bpw-2.4", "v4-native")
    for dialect in Dialect
    if (name, dialect) != ("bpw-2.4", Dialect.LLAMA)
]


@pytest.mark.parametrize(("name", "dialect"), ROUND)
def test_what_goes_out_comes_back_with_the_same_types(name: str, dialect: Dialect) -> None:
    made = recipe(name)
    targets = targets_of(name, made.output.layout)
    types = resolve_types(made, targets, weighted=lambda _: True)
    text = write_rules(rules_of(targets, types), dialect)
    # A base that gives no tensor the type it has: all must come from the rules.
    base = recipe(name, roles=recipe(V4 if "v4" in name else "native").roles, override=())
    back = import_rules(read_rules(text), targets, name="back", base=base)
    assert types_of(back.recipe, targets) == {name: t.name for name, t in types.items()}
    assert back.notes == ()
    bare = import_rules(read_rules(text), targets, name="back")
    allowed = bare.recipe.model_copy(update={"allow": made.allow})
    assert types_of(allowed, targets) == {name: t.name for name, t in types.items()}


@pytest.mark.parametrize("name", ["published-q3_k_m", "v4-q3_k"])
def test_rules_are_few_anchored_and_each_tensors_own(name: str) -> None:
    made = recipe(name)
    targets = targets_of(name, made.output.layout)
    rules = rules_of(targets, resolve_types(made, targets))
    assert len(rules) < 15
    assert all(rule.pattern[0] == "^" and rule.pattern[-1] == "$" for rule in rules)
    for target in targets:
        hits = [rule for rule in rules if re.search(rule.pattern, target.name)]
        assert len(hits) == (target.only_type is None)
        # Lists of ik's are apart by commas, llama.cpp's by blanks; shells know no \d.
        assert not any(re.search(r"[,\s#=]|\\d", rule.pattern) for rule in hits)


def test_layers_that_differ_are_alternatives() -> None:
    made = recipe("served")
    targets = targets_of("served", Layout.FORK)
    text = write_rules(rules_of(targets, resolve_types(made, targets)), Dialect.THIREUS)
    assert r"^blk\.(0|1)\.ffn_down_exps\.weight$=q5_K" in text.splitlines()
    assert r"^output\.weight$=q6_K" in text.splitlines()


def test_dialects_differ_in_what_stands_between_rules() -> None:
    rules = read_rules("a=Q3_K b=IQ4_XS")
    assert write_rules(rules, Dialect.IK) == "a=q3_K,b=iq4_xs\n"
    assert write_rules(rules, Dialect.LLAMA) == write_rules(rules, Dialect.THIREUS) == (
        "a=q3_K\nb=iq4_xs\n"
    )  # fmt: skip


def test_llama_cpp_is_not_given_types_of_ik() -> None:
    with pytest.raises(RecipeError, match=r"does not know these types; found IQ2_KS\. Export for"):
        write_rules(read_rules("a=iq2_ks b=q8_0"), Dialect.LLAMA)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q=q8_0 ffn=Q4_k\nx=bf16", [("q", "Q8_0", 1), ("ffn", "Q4_K", 1), ("x", "BF16", 2)]),
        ("--tensor-type q=q8_0 --tensor-type 'x=f16'", [("q", "Q8_0", 1), ("x", "F16", 1)]),
        ('--custom-q "a{1,3}=iq4_ks,b[,]=q6_K"', [("a{1,3}", "IQ4_KS", 1), ("b[,]", "Q6_K", 1)]),
        (
            "## head\n\n^output\\.weight$=q8_0 # best\n^x$=iq5_k_r4\n# ^y$=f32\n",
            [(r"^output\.weight$", "Q8_0", 3), ("^x$", "IQ5_K", 4)],
        ),
        ("a=q8_0,\\\nb=q8_0_r8\n", [("a", "Q8_0", 1), ("b", "Q8_0", 2)]),
        ("blk.[[:digit:]]+.x=f32", [("blk.[0-9]+.x", "F32", 1)]),
    ],
    ids=["file", "options", "custom-q", "thireus", "continued", "classes"],
)  # fmt: skip
def test_every_way_of_writing_rules_is_read(
    text: str, expected: list[tuple[str, str, int]]
) -> None:
    assert pairs(text) == expected


@pytest.mark.parametrize(
    ("text", "what", "found"),
    [
        ("a", "not a rule", "'a'"),
        ("=q8_0", "not a rule", "'=q8_0'"),
        ("a=", "not a rule", "'a='"),
        ("(=q8_0", "not a regular expression: missing ), unterminated subpattern", "'('"),
        ("a=q8_00", "no ggml type has this name", "'q8_00'"),
        ("# nothing", "there is no rule in it", None),
    ],
)
def test_what_is_no_rule(text: str, what: str, found: str | None) -> None:
    with pytest.raises(RecipeError) as caught:
        read_rules(text, name="my.recipe")
    assert caught.value.what.startswith(what)
    assert caught.value.found == found
    assert str(caught.value.file).startswith("my.recipe")


def test_all_that_is_no_rule_is_told_with_its_line() -> None:
    with pytest.raises(Problems) as caught:
        read_rules("a\n\nb=c", name="r")
    assert [error.file for error in caught.value.problems] == ["r, line 1", "r, line 3"]


def rest(type_name: str = "BF16") -> Recipe:
    roles = "".join(
        f'{r} = "{type_name}"\n' for r in ("routed", "engram", "attention", "embedding")
    )
    text = f'allow = ["larger_than_fp4"]\n[roles]\n{roles}shared = "{type_name}"\n'
    return parse_recipe(text.encode(), Path("rest.toml"))


def imported(text: str, base: Recipe | None = None) -> tuple[Recipe, tuple[str, ...]]:
    found = import_rules(
        read_rules(text), targets_of(V41, Layout.FORK), name="mine", base=base or rest()
    )
    return found.recipe, found.notes


def test_the_first_rule_wins_here_as_there() -> None:
    made, _ = imported(r"blk\.3\..*up_exps=q2_K" + "\n_exps=q3_K")
    types = types_of(made, targets_of(V41, Layout.FORK))
    assert (types["blk.3.ffn_up_exps.weight"], types["blk.4.ffn_up_exps.weight"]) == (
        "Q2_K",
        "Q3_K",
    )
    assert types["blk.3.ffn_up_shexp.weight"] == "BF16"


def test_a_wide_rule_leaves_norms_alone_as_the_tools_do() -> None:
    made, notes = imported("attn_q=q8_0")
    assert made.override[0].roles is not None
    types = types_of(made, targets_of(V41, Layout.FORK))
    assert (types["blk.0.attn_q_a.weight"], types["blk.0.attn_q_a_norm.weight"]) == ("Q8_0", "F32")
    assert notes == ()
    narrow, _ = imported("attn_q_b=q8_0")
    assert narrow.override[0].roles is None


def test_rules_that_come_to_nothing_are_left_out_and_noted() -> None:
    made, notes = imported("attn_kv_b=q8_0\n_exps=q3_K\nup_exps=q4_K\n^output_norm=f32\n")
    assert [override.match for override in made.override] == ["_exps"]
    assert notes == (
        "line 1: attn_kv_b is left out: the model has no such tensor",
        "line 3: up_exps is left out: earlier rules win",
    )
    types_of(made, targets_of(V41, Layout.FORK))


def test_the_base_says_the_rest_and_loses_what_rules_hide() -> None:
    base = recipe("served", description="x")
    made, _ = imported("down_exps=q2_K", base)
    assert (made.name, made.description, made.output) == ("mine", "", base.output)
    assert [override.match for override in made.override] == [
        "down_exps",
        r"indexer\.attn_q_b\.weight$",
    ]
    types = types_of(made, targets_of(V41, Layout.FORK))
    assert (types["blk.0.ffn_down_exps.weight"], types["blk.0.ffn_up_exps.weight"]) == (
        "Q2_K",
        "Q3_K",
    )


def test_rules_alone_must_say_everything() -> None:
    with pytest.raises(QuantmillError, match=r"say nothing of 1 tensors; tensor output\.weight"):
        import_rules(
            [Rule(r"^(?!output\.)", read_rules("a=q8_0")[0].type)],
            targets_of(V41, Layout.FORK),
            name="mine",
        )
