"""The chart: a PNG of the promised size, the same bytes every time, whatever matplotlibrc says."""

from __future__ import annotations

import struct
from itertools import pairwise

import matplotlib
import pytest

from pipeline.budget import Budget, Item, budget_of
from pipeline.model.roles import Role, SubRole
from pipeline.report.chart import ROLE_COLOURS, chart_png
from tests.pipeline.released_plans import plan_budget, source_budget


def chunks(png: bytes) -> list[bytes]:
    """Names of the PNG's chunks."""
    names, at = [], 8
    while at < len(png):
        (nbytes,) = struct.unpack_from(">I", png, at)
        names.append(png[at + 4 : at + 8])
        at += nbytes + 12
    return names


def size(png: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from(">II", png, 16)
    return width, height


@pytest.fixture(scope="module")
def steps() -> list[Budget]:
    return [source_budget()[0], plan_budget("published-q3_k_m")]


@pytest.fixture(scope="module")
def png(steps: list[Budget]) -> bytes:
    return chart_png(steps, "a title")


def test_it_is_a_png_of_readable_size(png: bytes) -> None:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = size(png)
    assert width == 1200
    assert 400 <= height <= 600


def test_it_holds_no_date_and_no_program_name(png: bytes) -> None:
    assert set(chunks(png)) <= {b"IHDR", b"pHYs", b"IDAT", b"IEND"}


def test_same_steps_same_bytes_under_other_settings(steps: list[Budget], png: bytes) -> None:
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "savefig.dpi": 10}):
        assert chart_png(steps, "a title") == png


def test_another_number_gives_another_picture(steps: list[Budget], png: bytes) -> None:
    assert chart_png([steps[0], plan_budget("served")], "a title") != png


def test_every_step_gets_room(steps: list[Budget]) -> None:
    heights = [size(chart_png([*steps, *steps][:n], "t"))[1] for n in range(1, 5)]
    assert all(a < b for a, b in pairwise(heights))


def test_every_role_has_its_own_colour() -> None:
    assert set(ROLE_COLOURS) == set(Role)
    assert len(set(ROLE_COLOURS.values())) == len(Role)


@pytest.mark.parametrize("nbytes", [0, 1, 5_000_000], ids=["nothing", "one byte", "a miniature"])
def test_small_models_are_drawn_too(nbytes: int) -> None:
    item = Item("t", Role.SHARED, SubRole.SHARED_UP, "I8", nbytes, nbytes, nbytes)
    assert chart_png([budget_of("plan", [item])], "t").startswith(b"\x89PNG")
