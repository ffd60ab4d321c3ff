"""Relayout of a folder that also holds the model's draft, and of models that have no layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import FormatError, OutputError, QuantmillError
from pipeline.gguf.model_file import read_draft
from pipeline.model.form import V41_DRAFT
from pipeline.model.layout import Layout
from pipeline.model.metadata.required import spare_keys
from pipeline.relayout.run import relayout
from tasks.engram import CheckEngram
from tasks.naming import SUMS, listed_digests
from tasks.output import VerifyOutput
from tasks.relayout import Relayout
from tests.gguf_builder import (
    draft_plan,
    small_config,
    small_plan,
    small_v4_config,
    write_hollow,
    write_plan,
)


def folder_with_draft(folder: Path, layout: Layout = Layout.FORK, stem: str = "mini") -> Path:
    """Shards of a target called ``<stem>-<layout>`` and the one of its draft."""
    name = f"{stem}-{layout}"
    for plan in (small_plan(layout), draft_plan(small_config())):
        is_draft = plan.form.is_draft
        write_plan(renamed(plan, f"{name}-draft" if is_draft else name), folder)
    return folder


def renamed(plan, name: str):
    shards = [
        replace(shard, file_name=shard.file_name.replace(plan.name, name, 1))
        for shard in plan.shards
    ]
    return replace(plan, name=name, shards=tuple(shards))


DRAFT = "mini-fork-draft-00001-of-00001.gguf"


@pytest.mark.parametrize("which", ["folder", "shard"])
def test_draft_goes_along_under_a_name_that_fits(tmp_path, which):
    folder = folder_with_draft(tmp_path / "a")
    shard = next(folder.glob("*-00002-of-*"))
    path = shard if which == "shard" else folder
    first = relayout(path, Layout.MAINLINE, tmp_path / "b")
    draft = read_draft(first)
    assert draft.files[0].path.name == DRAFT.replace("fork", "mainline")
    assert draft.files[0].path.samefile(folder / DRAFT)
    assert len(list((tmp_path / "b").iterdir())) == len(list(folder.iterdir()))
    back = relayout(first, Layout.FORK, tmp_path / "c")
    assert {p.name for p in back.parent.iterdir()} == {p.name for p in folder.iterdir()}


def test_draft_of_a_model_that_does_not_say_its_layout_keeps_its_name(tmp_path):
    write_plan(small_plan(Layout.FORK), tmp_path / "a")
    write_plan(draft_plan(small_config()), tmp_path / "a")
    first = relayout(tmp_path / "a", Layout.MAINLINE, tmp_path / "b")
    assert read_draft(first).files[0].path.name == "small-draft-00001-of-00001.gguf"


@pytest.mark.parametrize("how", ["foreign", "link to another"])
def test_what_stands_where_the_draft_goes_is_never_replaced(tmp_path, how):
    folder = folder_with_draft(tmp_path / "a")
    place = tmp_path / "b" / DRAFT.replace("fork", "mainline")
    place.parent.mkdir()
    if how == "foreign":
        place.write_bytes(b"somebody's")
    else:
        place.hardlink_to(next(folder.glob("mini-fork-00001-of-*")))
    before = place.read_bytes()
    with pytest.raises(OutputError, match="there already" if how == "foreign" else "itself"):
        relayout(folder, Layout.MAINLINE, tmp_path / "b")
    assert place.read_bytes() == before
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_draft_that_is_linked_already_stays(tmp_path):
    folder = folder_with_draft(tmp_path / "a")
    place = tmp_path / "b" / DRAFT.replace("fork", "mainline")
    place.parent.mkdir()
    place.hardlink_to(folder / DRAFT)
    assert read_draft(relayout(folder, Layout.MAINLINE, tmp_path / "b")).files[0].path == place


def test_the_task_lists_the_draft_and_verifies_it(tmp_path, capsys):
    folder = folder_with_draft(tmp_path / "mini-fork")
    Relayout(path=str(folder), layout="mainline").show()
    out = tmp_path / "mini-mainline"
    assert "the draft as it was, mini-mainline-draft-00001-of-00001.gguf" in capsys.readouterr().out
    assert DRAFT.replace("fork", "mainline") in listed_digests(out)
    assert sorted(listed_digests(out)) == sorted(p.name for p in out.iterdir() if p.name != SUMS)
    VerifyOutput(path=str(out)).show()
    for path in out.glob("mini-mainline-0*"):
        path.unlink()
    with pytest.raises(OutputError, match=r"there already; file .*-draft-00001-of-00001\.gguf"):
        Relayout(path=str(folder), layout="mainline").show()


def test_the_task_carries_no_damaged_draft_on(tmp_path):
    folder = folder_with_draft(tmp_path / "mini-fork")
    Relayout(path=str(folder), layout="mainline").show()
    made = tmp_path / "mini-mainline"
    draft = made / DRAFT.replace("fork", "mainline")
    content = bytearray(draft.read_bytes())
    draft.unlink()
    draft.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(QuantmillError, match="differ from their digest") as caught:
        Relayout(path=str(made), layout="fork", out=str(tmp_path / "again")).show()
    assert draft.name in str(caught.value)
    assert not (tmp_path / "again").exists()


def test_the_task_refuses_a_draft_of_another_model(tmp_path):
    folder = tmp_path / "mini-fork"
    write_plan(small_plan(Layout.FORK), folder)
    plan = draft_plan(replace(small_config(), hidden=96))
    write_hollow(plan, folder)
    with pytest.raises(QuantmillError, match="target and draft differ in embedding_length"):
        Relayout(path=str(folder), layout="mainline").show()
    assert list((tmp_path / "mini-mainline").glob("*.gguf")) == []


def test_the_task_takes_a_draft_that_lacks_what_loaders_do_without(tmp_path):
    folder = tmp_path / "mini-fork"
    write_plan(small_plan(Layout.FORK), folder)
    write_hollow(draft_plan(small_config(), without=spare_keys(V41_DRAFT)), folder)
    Relayout(path=str(folder), layout="mainline").show()
    assert len(list((tmp_path / "mini-mainline").glob("*-draft-*.gguf"))) == 1
    needed = draft_plan(small_config(), without=["dflash.hyper_connection.single_pass"])
    write_hollow(needed, folder)
    with pytest.raises(QuantmillError, match="single_pass is missing"):
        Relayout(path=str(folder), layout="mainline", out=str(tmp_path / "other")).show()


NO_LAYOUT = {
    "deepseek4": lambda: small_plan(Layout.MAINLINE, small_v4_config()),
    "dflash": lambda: draft_plan(small_v4_config()),
}


@pytest.mark.parametrize(("architecture", "plan"), NO_LAYOUT.items(), ids=NO_LAYOUT)
def test_models_without_layouts_are_refused_and_have_no_engram_to_check(
    tmp_path, capsys, architecture, plan
):
    path = write_hollow(plan(), tmp_path / "a")
    with pytest.raises(FormatError, match=f"a {architecture} file has no other layout"):
        relayout(path, Layout.FORK, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    CheckEngram(path=str(path)).show()
    assert f"{architecture}: a model without engram tables" in capsys.readouterr().out


def test_engram_check_of_a_folder_is_of_its_target(tmp_path, capsys):
    CheckEngram(path=str(folder_with_draft(tmp_path / "a"))).show()
    assert "engram check (fork)" in capsys.readouterr().out
