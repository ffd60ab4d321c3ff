"""An unfinished shard: what survives, what is noticed and mended, what is refused."""

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from pipeline import files
from pipeline.errors import OutputError, SourceError, VerifyError
from pipeline.gguf import committer as committer_module
from pipeline.gguf.journal import BlockRecord, head_line, read_journal
from pipeline.gguf.part import ShardPart, Span
from tests.pipeline.filling import Nth, refusing

HEADER = b"GGUF".ljust(96, b".")
BLOCKS = {96: b"first" * 20, 196: b"second" * 30, 400: b"third" * 7}
SPANS = (Span("two blocks", 96, 280), Span("one block", 400, 35))
NBYTES = 448
WHOLE = HEADER + BLOCKS[96] + BLOCKS[196] + bytes(400 - 376) + BLOCKS[400] + bytes(NBYTES - 435)
SPEC = "5" * 64


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ein Ordner" / "shard.gguf"


def part_of(path, spec=SPEC):
    return ShardPart(path, header=HEADER, nbytes=NBYTES, spec=spec)


def write(part, offsets):
    for offset in offsets:
        content = BLOCKS[offset]
        part.write(memoryview(content), offset)
        part.commit(BlockRecord(offset, len(content), hashlib.sha256(content).hexdigest()))


def finish(path):
    """Make what is missing, read back, publish; gives the offsets that were missing."""
    with part_of(path) as part:
        missing = [offset for offset in BLOCKS if offset not in part.done]
        write(part, missing)
        digests = part.read_back(SPANS, n_threads=2)
        part.publish()
    assert digests.file_sha256 == hashlib.sha256(WHOLE).hexdigest()
    return missing


def begin(path, offsets=(96, 196)):
    with part_of(path) as part:
        write(part, offsets)
    return path.with_name("shard.gguf.part"), path.with_name("shard.gguf.journal")


def test_blocks_in_any_order_become_the_whole_file(path):
    with part_of(path) as part:
        write(part, [400, 96, 196])
        digests = part.read_back(SPANS, n_threads=3)
        assert not path.exists()
        part.publish()
    assert path.read_bytes() == WHOLE
    assert digests.file_sha256 == hashlib.sha256(WHOLE).hexdigest()
    assert digests.spans == {
        span.name: hashlib.sha256(WHOLE[span.offset :][: span.nbytes]).hexdigest() for span in SPANS
    }
    assert [entry.name for entry in path.parent.iterdir()] == ["shard.gguf"]


def test_the_part_has_its_final_length_from_the_start(path):
    with part_of(path) as part:
        assert part.part.stat().st_size == NBYTES
        assert part.part.stat().st_blocks * 512 >= NBYTES


def test_journaled_blocks_are_not_made_again(path):
    begin(path)
    assert finish(path) == [400]
    assert path.read_bytes() == WHOLE


def test_a_line_stands_only_after_its_bytes_are_durable(path, monkeypatch):
    order = []
    for name in ("_pwrite", "_fdatasync", "_write"):
        real = getattr(files, name)

        def call(fd, *rest, name=name, real=real):
            order.append((name, Path(f"/proc/self/fd/{fd}").readlink().suffix))
            return real(fd, *rest)

        monkeypatch.setattr(files, name, call)
    with part_of(path) as part:
        order.clear()
        write(part, [96])
    assert order == [
        ("_pwrite", ".part"),
        ("_fdatasync", ".part"),
        ("_write", ".journal"),
        ("_fdatasync", ".journal"),
    ]


@pytest.mark.parametrize("at", [96, 195, 196, 300, 375])
def test_a_bit_flipped_in_a_journaled_block_is_noticed_and_mended(path, at):
    part, _ = begin(path)
    content = bytearray(part.read_bytes())
    content[at] ^= 4
    part.write_bytes(content)
    assert finish(path) == [96 if at < 196 else 196, 400]
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize("at", [0, 50, 380, 436, NBYTES - 1])
def test_damage_outside_the_blocks_is_mended_too(path, at):
    part, _ = begin(path)
    content = bytearray(part.read_bytes())
    content[at] = 0xA5
    part.write_bytes(content)
    finish(path)
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize("nbytes", [0, 1, 95, 150, NBYTES - 1, NBYTES + 1, 10_000])
def test_a_part_of_another_length_gets_the_planned_one(path, nbytes):
    part, _ = begin(path)
    os.truncate(part, nbytes)
    finish(path)
    assert path.read_bytes() == WHOLE


