"""P4 and P5: disks that are full, and calls that move less than they were asked to."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import files
from tests.promises.whole_job import (
    assert_only_whole_files,
    assert_right,
    installed,
    run_job,
)

FULL_DISK = """
import json, os, subprocess, sys
from pathlib import Path
from tests.promises.whole_job import assert_only_whole_files, finals, run_job

source, folder, nbytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
wanted = json.loads(sys.stdin.read())

def mount(nbytes, *options):
    words = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={nbytes}", *options]), "tmpfs", folder]
    subprocess.run(words, check=True)

def attempt():
    outcome = run_job(source, folder / "out")
    assert_only_whole_files(folder / "out", wanted)
    return outcome

mount(nbytes // 2)
refused = attempt()
assert not refused.ok and "does not fit on the disk" in refused.text, refused
assert not list((folder / "out").rglob("*.gguf*")), "nothing was begun"

# Room for every shard, as planned, but somebody else takes some of it in the meantime.
mount(nbytes + 300_000, "remount")
import tasks.plan
accept = tasks.plan.AcceptPlan.run
def accept_and_lose_room(task):
    accept(task)
    (folder / "theirs").write_bytes(bytes(1 << 20))
tasks.plan.AcceptPlan.run = accept_and_lose_room
full = attempt()
assert not full.ok and "No space left on device" in full.text, full
assert all(e.file and e.next_step for e in full.errors), full
kept = {p: p.stat().st_ino for p in folder.glob("out/.quantmill/*/shard.gguf")}
assert 0 < len(kept) < 5, kept
again = attempt()
assert not again.ok and ("No space" in again.text or "does not fit" in again.text), again

mount(2 * nbytes, "remount")
done = attempt()
assert done.ok, done
assert finals(folder / "out") == wanted
assert {p: p.stat().st_ino for p in kept} == kept, "finished shards were kept"
"""


def can_mount():
    words = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") and subprocess.run(words, capture_output=True).returncode == 0


@pytest.mark.slow
def test_p04_a_full_disk_stops_cleanly_and_resumes(small_miniature, tmp_path, undisturbed, wanted):
    """A disk of a few megabytes, in a mount namespace of the test's own."""
    if not can_mount():
        pytest.skip("needs the right to mount a tmpfs in a namespace of its own")
    pages = [-(-p.stat().st_size // 4096) * 4096 for p in undisturbed.glob(".quantmill/*/*")]
    words = ["unshare", "-m", sys.executable, "-c", FULL_DISK]
    result = subprocess.run(
        [*words, str(small_miniature), str(tmp_path), str(sum(pages))],
        input=json.dumps(wanted),
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]


FILE_LIMIT = """
import resource, sys
from tests.promises.whole_job import run_job

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
outcome = run_job(sys.argv[1], sys.argv[2])
assert not outcome.ok
assert "ulimit -f" in outcome.text, outcome
"""


@pytest.mark.slow
def test_p04_a_file_size_limit_stops_cleanly_and_resumes(small_miniature, tmp_path, wanted):
    """The shards that fit under the limit are made; the others say what to raise."""
    out, limit = tmp_path / "out", 3_000_000
    words = [sys.executable, "-c", FILE_LIMIT, str(small_miniature), str(out), str(limit)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert_only_whole_files(out, wanted)
    assert len(list(out.glob(".quantmill/*/shard.gguf"))) == 2
    assert run_job(small_miniature, out).ok
    assert_right(out, wanted)


def cut_calls(rng):
    """Every fifth call or so moves fewer bytes than it was given, down to one."""

    def make(seam, real):
        def call(fd, content, offset):
            if rng.random() > 0.2:
                return real(fd, content, offset)
            views = content if seam == "_preadv" else [content]
            n = rng.randint(1, max(1, memoryview(views[0]).nbytes))
            cut = memoryview(views[0])[:n]
            return real(fd, [cut] if seam == "_preadv" else cut, offset)

        return call

    return make


def test_p05_short_reads_and_writes_are_completed(small_miniature, tmp_path, wanted, monkeypatch):
    """Calls cut at random, and none ever moves more than a few kilobytes."""
    monkeypatch.setattr(files, "MAX_CALL_NBYTES", 50_003)
    installed(["_preadv", "_pwrite"], monkeypatch, cut_calls(random.Random(12)))
    assert run_job(small_miniature, tmp_path / "out").ok
    assert_right(tmp_path / "out", wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seam", "message"),
    [("_preadv", "the file ends too early"), ("_pwrite", "a write moved no byte")],
)
def test_p05_a_call_that_moves_nothing_is_refused(
    small_miniature, tmp_path, wanted, monkeypatch, seam, message
):
    """After so many good calls that shards are being filled."""
    out, n_calls = tmp_path / "out", 0

    def make(_, real):
        def call(*arguments):
            nonlocal n_calls
            n_calls += 1
            return 0 if n_calls > 200 else real(*arguments)

        return call

    with monkeypatch.context() as patch:
        installed([seam], patch, make)
        outcome = run_job(small_miniature, out)
    assert not outcome.ok
    assert message in outcome.text
    assert_only_whole_files(out, wanted)
    assert run_job(small_miniature, out).ok
    assert_right(out, wanted)
