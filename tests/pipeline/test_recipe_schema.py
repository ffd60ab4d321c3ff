"""Recipe files: what is read, and what every kind of mistake is answered with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.errors import Problems, QuantmillError, RecipeError, SourceError
from pipeline.files import write_whole
from pipeline.model.layout import Layout
from pipeline.model.roles import TARGET_ROLES, SubRole
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.types import TYPES
from pipeline.recipe.schema import DraftTable, Recipe, Roles, SubRoles, load_recipe, parse_recipe
from pipeline.recipe.values import MAINLINE_TYPES, WRITABLE_TYPES

PATH = Path("folder/some.toml")
ROLES = '[roles]\nrouted = "Q3_K"\n' + "".join(
    f'{role} = "Q8_0"\n' for role in TARGET_ROLES if role != "routed"
)


def parse(text: str) -> Recipe:
    return parse_recipe(text.encode(), PATH)


def errors_of(text: str | bytes) -> list[QuantmillError]:
    content = text.encode() if isinstance(text, str) else text
    with pytest.raises(QuantmillError) as caught:
        parse_recipe(content, PATH)
    error = caught.value
    return list(error.problems) if isinstance(error, Problems) else [error]


def test_the_least_recipe_takes_every_default() -> None:
    recipe = parse(ROLES)
    assert recipe.name == "some"
    assert recipe.roles.routed == "Q3_K"
    assert (recipe.output.layout, recipe.output.shard_nbytes) == (Layout.MAINLINE, 45_000_000_000)
    assert (recipe.allow, recipe.override, recipe.source.path) == ((), (), None)
    assert recipe.draft.mode == "keep"
    assert all(recipe.sub_roles.type_of(sub_role) is None for sub_role in SubRole)


def test_everything_said_is_kept() -> None:
    recipe = parse(
        'name = "other-1.0"\ndescription = "What it is."\nallow = ["below_bf16"]\n'
        + ROLES
        + '[sub_roles]\nrouter = "bf16"\n'
        + "[[override]]\nmatch = '^blk\\.0\\.'\ntype = \"q4_k\"\n"
        + '[[override]]\nmatch = "x"\ntype = "iq4_ks"\n'
        + '[source]\npath = "checkpoint"\n[draft]\nmode = "drop"\n'
        + '[output]\nlayout = "fork"\nshard_nbytes = 1_048_576\n'
    )
    assert (recipe.name, recipe.description) == ("other-1.0", "What it is.")
    assert recipe.allow == ("below_bf16",)
    assert recipe.sub_roles.type_of(SubRole.ROUTER) == "BF16"
    assert [(o.match, o.type) for o in recipe.override] == [
        ("^blk\\.0\\.", "Q4_K"),
        ("x", "IQ4_KS"),
    ]
    assert recipe.source.path == "checkpoint"
    assert (recipe.output.layout, recipe.output.shard_nbytes) == (Layout.FORK, 1 << 20)


OUTSIDE_A_TARGET = {
    *(SubRole.DRAFT, SubRole.DRAFT_INPUT, SubRole.MARKOV, SubRole.CONFIDENCE),
    SubRole.VISION,
}


def test_every_role_and_sub_role_of_a_target_file_can_be_addressed() -> None:
    assert set(Roles.model_fields) == set(TARGET_ROLES)
    assert set(SubRoles.model_fields) == set(SubRole) - OUTSIDE_A_TARGET


def test_mainline_types_are_those_ggml_has_an_encoder_for() -> None:
    quantizer = GgmlQuantizer()
    assert set(MAINLINE_TYPES) == {t.name for t in TYPES.values() if quantizer.can_write(t)}


def test_ik_types_are_writable_too() -> None:
    ik = {t.name for t in TYPES.values() if t.family == "ik"}
    assert set(WRITABLE_TYPES) == {*MAINLINE_TYPES, *ik}


TYPE_NAMES = "one of " + ", ".join(WRITABLE_TYPES)
ROLE_NAMES = "routed, engram, attention, embedding, shared"
NAME_RULE = "up to 100 letters, digits, dots, dashes or underscores; no mark first"
NAME_STEP = 'Without a key `name`, the name is the recipe\'s file name without ".toml".'


def broken(
    text: str, what: str, expected: object = None, found: object = None, step: str | None = None
) -> tuple[str, str, object, object, str | None]:
    return text, what, expected, found, step


def no_type(found: str, step: str | None = None) -> tuple[object, object, str | None]:
    return TYPE_NAMES, found, step


OVERRIDE = ROLES + '[[override]]\nmatch = "x"\ntype = "F32"\n[[override]]\n'

MISTAKES = {
    "key of the file": broken(
        'descripton = "x"\n' + ROLES,
        "unknown key descripton",
        f"one of {', '.join(Recipe.model_fields)}, extends",
        step="Did you mean description?",
    ),
    "key of roles": broken(
        ROLES + 'dratf = "F32"\n', "unknown key roles.dratf", f"one of {ROLE_NAMES}"
    ),
    "sub-role among roles": broken(
        ROLES + 'router = "BF16"\n',
        "unknown key roles.router",
        f"one of {ROLE_NAMES}",
        step="The key router belongs in [sub_roles].",
    ),
    "key of the file below a table": broken(
        ROLES + 'allow = ["below_bf16"]\n',
        "unknown key roles.allow",
        f"one of {ROLE_NAMES}",
        step="The key allow belongs to the top of the file, above every [table].",
    ),
    "key of sub_roles": broken(
        ROLES + '[sub_roles]\nroutde_gate = "F32"\n',
        "unknown key sub_roles.routde_gate",
        "one of " + ", ".join(SubRoles.model_fields),
        step="Did you mean routed_gate?",
    ),
    "key of an override": broken(
        OVERRIDE + 'match = "y"\ntype = "F32"\ntpye = "F32"\n',
        "unknown key override 2, tpye",
        "one of match, roles, sub_roles, layers, optional, type",
        step="Did you mean type?",
    ),
    "key of source": broken(
        ROLES + '[source]\npth = "x"\n',
        "unknown key source.pth",
        "path",
        step="Did you mean path?",
    ),
    "key of draft": broken(
        ROLES + '[draft]\nmod = "drop"\n',
        "unknown key draft.mod",
        f"one of {', '.join(DraftTable.model_fields)}",
        step="Did you mean mode?",
    ),
    "key of output": broken(
        ROLES + "[output]\nshard_bytes = 1\n",
        "unknown key output.shard_bytes",
        "one of layout, shard_nbytes",
        step="Did you mean shard_nbytes?",
    ),
    "no roles": broken(
        'name = "x"\n',
        "the table [roles] is missing",
        ROLE_NAMES,
        step="Every role must get a type.",
    ),
    "a role without a type": broken(
        ROLES.replace('shared = "Q8_0"\n', ""),
        "the key roles.shared is missing",
        "a type",
        step="Every role must get a type.",
    ),
    "an override of nothing": broken(
        OVERRIDE + 'type = "F32"\n',
        "override 2: nothing says which tensors are meant",
        "one or more of match, roles, sub_roles, layers",
        '{"type": "F32"}',
    ),
    "an override without a type": broken(
        OVERRIDE + 'match = "y"\n',
        "the key override 2, type is missing",
        "a type",
        step="An override is a `type` and what it is for.",
    ),
    "type of a role": broken(
        ROLES.replace("Q3_K", "Q3_K_M"),
        "roles.routed: no ggml type has this name",
        *no_type('"Q3_K_M"', "Did you mean Q3_K?"),
    ),
    "type of a sub-role": broken(
        ROLES + '[sub_roles]\nnorm = "float32"\n',
        "sub_roles.norm: no ggml type has this name",
        *no_type('"float32"', "Did you mean F32?"),
    ),
    "type of an override": broken(
        OVERRIDE + 'match = "y"\ntype = "zzz"\n',
        "override 2, type: no ggml type has this name",
        *no_type('"zzz"'),
    ),
    "a number for a type": broken(
        ROLES.replace('"Q3_K"', "3"), "roles.routed: not text", "text in quotes", "3"
    ),
    "a date for a type": broken(
        ROLES.replace('"Q3_K"', "1979-05-27"),
        "roles.routed: not text",
        "text in quotes",
        "1979-05-27",
    ),
    "a truth value for a description": broken(
        "description = true\n" + ROLES, "description: not text", "text in quotes", "true"
    ),
    "a list for a path": broken(
        ROLES + '[source]\npath = ["x"]\n', "source.path: not text", "text in quotes", '["x"]'
    ),
    "text for a list": broken(
        'allow = "below_bf16"\n' + ROLES,
        "allow: not a list",
        "a list in brackets",
        '"below_bf16"',
    ),
    "text for a table": broken(
        'roles = "Q8_0"\n',
        "roles: not a table",
        "a table: keys below a line [roles]",
        '"Q8_0"',
    ),
    "a list of tables for a table": broken(
        ROLES + "[[output]]\n",
        "output: not a table",
        "a table: keys below a line [output]",
        "[{}]",
    ),
    "a table for a list of tables": broken(
        ROLES + '[override]\nmatch = "x"\ntype = "F32"\n',
        "override: not a list of tables",
        "tables, each below a line [[override]]",
        '{"match": "x", "type": "F32"}',
    ),
    "text for a size": broken(
        ROLES + '[output]\nshard_nbytes = "45 GB"\n',
        "output.shard_nbytes: not a whole number",
        "a whole number without quotes, such as 45_000_000_000",
        '"45 GB"',
    ),
    "a float for a size": broken(
        ROLES + "[output]\nshard_nbytes = 45e9\n",
        "output.shard_nbytes: not a whole number",
        "a whole number without quotes, such as 45_000_000_000",
        "45000000000.0",
    ),
    "a truth value for a size": broken(
        ROLES + "[output]\nshard_nbytes = true\n",
        "output.shard_nbytes: not a whole number",
        "a whole number without quotes, such as 45_000_000_000",
        "true",
    ),
    "too small a size": broken(
        ROLES + "[output]\nshard_nbytes = 1_048_575\n",
        "output.shard_nbytes: shards this small are of no use",
        "at least 1,048,576 bytes",
        "1048575",
        "The size is in bytes: 45_000_000_000 is 45 GB.",
    ),
    "layout": broken(
        ROLES + '[output]\nlayout = "main"\n',
        "output.layout: not a layout",
        "one of mainline, fork",
        '"main"',
        "Did you mean mainline?",
    ),
    "a number for a layout": broken(
        ROLES + "[output]\nlayout = 1\n",
        "output.layout: not a layout",
        "one of mainline, fork",
        "1",
    ),
    "allowance": broken(
        'allow = ["larger_than_fp4", "below_bf15"]\n' + ROLES,
        "allow 2: nothing of this name can be allowed",
        "one of below_bf16, larger_than_fp4",
        '"below_bf15"',
        "Did you mean below_bf16?",
    ),
    "overrides of a draft alone": broken(
        '[draft]\nmode = "only"\n[[override]]\nmatch = "x"\ntype = "F32"\n',
        "overrides, grafts, experts, an importance matrix and a budget speak of the target, and "
        "this recipe makes a draft only",
        None,
        None,
        step="Types of the draft stand in [draft].",
    ),
    "draft mode": broken(
        ROLES + '[draft]\nmode = "kept"\n',
        "draft.mode: no mode of the draft module",
        "one of keep, drop, only",
        '"kept"',
        step="Did you mean keep?",
    ),
    "regular expression": broken(
        ROLES + '[[override]]\nmatch = "("\ntype = "F32"\n',
        "override 1, match: not a regular expression: "
        "missing ), unterminated subpattern at position 0",
        "a pattern of Python's re",
        '"("',
        "Write patterns in single quotes: TOML leaves their backslashes alone.",
    ),
    "repetition that overflows": broken(
        ROLES + '[[override]]\nmatch = "a{99999999999999999999}"\ntype = "F32"\n',
        "override 1, match: not a regular expression: the repetition number is too large",
        "a pattern of Python's re",
        '"a{99999999999999999999}"',
        "Write patterns in single quotes: TOML leaves their backslashes alone.",
    ),
    "empty pattern": broken(
        ROLES + '[[override]]\nmatch = ""\ntype = "F32"\n',
        "override 1, match: an empty pattern matches every tensor",
        "a regular expression for GGUF names",
        '""',
        "Give the type to the roles instead, or write '.' if every tensor is meant.",
    ),
    "name that leaves the folder": broken(
        'name = "../x"\n' + ROLES,
        "name: files cannot be named after this",
        NAME_RULE,
        '"../x"',
        NAME_STEP,
    ),
    "name with a line feed": broken(
        'name = "x\\n"\n' + ROLES,
        "name: files cannot be named after this",
        NAME_RULE,
        '"x\\n"',
        NAME_STEP,
    ),
    "hidden name": broken(
        'name = ".x"\n' + ROLES,
        "name: files cannot be named after this",
        NAME_RULE,
        '".x"',
        NAME_STEP,
    ),
    "empty name": broken(
        'name = ""\n' + ROLES,
        "name: files cannot be named after this",
        NAME_RULE,
        '""',
        NAME_STEP,
    ),
    "number for a name": broken("name = 3\n" + ROLES, "name: not text", "text in quotes", "3"),
    "cut TOML": broken(
        "name = \n",
        "the recipe is not valid TOML",
        found="Invalid value (at line 1, column 8)",
        step="Names of types are text and stand in quotes; see https://toml.io.",
    ),
    "type without quotes": broken(
        "[roles]\nrouted = Q3_K\n",
        "the recipe is not valid TOML",
        found="Invalid value (at line 2, column 10)",
        step="Names of types are text and stand in quotes; see https://toml.io.",
    ),
    "key given twice": broken(
        'name = "a"\nname = "b"\n',
        "the recipe is not valid TOML",
        found="Cannot overwrite a value (at line 2, column 11)",
        step="Names of types are text and stand in quotes; see https://toml.io.",
    ),
}


@pytest.mark.parametrize(
    ("text", "what", "expected", "found", "step"), MISTAKES.values(), ids=MISTAKES
)
def test_a_mistake_is_said_in_the_authors_words(
    text: str, what: str, expected: object, found: object, step: str | None
) -> None:
    (error,) = errors_of(text)
    assert type(error) is RecipeError
    assert error.what == what
    assert error.file == str(PATH)
    assert (error.expected, error.found, error.next_step) == (expected, found, step)


def test_words_of_the_library_never_reach_the_author() -> None:
    shown = " ".join(str(error) for text, *_ in MISTAKES.values() for error in errors_of(text))
    assert not re.search(r"Input should|instance of|tuple|dictionary|Extra inputs|pydantic", shown)


def test_bytes_that_are_not_utf8_are_located() -> None:
    (error,) = errors_of(b'name = "a\xff"\n')
    assert str(error) == (
        f"the recipe is not UTF-8 text; file {PATH}; offset 9; found byte 0xff. Save it as UTF-8."
    )


def test_brackets_without_end_are_refused_not_followed() -> None:
    (error,) = errors_of("x = " + "[" * 100_000)
    assert error.what == "the recipe is not valid TOML"


def test_a_long_value_is_cut_in_the_message() -> None:
    (error,) = errors_of(ROLES.replace("Q3_K", "Q" * 10_000))
    assert len(str(error)) < 600


def test_a_file_name_that_is_no_name_is_refused_for_itself() -> None:
    with pytest.raises(RecipeError, match=r"name: files cannot be named after this.*found \"a b\""):
        parse_recipe(ROLES.encode(), Path("a b.toml"))


MANY = """
name = "a b"
allow = ["nothing"]
colour = 1
[output]
layout = "frok"
size = 3
[sub_roles]
norm = 4
[[override]]
match = "("
type = "Q9"
[roles]
routed = "Q3"
shared = 5
"""
MANY_PLACES = [
    "name: ",
    "allow 1: ",
    "roles.routed: ",
    "the key roles.attention ",
    "the key roles.embedding ",
    "roles.shared: ",
    "sub_roles.norm: ",
    "override 1, match: ",
    "override 1, type: ",
    "output.layout: ",
    "unknown key output.size",
    "unknown key colour",
]


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_schema() -> None:
    errors = errors_of(MANY)
    assert [error.what[: len(p)] for error, p in zip(errors, MANY_PLACES, strict=True)] == (
        MANY_PLACES
    )
    assert {error.file for error in errors} == {str(PATH)}
    assert list(map(str, errors)) == list(map(str, errors_of(MANY)))


def test_several_mistakes_come_under_the_name_of_the_file() -> None:
    with pytest.raises(Problems, match=rf"^recipe {PATH}: 12 problems\n"):
        parse_recipe(MANY.encode(), PATH)


def test_a_recipe_is_read_from_a_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "mine.toml", ROLES.replace("\n", "\r\n").encode())
    assert load_recipe(tmp_path / "mine.toml").name == "mine"


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"absent\.toml"):
        load_recipe(tmp_path / "absent.toml")
