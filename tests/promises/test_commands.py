"""P12: luigi tells the truth, and its children end with it."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.promises.sessions import alive, begin, end_all, wait_until
from tests.promises.test_sources import spoilt
from tests.promises.whole_job import NAME, assert_only_whole_files, assert_right, run_job
from tests.tasks.commands import command, files_of, luigi, run_recipe


def test_p12_a_second_run_says_so_and_writes_nothing(small_miniature, undisturbed, tmp_path):
    words = run_recipe(small_miniature, "native", "--out", undisturbed)
    before = files_of(undisturbed)
    result = luigi(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "nothing to do" in result.stdout
    assert files_of(undisturbed) == before


def bad_scale(content, rng):
    """The last byte of an expert layer's shard is a BF16 infinity's."""
    return content[:-2] + b"\x80\x7f"


@pytest.mark.slow
def test_p12_a_failed_shard_is_30_and_the_next_run_ends_it(small_miniature, tmp_path):
    name = "model-00009-of-00014.safetensors"
    copy = spoilt(small_miniature, tmp_path / "copy", name, bad_scale)
    result = luigi(*run_recipe(copy), cwd=tmp_path)
    assert result.returncode == 30, result.stderr
    assert str(copy / name) in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out" / NAME / "manifest.json").exists()
    (copy / name).unlink()
    (copy / name).hardlink_to(small_miniature / name)
    assert luigi(*run_recipe(copy), cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_p12_a_task_that_makes_nothing_is_30(small_miniature, tmp_path):
    """luigi's own default would be success."""
    line = command("IdleRecipe", *run_recipe(small_miniature)[1:])
    line[line.index("recipes")] = "idle"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        line,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 30, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_p12_a_signal_leaves_no_child_and_no_harm(small_miniature, tmp_path, wanted, number):
    """Sent to luigi alone while a task process fills a shard."""
    out = tmp_path / "out"
    session = begin(*run_recipe(small_miniature), "--workers", 2, cwd=tmp_path)
    try:
        assert wait_until(lambda: list(out.glob(".quantmill/*/shard.gguf.part")))
        session.send_signal(number)
        assert session.wait(120) != 0
        assert wait_until(lambda: alive(session.pid) == [])
    finally:
        end_all(session)
    assert_only_whole_files(out, wanted)
    assert not (out / NAME / "manifest.json").exists()
    assert run_job(small_miniature, out).ok
    assert_right(out, wanted)
