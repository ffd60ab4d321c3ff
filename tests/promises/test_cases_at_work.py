"""Faults of public bug reports that show in whole runs: kills, disks, folders, downloads."""

import os
import signal
import subprocess

import pytest

from pipeline.errors import OutputError, SourceError
from pipeline.model.layout import Layout
from pipeline.relayout.run import relayout
from tests.hub_server import Fault, Flip, Status
from tests.pipeline.hub_side import CONTENT, PIECE, SHARD, fetch, served
from tests.promises.sessions import begin, end_all, wait_until
from tests.promises.whole_job import NAME, assert_only_whole_files, assert_right, finals
from tests.tasks.commands import command, luigi, run_recipe


@pytest.mark.slow
def test_fd_10_killed_in_the_middle_and_run_again(small_miniature, tmp_path, wanted):
    """One part per shard, with the same name every time; nothing of it under a final name."""
    out = tmp_path / "out"
    for _ in range(2):
        session = begin(*run_recipe(small_miniature), cwd=tmp_path)
        try:
            assert wait_until(lambda: list(out.glob(".quantmill/*/shard.gguf.part")))
            os.killpg(session.pid, signal.SIGKILL)
        finally:
            end_all(session)
        assert_only_whole_files(out, wanted)
        parts = list(out.glob(".quantmill/*/*.part"))
        assert {path.name for path in parts} <= {"shard.gguf.part", ".record.json.part"}
    result = luigi(*run_recipe(small_miniature), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_right(out, wanted)


@pytest.mark.slow
def test_fd_11_a_file_size_limit_stops_cleanly(small_miniature, tmp_path, short_folder, wanted):
    """By `ulimit -f`; and no tensor ever goes through the folder for temporary files."""
    words = command(*run_recipe(small_miniature))
    result = subprocess.run(
        ["bash", "-c", 'ulimit -f 3000; exec "$@"', "-", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(short_folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 30, result.stderr
    assert "Raise the file size limit (ulimit -f)" in result.stderr
    assert "Traceback" not in result.stderr
    assert_only_whole_files(tmp_path / "out", wanted)
    again = luigi(*run_recipe(small_miniature), cwd=tmp_path, TMPDIR=str(short_folder))
    assert again.returncode == 0, again.stderr
    assert_right(tmp_path / "out", wanted)
    left = sum(path.stat().st_size for path in short_folder.rglob("*") if path.is_file())
    assert left < 100_000


@pytest.mark.parametrize("way", ["the same path", "a symlink", "hard links"])
def test_fd_18_input_equals_output_is_refused(undisturbed, wanted, tmp_path, way):
    """Relayout is what reads and writes the same kind of file; see test_folders for RunRecipe."""
    model = undisturbed / NAME
    out = {"the same path": model, "a symlink": tmp_path / "link", "hard links": tmp_path / "hard"}
    if way == "a symlink":
        out[way].symlink_to(model)
    if way == "hard links":
        out[way].mkdir()
        for path in model.glob("*.gguf"):
            (out[way] / path.name.replace("mainline", "fork")).hardlink_to(path)
    with pytest.raises(OutputError):
        relayout(model, Layout.FORK, out[way])
    assert finals(undisturbed) == wanted


def test_fd_20_right_size_but_wrong_bytes_is_not_taken(tmp_path):
    with served(tmp_path) as hub:
        hub.fault(Fault(Flip(), SHARD, origin="cdn", times=None, position=3 * PIECE + 5))
        with pytest.raises(SourceError, match="sha256"):
            fetch(hub, tmp_path, tmp_path / "shard")
        assert not (tmp_path / "shard").exists()
        hub.clear_faults()
        fetch(hub, tmp_path, tmp_path / "shard")
    assert (tmp_path / "shard").read_bytes() == CONTENT


def test_fd_20_an_error_while_resuming_is_not_the_end_of_the_file(tmp_path):
    """Four pieces are here, then nothing but 503: not done, and the next run goes on there."""
    with served(tmp_path) as hub:
        for n_pieces in (4, 7):
            fault = Fault(Status(503), SHARD, times=None, position=n_pieces * PIECE)
            hub.fault(fault)
            with pytest.raises(SourceError):
                fetch(hub, tmp_path, tmp_path / "shard", n_connections=1)
            assert not (tmp_path / "shard").exists()
            hub.clear_faults()
        fetch(hub, tmp_path, tmp_path / "shard")
    assert (tmp_path / "shard").read_bytes() == CONTENT
