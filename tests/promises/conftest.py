"""What the tests of promises share: one undisturbed run that all others must equal."""

import pytest

from tests.promises.whole_job import finals, run_job


@pytest.fixture(scope="session")
def undisturbed(small_miniature, tmp_path_factory):
    """The output folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    outcome = run_job(small_miniature, out)
    assert outcome.ok, outcome.text
    return out


@pytest.fixture(scope="session")
def wanted(undisturbed):
    """sha256 of every file of that run."""
    return finals(undisturbed)
