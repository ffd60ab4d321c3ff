"""The test server's ranges, links and faults, seen with nothing but a socket in between."""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPMessage, IncompleteRead, RemoteDisconnected
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.hub_server import (
    Cut,
    Delay,
    ExpiredLink,
    Fault,
    Flip,
    Hangup,
    HubServer,
    IgnoredRange,
    Slow,
    Stall,
    Status,
    Truncated,
)
from tests.hub_server.effects import Effect

REPO = "owner/model"
SHARD = bytes(range(251)) * 1000
NAME = "model.safetensors"
SMALL = b'{"small": 1}'
SHARD_ETAG = f'"{hashlib.sha256(SHARD).hexdigest()}"'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "served"
    root.mkdir()
    (root / NAME).write_bytes(SHARD)
    (root / "config.json").write_bytes(SMALL)
    return root


@pytest.fixture
def hub(folder: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add_commit(REPO, folder, commit="a" * 40)
        yield server


@dataclass
class Answer:
    status: int
    headers: HTTPMessage
    body: bytes


def fetch(url: str, *, method: str = "GET", timeout: float = 10, **headers: str) -> Answer:
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.netloc, timeout=timeout)) as connection:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, url.removeprefix(f"http://{parts.netloc}"), headers=named)
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())


def receive_all(connection: socket.socket, received: bytearray) -> None:
    while piece := connection.recv(1 << 16):
        received += piece


def file_url(hub: HubServer, name: str = NAME) -> str:
    return f"{hub.url}/{REPO}/resolve/main/{name}"


def link(hub: HubServer, name: str = NAME) -> str:
    answer = fetch(file_url(hub, name))
    assert answer.status == 302
    return answer.headers["Location"]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_headers_of_a_small_file(hub: HubServer, method: str) -> None:
    answer = fetch(file_url(hub, "config.json"), method=method)
    oid = hashlib.sha1(b"blob %d\0" % len(SMALL) + SMALL).hexdigest()
    assert answer.status == 200
    assert answer.body == (SMALL if method == "GET" else b"")
    said = {name: answer.headers[name] for name in ("ETag", "X-Repo-Commit", "Content-Length")}
    assert said == {"ETag": f'"{oid}"', "X-Repo-Commit": "a" * 40, "Content-Length": "12"}
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["X-Linked-ETag"] is None


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_headers_of_an_lfs_file(hub: HubServer, method: str) -> None:
    answer = fetch(file_url(hub), method=method)
    assert answer.status == 302
    assert answer.headers["X-Repo-Commit"] == "a" * 40
    assert answer.headers["X-Linked-ETag"] == SHARD_ETAG
    assert answer.headers["X-Linked-Size"] == str(len(SHARD))
    assert answer.headers["X-Xet-Hash"] is None
    there = fetch(answer.headers["Location"], method=method)
    assert (there.status, there.headers["ETag"]) == (200, SHARD_ETAG)
    assert there.headers["X-Repo-Commit"] is None
    assert there.headers["Content-Length"] == str(len(SHARD))


END = len(SHARD)


