"""One type per tensor, and everything that a recipe may not ask for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pipeline.errors import Problems, QuantmillError, RecipeError, TypeRuleError
from pipeline.model.layout import Layout
from pipeline.model.roles import Role, SubRole
from pipeline.model.targets.draft import draft_tensors
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from pipeline.quant.guard import NEEDS_IMPORTANCE
from pipeline.quant.types import TYPES
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, SubRoles, parse_recipe
from pipeline.recipe.values import WRITABLE_TYPES
from pipeline.source.spec import Codec
from tests.pipeline.released_plans import released_config

SAFE = {"engram_gate": "BF16", "hyper_connection": "F32", "router": "BF16"}
"""Sub-roles that let every role be quantized without asking for an allowance."""


@cache
def targets(layout: Layout = Layout.FORK) -> tuple[TargetTensor, ...]:
    return target_tensors(released_config(), layout)


def recipe(
    *overrides: tuple[str, str],
    roles: dict[str, str] | None = None,
    sub_roles: dict[str, str] | None = None,
    allow: Sequence[str] = (),
) -> Recipe:
    """All roles Q2_K and the sensitive sub-roles above, unless said otherwise."""
    types = dict.fromkeys(("routed", "engram", "attention", "embedding", "shared"), "Q2_K")
    lines = [
        f"allow = {list(allow)}",
        "[roles]",
        *(f'{key} = "{name}"' for key, name in (types | (roles or {})).items()),
        "[sub_roles]",
        *(f'{key} = "{name}"' for key, name in (SAFE | (sub_roles or {})).items()),
        *(f"[[override]]\nmatch = '{match}'\ntype = \"{name}\"" for match, name in overrides),
    ]
    return parse_recipe("\n".join(lines).encode(), Path("r.toml"))


def resolved(made: Recipe, layout: Layout = Layout.FORK) -> dict[str, str]:
    return {name: t.name for name, t in resolve_types(made, targets(layout)).items()}


def errors_of(
    made: Recipe, tensors: Sequence[TargetTensor] | None = None
) -> tuple[QuantmillError, ...]:
    with pytest.raises(QuantmillError) as caught:
        resolve_types(made, targets() if tensors is None else tensors)
    error = caught.value
    return error.problems if isinstance(error, Problems) else (error,)


@pytest.mark.parametrize("layout", Layout)
def test_every_tensor_gets_one_type(layout: Layout) -> None:
    assert list(resolved(recipe(), layout)) == [t.name for t in targets(layout)]


@pytest.mark.parametrize("role", ["routed", "engram", "attention", "embedding", "shared"])
def test_a_role_reaches_its_own_tensors_only(role: str) -> None:
    found = resolved(recipe(roles={role: "Q3_K"}))
    reached = {t.role for t in targets() if found[t.name] == "Q3_K"}
    assert reached == {Role(role)}


@pytest.mark.parametrize(
    "sub_role",
    [s for s in SubRole if s in SubRoles.model_fields and s not in (SubRole.NORM, SubRole.BIAS)],
)
def test_a_sub_role_wins_over_its_role(sub_role: SubRole) -> None:
    found = resolved(recipe(sub_roles={sub_role: "F16"}, allow=["larger_than_fp4"]))
    reached = {name for name, type_name in found.items() if type_name == "F16"}
    assert reached == {t.name for t in targets() if t.sub_role is sub_role and not t.only_type}


def draft_types(lines: str = "") -> dict[str, str]:
    made = parse_recipe(f"{LEAST}[draft]\n{lines}".encode(), Path("r.toml"))
    return {
        name: t.name for name, t in resolve_types(made, draft_tensors(released_config())).items()
    }


LEAST = "[roles]\n" + "".join(f'{r} = "Q2_K"\n' for r in ("routed", "engram", "attention"))
LEAST += 'embedding = "Q2_K"\nshared = "Q2_K"\n'


def test_a_draft_has_the_types_of_the_published_one_unasked() -> None:
    found = draft_types()
    dense = [name for name in found if re.search(r"attn_(q|kv|output)\w*\.|shexp|^fc\.", name)]
    assert {found[name] for name in dense if "norm" not in name} == {"Q8_0"}
    assert {found[name] for name in found if "_exps" in name} == {"MXFP4"}
    assert {t for n, t in found.items() if re.search("markov|conf|gate_inp", n)} == {"BF16"}
    assert {t for n, t in found.items() if re.search("norm|hc_|sinks|bias", n)} == {"F32"}


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ('routed = "Q4_K"', "_exps"),
        ('routed_down = "Q4_K"', "ffn_down_exps"),
        ('shared_up = "Q4_K"', "ffn_up_shexp"),
        ('draft_input = "Q4_K"', "^fc"),
        ('markov = "Q4_K"', "^markov"),
        ('attention = "Q4_K"', r"attn_(q_a|q_b|kv|output_a|output_b)\.weight"),
    ],
)
def test_an_entry_of_the_draft_table_reaches_its_tensors_only(line: str, pattern: str) -> None:
    allowed = f'allow = ["larger_than_fp4"]\n{LEAST}[draft]\n{line}\n'
    made = parse_recipe(allowed.encode(), Path("r.toml"))
    found = resolve_types(made, draft_tensors(released_config()))
    reached = {name for name, t in found.items() if t.name == "Q4_K"}
    assert reached == {name for name in found if re.search(pattern, name)}


def test_draft_experts_are_not_made_larger_unasked() -> None:
    with pytest.raises(QuantmillError, match=r"draft\.routed asks for Q6_K, but MXFP4 keeps"):
        draft_types('routed = "Q6_K"\n')


def test_a_model_with_an_engram_needs_a_type_for_it() -> None:
    made = parse_recipe(LEAST.replace('engram = "Q2_K"\n', "").encode(), Path("r.toml"))
    with pytest.raises(QuantmillError, match="gives no type to the engram"):
        resolve_types(made, targets())


def test_a_sub_role_cuts_across_roles() -> None:
    found = resolved(recipe(sub_roles={"indexer": "Q8_0"}))
    assert found["blk.2.indexer.proj.weight"] == found["blk.2.indexer.attn_k.weight"] == "Q8_0"


def test_an_override_wins_over_its_sub_role_and_the_first_over_the_second() -> None:
    found = resolved(
        recipe(
            (r"^blk\.0\.ffn_down_exps", "Q6_K"),
            (r"ffn_down_exps", "Q5_K"),
            sub_roles={"routed_down": "Q4_K"},
            allow=["larger_than_fp4"],
        )
    )
    downs = Counter(name for key, name in found.items() if "down_exps" in key)
    assert (found["blk.0.ffn_down_exps.weight"], downs) == ("Q6_K", {"Q6_K": 1, "Q5_K": 39})
    assert found["blk.0.ffn_up_exps.weight"] == "Q2_K"


def test_patterns_are_searched_anywhere_in_the_name() -> None:
    assert resolved(recipe(("attn_q_b", "Q8_0")))["blk.2.indexer.attn_q_b.weight"] == "Q8_0"


@pytest.mark.parametrize("layout", Layout)
def test_what_must_stay_f32_is_so_unasked(layout: Layout) -> None:
    found = resolved(recipe(sub_roles={"hyper_connection": "BF16", "attention": "Q8_0"}), layout)
    assert {found[t.name] for t in targets(layout) if t.only_type} == {"F32"}
    assert found["blk.0.hc_attn_fn.weight"] == "BF16"
    assert (found["blk.0.attn_q_a.weight"], found["blk.0.attn_sinks.weight"]) == ("Q8_0", "F32")


def test_f32_by_sub_role_or_override_is_no_mistake_there() -> None:
    made = recipe(("sinks|hc_attn_base", "F32"), sub_roles={"norm": "F32", "bias": "F32"})
    assert resolved(made)["blk.0.attn_sinks.weight"] == "F32"


@pytest.mark.parametrize(
    ("made", "what", "tensor", "step"),
    [
        (
            recipe(sub_roles={"norm": "Q8_0"}),
            "recipe r: sub_roles.norm asks for Q8_0, but engines accept nothing but F32 here",
            "output_norm.weight [5120], blk.0.attn_norm.weight [5120], ",
            "Remove sub_roles.norm: they stay F32 unasked.",
        ),
        (
            recipe(sub_roles={"bias": "BF16"}),
            "recipe r: sub_roles.bias asks for BF16, but engines accept nothing but F32 here",
            "blk.0.exp_probs_b.bias [384], blk.0.exp_probs_b_vl.bias [384], ",
            "Remove sub_roles.bias: they stay F32 unasked.",
        ),
        (
            recipe(("_scale", "F16")),
            "recipe r: override 1 (_scale) asks for F16, but engines accept nothing but F32 here",
            "blk.0.hc_attn_scale.weight [3], ",
            "Narrow the pattern.",
        ),
    ],
    ids=["norm", "bias", "override"],
)
def test_f32_only_tensors_are_not_quantized(
    made: Recipe, what: str, tensor: str, step: str
) -> None:
    (error,) = errors_of(made)
    assert (type(error), error.what, error.next_step) == (RecipeError, what, step)
    assert str(error.tensor).startswith(tensor)


def test_mainlines_gate_stays_f32_whatever_the_sub_role_says() -> None:
    made = recipe(sub_roles={"engram_gate": "BF16"})
    assert resolved(made, Layout.MAINLINE)["blk.1.engram_gate.weight"] == "F32"
    assert resolved(made, Layout.FORK)["blk.1.engram_q.weight"] == "BF16"


def test_an_override_that_matches_nothing() -> None:
    (error,) = errors_of(recipe((r"^blk\.40\.", "F32")))
    assert type(error) is RecipeError
    assert str(error) == (
        r"recipe r: override 1 (^blk\.40\.) matches no tensor. Patterns are searched in GGUF names "
        "such as blk.0.ffn_down_exps.weight; engram tensors have other names in the other layout."
    )


def test_an_override_that_earlier_ones_hide_altogether() -> None:
    made = recipe(("shexp", "Q8_0"), ("gate_inp", "F32"), (r"^blk\.3\.\w+_shexp", "Q6_K"))
    (error,) = errors_of(made)
    assert str(error) == (
        r"recipe r: override 3 (^blk\.3\.\w+_shexp) is never reached: override 1 (shexp) wins "
        "first. The first override that matches a name wins: write this one above."
    )


def test_the_same_pattern_twice_is_seen() -> None:
    (error,) = errors_of(recipe(("shexp", "Q8_0"), ("shexp", "Q6_K")))
    assert error.what.startswith("recipe r: override 2 (shexp) is never reached")


NARROW = replace(released_config(), expert_ff=2336)
"""Down matrices with rows of 73 x 32 weights: no multiple of a K-quant's 256."""


