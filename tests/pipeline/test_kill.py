"""Processes that are killed while they fill a shard, and processes that fill the same one."""

import os
import random
import shutil
import signal
import threading
import time

import pytest

from pipeline import blocks as blocks_module
from pipeline.blocks import blocks_of
from pipeline.gguf.committer import N_WAITING
from pipeline.gguf.journal import read_journal
from tests.pipeline.filling import (
    CHILDREN,
    SEAMS,
    Nth,
    dying,
    fill,
    job_of,
    journal_path,
    one_life,
    part_path,
    sha256_of,
    shard_path,
)

ENGRAM = 1
N_THREADS = 2


@pytest.fixture(scope="module")
def digest(small_miniature, tmp_path_factory):
    """sha256 of the shard, from one undisturbed run."""
    return fill(job_of(small_miniature, tmp_path_factory.mktemp("undisturbed")), ENGRAM).file_sha256


@pytest.fixture
def job(small_miniature, tmp_path):
    return job_of(small_miniature, tmp_path / "out")


def child(job, **options):
    arguments = (job.parameters.source, job.parameters.out, ENGRAM)
    process = CHILDREN.Process(target=one_life, args=arguments, kwargs=options)
    process.start()
    return process


def journaled(job):
    return set(read_journal(journal_path(job, ENGRAM), job.shard_specs[ENGRAM]))


class Watch:
    """Looks at the final name all the time: what is there must be whole."""

    def __init__(self, path, digest):
        self.seen = set()
        self._path, self._digest = path, digest
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _look(self):
        while not self._ended.wait(0.002):
            if self._path.exists():
                self.seen.add(sha256_of(self._path))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_forty_kills_change_no_byte_and_cost_no_finished_block(
    job, digest, tmp_path, monkeypatch, seed
):
    block_weights, n_kills = 2_560, 40
    monkeypatch.setattr(blocks_module, "BLOCK_WEIGHTS", block_weights)
    offsets = {str(b): b.offset for t in job.shards[ENGRAM].tensors for b in blocks_of(t)}
    rng, log = random.Random(seed), tmp_path / "log"
    n_begun, n_resumed = 0, 0
    with Watch(shard_path(job, ENGRAM), digest) as watch:
        for _ in range(n_kills):
            before = journaled(job) if part_path(job, ENGRAM).exists() else set()
            log.unlink(missing_ok=True)
            process = child(job, block_weights=block_weights, log=log, pause=0.02)
            if rng.random() < 0.7:  # else it may die before it begins a block
                while not log.exists() and process.is_alive():
                    time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.06))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, f"seed {seed}: it ended before its kill"
            assert not shard_path(job, ENGRAM).exists()
            lines = log.read_text().splitlines() if log.exists() else []
            assert not before & {offsets[line] for line in lines}
            n_begun += len(lines)
            n_resumed += bool(before)
        log.unlink(missing_ok=True)
        before = journaled(job)
        process = child(job, block_weights=block_weights, log=log)
        process.join()
        assert process.exitcode == 0
    lines = log.read_text().splitlines()
    assert {offsets[line] for line in lines} == set(offsets.values()) - before
    assert n_begun + len(lines) <= len(offsets) + n_kills * (N_THREADS + 2 * N_WAITING)
    assert n_resumed >= 15
    assert before
    assert watch.seen <= {digest}
    assert sha256_of(shard_path(job, ENGRAM)) == digest


@pytest.mark.slow
def test_death_at_every_single_call_leaves_nothing_or_the_whole(job, digest, monkeypatch):
    final = shard_path(job, ENGRAM)
    monkeypatch.setattr(blocks_module, "BLOCK_WEIGHTS", 120_000)
    n_lived = 0
    for n in range(1, 200):
        shutil.rmtree(job.store.root, ignore_errors=True)
        process = child(job, block_weights=120_000, death=Nth(SEAMS, n, dying))
        process.join()
        assert process.exitcode in (0, 9)
        assert not final.exists() or sha256_of(final) == digest
        assert final.exists() or job.store.record(job.shard_specs[ENGRAM]) is None
        assert fill(job, ENGRAM).file_sha256 == digest
        assert sha256_of(final) == digest
        n_lived += process.exitcode == 0
        if n_lived == 3:  # how many blocks share a sync, and so the number of calls, varies
            break
    assert n > 25


@pytest.mark.parametrize(
    ("seam", "n", "is_recorded", "is_published"),
    [
        ("_replace", 1, False, False),
        ("_replace", 2, True, False),
        ("_fsync", 3, True, True),
    ],
    ids=["before the record", "before the final name", "before the final name is durable"],
)
def test_death_around_the_last_renames(job, digest, seam, n, is_recorded, is_published):
    process = child(job, block_weights=120_000, death=Nth([seam], n, dying))
    process.join()
    assert process.exitcode == 9
    final = shard_path(job, ENGRAM)
    assert final.with_name("record.json").exists() == is_recorded
    assert final.exists() == is_published
    assert (job.store.record(job.shard_specs[ENGRAM]) is not None) == is_published
    assert not is_published or sha256_of(final) == digest
    assert fill(job, ENGRAM).file_sha256 == digest
    assert sha256_of(final) == digest
    assert {entry.name for entry in final.parent.iterdir()} == {"shard.gguf", "record.json"}


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_two_processes_on_one_shard_do_no_harm(job, digest, seed):
    rng = random.Random(seed)
    options = {"block_weights": 20_000, "pause": 0.001}
    with Watch(shard_path(job, ENGRAM), digest) as watch:
        first = child(job, **options)
        time.sleep(rng.uniform(0, 0.15) if seed else 0)
        second = child(job, **options)
        for process in (first, second):
            process.join()
    # The one that comes too late is refused, and a task then takes the other's file for its own.
    assert 0 in {first.exitcode, second.exitcode} <= {0, 1}
    assert watch.seen <= {digest}
    assert sha256_of(shard_path(job, ENGRAM)) == digest
    assert job.store.record(job.shard_specs[ENGRAM]) or job.store.revive(job.shard_specs[ENGRAM])
    assert job.store.record(job.shard_specs[ENGRAM]).file_sha256 == digest
    names = {entry.name for entry in shard_path(job, ENGRAM).parent.iterdir()}
    assert names == {"shard.gguf", "record.json"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_one_of_two_killed_again_and_again(job, digest, seed):
    rng = random.Random(seed)
    with Watch(shard_path(job, ENGRAM), digest) as watch:
        steady = child(job, block_weights=2_560, pause=0.01)
        while steady.is_alive():
            other = child(job, block_weights=2_560, pause=0.01)
            time.sleep(rng.uniform(0, 0.3))
            other.kill()
            other.join()
        assert steady.exitcode == 0
    assert watch.seen <= {digest}
    assert fill(job, ENGRAM).file_sha256 == digest
    assert sha256_of(shard_path(job, ENGRAM)) == digest


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_the_umask_decides_who_may_read(job, digest, mask):
    before = os.umask(mask)
    try:
        fill(job, ENGRAM)
    finally:
        os.umask(before)
    assert shard_path(job, ENGRAM).stat().st_mode & 0o777 == 0o644 & ~mask
    assert sha256_of(shard_path(job, ENGRAM)) == digest
