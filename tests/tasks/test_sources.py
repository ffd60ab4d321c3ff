"""The window of fetched files that lie on the disk while sources are let go."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.source.checkpoint import Checkpoint
from pipeline.source.header import SourceFile
from pipeline.source.hub.snapshot import HubSnapshot
from tasks.origin import Origin
from tasks.sources import SPARE_FILES, Sources

FOLDER = Path("nowhere")
LOCAL = "local.safetensors"


def sources_of(sizes):
    """Files of a hub, in fetching order, and one of 1 TB that is read where it lies."""
    names = [f"model-{no:05}.safetensors" for no, _ in enumerate(sizes, start=1)]
    nbytes = {**dict(zip(names, sizes, strict=True)), LOCAL: 10**12}
    files = {
        name: SourceFile(FOLDER / name, n, header_nbytes=0, header_sha256="", tensors={})
        for name, n in nbytes.items()
    }
    checkpoint = Checkpoint(FOLDER, {}, "", None, files, {}, None)
    hub = Origin(checkpoint, HubSnapshot("owner/name", "0" * 40, "main", {}), FOLDER)
    origins = {**dict.fromkeys(names, hub), LOCAL: Origin(checkpoint)}
    return Sources(checkpoint, origins, [LOCAL, *names])


many_sizes = st.lists(st.integers(1, 10**12), min_size=1, max_size=60)


@given(many_sizes)
def test_what_must_be_gone_comes_earlier_so_nothing_waits_for_itself(sizes):
    sources = sources_of(sizes)
    order = sources.fetched()
    for at, name in enumerate(order):
        gone = sources.let_go_before(name)
        assert gone == order[: len(gone)]
        assert len(gone) <= at


@given(many_sizes)
def test_whatever_lies_beside_the_last_file_fits_the_window(sizes):
    sources = sources_of(sizes)
    order = sources.fetched()
    for at, name in enumerate(order):
        gone = set(sources.let_go_before(name))
        live = [other for other in order[: at + 1] if other not in gone]
        assert name in live
        assert sum(map(sources.nbytes, live)) <= sources.window_nbytes()


@given(many_sizes)
def test_once_gone_means_gone_for_all_later_files(sizes):
    sources = sources_of(sizes)
    cuts = [len(sources.let_go_before(name)) for name in sources.fetched()]
    assert cuts == sorted(cuts)


@given(many_sizes)
def test_no_more_is_let_go_than_must_be(sizes):
    sources = sources_of(sizes)
    order = sources.fetched()
    for at, name in enumerate(order):
        gone = sources.let_go_before(name)
        if gone:
            live = order[len(gone) - 1 : at + 1]
            assert sum(map(sources.nbytes, live)) > sources.window_nbytes()


@pytest.mark.parametrize(
    ("sizes", "window", "gone"),
    [
        ([5], 5, [0]),
        ([5, 5, 5], 15, [0, 0, 0]),
        ([5] * 6, 20, [0, 0, 0, 0, 1, 2]),
        ([1, 1, 1, 1, 1, 100], 103, [0, 0, 0, 0, 0, 2]),
        ([100, 1, 1, 1, 1, 1], 103, [0, 0, 0, 0, 1, 1]),
        ([9, 100, 9, 100, 9], 127, [0, 0, 0, 2, 2]),
    ],
    ids=["one file", "all fit", "equal", "large last", "large first", "two large"],
)
def test_the_window_holds_the_largest_file_and_some_ordinary_ones(sizes, window, gone):
    sources = sources_of(sizes)
    assert SPARE_FILES == 3
    assert sources.window_nbytes() == window
    assert [len(sources.let_go_before(name)) for name in sources.fetched()] == gone


def test_files_that_are_read_where_they_lie_take_no_room():
    sources = sources_of([1, 2, 3])
    assert LOCAL not in sources.fetched()
    assert sources_of([]).window_nbytes() == 0
    assert not sources_of([]).is_remote