def test_rows_that_a_block_does_not_divide_are_all_listed_with_types_that_fit() -> None:
    narrow = target_tensors(NARROW, Layout.FORK)
    shared, routed = errors_of(recipe(), narrow)
    assert type(routed) is TypeRuleError
    assert routed.what == (
        "recipe r: roles.routed asks for Q2_K, whose block does not divide the rows"
    )
    assert routed.expected == "rows of a multiple of 256 weights"
    assert routed.tensor == ", ".join(
        f"blk.{n}.ffn_down_exps.weight [384 x 5120 x 2336]" for n in range(40)
    )
    n_blocks = 40 * 384 * 5120 * 2336 // 32
    assert str(routed.next_step).startswith(f"Types that fit: MXFP4 ({n_blocks * 17:,} bytes).")
    assert len(str(shared.tensor).split(", ")) == 40
    # Nearest in bits per weight first; a shared expert is no FP4, so larger types are no mistake.
    assert re.findall(r"(\w+) \(", str(shared.next_step)) == [
        *("MXFP4", "Q4_0", "IQ4_NL", "Q4_1", "Q5_0")
    ]


def test_rows_that_no_small_type_fits_are_offered_plain_ones() -> None:
    one = next(t for t in targets() if t.name == "blk.0.attn_q_a.weight")
    odd = replace(one, shape=(1280, 200))
    (error,) = errors_of(recipe(roles={"attention": "Q4_K"}), [odd])
    assert error.next_step == (
        "Types that fit: F16 (512,000 bytes), BF16 (512,000 bytes), F32 (1,024,000 bytes)."
    )


