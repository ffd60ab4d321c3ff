"""The command lines that people are told, held against llama.cpp's own parser."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.model.layout import Layout
from pipeline.report.launch import LaunchLine, launch_lines
from tests.engines import install
from tests.engines.conftest import available
from tests.engines.engine import Refused
from tests.engines.process import Process
from tests.pipeline.released_plans import released_draft_plan, released_plan

pytestmark = pytest.mark.engine

README = Path(__file__).parents[2] / "README.md"

LINES = {
    "V4.1 mainline": ("native", Layout.MAINLINE, 0),
    "V4.1 branches": ("served", Layout.FORK, 0),
    "V4.1 in ik_llama.cpp": ("served", Layout.FORK, 1),
    "V4": ("v4-native", Layout.MAINLINE, 0),
}
"""Recipe, layout, and the place of the engine among those that read that form."""

Parse = Callable[[Sequence[str]], dict]


@cache
def lines(recipe: str, layout: Layout) -> tuple[LaunchLine, ...]:
    return launch_lines([released_plan(recipe, layout), released_draft_plan(recipe)])


@pytest.fixture(params=LINES.values(), ids=LINES)
def words(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """A command line, word by word."""
    recipe, layout, place = request.param
    return lines(recipe, layout)[place].words


@pytest.fixture(scope="module")
def parse() -> Iterator[Parse]:
    """Words of a command line -> the options that the engine's server takes from them."""
    script = Path(__file__).with_name("options_child.py")
    process = Process([sys.executable, str(script), str(available(install.native_package))])
    yield lambda words: process.ask("parse", words=list(words))
    process.close()


def test_lines_for_every_engine_are_here() -> None:
    forms = {(recipe, layout) for recipe, layout, _ in LINES.values()}
    assert sum(len(lines(*form)) for form in forms) == len(LINES)


def test_llama_cpp_takes_every_word_as_it_is_meant(parse: Parse, words: tuple[str, ...]) -> None:
    options, said = parse(words), dict(pairwise(words))
    assert options["model"] == said["-m"]
    assert options["placement"] == said["-ot"] == "exps=CPU"
    if "--lazy-mode" in said:
        auto, off = (parse(["llama-server", "--lazy-mode", mode]) for mode in ("auto", "off"))
        assert options["lazy_mode"] == auto["lazy_mode"] != off["lazy_mode"]
    if "-md" in said:
        assert options["draft"] == said["-md"]
        assert options["speculation"][-1] == "COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK"
        assert options["draft_n_max"] == int(said["--spec-draft-n-max"]) == 5
        assert options["fit"] is False


def test_a_word_misspelt_is_refused(parse: Parse, words: tuple[str, ...]) -> None:
    """So what passes above has been read."""
    for place, word in enumerate(words):
        if word.startswith("-"):
            with pytest.raises(Refused, match=f"invalid argument: {word}x"):
                parse([*words[:place], f"{word}x", *words[place + 1 :]])


def test_llama_cpp_takes_the_lines_of_the_readme(parse: Parse) -> None:
    told = re.findall(r"`(llama-server [^`]+)`", README.read_text())
    assert told
    for line in told:
        assert parse(line.split())["model"].startswith("TARGET"), line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--lazy-mode", "automatic"),
        ("--spec-type", "dspark"),
        ("--fit", "none"),
        ("-ot", "exps"),
        ("-ot", "exps=RAM"),
        ("--spec-draft-n-max", "five"),
    ],
)
def test_a_value_that_it_does_not_know_is_refused(parse: Parse, option: str, value: str) -> None:
    with pytest.raises(Refused, match=option):
        parse(["llama-server", option, value])


def test_the_type_of_speculation_is_known_to_mainline_too() -> None:
    """Its module has no parser for a server, but drafts by the same names."""
    module = available(install.mainline_packages) / install.PINS["mainline"]["wasm"]
    content = module.read_bytes()
    assert all(word in content for word in (b"--spec-type", b"draft-dspark"))
