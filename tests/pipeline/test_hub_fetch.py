"""One file against a real server: whole, resumed, verified, or refused in words that help."""

import hashlib
import re
import time

import pytest

from pipeline.errors import SourceError
from pipeline.source.hub.checksums import with_checksums
from pipeline.source.hub.fetch import fetch_file
from pipeline.source.hub.remote import HubRemote
from pipeline.source.hub.throttle import Throttle
from tests.hub_server import (
    Cut,
    Delay,
    ExpiredLink,
    Fault,
    Flip,
    Hangup,
    IgnoredRange,
    Stall,
    Status,
    Truncated,
)
from tests.pipeline.hub_side import (
    CONTENT,
    FILES,
    N_PIECES,
    PIECE,
    SHARD,
    Timeless,
    Told,
    access_to,
    fetch,
    left,
    ranges_asked,
    served,
    snapshot_of,
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("has_cache", [False, True], ids=["direct", "resolve cache"])
def test_a_file_comes_whole(hub, tmp_path, target, name, has_cache):
    hub.has_resolve_cache = has_cache
    told = Told()
    fetch(hub, tmp_path, target, name=name, told=told)
    assert target.read_bytes() == FILES[name]
    assert left(target) == [target.name]
    assert told.total == len(FILES[name])
    assert told.notes == []


def test_no_byte_is_asked_for_twice_and_the_link_once(hub, tmp_path, target):
    fetch(hub, tmp_path, target)
    spans = sorted(ranges_asked(hub))
    assert len(spans) == N_PIECES
    assert [first for first, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == len(CONTENT)
    assert sum(one.method == "HEAD" for one in hub.requests) == 1


def test_the_token_goes_to_the_hub_and_not_to_storage(tmp_path, target):
    with served(tmp_path, token="secret") as hub:
        snapshot = snapshot_of(hub, tmp_path, token="secret")
        remote = HubRemote(snapshot, access_to(hub, token="secret"))
        for name in (SHARD, "config.json"):
            fetch_file(remote, snapshot.file(name), target.with_name(name))
        assert {one.origin for one in hub.requests} == {"hub", "cdn"}
        assert all(one.is_authorized == (one.origin == "hub") for one in hub.requests)


def test_connections_work_at_the_same_time(hub, tmp_path, target):
    hub.fault(Fault(Delay(1.5), SHARD, times=4))
    fetch(hub, tmp_path, target, n_connections=4)
    asked = [one.at for one in hub.requests if one.origin == "cdn"][:4]
    assert asked[3] - asked[0] < 1.5


@pytest.mark.parametrize(
    ("effect", "waits", "note"),
    [
        (Cut(), [0.5], ""),
        (Truncated(), [0.5], ""),
        (Truncated(is_declared=True), [0.5], "ended too early"),
        (Hangup(), [0.5], ""),
        (Stall(seconds=30), [0.5], "no byte"),
        (Status(500), [0.5], "500"),
        (Status(503, retry_after=3), [3.0], "503"),
        (Status(429, retry_after=11), [11.0], "429"),
        (ExpiredLink(), [0.5], "link"),
    ],
    ids=lambda value: re.sub(r"\W+", " ", repr(value)) if not isinstance(value, str) else "",
)
def test_a_fault_that_passes(hub, tmp_path, target, effect, waits, note):
    position = 3 * PIECE + 1000
    in_body = isinstance(effect, Cut | Truncated | Stall)
    hub.fault(Fault(effect, SHARD, position=position if in_body else None, origin="cdn"))
    told, timeless = Told(), Timeless()
    stall_s = 1.5 if isinstance(effect, Stall) else 20
    fetch(hub, tmp_path, target, told=told, timeless=timeless, stall_s=stall_s, n_connections=1)
    assert target.read_bytes() == CONTENT
    # The server ends the connection; the next request may still find it open, and fail once more.
    assert timeless.waits in (waits, [*waits, 1.0])
    assert len(told.notes) == len(timeless.waits)
    assert note in told.notes[0]
    assert SHARD in told.notes[0]
    assert told.total == len(CONTENT)
    if in_body:  # what came before the fault is not asked for again
        assert (position, 4 * PIECE) in ranges_asked(hub)


def test_waits_grow_and_end(hub, tmp_path, target):
    hub.fault(Fault(Status(500), SHARD, times=None, origin="cdn"))
    timeless = Timeless()
    with pytest.raises(SourceError, match="again and again") as caught:
        fetch(hub, tmp_path, target, timeless=timeless, n_connections=1)
    assert timeless.waits == [0.5, 1.0, 2.0]
    assert "answered 500" in str(caught.value)
    assert not target.exists()


def test_a_link_that_expires_for_all_connections(hub, tmp_path, target):
    hub.fault(Fault(ExpiredLink(), SHARD, nth=3, times=1))
    fetch(hub, tmp_path, target, n_connections=3)
    assert target.read_bytes() == CONTENT
    assert sum(one.method == "HEAD" for one in hub.requests) == 2


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_server_without_ranges(hub, tmp_path, target, is_declared):
    hub.fault(Fault(IgnoredRange(is_declared), SHARD, times=None))
    told = Told()
    fetch(hub, tmp_path, target, told=told)
    assert target.read_bytes() == CONTENT
    assert told.total == len(CONTENT)
    assert any("whole files only" in note for note in told.notes)


def test_a_server_without_ranges_that_is_cut_begins_anew(hub, tmp_path, target):
    hub.fault(Fault(IgnoredRange(), SHARD, times=None))
    hub.fault(Fault(Cut(), SHARD, position=len(CONTENT) - 5, nth=3))
    told = Told()
    fetch(hub, tmp_path, target, told=told, n_connections=1)
    assert target.read_bytes() == CONTENT
    assert told.total == len(CONTENT)


def test_wrong_bytes_of_the_right_size_are_fetched_again(hub, tmp_path, target):
    hub.fault(Fault(Flip(), SHARD, position=2 * PIECE + 5))
    told = Told()
    fetch(hub, tmp_path, target, told=told)
    assert target.read_bytes() == CONTENT
    assert len(ranges_asked(hub)) == 2 * N_PIECES
    assert told.total == len(CONTENT)
    assert "fetched again" in told.notes[0]


def test_all_connections_share_the_limit(hub, tmp_path, target):
    rate = 2 * len(CONTENT)
    limit, began = Throttle(rate), time.monotonic()
    fetch(hub, tmp_path, target, limit=limit, n_connections=4)
    seconds = time.monotonic() - began
    assert target.read_bytes() == CONTENT
    assert 0.4 < seconds < 20


def test_a_checksum_list_is_held_too(hub, tmp_path, target):
    snapshot = snapshot_of(hub, tmp_path)
    listed = {"config.json": hashlib.sha256(FILES["config.json"]).hexdigest()}
    remote = HubRemote(snapshot, access_to(hub))
    good = with_checksums(snapshot, listed, tmp_path / "SHA256SUMS")
    fetch_file(remote, good.file("config.json"), target)
    target.unlink()
    bad = with_checksums(snapshot, {"config.json": "0" * 64}, tmp_path / "SHA256SUMS")
    with pytest.raises(SourceError, match="contradict each other") as caught:
        fetch_file(remote, bad.file("config.json"), target)
    assert "the hub" in str(caught.value)
    assert "the checksum list" in str(caught.value)