def test_a_block_that_cannot_be_read_is_made_again(path, monkeypatch):
    begin(path)
    with monkeypatch.context() as patch:
        # First the journal is read, then the two blocks.
        Nth(["_preadv"], 2, refusing(errno.EIO)).install(patch)
        with part_of(path) as part:
            assert sorted(part.done) == [196]
    finish(path)


def test_records_that_the_file_cannot_hold_are_not_trusted(path):
    _, journal = begin(path)
    with journal.open("ab") as opened:
        opened.write(b'{"nbytes":50,"offset":400,"sha256":"%s"}\n' % (b"0" * 64))
        opened.write(b'{"nbytes":9000000000000000000,"offset":96,"sha256":""}\n')
        opened.write(b'{"nbytes":5,"offset":99999999999999999999999,"sha256":""}\n')
    assert finish(path) == [96, 400]


def test_a_torn_last_line_costs_one_block(path):
    _, journal = begin(path)
    journal.write_bytes(journal.read_bytes()[:-9])
    assert finish(path) == [196, 400]


def test_another_spec_is_refused_and_nothing_is_touched(path):
    part, journal = begin(path)
    before = (part.read_bytes(), journal.read_bytes())
    with pytest.raises(OutputError, match="another spec") as caught, part_of(path, "6" * 64):
        pass
    assert SPEC in str(caught.value)
    assert "6" * 64 in str(caught.value)
    assert (part.read_bytes(), journal.read_bytes()) == before


def test_a_journal_without_its_part_says_nothing(path):
    part, _ = begin(path)
    part.unlink()
    assert finish(path) == list(BLOCKS)


def test_a_part_without_its_journal_is_made_anew(path):
    _, journal = begin(path)
    journal.unlink()
    assert finish(path) == list(BLOCKS)


def test_a_missing_block_is_told(path):
    with part_of(path) as part:
        write(part, [96, 400])
        with pytest.raises(OutputError, match=r"never written.*two blocks.*offset 196"):
            part.read_back(SPANS, n_threads=2)


def test_bytes_that_changed_before_the_end_are_told_and_mended(path):
    with part_of(path) as part:
        write(part, BLOCKS)
        part.write(memoryview(b"X"), 250)
        with pytest.raises(VerifyError, match=r"read back differ.*two blocks.*offset 196"):
            part.read_back(SPANS, n_threads=2)
    assert not path.exists()
    assert finish(path) == [196]


def test_a_failed_sync_is_raised_by_who_comes_next_and_again_at_the_end(path, monkeypatch):
    with monkeypatch.context() as patch, part_of(path) as part:
        Nth(["_fdatasync"], 1, refusing(errno.EIO)).install(patch)
        with pytest.raises(OutputError, match="cannot make writes durable"):
            write(part, [96] * 10_000)
        with pytest.raises(OutputError, match="cannot make writes durable"):
            part.read_back(SPANS, n_threads=1)
    assert finish(path) == list(BLOCKS)


def test_few_blocks_wait_while_a_sync_is_slow(path, monkeypatch):
    go, n_committed = threading.Event(), 0
    real = files._fdatasync

    def slow(fd):
        go.wait(10)
        real(fd)

    def commit_many(part):
        nonlocal n_committed
        for _ in range(10 * committer_module.N_WAITING):
            write(part, [96])
            n_committed += 1

    with part_of(path) as part:
        monkeypatch.setattr(files, "_fdatasync", slow)
        thread = threading.Thread(target=commit_many, args=(part,))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert n_committed <= 2 * committer_module.N_WAITING
        go.set()
        thread.join()
    assert n_committed == 10 * committer_module.N_WAITING


ENTER_CALLS = ("_open", "_fallocate", "_pwrite", "_write", "_fdatasync", "_fsync", "_preadv")


def test_entering_that_fails_anywhere_leaves_no_file_open_and_no_thread(path, monkeypatch):
    begin(path)
    n_open, n_threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    # Kept, since an error that is dropped takes its frames and their open files along.
    errors = []
    for n in range(1, 30):
        with monkeypatch.context() as patch:
            fault = Nth(ENTER_CALLS, n, refusing(errno.EIO)).install(patch)
            try:
                part_of(path).__enter__().__exit__(None, None, None)
            except (OutputError, SourceError) as error:
                errors.append(error)
        assert len(list(Path("/proc/self/fd").iterdir())) == n_open
        assert threading.active_count() == n_threads
        if not fault.happened:
            break
    assert len(errors) >= 6
    assert finish(path) == [400]


