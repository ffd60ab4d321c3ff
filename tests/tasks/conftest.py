"""A hub on loopback that serves the small miniature, and what its folder itself gives."""

import pytest

from tests.hub_server import HubServer
from tests.promises.whole_job import run_job
from tests.tasks.hub_runs import REPO, shard_digests


@pytest.fixture(scope="session")
def local(small_miniature, tmp_path_factory):
    """Digests of the shards that the folder itself gives."""
    cwd = tmp_path_factory.mktemp("local run")
    outcome = run_job(small_miniature, cwd / "out")
    assert outcome.ok, outcome.text
    made = shard_digests(cwd)
    assert len(made) == 5
    return made


@pytest.fixture
def hub(small_miniature):
    with HubServer() as server:
        server.add_commit(REPO, small_miniature)
        yield server
