"""Fixtures of the hub client's tests."""

import pytest

from tests.pipeline.hub_side import served


@pytest.fixture
def hub(tmp_path):
    with served(tmp_path) as server:
        yield server


@pytest.fixture
def target(tmp_path):
    return tmp_path / "ein Ordner, größer" / "模型.safetensors"
