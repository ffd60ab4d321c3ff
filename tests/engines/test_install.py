"""Fetching the engines: whole or not at all, and loudly where it cannot be done."""

import pytest

from tests.engines import install
from tests.engines.conftest import available

pytestmark = pytest.mark.engine


@pytest.fixture
def empty_path(monkeypatch, tmp_path):
    """A PATH with one folder, which holds nothing yet."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_machine_without_node_is_told_which_to_get(empty_path):
    with pytest.raises(install.Unavailable, match=r"`node` is not on PATH: .* Node 20 or newer"):
        install.node()


def test_an_old_node_is_told_apart(empty_path):
    old = empty_path / "node"
    old.write_text("#!/bin/sh\necho v18.20.4\n")
    old.chmod(0o755)
    with pytest.raises(install.Unavailable, match=r"Node 20 or newer is needed; .* is v18\.20\.4"):
        install.node()


def test_without_an_engine_tests_are_skipped_but_fail_in_ci(monkeypatch, empty_path):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="nothing is tested: `node` is not on PATH"):
        available(install.node)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no engine: `node` is not on PATH"):
        available(install.node)


@pytest.fixture
def engines(monkeypatch, tmp_path):
    monkeypatch.setattr(install, "ENGINES", tmp_path / "engines")
    return tmp_path / "engines"


def test_what_was_fetched_once_is_not_fetched_again(engines):
    fetched = []
    for _ in range(2):
        folder = install._installed("one", lambda folder: fetched.append(folder))
    assert len(fetched) == 1
    assert [path.name for path in engines.iterdir()] == ["one"]
    assert folder == engines / "one"


def test_what_was_not_fetched_whole_leaves_nothing(engines):
    def half(folder):
        (folder / "half").touch()
        raise install.Unavailable("the line is down")

    with pytest.raises(install.Unavailable, match="the line is down"):
        install._installed("one", half)
    assert not list(engines.iterdir())


def test_of_two_runs_at_once_one_wins(engines):
    def while_another_does(folder):
        (folder / "slow").touch()
        (engines / "one").mkdir()
        (engines / "one" / "fast").touch()

    folder = install._installed("one", while_another_does)
    assert [path.name for path in folder.iterdir()] == ["fast"]
    assert list(engines.iterdir()) == [folder]
