"""A hub on loopback that serves the small miniature, and what its folder itself gives."""

import pytest

from tests.hub_server import HubServer
from tests.tasks.commands import luigi, run_recipe
from tests.tasks.hub_runs import REPO, shard_digests


@pytest.fixture(scope="session")
def local(small_miniature, tmp_path_factory):
    """Digests of the shards that the folder itself gives."""
    cwd = tmp_path_factory.mktemp("local run")
    result = luigi(*run_recipe(small_miniature), cwd=cwd)
    assert result.returncode == 0, result.stderr
    made = shard_digests(cwd)
    assert len(made) == 5
    return made


@pytest.fixture
def hub(small_miniature):
    with HubServer() as server:
        server.add_commit(REPO, small_miniature)
        yield server
