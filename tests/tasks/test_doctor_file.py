"""The page of a model file, its exit code, and that what it tells to type mends the file."""

import shlex
from dataclasses import replace

import pytest

from pipeline.diagnosis.diagnose import diagnose
from pipeline.model.layout import Layout
from pipeline.report.diagnosis_page import diagnosis_page, role_table
from pipeline.report.tables import WIDTH
from tasks.doctor.file import main
from tests.gguf_builder import small_keys
from tests.pipeline.diagnosis.models import (
    FIVE,
    LATER,
    P,
    examined,
    retyped,
    sound_model,
    sound_plan,
    written,
)
from tests.tasks.commands import luigi


@pytest.fixture
def keys():
    return list(small_keys(sound_plan(Layout.FORK).config, Layout.FORK))


@pytest.fixture
def broken(tmp_path, keys):
    """A published file with five of the nine engram keys missing and part of the rest as V4's."""
    kept = [entry for entry in keys if entry.key not in (*FIVE, *LATER)]
    moved = [
        replace(e, key=e.key.replace(P, "deepseek4.")) if e.key.startswith(f"{P}rope") else e
        for e in kept
    ]
    return written(tmp_path / "model.gguf", keys=moved)


def test_the_page_says_what_it_is_what_is_wrong_and_what_mends_it(broken, capsys):
    assert main([str(broken)]) == 1
    page = capsys.readouterr().out
    assert page.splitlines()[0] == str(broken)
    for words in (
        "DeepSeek-V4.1-Flash, target, fork layout (architecture deepseek41)",
        "faulty: engines refuse it or run it wrong",
        "routed experts",
        "MXFP4 (18)",
        "[does not load] 5 of 9 engram keys are missing",
        'engines say: "key not found in model: deepseek41.engram.pad_id"',
        "7 keys under a wrong prefix",
        f"scripts/run RunRecipe --recipe as-is --source {shlex.quote(str(broken))} --layout fork",
        "CHECKPOINT: the released checkpoint",
    ):
        assert words in page
    plain = [line for line in page.splitlines() if "scripts/" not in line and "/" not in line]
    assert max(map(len, plain)) <= WIDTH


def test_roles_add_up(broken):
    diagnosis = diagnose(broken)
    *roles, total = role_table(diagnosis.roles).values("tensors")
    assert sum(roles) == total == 176
    *nbytes, total = role_table(diagnosis.roles).values("bytes")
    assert sum(nbytes) == total == sum(t.nbytes for t in sound_plan(Layout.FORK).tensors)


def test_exit_codes(tmp_path, keys, capsys):
    sound = written(tmp_path / "sound.gguf", keys=keys)
    (tmp_path / "note.txt").write_text("no model")
    assert main([str(sound)]) == 0
    assert main([str(tmp_path / "note.txt")]) == 2
    assert main([str(tmp_path / "nothing.gguf")]) == 2
    assert "nothing.gguf" in capsys.readouterr().err
    assert main([str(sound), str(tmp_path / "note.txt")]) == 2


def test_the_repair_recipe_stands_on_the_page_with_its_command():
    changed = retyped(".ffn_gate_inp.", "Q8_0")(sound_model(Layout.FORK))
    page = diagnosis_page(examined(changed))
    assert "see mend.toml below" in page
    assert '    sub_roles = ["router"]\n    type = "BF16"' in page
    assert page.count("--graft original=CHECKPOINT") == 1


@pytest.mark.slow
def test_the_mending_command_mends(broken, tmp_path):
    mends = [f.mend for f in diagnose(broken).findings if f.severity.is_fault]
    assert len({mend.commands for mend in mends}) == 1
    script, *words = shlex.split(mends[0].commands[0])
    assert script == "scripts/run"
    result = luigi(*words, "--name", "mended", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    mended = tmp_path / "out" / "mended-as-is-fork"
    assert diagnose(mended).verdict == 0
