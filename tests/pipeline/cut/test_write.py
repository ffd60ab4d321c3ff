"""How cuts are written: in one pass, resumable, and never from or to damaged bytes."""

from __future__ import annotations

import errno
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import blocks as blocks_module
from pipeline import files
from pipeline.cut.write import Cut, side_by_side
from pipeline.errors import OutputError, SourceError, VerifyError
from pipeline.gguf.model_file import read_model
from pipeline.gguf.part import ShardPart
from pipeline.model.layout import Layout
from pipeline.source import reader as reader_module
from pipeline.source.reader import SourceReader
from tasks.cut.job import CutJob, CutParameters
from tasks.naming import SUMS, sums_text
from tests.gguf_builder import small_plan, write_hollow
from tests.pipeline.cut.models import (
    CONFIG,
    N_EXPERTS,
    begun,
    cut,
    keep_of,
    shard_task,
    shards,
)
from tests.pipeline.filling import CHILDREN, PeakAnonymous, refusing, sha256_of

EXPERTS = 3
"""The first shard that holds stacks."""


def stored(job: CutJob, no: int) -> list[Path]:
    return [job.store.path(variant.shard_specs[no]) for variant in job.variants]


def digests(job: CutJob) -> list[list[str]]:
    return [[sha256_of(path) for path in stored(job, no)] for no in range(len(job.whole.shards))]


@pytest.fixture
def whole(tmp_path):
    return shards(tmp_path / "whole", Layout.FORK)


def test_several_lists_give_the_bytes_of_one_after_the_other(whole, tmp_path):
    keeps = keep_of(5), keep_of(3), keep_of(6)
    together = cut(whole, tmp_path / "together", *keeps)
    for keep, variant in zip(keeps, together, strict=True):
        alone = cut(whole, tmp_path / str(keep.n_kept), keep)[0]
        for shard in variant.shards:
            ours, theirs = (v.folder / shard.file_name for v in (variant, alone))
            assert ours.read_bytes() == theirs.read_bytes()


