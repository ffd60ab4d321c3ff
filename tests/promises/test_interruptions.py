"""P1 to P3: jobs that are stopped anywhere, by errors, deaths and kills."""

import errno
import random
import shutil
import signal
import time

import pytest

from pipeline.blocks import blocks_of
from pipeline.store import ShardStore
from tasks.job import Job
from tasks.request import JobParameters
from tests.pipeline.filling import CHILDREN, Nth, dying, refusing
from tests.promises.sessions import alive, begin, end_all
from tests.promises.whole_job import (
    WRITING_SEAMS,
    assert_only_whole_files,
    assert_right,
    one_life,
    run_job,
    say,
)
from tests.tasks.commands import run_recipe

N_CALLS = {
    "_pwrite": 450,
    "_write": 30,
    "_fdatasync": 75,
    "_fsync": 28,
    "_replace": 24,
    "_fallocate": 4,
    "_truncate": 12,
    "_link": 8,
}
"""About as many of each as a job makes."""


def short(call, fd, content, *offset):
    """An act: the call moves half of what it was given."""
    return call(fd, content[: len(content) // 2], *offset)


def acts_of(seam):
    acts = {"ENOSPC": refusing(errno.ENOSPC), "EIO": refusing(errno.EIO)}
    if seam in ("_pwrite", "_write"):
        acts["short"] = short
    return acts


def ladder(rng, step):
    """1, then ever larger numbers."""
    n = 1
    while True:
        yield n
        n += rng.randint(1, 1 + int(n * step))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_p01_a_final_name_never_holds_unfinished_bytes(
    small_miniature, tmp_path, wanted, monkeypatch, seed
):
    """Failures at some call of every seam, one after the other in the same output folder."""
    rng = random.Random(seed)
    out, n_failed = tmp_path / "out", 0
    for seam in rng.sample(WRITING_SEAMS, len(WRITING_SEAMS)):
        n = rng.randint(1, max(1, N_CALLS[seam] // 2))
        act = rng.choice(list(acts_of(seam)))
        say(f"seed {seed}: {seam} call {n} {act}")
        with monkeypatch.context() as patch:
            fault = Nth([seam], n, acts_of(seam)[act]).install(patch)
            outcome = run_job(small_miniature, out)
        assert outcome.ok or fault.happened, outcome.text
        assert outcome.ok or all(hasattr(e, "next_step") for e in outcome.errors), outcome.errors
        n_failed += not outcome.ok
        assert_only_whole_files(out, wanted)
        if outcome.ok:
            assert_right(out, wanted)
            shutil.rmtree(out)
    assert n_failed >= 4
    assert run_job(small_miniature, out).ok
    assert_right(out, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seam", WRITING_SEAMS)
def test_p01_whichever_call_fails_nothing_unfinished_is_named(
    small_miniature, tmp_path, wanted, monkeypatch, seam
):
    """The n-th call of a seam fails, for n = 1 and ever larger steps until a run passes."""
    seed = WRITING_SEAMS.index(seam)
    rng, out = random.Random(seed), tmp_path / "out"
    for n in ladder(rng, 3):
        shutil.rmtree(out, ignore_errors=True)
        act = rng.choice(list(acts_of(seam)))
        say(f"seed {seed}: {seam} call {n} {act}")
        with monkeypatch.context() as patch:
            fault = Nth([seam], n, acts_of(seam)[act]).install(patch)
            outcome = run_job(small_miniature, out)
        assert_only_whole_files(out, wanted)
        if not fault.happened:
            assert outcome.ok
            break
        if not outcome.ok:
            assert run_job(small_miniature, out).ok
        assert_right(out, wanted)
    assert n > 1


@pytest.mark.slow
def test_p01_dying_at_any_call_leaves_nothing_unfinished_under_a_final_name(
    small_miniature, tmp_path, wanted
):
    seed, out = 7, tmp_path / "out"
    rng = random.Random(seed)
    for n in ladder(rng, 2):
        say(f"seed {seed}: call {n}")
        shutil.rmtree(out, ignore_errors=True)
        code = life(small_miniature, out, Nth(WRITING_SEAMS, n, dying))
        assert code in (0, 9)
        assert_only_whole_files(out, wanted)
        if code == 0:
            break
        assert run_job(small_miniature, out).ok
        assert_right(out, wanted)
    assert n > 300


def life(source, out, death=None):
    process = CHILDREN.Process(target=one_life, args=(source, out, death))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.slow
def test_p02_a_resumed_run_equals_an_uninterrupted_one(small_miniature, tmp_path, wanted):
    """Process after process dies in the same job; the last one lives."""
    seed, out = 3, tmp_path / "out"
    rng = random.Random(seed)
    for _ in range(5):
        n = rng.randint(1, 250)
        say(f"seed {seed}: call {n}")
        assert life(small_miniature, out, Nth(WRITING_SEAMS, n, dying)) == 9
        assert_only_whole_files(out, wanted)
    assert life(small_miniature, out) == 0
    assert_right(out, wanted)


@pytest.mark.slow
def test_p02_a_storm_of_kills_changes_no_byte(small_miniature, tmp_path, wanted):
    """Whole luigi sessions killed by SIGKILL at random moments, for about half a minute."""
    rng, out, n_kills = random.Random(11), tmp_path / "out", 0
    end = time.monotonic() + 25
    while time.monotonic() < end:
        shutil.rmtree(out, ignore_errors=True)
        session = begin(*run_recipe(small_miniature), "--workers", rng.choice((1, 2)), cwd=tmp_path)
        try:
            time.sleep(rng.uniform(1.5, 6))
            session.kill()
            session.wait()
            n_kills += session.returncode == -signal.SIGKILL
            assert_no_child_is_left(session)
        finally:
            end_all(session)
        assert_only_whole_files(out, wanted)
        assert run_job(small_miniature, out).ok
        assert_right(out, wanted)
    assert n_kills


def assert_no_child_is_left(session):
    deadline = time.monotonic() + 60
    while alive(session.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(session.pid) == []


def test_p03_no_finished_block_is_made_twice(small_miniature, tmp_path, wanted, monkeypatch):
    """Blocks journaled, and shards recorded, before a run are not begun again in it."""
    seed, out = 5, tmp_path / "out"
    rng = random.Random(seed)
    job = Job(JobParameters(str(small_miniature), "native", str(out), name="mini"))
    begun = []
    real = ShardStore.note
    monkeypatch.setattr(
        ShardStore, "note", lambda *args: begun.append((args[1], args[3])) or real(*args)
    )
    offsets = {
        (spec, str(block)): block.offset
        for shard, spec in zip(job.shards, job.shard_specs, strict=True)
        for tensor in shard.tensors
        for block in blocks_of(tensor)
    }
    n_resumed = 0
    for n in (rng.randint(4, 40), rng.randint(20, 60), rng.randint(20, 60), 10**9):
        begun.clear()
        before = {spec: finished_offsets(job, spec, offsets) for spec in job.shard_specs}
        n_resumed += any(before.values())
        with monkeypatch.context() as patch:
            Nth(["_fdatasync"], n, refusing(errno.EIO)).install(patch)
            outcome = run_job(small_miniature, out)
        again = [block for block in begun if offsets[block] in before[block[0]]]
        assert again == [], f"seed {seed}, call {n}"
    assert outcome.ok
    assert n_resumed >= 2
    assert_right(out, wanted)


def finished_offsets(job, spec, offsets):
    """Offsets of the blocks of a shard that a run may take as they are."""
    if job.store.record(spec) is not None:
        return {offset for (owner, _), offset in offsets.items() if owner == spec}
    return set(job.store.journaled(spec))