def test_everything_q2_k_is_refused_where_it_would_spoil_the_model() -> None:
    everything = recipe(sub_roles=dict.fromkeys(SAFE, "Q2_K"))
    errors = errors_of(everything)
    assert [error.what for error in errors] == [
        f"recipe r: sub_roles.{sub_role} asks for Q2_K, too coarse for these small sensitive "
        "matrices"
        for sub_role in ("hyper_connection", "router", "engram_gate")
    ]
    assert errors[2].tensor == ", ".join(
        f"blk.{n}.engram_{x}.weight [4 x 5120]" for n in (1, 14) for x in "qk"
    )
    assert errors[2].next_step == (
        "Types that fit: F16 (163,840 bytes), BF16 (163,840 bytes), F32 (327,680 bytes). "
        'To have it all the same, add "below_bf16" to allow.'
    )


def test_the_same_is_allowed_by_name() -> None:
    made = recipe(sub_roles=dict.fromkeys(SAFE, "Q2_K"), allow=["below_bf16"])
    found = resolved(made)
    assert Counter(found.values()) == {
        "Q2_K": len(found) - sum(t.only_type is not None for t in targets()),
        "F32": sum(t.only_type is not None for t in targets()),
    }


@pytest.mark.parametrize("name", ["Q4_K", "IQ4_XS", "IQ4_NL", "NVFP4", "Q8_0", "BF16", "F32"])
def test_experts_stored_as_fp4_gain_nothing_from_larger_types(name: str) -> None:
    (error,) = errors_of(recipe(sub_roles={"routed_up": name}))
    assert type(error) is RecipeError
    assert error.what == (
        f"recipe r: sub_roles.routed_up asks for {name}, but MXFP4 keeps experts that are stored "
        "as FP4 bit for bit and is no larger"
    )
    assert str(error.tensor).startswith("blk.0.ffn_up_exps.weight [384 x 2304 x 5120], ")
    assert str(error.tensor).endswith(" and 32 more")
    assert str(error.next_step).startswith("Types that fit: MXFP4 (96,259,276,800 bytes), ")
    assert str(error.next_step).endswith('To have it all the same, add "larger_than_fp4" to allow.')


