"""What an earlier run left behind: used when it is right, mended when it is not."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline import files
from pipeline.errors import OutputError, SourceError
from pipeline.source.hub.fetch import fetch_file, is_fetched
from pipeline.source.hub.part import forget_download
from pipeline.source.hub.remote import HubRemote
from tests.hub_server import (
    Fault,
    Status,
)
from tests.pipeline.hub_side import (
    CONTENT,
    N_PIECES,
    PIECE,
    SHARD,
    Timeless,
    Told,
    access_to,
    fetch,
    habits,
    left,
    ranges_asked,
    snapshot_of,
)


def test_bytes_that_the_disk_changed_are_fetched_again_and_no_others(hub, tmp_path, target):
    interrupt(hub, tmp_path, target)
    part = target.with_name(f"{target.name}.part")
    with part.open("r+b") as damaged:
        damaged.write(b"?")
    hub.log.clear()
    fetch(hub, tmp_path, target)
    assert target.read_bytes() == CONTENT
    assert ranges_asked(hub).count((0, PIECE)) == 1
    assert (PIECE, 2 * PIECE) not in ranges_asked(hub)


def interrupt(hub, tmp_path, target, n_pieces=4):
    """Leave ``n_pieces`` finished pieces behind."""
    hub.fault(Fault(Status(404), SHARD, origin="cdn", times=None, position=n_pieces * PIECE))
    with pytest.raises(SourceError):
        fetch(hub, tmp_path, target, n_connections=1)
    hub.clear_faults()
    hub.log.clear()


def test_finished_pieces_are_not_asked_for_again(hub, tmp_path, target):
    interrupt(hub, tmp_path, target)
    told = Told()
    fetch(hub, tmp_path, target, told=told)
    assert target.read_bytes() == CONTENT
    assert min(ranges_asked(hub)) == (4 * PIECE, 5 * PIECE)
    assert told.total == len(CONTENT)


def test_a_resume_with_other_pieces_asks_for_the_rest_only(hub, tmp_path, target):
    interrupt(hub, tmp_path, target)
    fetch(hub, tmp_path, target, habits=habits(Timeless(), piece_nbytes=3 * PIECE))
    assert target.read_bytes() == CONTENT
    assert sorted(ranges_asked(hub)) == [(4 * PIECE, 7 * PIECE), (7 * PIECE, len(CONTENT))]


@pytest.mark.parametrize(
    ("damage", "n_asked"),
    [
        (lambda journal: journal.write_bytes(journal.read_bytes()[:-9]), N_PIECES - 3),
        (lambda journal: journal.write_bytes(b"{}\n"), N_PIECES),
        (lambda journal: journal.unlink(), N_PIECES),
        (lambda journal: journal.with_suffix(".part").unlink(), N_PIECES),
        (lambda journal: os.truncate(journal.with_suffix(".part"), 9), N_PIECES),
    ],
    ids=["torn line", "no journal inside", "journal gone", "part gone", "part cut"],
)
def test_a_damaged_journal_or_part(hub, tmp_path, target, damage, n_asked):
    interrupt(hub, tmp_path, target)
    damage(target.with_name(f"{target.name}.journal"))
    fetch(hub, tmp_path, target)
    assert target.read_bytes() == CONTENT
    assert len(set(ranges_asked(hub))) == n_asked


def test_a_part_of_another_version_is_thrown_away(hub, tmp_path, target):
    interrupt(hub, tmp_path, target)
    other = tmp_path / "other"
    other.mkdir()
    changed = bytes(len(CONTENT))
    (other / SHARD).write_bytes(changed)
    hub.add_commit("owner/model", other, commit="c" * 40)
    (tmp_path / "pin.json").unlink()
    fetch(hub, tmp_path, target)
    assert target.read_bytes() == changed


def test_what_is_here_is_left_alone(hub, tmp_path, target):
    fetch(hub, tmp_path, target)
    before = target.stat()
    hub.log.clear()
    told = Told()
    fetch(hub, tmp_path, target, told=told)
    assert target.stat() == before
    assert not ranges_asked(hub)
    assert told.total == len(CONTENT)


@pytest.mark.parametrize(
    ("content", "n_asked"),
    [(CONTENT, 0), (bytes(len(CONTENT)), N_PIECES), (CONTENT[:-1], N_PIECES)],
    ids=["right", "right size", "cut"],
)
def test_a_target_that_nobody_vouched_for_is_checked(hub, tmp_path, target, content, n_asked):
    target.parent.mkdir()
    target.write_bytes(content)
    fetch(hub, tmp_path, target)
    assert target.read_bytes() == CONTENT
    assert len(ranges_asked(hub)) == n_asked


def test_a_target_is_read_once_for_its_digest(hub, tmp_path, target, monkeypatch):
    fetch(hub, tmp_path, target)
    file = snapshot_of(hub, tmp_path).file(SHARD)
    read = []
    real = files.read_exact
    monkeypatch.setattr(
        files, "read_exact", lambda fd, out, at, path: (read.append(path), real(fd, out, at, path))
    )
    assert is_fetched(file, target)
    assert target not in read
    os.utime(target, ns=(1, 1))
    assert is_fetched(file, target)
    assert target in read


def test_a_full_disk_keeps_what_is_finished(hub, tmp_path, target, monkeypatch):
    n_left = [4 * PIECE + 8000]  # the record of the commit is written too
    real = os.pwrite

    def pwrite(fd, content, offset):
        n_left[0] -= len(content)
        if n_left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, content, offset)

    monkeypatch.setattr(files, "_pwrite", pwrite)
    with pytest.raises(OutputError, match=r"No space left.*run the same command again"):
        fetch(hub, tmp_path, target, n_connections=1)
    assert not target.exists()
    monkeypatch.undo()
    hub.log.clear()
    fetch(hub, tmp_path, target)
    assert target.read_bytes() == CONTENT
    assert min(ranges_asked(hub)) == (4 * PIECE, 5 * PIECE)


def test_a_full_disk_is_noticed_before_the_first_byte(hub, tmp_path, target, monkeypatch):
    def allocate(fd, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_fallocate", allocate)
    with pytest.raises(OutputError, match="cannot reserve space"):
        fetch(hub, tmp_path, target)
    assert not ranges_asked(hub)


def test_two_at_once_on_one_target_do_no_harm(hub, tmp_path, target):
    snapshot = snapshot_of(hub, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(
                fetch_file,
                HubRemote(snapshot, access_to(hub)),
                snapshot.file(SHARD),
                target,
                habits=habits(Timeless()),
            )
            for _ in range(2)
        ]
        for one in both:
            one.result()
    assert target.read_bytes() == CONTENT
    assert left(target) == [target.name]


def test_a_journal_that_a_kill_left_goes_with_its_file(tmp_path):
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"whole")
    target.with_name("model.safetensors.journal").write_bytes(b"{}\n")
    forget_download(target)
    assert list(tmp_path.iterdir()) == []
