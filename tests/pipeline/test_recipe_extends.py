"""Recipes that extend others: what is handed on, and in which file a mistake stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import Problems, QuantmillError, RecipeError
from pipeline.files import write_whole
from pipeline.model.layout import Layout
from pipeline.recipe.schema import Recipe, load_recipe
from tasks.recipe_file import SHIPPED, read_recipe

ROLES = "[roles]\n" + "".join(
    f'{role} = "Q8_0"\n' for role in ("routed", "engram", "attention", "embedding", "shared")
)
PARENT = (
    'description = "Of the parent."\nname = "ours"\nallow = ["below_bf16"]\n'
    + ROLES
    + '[sub_roles]\nrouter = "BF16"\noutput = "Q6_K"\n'
    + "[[override]]\nmatch = 'a'\ntype = \"F32\"\n"
    + '[[graft]]\nfrom = "p"\nlayers = "0"\n'
    + '[output]\nlayout = "fork"\nshard_nbytes = 2_000_000\n'
    + '[budget]\nfile_nbytes = 5\ncandidates = ["Q2_K"]\n'
    + "[budget.types]\nrouted = []\n[budget.weights]\nrouted = 2\n"
)


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        write_whole(tmp_path / name, text.encode())
        return tmp_path / name

    return write


def merged(write, child: str, parent: str = PARENT) -> Recipe:
    write("parent.toml", parent)
    return load_recipe(write("child.toml", 'extends = "parent"\n' + child))


def problems(path: Path) -> list[QuantmillError]:
    with pytest.raises(QuantmillError) as caught:
        load_recipe(path)
    error = caught.value
    return list(error.problems) if isinstance(error, Problems) else [error]


def test_a_child_that_says_nothing_is_its_parent_under_its_own_name(write) -> None:
    child, parent = merged(write, ""), load_recipe(write("p.toml", PARENT))
    assert (child.name, child.description) == ("child", "")
    assert (parent.name, parent.description) == ("ours", "Of the parent.")
    same = {"name": "x", "description": ""}
    assert child.model_copy(update=same) == parent.model_copy(update=same)


def test_tables_are_merged_key_by_key_and_the_child_wins(write) -> None:
    child = merged(
        write,
        'allow = []\n[roles]\nrouted = "Q2_K"\n[sub_roles]\noutput = "BF16"\n'
        "[output]\nshard_nbytes = 3_000_000\n"
        '[budget]\nfile_nbytes = 6\n[budget.types]\nshared = ["Q4_K"]\n',
    )
    assert (child.roles.routed, child.roles.shared) == ("Q2_K", "Q8_0")
    assert (child.sub_roles.output, child.sub_roles.router) == ("BF16", "BF16")
    assert (child.output.layout, child.output.shard_nbytes) == (Layout.FORK, 3_000_000)
    assert child.allow == ()
    assert (child.budget.file_nbytes, child.budget.candidates) == (6, ("Q2_K",))
    assert (child.budget.types.routed, child.budget.types.shared) == ((), ("Q4_K",))
    assert child.budget.weights.routed == 2


def test_overrides_and_grafts_of_the_child_stand_first_and_may_hide_the_parents(write) -> None:
    child = merged(
        write,
        '[[override]]\nmatch = \'b\'\ntype = "BF16"\n[[graft]]\nfrom = "c"\nlayers = "1"\n',
    )
    assert [(o.match, o.optional) for o in child.override] == [("b", False), ("a", True)]
    assert [(g.origin, g.optional) for g in child.graft] == [("c", False), ("p", True)]


def test_a_grandparent_hands_on_what_nobody_said_anew(write) -> None:
    write("old.toml", PARENT)
    child = merged(
        write, '[roles]\nshared = "Q6_K"\n', 'extends = "old.toml"\n[roles]\nrouted="Q3_K"\n'
    )
    assert (child.roles.routed, child.roles.shared, child.roles.engram) == ("Q3_K", "Q6_K", "Q8_0")


def test_a_parent_may_lack_what_its_child_says(write) -> None:
    child = merged(write, ROLES, '[sub_roles]\noutput = "F32"\n')
    assert (child.roles.routed, child.sub_roles.output) == ("Q8_0", "F32")


def test_a_mistake_is_told_of_the_file_in_which_it_stands(write) -> None:
    parent = PARENT.replace('output = "Q6_K"', 'output = "Q6_X"').replace(
        "match = 'a'", "mtch = 'a'"
    )
    write("parent.toml", parent)
    child = write(
        "child.toml",
        'extends = "parent"\ncolour = 1\n[[override]]\nmatch = "x"\ntype = "F"\n',
    )
    found = [(Path(str(error.file)).name, error.what) for error in problems(child)]
    assert found == [
        ("child.toml", "override 1, type: no ggml type has this name"),
        ("child.toml", "unknown key colour"),
        ("parent.toml", "sub_roles.output: no ggml type has this name"),
        ("parent.toml", "unknown key override 1, mtch"),
    ]


def test_what_nobody_says_is_missed_in_the_child(write) -> None:
    write("parent.toml", '[sub_roles]\noutput = "F32"\n')
    (error,) = problems(write("child.toml", 'extends = "parent"\n'))
    assert (error.what, Path(str(error.file)).name) == (
        "the table [roles] is missing",
        "child.toml",
    )
    found = problems(write("child.toml", 'extends = "parent"\n[roles]\nrouted = "F32"\n'))
    assert [error.what for error in found] == [
        f"the key roles.{role} is missing" for role in ("attention", "embedding", "shared")
    ]


def test_a_parent_that_is_no_toml_is_named(write) -> None:
    write("parent.toml", "name = ")
    (error,) = problems(write("child.toml", 'extends = "parent"\n'))
    assert (error.what, Path(str(error.file)).name) == (
        "the recipe is not valid TOML",
        "parent.toml",
    )


def test_a_parent_that_is_not_there(write) -> None:
    (error,) = problems(write("child.toml", 'extends = "nobody"\n'))
    assert type(error) is RecipeError
    assert (error.what, error.found) == (
        "the recipe that this one extends is not there",
        "'nobody'",
    )


@pytest.mark.parametrize("word", ["3", '""', '["parent"]'])
def test_a_parent_without_a_name(write, word: str) -> None:
    (error,) = problems(write("child.toml", f"extends = {word}\n"))
    assert error.what == "extends: not the name of a recipe"


def test_recipes_in_a_circle_are_refused_with_the_circle(write) -> None:
    write("a.toml", 'extends = "b"\n')
    write("b.toml", 'extends = "c"\n')
    write("c.toml", 'extends = "./b.toml"\n')
    (error,) = problems(write("child.toml", 'extends = "a"\n'))
    assert error.what == "recipes extend each other in a circle"
    assert (error.found, Path(str(error.file)).name) == ("b.toml -> c.toml -> b.toml", "c.toml")
    (error,) = problems(write("self.toml", 'extends = "self"\n'))
    assert error.found == "self.toml -> self.toml"


def test_a_shipped_recipe_is_extended_by_name_from_anywhere(write) -> None:
    path = write("mine.toml", 'extends = "served-lean"\n[sub_roles]\noutput = "Q8_0"\n')
    shipped, mine = read_recipe("served-lean"), read_recipe(str(path))
    assert (mine.name, mine.sub_roles.output) == ("mine", "Q8_0")
    assert (mine.roles, mine.override) == (shipped.roles, shipped.override)


def test_a_shipped_name_that_is_almost_right(write) -> None:
    path = write("mine.toml", 'extends = "served-leen"\n')
    with pytest.raises(RecipeError, match=r"native, .*Did you mean served-lean\?"):
        read_recipe(str(path))


def test_a_recipe_beside_does_not_hide_a_shipped_one(write) -> None:
    write("served.toml", ROLES)
    path = write("mine.toml", 'extends = "served"\n')
    assert read_recipe(str(path)).roles == load_recipe(SHIPPED / "served.toml").roles
