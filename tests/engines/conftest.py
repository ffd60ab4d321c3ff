"""The engines, installed once, and what this project makes of a miniature for them."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.engines import install, plain_model
from tests.engines.mainline import Mainline
from tests.engines.native import Native
from tests.tasks.commands import luigi, run_recipe


def available(get):
    """What ``get`` gives; without it tests are skipped, but in CI they fail."""
    try:
        return get()
    except install.Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"no engine: {error}", pytrace=False)
        pytest.skip(f"NO ENGINE, nothing is tested: {error}")


@pytest.fixture(scope="session")
def mainline():
    """Mainline llama.cpp, which reads every model of ours but the fork layout."""
    node, packages = available(install.node), available(install.mainline_packages)
    engine = Mainline(node, packages, install.PINS["mainline"]["build"])
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def native():
    """An earlier llama.cpp, compiled for this machine: V4 and its draft only."""
    return Native(available(install.native_package), install.PINS["native"]["build"])


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A model of the oldest architecture, which every engine reads, in F32."""
    path = tmp_path_factory.mktemp("plain model") / "plain.gguf"
    plain_model.write(path)
    return path


@dataclass(frozen=True)
class Converted:
    """The files of one run: the target's shards, the first one first, and the draft beside it."""

    shards: list[Path]
    draft: Path


@pytest.fixture(scope="session")
def converted(miniature, tmp_path_factory):
    """``converted(recipe, layout)``: what the recipe makes of the miniature, once."""

    @cache
    def convert(recipe, layout):
        return run(miniature, recipe, layout, tmp_path_factory.mktemp(f"{recipe} {layout}"))

    return convert


@pytest.fixture(scope="session")
def small_mainline(small_miniature, tmp_path_factory):
    """The native recipe's files of the smallest checkpoint: loaded and run in a blink."""
    return run(small_miniature, "native", "mainline", tmp_path_factory.mktemp("small native"))


def run(source, recipe, layout, cwd):
    """What ``luigi RunRecipe`` makes in ``cwd``."""
    result = luigi(*run_recipe(source, recipe, "--layout", layout), cwd=cwd)
    assert result.returncode == 0, result.stderr
    files = sorted((cwd / "out" / f"mini-{recipe}-{layout}").glob("*.gguf"))
    (draft,) = (file for file in files if "-draft" in file.name)
    return Converted([file for file in files if file != draft], draft)