def test_larger_experts_are_allowed_by_name() -> None:
    made = recipe(sub_roles={"routed_up": "Q4_K"}, allow=["larger_than_fp4"])
    assert resolved(made)["blk.0.ffn_up_exps.weight"] == "Q4_K"


@pytest.mark.parametrize("name", ["MXFP4", "Q3_K", "IQ3_S", "Q2_K", "TQ2_0"])
def test_experts_may_be_kept_or_made_smaller(name: str) -> None:
    assert resolved(recipe(roles={"routed": name}))["blk.0.ffn_up_exps.weight"] == name


def test_only_experts_are_held_against_fp4() -> None:
    assert resolved(recipe(roles={"shared": "Q8_0"}))["blk.0.ffn_up_shexp.weight"] == "Q8_0"


def test_experts_that_are_not_stored_as_fp4_may_take_any_type() -> None:
    stack = next(t for t in targets() if t.name == "blk.0.ffn_up_exps.weight")
    wide = [replace(matrix, codec=Codec.BF16, scale=None) for matrix in stack.matrices]
    types = resolve_types(recipe(roles={"routed": "Q6_K"}), [replace(stack, matrices=tuple(wide))])
    assert types[stack.name].name == "Q6_K"


WRITABLE_WITHOUT_MATRIX = [name for name in WRITABLE_TYPES if name not in NEEDS_IMPORTANCE]
MATRIX_TYPES = [name for name in WRITABLE_TYPES if name in NEEDS_IMPORTANCE]
UNWRITABLE = sorted(set(TYPES) - set(WRITABLE_TYPES))


