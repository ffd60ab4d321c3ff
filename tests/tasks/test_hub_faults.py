"""The main job from a hub that is out of order, out of reach, or says no."""

import re

import numpy as np
import pytest

from tests.hub_server import Cut, ExpiredLink, Fault, Flip, IgnoredRange, Stall, Status, Truncated
from tests.tasks.hub_runs import (
    ADDRESS,
    ENGRAM,
    REPO,
    big_requests,
    hub_run,
    kill_once,
    needed,
    refused,
    shard_digests,
    sources_left,
    succeeded,
    without,
)

STORM = (
    Fault(Cut(after=70_000), file="model-00002-*"),
    Fault(Cut(), file="model-00003-*", position=400_000),
    Fault(Status(429, retry_after=1), file="model-00004-*", nth=2),
    Fault(Status(500), file="model-00005-*", nth=2, times=2),
    Fault(Stall(after=300_000, seconds=30), file="model-00006-*", nth=2),
    Fault(Flip(), file="model-00007-*", position=1_000_000),
    Fault(Truncated(after=500_000), file="model-00008-*", nth=2),
    Fault(ExpiredLink(), file="model-00013-*", nth=2),
    Fault(IgnoredRange(), file="model-00014-*", nth=2),
    Fault(Status(503), file="api/revision", method="GET"),
)
"""One of every fault, each on a file of its own; the first answer of a shard is its header."""

TOLD = (
    f"{ADDRESS}: the server answered 503; next attempt in ",
    "model-00002-of-00014.safetensors: [Errno 104] Connection reset by peer; ",
    "model-00003-of-00014.safetensors: [Errno 104] Connection reset by peer; ",
    "model-00004-of-00014.safetensors: the server answered 429; ",
    "model-00006-of-00014.safetensors: no byte came for too long; ",
    "the bytes that came have another digest than the release; file model-00007-of-00014.",
    "model-00008-of-00014.safetensors: peer closed connection without sending ",
    "model-00013-of-00014.safetensors: the storage refuses its link (answer 403); ",
)


@pytest.mark.slow
def test_a_storm_of_faults_changes_no_byte(hub, tmp_path, local, small_miniature):
    for fault in STORM:
        hub.fault(fault)
    commit = hub.repos[REPO].commits[hub.repos[REPO].branches["main"]]
    sums = "".join(f"{blob.sha256}  {name}\n" for name, blob in commit.files.items())
    (tmp_path / "sums").write_text(sums)
    more = ("--keep-source", "no", "--checksums", "sums")
    result = succeeded(hub_run(hub, tmp_path, *more, HF_HUB_DOWNLOAD_TIMEOUT="5"))
    struck = [name for one in hub.requests for name in one.faults]
    assert len(struck) == sum(fault.times for fault in STORM)
    assert shard_digests(tmp_path) == local
    assert sources_left(tmp_path) == []
    assert result.stdout.count("let go: ") == len(needed(small_miniature))
    for sentence in TOLD:
        assert result.stderr.count(sentence) == 1, result.stderr
    for number in (6, 7):  # neither waits for the end of the stall nor trusts wrong bytes
        assert len(big_requests(hub, f"model-{number:05}-of-00014.safetensors")) == 2


def test_a_shard_that_the_repository_lacks_is_named(hub, tmp_path, small_miniature):
    hub.add_commit(REPO, without(small_miniature, ENGRAM[:1], tmp_path / "lacking"))
    result = hub_run(hub, tmp_path)
    told = "the repository lacks shards that its own index names"
    refused(result, tmp_path, told, f": {ENGRAM[0]}; ", "(--supplement)")
    assert big_requests(hub) == []


def unauthorized(hub):
    hub.token = "the one"


def gated(hub):
    hub.token, hub.gated = "the one", True


def unreachable(hub):
    hub.url = hub.url.rpartition(":")[0] + ":9"  # discard: nobody listens there