def test_a_torn_append_is_told_and_costs_nothing_else(path, monkeypatch):
    with monkeypatch.context() as patch, part_of(path) as part:
        Nth(["_write"], 1, lambda call, fd, line: call(fd, line[:7])).install(patch)

        def go_on():
            write(part, [96, 196])
            part.read_back(SPANS, n_threads=1)

        with pytest.raises(OutputError, match="appended only in part"):
            go_on()
    assert 196 in finish(path)
    assert path.read_bytes() == WHOLE


class TestTwoWorkers:
    """Both in one process here; see test_kill for two processes at full speed."""

    def test_the_second_to_finish_finds_the_file_published(self, path):
        with part_of(path) as first, part_of(path) as second:
            write(first, [96, 400])
            write(second, BLOCKS)
            write(first, [196])
            for part in (first, second):
                part.read_back(SPANS, n_threads=1)
                part.publish()
                assert path.read_bytes() == WHOLE
        assert [entry.name for entry in path.parent.iterdir()] == ["shard.gguf"]

    def test_writing_on_after_the_other_has_published_is_refused(self, path):
        with part_of(path) as slow:
            write(slow, [96])
            finish(path)
            before = path.stat().st_mtime_ns
            with pytest.raises(OutputError, match="another worker finished"):
                write(slow, [196])
        assert path.read_bytes() == WHOLE
        assert path.stat().st_mtime_ns == before

    def test_a_third_workers_unfinished_part_is_never_published(self, path):
        with part_of(path) as slow:
            write(slow, BLOCKS)
            slow.read_back(SPANS, n_threads=1)
            finish(path)
            with part_of(path) as third:
                write(third, [96])
                slow.publish()
                assert path.read_bytes() == WHOLE
                write(third, [196, 400])
                third.read_back(SPANS, n_threads=1)
                third.publish()
        assert path.read_bytes() == WHOLE

    def test_the_journal_of_the_first_survives_the_second(self, path):
        with part_of(path) as first:
            with part_of(path) as second:
                write(second, [196])
            write(first, [96])
        assert sorted(read_journal(path.with_name("shard.gguf.journal"), SPEC)) == [96, 196]

    def test_a_journal_that_vanishes_while_it_is_read_is_no_error(self, path, monkeypatch):
        begin(path)
        real = files._open

        def vanishing(name, *rest):
            if str(name).endswith(".journal") and rest[0] == os.O_RDONLY:
                Path(name).unlink()
            return real(name, *rest)

        monkeypatch.setattr(files, "_open", vanishing)
        assert finish(path) == list(BLOCKS)


def test_a_part_that_somebody_deleted_is_told(path):
    with part_of(path) as part:
        write(part, BLOCKS)
        part.read_back(SPANS, n_threads=1)
        part.part.unlink()
        with pytest.raises(OutputError, match="taken away"):
            part.publish()
    assert not path.exists()


def test_a_refused_rename_is_told_even_over_an_old_file_of_that_size(path, monkeypatch):
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(NBYTES))
    with part_of(path) as part:
        write(part, BLOCKS)
        part.read_back(SPANS, n_threads=1)
        with monkeypatch.context() as patch:
            Nth(["_replace"], 1, refusing(errno.EIO)).install(patch)
            with pytest.raises(OutputError, match="cannot rename"):
                part.publish()
        part.publish()
    assert path.read_bytes() == WHOLE


def test_a_folder_that_cannot_be_synced_is_told(path, monkeypatch):
    with part_of(path) as part:
        write(part, BLOCKS)
        part.read_back(SPANS, n_threads=1)
        Nth(["_fsync"], 1, refusing(errno.EIO)).install(monkeypatch)
        with pytest.raises(OutputError, match="cannot make names durable"):
            part.publish()


def test_a_shard_without_tensors_is_its_header(tmp_path):
    with ShardPart(tmp_path / "a", header=HEADER, nbytes=len(HEADER), spec=SPEC) as part:
        digests = part.read_back((), n_threads=1)
        part.publish()
    assert (tmp_path / "a").read_bytes() == HEADER
    assert digests.file_sha256 == hashlib.sha256(HEADER).hexdigest()


def test_the_journal_begins_with_its_head(path):
    with part_of(path):
        pass
    assert path.with_name("shard.gguf.journal").read_bytes() == head_line(SPEC)