@pytest.mark.parametrize("name", MATRIX_TYPES)
def test_types_that_need_an_importance_matrix(name: str) -> None:
    (error,) = errors_of(recipe(roles={"routed": name}))
    assert type(error) is RecipeError
    assert error.what == (
        f"recipe r: roles.routed asks for {name}, which needs an importance matrix, "
        f"and there is none for these tensors: {NEEDS_IMPORTANCE[name]}"
    )
    assert str(error.next_step).endswith("Or give a matrix that has these tensors (--imatrix).")
    offered = re.findall(r"(\w+) \([\d,]+ bytes", str(error.next_step))
    assert offered
    assert not set(offered) & set(MATRIX_TYPES)


@pytest.mark.parametrize("name", UNWRITABLE)
def test_types_that_are_read_but_not_written(name: str) -> None:
    (error,) = errors_of(recipe(("token_embd", name)))
    assert type(error) is RecipeError
    assert error.what == (
        f"recipe r: override 1 (token_embd) asks for {name}, which this version cannot write"
    )
    assert error.tensor == "token_embd.weight [129280 x 5120]"
    offered = re.findall(r"(\w+) \(([\d,]+) bytes\)", str(error.next_step))
    assert len(offered) == 5
    for other, nbytes in offered:
        assert other in WRITABLE_WITHOUT_MATRIX
        assert int(nbytes.replace(",", "")) == 129_280 * TYPES[other].row_nbytes(5120)


def test_integer_types_are_among_those_not_written() -> None:
    assert set(UNWRITABLE) == {*("I8", "I16", "I32", "I64", "F64", "F8_E4M3", "Q8_1", "Q8_K")}


@pytest.mark.parametrize("name", WRITABLE_WITHOUT_MATRIX)
def test_every_writable_type_can_be_asked_for(name: str) -> None:
    assert resolved(recipe(("token_embd", name)))["token_embd.weight"] == name


def test_all_that_is_wrong_is_reported_at_once_and_in_order() -> None:
    made = recipe(
        ("nothing", "F32"),
        ("_exps", "Q8_0"),
        (r"down_exps", "Q2_K"),
        sub_roles={"norm": "F16", "router": "Q4_K"},
        roles={"shared": "IQ1_S", "attention": "Q8_K"},
    )
    with pytest.raises(Problems, match=r"^recipe r does not fit the model: 7 problems\n"):
        resolve_types(made, targets())
    assert [error.what.removeprefix("recipe r: ")[:34] for error in errors_of(made)] == [
        "override 1 (nothing) matches no te",
        "override 3 (down_exps) is never re",
        "sub_roles.norm asks for F16, but e",
        "roles.attention asks for Q8_K, whi",
        "sub_roles.router asks for Q4_K, to",
        "roles.shared asks for IQ1_S, which",
        "override 2 (_exps) asks for Q8_0, ",
    ]
    assert [str(e) for e in errors_of(made)] == [str(e) for e in errors_of(made)]


def test_every_message_says_where_and_what_next() -> None:
    made = recipe(
        ("nothing", "F32"),
        ("shexp", "Q8_0"),
        ("up_shexp", "Q8_0"),
        sub_roles={"norm": "F16", "router": "Q4_K", "compressor": "I8", "indexer": "IQ2_S"},
        roles={"routed": "Q5_K"},
    )
    errors = errors_of(made, (*targets(), *_odd_rows()))
    assert len(errors) == 8
    for error in errors:
        assert error.what.startswith("recipe r: ")
        assert error.next_step
        assert error.tensor or "override" in error.what


def _odd_rows() -> tuple[TargetTensor, ...]:
    table = next(t for t in targets() if t.name == "blk.1.engram_embd.weight")
    return (replace(table, name="blk.39.engram_embd.weight", shape=(8, 96)),)