def test_blocks_of_all_lists_are_begun_in_the_order_of_what_they_read(whole, tmp_path, monkeypatch):
    """So a byte that several want is at hand when the last of them comes for it."""
    monkeypatch.setattr(blocks_module, "BLOCK_WEIGHTS", 768)
    job = begun(whole, tmp_path / "out", keep_of(5), keep_of(6), keep_of(N_EXPERTS, n_layers=6))
    stack = job.whole.shards[EXPERTS].tensors[0]
    cuts = [Cut(variant.shards[EXPERTS], object()) for variant in job.variants]
    starts = {id(cut.part): [] for cut in cuts}
    order = []
    for part, block in side_by_side(stack, cuts):
        matrix = block.matrices[0]
        n_rows = matrix.n_rows // len(matrix.picks.entries) if matrix.picks else matrix.n_rows
        entries = matrix.picks.entries if matrix.picks else range(1)
        order.append(entries[block.begin // n_rows] * n_rows + block.begin % n_rows)
        starts[id(part)].append(block.offset)
    assert order == sorted(order)
    assert len(order) == sum(map(len, starts.values())) == 14 + 16 + 19
    assert all(offsets == sorted(offsets) for offsets in starts.values())


def test_bytes_leave_the_page_cache_once_and_after_their_last_reader(whole, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(reader_module, "read_exact", told(calls, files.read_exact, "read"))
    monkeypatch.setattr(reader_module, "forget_cached", told(calls, lambda *_: None, "forget"))
    job = begun(whole, tmp_path / "out", keep_of(5), keep_of(3))
    shard_task(job, EXPERTS).run()
    file = job.whole.shards[EXPERTS].existing
    for tensor in file.tensors.values():
        span = range(tensor.offset, tensor.offset + tensor.nbytes)
        about = [(what, at) for what, at, _ in calls if at in span]
        assert about[-1] == ("forget", tensor.offset)
        assert [what for what, _ in about].count("forget") == 1


def told(calls, call, what):
    def wrapped(*arguments):
        offset = arguments[2] if what == "read" else arguments[1]
        calls.append((what, offset, arguments))
        return call(*arguments)

    return wrapped


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("no", [0, 1, EXPERTS], ids=["dense", "shared", "experts"])
def test_a_file_that_is_not_what_it_is_listed_as_is_not_carried_on(whole, tmp_path, no):
    model = read_model(whole)
    sums = {file.path.name: sha256_of(file.path) for file in model.files}
    (whole.parent / SUMS).write_bytes(sums_text(sums))
    good = begun(whole, tmp_path / "good", keep_of(5))
    shard_task(good, no).run()
    last = list(model.files[no].tensors.values())[-1]
    flip(model.files[no].path, last.offset + last.nbytes - 1)
    job = begun(whole, tmp_path / "out", keep_of(5), keep_of(3))
    with pytest.raises(SourceError, match=r"digest.*its damage would be carried on"):
        shard_task(job, no).run()
    assert not list(job.store.root.glob("*/shard.gguf*"))


def test_bytes_that_should_not_change_are_held_against_the_model(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_copy_file_range", refusing(errno.EXDEV))
    """The copy itself goes wrong, so journal and read-back find nothing."""
    copied = SourceReader.copy_rows

    def wrong(reader, matrix, begin, out):
        copied(reader, matrix, begin, out)
        if matrix.weight == "blk.3.attn_kv.weight":
            out[-1, -1] ^= 1

    job = begun(whole, tmp_path / "out", keep_of(5))
    with monkeypatch.context() as patch:
        patch.setattr(SourceReader, "copy_rows", wrong)
        with pytest.raises(VerifyError, match=r"keeps all its bytes.*tensor blk\.3\.attn_kv"):
            shard_task(job, 0).run()
    assert not list(job.store.root.glob("*/shard.gguf*"))
    shard_task(job, 0).run()


def test_a_model_that_changes_while_it_is_cut_is_refused(whole, tmp_path):
    job = begun(whole, tmp_path / "out", keep_of(5))
    for no in (1, EXPERTS):
        task = shard_task(job, no)
        task.job.variants  # noqa: B018 - reads the headers
        task.job.whole.shards[no].existing.path.touch()
        with pytest.raises(SourceError, match="changed after"):
            task.run()
    assert not any(path.exists() for path in (*stored(job, 1), *stored(job, EXPERTS)))


def test_a_full_disk_stops_it_and_the_next_run_goes_on(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_copy_file_range", refusing(errno.EXDEV))
    wanted = begun(whole, tmp_path / "wanted", keep_of(5), keep_of(3))
    shard_task(wanted, EXPERTS).run()
    job = begun(whole, tmp_path / "out", keep_of(5), keep_of(3))
    monkeypatch.setattr(blocks_module, "BLOCK_WEIGHTS", 1_024)
    real, calls = files._pwrite, iter(range(30))

    def full(*arguments):
        if next(calls, None) is None:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_pwrite", full)
        with pytest.raises(OutputError, match="Free some space"):
            shard_task(job, EXPERTS).run()
    assert not any(path.exists() for path in stored(job, EXPERTS))
    shard_task(job, EXPERTS).run()
    pairs = zip(stored(job, EXPERTS), stored(wanted, EXPERTS), strict=True)
    assert all(sha256_of(one) == sha256_of(other) for one, other in pairs)


def test_one_list_more_writes_only_what_is_its_own(whole, tmp_path):
    out = tmp_path / "out"
    first = cut(whole, out, keep_of(5))[0]
    before = {path: path.stat().st_mtime_ns for path in out.glob(".quantmill/*/shard.gguf")}
    cut(whole, out, keep_of(5), keep_of(3))
    after = {path: path.stat().st_mtime_ns for path in out.glob(".quantmill/*/shard.gguf")}
    assert before.items() <= after.items()
    n_written = sum(shard.existing is None for shard in first.shards)
    assert len(after) == len(before) + n_written


def test_lists_of_one_number_share_no_stacks(whole, tmp_path):
    """Their shards have the same header, so only what is picked tells them apart."""
    one, other = (begun(whole, tmp_path / name, keep_of(5, seed=n)) for n, name in enumerate("ab"))
    pairs = zip(one.variants[0].shards, other.variants[0].shards, strict=True)
    assert [a.header == b.header for a, b in pairs] == [False, True, True, True, True, True]
    pairs = zip(one.variants[0].shard_specs, other.variants[0].shard_specs, strict=True)
    assert [a == b for a, b in pairs] == [False, True, True, False, False, False]


def fill_slowly(path, lists, out, no, log):
    """Cut one file in a process of its own, small blocks, a pause after each."""
    blocks_module.BLOCK_WEIGHTS = 1_024
    write = ShardPart.commit

    def commit(part, record):
        write(part, record)
        with log.open("a") as opened:
            opened.write(f"{part.path.parent.name} {record.offset}\n")
        time.sleep(0.01)

    ShardPart.commit = commit
    sys.stdout = sys.stderr = log.with_name("told").open("a")
    shard_task(CutJob(CutParameters(str(path), lists, str(out))), no).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_change_no_byte_and_cost_no_finished_block(whole, tmp_path, monkeypatch, seed):
    monkeypatch.setattr(blocks_module, "BLOCK_WEIGHTS", 1_024)
    keeps = keep_of(5), keep_of(3)
    wanted = begun(whole, tmp_path / "wanted", *keeps)
    shard_task(wanted, EXPERTS).run()
    job = begun(whole, tmp_path / "out", *keeps)
    rng, log = random.Random(seed), tmp_path / "log"
    arguments = (whole, job.parameters.keep, tmp_path / "out", EXPERTS, log)
    n_resumed = 0
    for _ in range(25):
        before = journaled(job)
        log.unlink(missing_ok=True)
        process = CHILDREN.Process(target=fill_slowly, args=arguments)
        process.start()
        deadline = time.monotonic() + 60
        while not log.exists() and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.04))
        process.kill()
        process.join()
        lines = log.read_text().splitlines() if log.exists() else []
        done = {tuple(line.split()) for line in lines}
        assert not {(name, str(offset)) for name, offset in before} & done
        n_resumed += bool(before)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        assert not all(path.exists() for path in stored(job, EXPERTS))
    assert n_resumed >= 3
    shard_task(job, EXPERTS).run()
    pairs = zip(stored(job, EXPERTS), stored(wanted, EXPERTS), strict=True)
    assert all(sha256_of(one) == sha256_of(other) for one, other in pairs)


def journaled(job: CutJob) -> set[tuple[str, int]]:
    specs = [variant.shard_specs[EXPERTS] for variant in job.variants]
    store = job.store
    return {(store.folder(spec).name, offset) for spec in specs for offset in store.journaled(spec)}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_stacks(tmp_path):
    """800 MB of stacks that lie in holes, cut twice."""
    config = replace(CONFIG, hidden=1024, expert_ff=2048, n_experts=32)
    plan = small_plan(Layout.FORK, config, shard_nbytes=10**9)
    path = write_hollow(plan, tmp_path / "whole")
    keeps = [keep_of(n, n_experts=32) for n in (4, 2)]
    job = begun(path, tmp_path / "out", *keeps)
    stacks = job.whole.shards[EXPERTS]
    assert stacks.nbytes > 600_000_000
    with PeakAnonymous() as peak:
        shard_task(job, EXPERTS).run()
    assert peak.nbytes - peak.before < 20_000_000


def test_copies_inside_the_kernel_have_the_bytes_of_copies_through_us(whole, tmp_path, monkeypatch):
    keeps = keep_of(5), keep_of(3)
    n_calls, real = 0, files._copy_file_range

    def counted(*arguments):
        nonlocal n_calls
        n_calls += 1
        return real(*arguments)

    monkeypatch.setattr(files, "_copy_file_range", counted)
    inside = begun(whole, tmp_path / "inside", *keeps)
    shard_task(inside, EXPERTS).run()
    assert n_calls > 0
    monkeypatch.setattr(files, "_copy_file_range", refusing(errno.EXDEV))
    through = begun(whole, tmp_path / "through", *keeps)
    shard_task(through, EXPERTS).run()
    pairs = zip(stored(inside, EXPERTS), stored(through, EXPERTS), strict=True)
    assert all(sha256_of(one) == sha256_of(other) for one, other in pairs)


def test_a_disk_that_fails_inside_the_kernel_is_told(whole, tmp_path, monkeypatch):
    job = begun(whole, tmp_path / "out", keep_of(5))
    monkeypatch.setattr(files, "_copy_file_range", refusing(errno.ENOSPC))
    with pytest.raises(OutputError, match="Free some space"):
        shard_task(job, EXPERTS).run()
