"""`scripts/recipe`: what it prints, and what it answers mistakes with."""

from __future__ import annotations

import argparse
import io
import re
import tomllib
from pathlib import Path

import pytest

from pipeline.errors import RecipeError
from pipeline.files import write_whole
from pipeline.model.layout import Layout
from pipeline.recipe.dump import recipe_toml
from tasks.recipe_command import import_, main
from tasks.recipe_file import SHIPPED, read_recipe
from tests.gguf_builder import small_plan, write_hollow


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    def said(*words: object, code: int = 0) -> tuple[str, str]:
        assert main([str(word) for word in words]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return said


def test_show_prints_the_recipe_in_full(said) -> None:
    assert said("show", "reap-256-q3") == (recipe_toml(read_recipe("reap-256-q3")), "")


def test_show_of_a_model_adds_types_and_bytes(said) -> None:
    out, _ = said("show", "reap-256-q3", "--source", "v4.1")
    assert [line.split()[:4] for line in out.splitlines() if line.startswith("routed_down  ")] == [
        ["routed_down", "Q4_K", "38", "64,550,338,560"],
        ["routed_down", "Q5_K", "2", "4,152,360,960"],
    ]
    assert out.splitlines()[-1].split()[:3] == ["total", "1,046", "266,410,746,908"]


def test_show_of_a_gguf(said, tmp_path: Path) -> None:
    path = write_hollow(small_plan(Layout.FORK), tmp_path)
    write_whole(tmp_path / "same.toml", b'extends = "as-is"\n[output]\nlayout = "fork"\n')
    out, _ = said("show", tmp_path / "same.toml", "--source", path)
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("routed_up")] == [
        ["routed_up", "MXFP4", "6"]
    ]


def test_diff_shows_lines_and_of_a_model_bytes(said) -> None:
    out, _ = said("diff", "published-q3_k_m", "served")
    assert '-shared = "Q3_K"' in out.splitlines()
    assert "what differs" not in out
    out, _ = said("diff", "published-q3_k_m", "served", "--source", "v4.1")
    assert out.splitlines()[-1].split() == ["total", "337", "+129,719,982,660", "+129.720"]
    assert said("diff", "native", "native") == ("", "")


def test_export_and_import_are_inverse(said, tmp_path: Path) -> None:
    rules, _ = said("export", "served", "--to", "thireus")
    write_whole(tmp_path / "mine.recipe", rules.encode())
    out, err = said("import", tmp_path / "mine.recipe", "--base", "served")
    assert err == ""
    write_whole(tmp_path / "mine.toml", out.encode())
    assert tomllib.loads(out)["name"] == "mine"
    assert said("export", tmp_path / "mine.toml", "--to", "thireus") == (rules, "")


def test_import_takes_the_rest_from_one_type(said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"_exps=mxfp4,nothing=q8_0")))
    out, err = said("import", "-", "--rest", "bf16", "--name", "x", "--layout", "fork")
    made = tomllib.loads(out)
    assert (made["name"], made["roles"]["shared"], made["output"]["layout"]) == (
        "x",
        "BF16",
        "fork",
    )
    assert err == "# line 1: nothing is left out: the model has no such tensor\n"


def test_import_says_what_stands_in_the_way(said, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, expected in (((), "larger_than_fp4"), (("--allow", "larger_than_fp4"), "")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"_exps=q6_K")))
        out, err = said("import", "-", "--rest", "BF16", *words)
        assert expected in err
        assert tomllib.loads(out).get("allow", []) == list(words[1:])
        assert bool(err) == (not words)


def test_from_a_file(said, tmp_path: Path) -> None:
    path = write_hollow(small_plan(Layout.FORK), tmp_path)
    out, err = said("from", path)
    assert tomllib.loads(out)["roles"]["routed"] == "MXFP4"
    assert err == "# told from the types of its tensors\n"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("show", "nativ"), "no such recipe.*Did you mean native"),
        (("show", "native", "--source", "nowhere"), "nowhere"),
        (("export", "bpw-3.0", "--to", "llama"), "does not know these types"),
        (("export", "draft", "--to", "ik"), "makes a draft only"),
        (("from", "absent.gguf"), "absent.gguf"),
        (("import", "absent.txt", "--rest", "F32"), "absent.txt"),
        (("import", str(SHIPPED / "native.toml"), "--rest", "F32"), "not a rule"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_sentence(said, words: tuple[str, ...], answer: str) -> None:
    out, err = said(*words, code=1)
    assert out == ""
    assert re.search(answer, err)
    assert err.startswith("recipe: ")


def test_import_names_bytes_that_are_no_text(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ffn=\xff\xfe")))
    with pytest.raises(RecipeError, match="not UTF-8 text"):
        import_(argparse.Namespace(rules="-"))
