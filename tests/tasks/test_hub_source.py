"""The main job from a hub: the bytes of a local run, and nothing asked for that is not needed."""

import json

import pytest
from huggingface_hub import hf_hub_download

from tests.hub_server import HubServer
from tests.tasks.commands import files_of
from tests.tasks.hub_runs import (
    ADDRESS,
    ENGRAM,
    OUTPUT,
    REPO,
    big_requests,
    files_asked,
    hub_run,
    kill_once,
    listed_digests,
    needed,
    refused,
    shard_digests,
    sources_left,
    succeeded,
    weight_map,
    without,
)


@pytest.fixture(scope="module")
def finished(small_miniature, tmp_path_factory):
    """A folder in which a run from the hub has ended, its result, and the hub."""
    cwd = tmp_path_factory.mktemp("hub run")
    with HubServer() as server:
        server.add_commit(REPO, small_miniature)
        yield server, cwd, hub_run(server, cwd)


@pytest.mark.slow
class TestAPlainRun:
    def test_it_gives_the_bytes_of_the_local_run(self, finished, local):
        _, cwd, result = finished
        succeeded(result)
        assert listed_digests(cwd) == shard_digests(cwd) == local

    def test_it_asks_for_needed_files_only_and_once(self, finished, small_miniature):
        hub, _, _ = finished
        wanted = needed(small_miniature)
        assert len(wanted) == 13
        assert sorted(one.file for one in big_requests(hub)) == sorted(wanted)

    def test_all_headers_come_before_the_first_big_byte(self, finished, small_miniature):
        hub, _, _ = finished
        shards = set(weight_map(small_miniature).values())
        asked = [one.file for one in hub.requests]
        first = hub.requests.index(big_requests(hub)[0])
        assert shards <= set(asked[:first])

    def test_the_branch_is_resolved_once_not_by_every_task(self, finished):
        hub, _, _ = finished
        assert sum(one.file.startswith("api/") for one in hub.requests) == 1

    def test_documents_name_the_commit(self, finished):
        hub, cwd, _ = finished
        manifest = json.loads((cwd / OUTPUT / "manifest.json").read_text())
        assert manifest["source"]["repo"] == REPO
        assert manifest["source"]["commit"] == hub.repos[REPO].branches["main"]

    def test_a_second_run_does_nothing_but_say_that_the_branch_moved(self, finished, tmp_path):
        hub, cwd, _ = finished
        before, old = files_of(cwd / "out"), hub.repos[REPO].branches["main"]
        (tmp_path / "config.json").write_text("{}")
        new = hub.add_commit(REPO, tmp_path)
        hub.clear_requests()
        result = succeeded(hub_run(hub, cwd))
        assert "nothing to do" in result.stdout
        assert files_of(cwd / "out") == before
        assert result.stderr.count(f"{ADDRESS} has moved to {new} since {old} was recorded") == 1
        assert len(hub.requests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_goes_on_and_fetches_nothing_that_is_used_up(hub, tmp_path, local, seed):
    n_gone, after_s = [(1, 0.0), (2, 0.1), (4, 0.3), (6, 0.05), (9, 0.2)][seed]
    told = kill_once(
        hub,
        tmp_path,
        *("--keep-source", "no"),
        ready=lambda text: text.count("let go: ") >= n_gone,
        after_s=after_s,
    )
    gone = {line.split()[2] for line in told.splitlines() if line.startswith("let go: ")}
    assert len(gone) >= n_gone
    assert not (tmp_path / OUTPUT / "manifest.json").exists()
    hub.clear_requests()
    succeeded(hub_run(hub, tmp_path, "--keep-source", "no"))
    assert shard_digests(tmp_path) == local
    assert not files_asked(hub) & gone
    assert sources_left(tmp_path) == []


@pytest.mark.slow
def test_a_second_source_and_the_hub_cache_fill_what_is_missing(
    hub, tmp_path, local, small_miniature
):
    """The second repository has the engram shards; one of them lies in the user's hub cache."""
    hub.add_commit("other/pruned", without(small_miniature, ENGRAM, tmp_path / "pruned"))
    cache = tmp_path / "home" / "hub"
    hf_hub_download(REPO, ENGRAM[0], endpoint=hub.url, token=False, cache_dir=cache)
    before = files_of(cache)
    hub.clear_requests()
    more = ("--supplement", ADDRESS, "--keep-source", "no")
    result = succeeded(hub_run(hub, tmp_path, *more, source="other/pruned"))
    assert shard_digests(tmp_path) == local
    assert ENGRAM[0] not in files_asked(hub)
    asked = {(one.path.startswith(f"/{REPO}/"), one.file) for one in big_requests(hub)}
    second = [file for is_second, file in asked if is_second]
    assert second == [ENGRAM[1]]
    assert files_of(cache) == before
    assert f"let go: {ENGRAM[0]}" not in result.stdout


@pytest.mark.slow
def test_a_second_source_that_supplies_nothing_is_refused(hub, tmp_path, small_miniature):
    result = hub_run(hub, tmp_path, "--supplement", small_miniature)
    refused(result, tmp_path, "the second source supplies nothing that the first lacks")
    assert big_requests(hub) == []


def test_a_checksum_list_that_contradicts_is_refused_before_any_byte(hub, tmp_path):
    (tmp_path / "sums").write_text(f"{'a' * 64}  {ENGRAM[1]}\n")
    result = hub_run(hub, tmp_path, "--checksums", "sums")
    refused(result, tmp_path, "the checksum list and the hub contradict each other", ENGRAM[1])
    assert {one.file for one in hub.requests} == {"api/revision"}
