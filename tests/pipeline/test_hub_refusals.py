"""What the hub, its storage or the bytes themselves refuse, said in words that help."""

import hashlib
from contextlib import nullcontext

import pytest
from huggingface_hub import constants

from pipeline.errors import SourceError
from pipeline.source.hub.fetch import fetch_file
from pipeline.source.hub.remote import HubRemote, RangeIgnored, _check_part
from pipeline.source.hub.retry import TransferFault
from pipeline.source.hub.snapshot import HubFile
from tests.hub_server import (
    Fault,
    Flip,
    Status,
)
from tests.pipeline.hub_side import (
    FILES,
    PIECE,
    SHARD,
    Timeless,
    access_to,
    fetch,
    habits,
    left,
    ranges_asked,
    served,
    snapshot_of,
)


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_wrong_bytes_again_and_again_are_named(hub, tmp_path, target, name):
    hub.fault(Fault(Flip(), name, position=5, times=None))
    with pytest.raises(SourceError, match="another digest") as caught:
        fetch(hub, tmp_path, target, name=name)
    content = bytearray(FILES[name])
    content[5] ^= 1
    header = b"" if name == SHARD else b"blob %d\0" % len(content)
    kind = hashlib.sha256 if name == SHARD else hashlib.sha1
    assert name in str(caught.value)
    assert kind(header + FILES[name]).hexdigest() in str(caught.value)
    assert kind(header + content).hexdigest() in str(caught.value)
    assert left(target) == []
    assert ranges_asked(hub, name).count((0, min(PIECE, len(content)))) == 3


@pytest.mark.parametrize(
    ("settings", "token", "words"),
    [
        ({"gated": True}, None, ["gated", "Accept its terms", "HF_TOKEN"]),
        ({"gated": True}, "mine", ["gated", "Accept its terms", "HF_TOKEN"]),
        ({"expired_tokens": {"old"}}, "old", ["expired", "HF_TOKEN"]),
    ],
    ids=["gated 401", "gated 403", "expired token"],
)
def test_refusals_come_at_once_and_say_what_to_do(tmp_path, target, settings, token, words):
    with served(tmp_path) as hub:
        snapshot = snapshot_of(hub, tmp_path)
        for name, value in settings.items():
            setattr(hub, name, value)
        timeless = Timeless()
        remote = HubRemote(snapshot, access_to(hub, token=token))
        with pytest.raises(SourceError) as caught:
            fetch_file(remote, snapshot.file(SHARD), target, habits=habits(timeless))
    assert all(word in str(caught.value) for word in [*words, "owner/model"])
    assert timeless.waits == []
    assert not target.exists()


@pytest.mark.parametrize(
    ("status", "words"),
    [(403, "refuses access"), (404, "no such repository"), (416, "ends before")],
)
def test_a_permanent_answer_to_a_small_file_ends_at_once(hub, tmp_path, target, status, words):
    hub.fault(Fault(Status(status), "config.json"))
    timeless = Timeless()
    with pytest.raises(SourceError, match=words):
        fetch(hub, tmp_path, target, name="config.json", timeless=timeless)
    assert timeless.waits == []


def test_a_file_that_is_gone_is_named(hub, tmp_path, target):
    snapshot = snapshot_of(hub, tmp_path)
    (hub.repos["owner/model"].commits["a" * 40].files).pop(SHARD)
    with pytest.raises(SourceError, match=f"no such file; file owner/model@aaaaaaaa: {SHARD}"):
        fetch_file(HubRemote(snapshot, access_to(hub)), snapshot.file(SHARD), target)


def test_storage_that_refuses_every_link_ends_soon(hub, tmp_path, target):
    hub.fault(Fault(Status(403), SHARD, times=None, origin="cdn"))
    timeless = Timeless()
    with pytest.raises(SourceError, match="refuses every link"):
        fetch(hub, tmp_path, target, timeless=timeless, n_connections=1)
    assert len(timeless.waits) == 2


def test_offline_is_said_at_once(hub, tmp_path, target, monkeypatch):
    snapshot = snapshot_of(hub, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"must not be asked.*HF_HUB_OFFLINE"):
        fetch_file(HubRemote(snapshot, access_to(hub)), snapshot.file(SHARD), target)


@pytest.mark.parametrize(
    ("status", "headers", "problem"),
    [
        (206, {"content-range": "bytes 10-19/100"}, None),
        (206, {"content-range": "bytes 10-15/*"}, None),
        (206, {"content-range": "bytes 0-9/100"}, TransferFault),
        (206, {"content-range": "bytes 10-20/100"}, TransferFault),
        (206, {}, TransferFault),
        (204, {}, TransferFault),
        (206, {"content-range": "bytes 10-19/99"}, SourceError),
        (206, {"content-range": "bytes 10-19/100", "content-encoding": "gzip"}, SourceError),
        (200, {"content-length": "100"}, RangeIgnored),
    ],
)
def test_what_an_answer_says_about_itself(status, headers, problem):
    file = HubFile("a.bin", 100, None, "0" * 40)
    with pytest.raises(problem) if problem else nullcontext():
        _check_part(status, headers, 10, 10, file)


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"content-length": "100"}, None),
        ({}, None),
        ({"content-length": "7"}, TransferFault),
    ],
)
def test_a_whole_file_is_fine_from_its_first_byte(headers, problem):
    file = HubFile("a.bin", 100, None, "0" * 40)
    with pytest.raises(problem) if problem else nullcontext():
        _check_part(200, headers, 0, 10, file)