@pytest.mark.parametrize(
    ("asked", "status", "first", "end"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=10-19", 206, 10, 20),
        (f"bytes={END - 1}-", 206, END - 1, END),
        (f"bytes=5-{END * 2}", 206, 5, END),
        ("bytes=-7", 206, END - 7, END),
        (f"bytes=-{END * 2}", 206, 0, END),
        (f"bytes={END}-", 416, 0, 0),
        (f"bytes={END}-{END + 5}", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
        ("bytes=9-8", 200, 0, END),
        ("bytes=-", 200, 0, END),
        ("bytes=0-1,5-6", 200, 0, END),
        ("lines=0-1", 200, 0, END),
    ],
)
def test_ranges(hub: HubServer, asked: str, status: int, first: int, end: int) -> None:
    answer = fetch(link(hub), Range=asked)
    said = {
        200: None,
        206: f"bytes {first}-{end - 1}/{END}",
        416: f"bytes */{END}",
    }
    assert (answer.status, answer.headers["Content-Range"]) == (status, said[status])
    assert answer.body == SHARD[first:end]
    request = hub.requests[-1]
    assert (request.range, request.status, request.nbytes) == (asked, status, end - first)


@pytest.mark.parametrize(("etag", "status"), [(SHARD_ETAG, 206), ('"other"', 200)])
def test_a_range_of_another_file_is_the_whole_file(hub: HubServer, etag: str, status: int) -> None:
    assert fetch(link(hub), Range="bytes=0-9", If_Range=etag).status == status


def test_a_sparse_file_is_neither_read_whole_nor_hashed_by_reading(tmp_path: Path) -> None:
    root = tmp_path / "sparse"
    root.mkdir()
    with (root / "huge.bin").open("wb") as huge, (root / "hole.bin").open("wb") as hole:
        huge.truncate(1 << 42)
        hole.truncate(3 << 20)
        hole.seek(1 << 20)
        hole.write(b"data")
    with HubServer() as hub:
        hub.add_commit(REPO, root, sha256={"huge.bin": "f" * 64})
        answer = fetch(link(hub, "huge.bin"), Range=f"bytes={(1 << 42) - 4}-")
        assert (answer.body, answer.headers["ETag"]) == (bytes(4), f'"{"f" * 64}"')
        content = (root / "hole.bin").read_bytes()
        etag = fetch(link(hub, "hole.bin")).headers["ETag"]
        assert etag == f'"{hashlib.sha256(content).hexdigest()}"'


def serve(folder: Path, change: Callable[[Path], object]) -> None:
    with HubServer() as hub:
        hub.add_commit(REPO, folder)
        change(folder / NAME)
        with pytest.raises(RemoteDisconnected):
            fetch(file_url(hub))


def test_a_file_that_changed_is_not_served(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="changed after its commit"):
        serve(folder, lambda path: path.write_bytes(b"changed"))


def test_a_huge_file_needs_a_declared_digest(folder: Path) -> None:
    os.truncate(folder / NAME, 5 << 30)
    with pytest.raises(ValueError, match="declare its sha256"):
        serve(folder, lambda path: None)


@pytest.mark.parametrize("how", ["fault", "all", "time", "forged"])
def test_an_expired_link_is_refused_until_resolved_anew(hub: HubServer, how: str) -> None:
    if how == "time":
        hub.links.seconds = 0
    url = link(hub)
    if how == "fault":
        hub.fault(Fault(ExpiredLink(), "*.safetensors"))
    if how == "all":
        hub.expire_links()
    if how == "forged":
        url = url.replace("Expires=", "Expires=9")
    for _ in range(2):
        refused = fetch(url)
        assert (refused.status, refused.headers["X-Error-Code"]) == (403, None)
        assert b"<Code>" in refused.body
    hub.links.seconds = 60
    assert fetch(link(hub)).body == SHARD


@pytest.mark.parametrize(
    ("effect", "status", "headers"),
    [
        (Status(429, retry_after=7), 429, {"Retry-After": "7"}),
        (Status(429, ratelimit=9), 429, {"RateLimit": '"resolvers";r=0;t=9'}),
        (Status(500), 500, {}),
        (Status(502), 502, {}),
        (Status(503, retry_after=1), 503, {"Retry-After": "1"}),
    ],
    ids=["429", "429 by quota", "500", "502", "503"],
)
def test_status(hub: HubServer, effect: Effect, status: int, headers: dict[str, str]) -> None:
    hub.fault(Fault(effect, "config.json"))
    answer = fetch(file_url(hub, "config.json"))
    assert answer.status == status
    assert {name: answer.headers[name] for name in headers} == headers
    assert fetch(file_url(hub, "config.json")).body == SMALL
    assert [each.faults for each in hub.requests] == [("Status",), ()]


@pytest.mark.parametrize("n", [0, 1, 100_000])
def test_cut_resets_after_just_so_many_bytes(hub: HubServer, n: int) -> None:
    hub.fault(Fault(Cut(after=n), NAME, origin="cdn"))
    received = bytearray()
    parts = urlsplit(link(hub))
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        target = f"{parts.path}?{parts.query}"
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        with pytest.raises(ConnectionResetError):
            receive_all(connection, received)
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(SHARD)}".encode() in head
    assert body == SHARD[:n]
    assert hub.requests[-1].nbytes == n


@pytest.mark.parametrize("is_declared", [False, True])
def test_truncated(hub: HubServer, is_declared: bool) -> None:
    hub.fault(Fault(Truncated(after=1000, is_declared=is_declared), NAME))
    url = link(hub)
    if is_declared:
        answer = fetch(url, Range="bytes=0-4999")
        assert (answer.body, answer.headers["Content-Length"]) == (SHARD[:1000], "1000")
        assert answer.headers["Content-Range"] == f"bytes 0-4999/{END}"
    else:
        with pytest.raises(IncompleteRead) as caught:
            fetch(url)
        assert (caught.value.partial, caught.value.expected) == (SHARD[:1000], END - 1000)


