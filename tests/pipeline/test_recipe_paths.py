"""Paths in recipes count from the file in which they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.recipe.paths import source_from
from pipeline.recipe.schema import Recipe, load_recipe

ROLES = "[roles]\n" + "".join(
    f'{role} = "Q8_0"\n' for role in ("routed", "engram", "attention", "embedding", "shared")
)
PARENT = (
    ROLES
    + '[imatrix]\nfile = "m.gguf"\n[experts]\nkeep = "lists/keep.json"\n'
    + '[source]\npath = "{path}"\n[[graft]]\nfrom = "{origin}"\nlayers = "0"\n'
)


def child_of(folder: Path, *, path: str = "there", origin: str = "there") -> Recipe:
    (folder / "base" / "there").mkdir(parents=True)
    (folder / "base" / "a").mkdir()
    (folder / "base" / "parent.toml").write_text(
        PARENT.replace("{path}", path).replace("{origin}", origin)
    )
    (folder / "mine").mkdir()
    child = folder / "mine" / "child.toml"
    child.write_text('extends = "../base/parent"\n[[graft]]\nfrom = "there"\nlayers = "1"\n')
    return load_recipe(child)


def test_what_a_parent_names_lies_beside_the_parent(tmp_path: Path) -> None:
    recipe = child_of(tmp_path)
    assert (recipe.imatrix.file, recipe.experts.keep, recipe.source.path) == (
        "../base/m.gguf",
        "../base/lists/keep.json",
        "../base/there",
    )
    # The child's own stands as it is.
    assert [graft.origin for graft in recipe.graft] == ["there", "../base/there"]


@pytest.mark.parametrize("word", ["/elsewhere/x", "owner/name@main", "owner/name"])
def test_absolute_paths_and_addresses_stay(tmp_path: Path, word: str) -> None:
    recipe = child_of(tmp_path, path=word, origin=word)
    assert (recipe.source.path, recipe.graft[1].origin) == (word, word)


@pytest.mark.parametrize(
    ("word", "seen"), [("original", "original"), ("x/y/z", "../base/x/y/z"), ("a", "../base/a")]
)
def test_a_bare_word_that_is_no_file_is_a_label(tmp_path: Path, word: str, seen: str) -> None:
    assert child_of(tmp_path, origin=word).graft[1].origin == seen


def test_folders_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    (tmp_path / "parent.toml").write_text(PARENT.replace("{path}", "x").replace("{origin}", "y"))
    (tmp_path / "m.gguf").touch()
    child = tmp_path / "link" / "child.toml"
    child.write_text(f'extends = "{tmp_path}/parent"\n')
    name = load_recipe(child).imatrix.file
    assert name is not None
    assert (child.parent / name).samefile(tmp_path / "m.gguf")


def test_a_source_is_what_lies_there_or_an_address(tmp_path: Path) -> None:
    assert source_from(tmp_path, "owner/name") == "owner/name"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert source_from(tmp_path, "owner/name") == str(tmp_path / "owner" / "name")
    assert source_from(tmp_path, "a/b/c") == str(tmp_path / "a/b/c")
