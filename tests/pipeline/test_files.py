"""The one room that touches files: completed or refused, whole or absent."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from pipeline import files, sharing
from pipeline.errors import OutputError, SourceError
from tests.pipeline.filling import CHILDREN, Nth, refusing, write_often

NAMES = ["plain.bin", "with blanks.bin", "Größe ☃ 日本.bin", "-n", "a" * 200]


@pytest.fixture(params=NAMES)
def path(request, tmp_path):
    return tmp_path / request.param


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


class TestReading:
    def test_ranges_come_back(self, path):
        path.write_bytes(bytes(range(100)))
        assert files.read_bytes(path) == bytes(range(100))
        assert files.read_bytes(path, 90) == bytes(range(90, 100))
        assert files.read_bytes(path, 10, 5) == bytes(range(10, 15))

    def test_short_reads_are_completed(self, tmp_path, monkeypatch):
        path = tmp_path / "file"
        path.write_bytes(bytes(range(100)))
        real = os.preadv
        monkeypatch.setattr(files, "_preadv", lambda fd, b, at: real(fd, [b[0][:1]], at))
        assert files.read_bytes(path) == bytes(range(100))

    def test_calls_stay_below_what_linux_moves_at_once(self, tmp_path, monkeypatch):
        path = tmp_path / "file"
        path.write_bytes(bytes(range(100)))
        monkeypatch.setattr(files, "MAX_CALL_NBYTES", 7)
        asked = []
        real = os.preadv

        def preadv(fd, buffers, offset):
            asked.append(buffers[0].nbytes)
            return real(fd, buffers, offset)

        monkeypatch.setattr(files, "_preadv", preadv)
        assert files.read_bytes(path) == bytes(range(100))
        assert asked == [7] * 14 + [2]

    def test_a_file_that_ends_early_is_named(self, path):
        path.write_bytes(b"abc")
        with pytest.raises(SourceError, match="ends too early") as caught:
            files.read_bytes(path, 1, 5)
        assert str(path) in str(caught.value)
        assert "expected 5 bytes; found 2 bytes" in str(caught.value)

    def test_a_device_error_is_named_with_its_offset(self, tmp_path, monkeypatch):
        path = tmp_path / "file"
        path.write_bytes(bytes(100))
        monkeypatch.setattr(files, "MAX_CALL_NBYTES", 40)
        Nth(["_preadv"], 2, refusing(errno.EIO)).install(monkeypatch)
        with pytest.raises(SourceError, match=r"refused a read.*offset 40.*Input/output error"):
            files.read_bytes(path)

    @pytest.mark.parametrize("make", [lambda p: None, Path.mkdir], ids=["missing", "folder"])
    def test_what_cannot_be_read_is_named(self, path, make):
        make(path)
        with pytest.raises(SourceError) as caught:
            files.read_bytes(path, 0, 1)
        assert str(path) in str(caught.value)
        assert files.is_gone(caught.value) == (not path.exists())


class TestWriting:
    def test_nothing_else_in_the_file_changes(self, path):
        path.write_bytes(b"0123456789")
        with files.writing(path) as fd:
            files.write_exact(fd, memoryview(b"xyz"), 4, path)
        assert path.read_bytes() == b"0123xyz789"

    def test_short_writes_are_completed(self, tmp_path, monkeypatch):
        path = tmp_path / "file"
        real = os.pwrite
        monkeypatch.setattr(files, "_pwrite", lambda fd, c, at: real(fd, c[:1], at))
        with files.writing(path, create=True) as fd:
            files.write_exact(fd, memoryview(bytes(range(50))), 3, path)
        assert path.read_bytes() == bytes(3) + bytes(range(50))

    def test_a_write_that_moves_nothing_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "_pwrite", lambda *_: 0)
        with (
            files.writing(tmp_path / "file", create=True) as fd,
            pytest.raises(OutputError, match="moved no byte"),
        ):
            files.write_exact(fd, memoryview(b"abc"), 0, tmp_path / "file")

    @pytest.mark.parametrize(
        ("code", "step"),
        [
            (errno.ENOSPC, "Free some space"),
            (errno.EDQUOT, "Free some quota"),
            (errno.EFBIG, "ulimit -f"),
            (errno.EROFS, "writable file system"),
        ],
    )
    def test_refusals_say_what_to_do(self, tmp_path, monkeypatch, code, step):
        Nth(["_pwrite"], 1, refusing(code)).install(monkeypatch)
        path = tmp_path / "file"
        with files.writing(path, create=True) as fd, pytest.raises(OutputError, match=step):
            files.write_exact(fd, memoryview(b"abc"), 77, path)

    def test_appending_keeps_what_is_there(self, path):
        path.write_bytes(b"one\n")
        with files.appending(path) as fd:
            files.append_line(fd, b"two\n", path)
        assert path.read_bytes() == b"one\ntwo\n"

    def test_lengths_are_set_both_ways(self, path):
        path.write_bytes(b"0123456789")
        files.truncate(path, 4)
        files.truncate(path, 6)
        assert path.read_bytes() == b"0123\0\0"

    def test_no_descriptor_stays_open(self, tmp_path):
        n_open = len(list(Path("/proc/self/fd").iterdir()))
        files.write_whole(tmp_path / "a", b"1")
        sharing.link_or_copy(tmp_path / "a", tmp_path / "b")
        sharing.copy_range(tmp_path / "a", 0, 1, tmp_path / "c", 0)
        files.read_bytes(tmp_path / "c")
        assert len(list(Path("/proc/self/fd").iterdir())) == n_open


class TestAllocate:
    def allocated(self, path, nbytes):
        with files.writing(path, create=True) as fd:
            files.allocate(fd, nbytes, path)
        return path.stat()

    def test_space_is_reserved(self, path):
        stat = self.allocated(path, 100_000)
        assert stat.st_size == 100_000
        assert stat.st_blocks * 512 >= 100_000

    def test_what_is_there_stays(self, path):
        path.write_bytes(b"abc")
        self.allocated(path, 10)
        assert path.read_bytes() == b"abc" + bytes(7)

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
    def test_file_systems_without_it_get_a_hole(self, path, monkeypatch, code):
        Nth(["_fallocate"], 1, refusing(code)).install(monkeypatch)
        stat = self.allocated(path, 1 << 20)
        assert (stat.st_size, stat.st_blocks) == (1 << 20, 0)

    def test_the_hole_never_cuts_what_a_second_worker_made_longer(self, path, monkeypatch):
        path.write_bytes(bytes(100))
        Nth(["_fallocate"], 1, refusing(errno.EOPNOTSUPP)).install(monkeypatch)
        assert self.allocated(path, 50).st_size == 100

    def test_more_than_the_disk_has_is_refused_at_once(self, path):
        with pytest.raises(OutputError, match="cannot reserve space"):
            self.allocated(path, 1 << 62)


class TestWriteWhole:
    def test_it_replaces_and_leaves_nothing_beside(self, path):
        for content in (b"the first, longer one", b"second", b""):
            files.write_whole(path, content)
            assert path.read_bytes() == content
            assert names_in(path.parent) == [path.name]

    def test_folders_are_made(self, tmp_path):
        files.write_whole(tmp_path / "a" / "ü b" / "c", b"1")
        assert (tmp_path / "a" / "ü b" / "c").read_bytes() == b"1"

    def test_what_a_killed_run_left_does_not_show(self, tmp_path):
        (tmp_path / ".name.part").write_bytes(b"x" * 1000)
        files.write_whole(tmp_path / "name", b"short")
        assert (tmp_path / "name").read_bytes() == b"short"
        assert names_in(tmp_path) == ["name"]

    @pytest.mark.parametrize("seam", ["_open", "_pwrite", "_truncate", "_fdatasync", "_replace"])
    def test_a_failure_leaves_the_old_file(self, tmp_path, monkeypatch, seam):
        path = tmp_path / "name"
        path.write_bytes(b"old")
        with monkeypatch.context() as patch:
            Nth([seam], 1, refusing(errno.EIO)).install(patch)
            with pytest.raises(OutputError, match="Input/output error"):
                files.write_whole(path, b"new")
        assert path.read_bytes() == b"old"
        files.write_whole(path, b"new")
        assert path.read_bytes() == b"new"

    def test_many_writers_take_turns_and_no_reader_sees_a_half(self, tmp_path):
        path = tmp_path / "name"
        contents = [bytes([65 + i]) * (1000 + 500 * i) for i in range(6)]
        files.write_whole(path, contents[0])
        workers = [
            CHILDREN.Process(target=write_often, args=(path, content)) for content in contents
        ]
        for worker in workers:
            worker.start()
        n_read = 0
        while any(worker.is_alive() for worker in workers):
            assert path.read_bytes() in contents
            n_read += 1
        assert [worker.exitcode for worker in workers] == [0] * len(workers)
        assert n_read > 10
        assert names_in(tmp_path) == ["name"]

    @pytest.mark.parametrize("content", [b"equal", b"other"])
    def test_without_locks_a_twin_that_was_faster_is_accepted(self, tmp_path, monkeypatch, content):
        path = tmp_path / "name"
        real = os.replace

        def overtaken(part, final):
            part.unlink()
            final.write_bytes(content)
            return real(part, final)

        monkeypatch.setattr(files, "_replace", overtaken)
        if content == b"equal":
            files.write_whole(path, b"equal")
        else:
            with pytest.raises(OutputError, match="cannot rename"):
                files.write_whole(path, b"equal")

    def test_file_systems_without_locks_are_fine(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files.fcntl, "flock", lambda *_: refusing(errno.ENOLCK)(None))
        files.write_whole(tmp_path / "name", b"1")
        assert (tmp_path / "name").read_bytes() == b"1"


class TestLinkOrCopy:
    @pytest.fixture
    def existing(self, tmp_path):
        existing = tmp_path / "store 1" / "shard.gguf"
        files.write_whole(existing, bytes(range(256)) * 40)
        return existing

    @pytest.fixture(params=NAMES)
    def name(self, request, tmp_path):
        return tmp_path / "out" / request.param

    def test_it_is_the_same_file(self, existing, name):
        sharing.link_or_copy(existing, name)
        assert name.samefile(existing)
        assert names_in(name.parent) == [name.name]

    def test_again_leaves_nothing_beside(self, existing, name):
        for _ in range(3):
            sharing.link_or_copy(existing, name)
        assert name.samefile(existing)
        assert names_in(name.parent) == [name.name]

    def test_another_file_under_that_name_is_replaced(self, existing, name):
        files.write_whole(name, b"another")
        sharing.link_or_copy(existing, name)
        assert name.samefile(existing)
        assert names_in(name.parent) == [name.name]

    def test_what_a_killed_run_left_is_replaced(self, existing, tmp_path):
        files.write_whole(tmp_path / "out" / ".a.link", b"left")
        sharing.link_or_copy(existing, tmp_path / "out" / "a")
        assert names_in(tmp_path / "out") == ["a"]

    @pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
    def test_where_links_cannot_be_made_it_is_a_copy(self, existing, name, monkeypatch, code):
        files.write_whole(name.with_name(f".{name.name}.part"), bytes(99_999))
        Nth(["_link"], 1, refusing(code)).install(monkeypatch)
        sharing.link_or_copy(existing, name)
        assert not name.samefile(existing)
        assert name.read_bytes() == existing.read_bytes()
        assert names_in(name.parent) == [name.name]

    def test_a_full_disk_leaves_no_name(self, existing, tmp_path, monkeypatch):
        name = tmp_path / "out" / "a"
        Nth(["_link"], 1, refusing(errno.EXDEV)).install(monkeypatch)
        Nth(["_copy_file_range"], 1, refusing(errno.ENOSPC)).install(monkeypatch)
        with pytest.raises(OutputError, match="No space left"):
            sharing.link_or_copy(existing, name)
        assert not name.exists()

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(OutputError, match="cannot link"):
            sharing.link_or_copy(tmp_path / "missing", tmp_path / "name")
        assert names_in(tmp_path) == []

    def test_a_twin_that_was_faster_is_accepted(self, existing, tmp_path, monkeypatch):
        name = tmp_path / "name"
        real = os.replace

        def overtaken(part, final):
            real(part, final)
            return real(part, final)

        monkeypatch.setattr(files, "_replace", overtaken)
        sharing.link_or_copy(existing, name)
        assert name.samefile(existing)


class TestCopyRange:
    @pytest.fixture
    def source(self, tmp_path):
        source = tmp_path / "source file"
        source.write_bytes(os.urandom(10_000))
        return source

    @pytest.mark.parametrize("code", [None, errno.EXDEV, errno.EINVAL, errno.ENOSYS])
    @pytest.mark.parametrize(
        ("begin", "nbytes", "at"), [(0, 10_000, 0), (77, 5_000, 123), (5, 0, 9)]
    )
    def test_ranges_arrive(self, source, path, monkeypatch, code, begin, nbytes, at):
        if code:
            monkeypatch.setattr(files, "_copy_file_range", lambda *_: refusing(code)(None))
        seen = []
        sharing.copy_range(source, begin, nbytes, path, at, progress=seen.append)
        expected = bytes(at if nbytes else 0) + source.read_bytes()[begin : begin + nbytes]
        assert path.read_bytes() == expected
        assert sum(seen) == nbytes

    def test_the_rest_of_the_target_stays(self, source, path):
        path.write_bytes(b"x" * 300)
        sharing.copy_range(source, 0, 100, path, 100)
        assert path.read_bytes() == b"x" * 100 + source.read_bytes()[:100] + b"x" * 100

    def test_short_copies_are_completed(self, source, tmp_path, monkeypatch):
        real = os.copy_file_range
        monkeypatch.setattr(
            files, "_copy_file_range", lambda a, b, n, *at: real(a, b, min(n, 999), *at)
        )
        sharing.copy_range(source, 0, 10_000, tmp_path / "copy", 0)
        assert (tmp_path / "copy").read_bytes() == source.read_bytes()

    @pytest.mark.parametrize("code", [None, errno.EXDEV], ids=["kernel", "by hand"])
    def test_a_source_that_ends_early_is_named(self, source, tmp_path, monkeypatch, code):
        if code:
            monkeypatch.setattr(files, "_copy_file_range", lambda *_: refusing(code)(None))
        with pytest.raises(SourceError, match=r"ends too early.*source file"):
            sharing.copy_range(source, 9_000, 2_000, tmp_path / "copy", 0)


class TestFolders:
    def test_a_file_in_the_way_is_named(self, path):
        path.touch()
        with pytest.raises(OutputError, match="cannot create the folder"):
            files.make_folder(path / "below")

    def test_a_folder_that_may_not_be_written_is_told(self, tmp_path, monkeypatch):
        # By the seam, since root may write everywhere.
        Nth(["_open"], 1, refusing(errno.EACCES)).install(monkeypatch)
        with pytest.raises(OutputError, match=r"Permission denied.*that you can write"):
            files.write_whole(tmp_path / "name", b"1")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_read_only_folder_is_told(self, tmp_path):
        tmp_path.chmod(0o500)
        with pytest.raises(OutputError, match=r"Permission denied.*that you can write"):
            files.write_whole(tmp_path / "name", b"1")

    def test_network_file_systems_that_cannot_sync_a_folder_are_fine(self, tmp_path, monkeypatch):
        Nth(["_fsync"], 1, refusing(errno.EINVAL)).install(monkeypatch)
        files.write_whole(tmp_path / "name", b"1")

    def test_a_vanished_folder_is_told(self, tmp_path):
        with pytest.raises(OutputError, match="cannot make names durable"):
            files.sync_folder(tmp_path / "gone")

    def test_free_space_is_that_of_the_nearest_folder_that_exists(self, tmp_path):
        assert files.free_nbytes(tmp_path / "a" / "b") > 0

    def test_removing_what_is_not_there_is_fine_and_a_folder_is_not(self, path):
        files.remove(path)
        path.mkdir()
        with pytest.raises(OutputError, match="cannot remove"):
            files.remove(path)


def test_only_one_writer_at_a_time_holds_a_part(tmp_path):
    """The lock is what keeps turns; without it both threads would be inside at once."""
    inside, most = 0, 0
    lock = threading.Lock()

    def work():
        nonlocal inside, most
        for _ in range(10):
            with files.sole_writing(tmp_path / "part"):
                with lock:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.001)
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_folder_where_a_file_is_wanted_is_called_one(tmp_path):
    with pytest.raises(SourceError, match="a folder, where a file is wanted"):
        files.read_bytes(tmp_path, 0, 4)