REFUSALS = {
    "no token": (unauthorized, {}, ADDRESS, "answer 401", "Give a token in HF_TOKEN"),
    "wrong token": (unauthorized, {"HF_TOKEN": "another"}, ADDRESS, "answer 401", "HF_TOKEN"),
    "gated": (gated, {"HF_TOKEN": "the one"}, ADDRESS, "answer 403", "Accept its terms on "),
    "no repository": (
        lambda hub: None,
        {},
        "owner/modell",
        "the hub knows no such repository",
        "Check the spelling",
    ),
    "no revision": (
        lambda hub: None,
        {},
        f"{REPO}@v2",
        "the repository has no such revision",
        "Check the spelling",
    ),
    "no network": (unreachable, {}, ADDRESS, "the hub cannot be reached", "Check the network"),
}
FAST_REFUSALS = ("gated", "no network")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in FAST_REFUSALS else pytest.mark.slow)
        for name, case in REFUSALS.items()
    ],
)
def test_what_the_hub_refuses_ends_with_one_clear_message(hub, tmp_path, case):
    change, settings, source, *sentences = case
    change(hub)
    refused(hub_run(hub, tmp_path, source=source, **settings), tmp_path, *sentences)


EFFECTS = {
    "cut": Cut(after=100_000),
    "too many requests": Status(429, retry_after=1),
    "server error": Status(500),
    "stall": Stall(after=100_000, seconds=30),
    "wrong byte": Flip(after=100_000),
    "short body": Truncated(after=100_000),
    "short body, declared so": Truncated(after=100_000, is_declared=True),
    "expired link": ExpiredLink(),
    "no ranges": IgnoredRange(),
}


@pytest.mark.slow
@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS.keys())
def test_every_file_is_struck_once_and_comes_all_the_same(
    hub, tmp_path, local, small_miniature, effect
):
    for name in needed(small_miniature):
        hub.fault(Fault(effect, file=name, nth=2, origin="cdn"))
    succeeded(hub_run(hub, tmp_path, "--keep-source", "no", HF_HUB_DOWNLOAD_TIMEOUT="2"))
    assert sum(len(one.faults) for one in hub.requests) == len(needed(small_miniature))
    assert shard_digests(tmp_path) == local


@pytest.mark.slow
def test_bandwidth_is_kept_to(hub, tmp_path, local, small_miniature):
    """Two files come side by side, each at half of it."""
    result = succeeded(hub_run(hub, tmp_path, "--bandwidth", 2_000_000))
    rates = re.findall(r"^fetch model-.* bytes, (\d+\.\d) MB/s", result.stderr, re.MULTILINE)
    assert len(rates) == len(needed(small_miniature))
    assert max(map(float, rates)) <= 1.0
    sizes = [(small_miniature / name).stat().st_size for name in needed(small_miniature)]
    big = big_requests(hub)
    # When the last file begins, at most one other is still on its way.
    assert big[-1].at - big[0].at >= (sum(sizes) - 2 * max(sizes)) / 2_000_000
    assert shard_digests(tmp_path) == local


@pytest.mark.slow
def test_parts_that_rot_between_two_runs_are_made_good(hub, tmp_path, local):
    """What they were made of is let go by then, and comes again in a run after that."""
    more = ("--keep-source", "no")
    told = kill_once(hub, tmp_path, *more, ready=lambda text: text.count("let go: ") >= 3)
    assert "written: 1 of" not in told
    for part in tmp_path.glob("out/.quantmill/*/shard.gguf.part"):
        content = np.memmap(part, np.uint8, mode="r+")
        content[:] ^= 1
        content.flush()
    codes = [hub_run(hub, tmp_path, *more).returncode for _ in range(3)]
    # A run fails once for each shard whose sources are gone: target, draft.
    assert codes[-1] == 0
    assert set(codes) <= {0, 30}
    assert shard_digests(tmp_path) == local