def test_flip_at_a_byte_of_the_file_strikes_whoever_fetches_it(hub: HubServer) -> None:
    hub.fault(Fault(Flip(), NAME, position=70_000, times=None))
    url = link(hub)
    changed = bytearray(SHARD)
    changed[70_000] ^= 1
    assert fetch(url, Range="bytes=0-69999").body == SHARD[:70_000]
    assert fetch(url, Range="bytes=70000-70000").body == changed[70_000:70_001]
    assert fetch(url, Range="bytes=60000-").body == changed[60_000:]
    assert fetch(url).body == changed


@pytest.mark.parametrize("is_declared", [True, False])
def test_ignored_range(hub: HubServer, is_declared: bool) -> None:
    hub.fault(Fault(IgnoredRange(is_declared=is_declared)))
    url = link(hub)
    answer = fetch(url, Range="bytes=100-199")
    assert (answer.status, answer.body) == (200, SHARD)
    assert answer.headers["Content-Range"] is None
    assert answer.headers["Content-Length"] == (str(END) if is_declared else None)
    assert fetch(url, Range="bytes=100-199").body == SHARD[100:200]


def test_hangup(hub: HubServer) -> None:
    hub.fault(Fault(Hangup(), "api/revision"))
    with pytest.raises(RemoteDisconnected):
        fetch(f"{hub.url}/api/models/{REPO}/revision/main")
    assert [each.status for each in hub.requests] == [0]


@pytest.mark.parametrize("effect", [Stall(after=1000, seconds=0.3), Delay(0.3)])
def test_a_pause_is_seen_as_a_timeout_or_waited_for(hub: HubServer, effect: Effect) -> None:
    hub.fault(Fault(effect, NAME, times=2, origin="cdn"))
    url = link(hub)
    with pytest.raises(TimeoutError):
        fetch(url, timeout=0.1)
    start = time.monotonic()
    assert fetch(url).body == SHARD
    assert time.monotonic() - start >= 0.3


def test_slow(hub: HubServer) -> None:
    hub.fault(Fault(Slow(nbytes_per_s=1_000_000), NAME, origin="cdn"))
    start = time.monotonic()
    assert fetch(link(hub)).body == SHARD
    assert time.monotonic() - start >= 0.25


def test_a_fault_strikes_from_the_nth_match_and_as_often_as_told(hub: HubServer) -> None:
    hub.fault(Fault(Status(500), "*.json", nth=2, times=2))
    hub.fault(Fault(Status(503), "*.json", nth=4, times=None))
    url = file_url(hub, "config.json")
    fetch(url, method="HEAD")
    assert [fetch(url).status for _ in range(5)] == [200, 500, 500, 503, 503]
    hub.clear_faults()
    assert fetch(url).status == 200


def test_faults_add_up(hub: HubServer) -> None:
    hub.fault(Fault(IgnoredRange(), NAME))
    hub.fault(Fault(Flip(), NAME, position=10))
    hub.fault(Fault(Truncated(), NAME, position=12))
    with pytest.raises(IncompleteRead) as caught:
        fetch(link(hub), Range="bytes=5-99")
    assert caught.value.partial == SHARD[:10] + bytes([SHARD[10] ^ 1]) + SHARD[11:12]
    assert hub.requests[-1].faults == ("IgnoredRange", "Flip", "Truncated")


def test_leaving_ends_what_still_runs(folder: Path) -> None:
    n_threads = threading.active_count()
    with HubServer() as hub:
        hub.add_commit(REPO, folder)
        hub.fault(Fault(Stall(seconds=60), "config.json"))
        parts = urlsplit(hub.url)
        stalled = socket.create_connection((parts.hostname, parts.port), timeout=10)
        stalled.sendall(f"GET /{REPO}/resolve/main/config.json HTTP/1.1\r\n\r\n".encode())
        assert stalled.recv(9) == b"HTTP/1.1 "
        idle = HTTPConnection(parts.netloc, timeout=10)
        idle.request("HEAD", f"/api/models/{REPO}")
        assert idle.getresponse().read() == b""
        start = time.monotonic()
    with stalled, closing(idle):
        assert time.monotonic() - start < 30
        assert idle.sock.recv(1) == b""
    assert threading.active_count() == n_threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((parts.hostname, parts.port), timeout=1)
