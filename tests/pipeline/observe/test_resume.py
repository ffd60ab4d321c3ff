"""Observations that are killed and go on, and states that somebody has touched."""

import errno
import shutil
import time

import numpy as np
import pytest

from pipeline import files
from pipeline.errors import OutputError
from pipeline.observe import needs
from pipeline.observe.disk_state import DiskState
from pipeline.observe.records import Records
from pipeline.observe.state import file_names
from tests.pipeline.filling import CHILDREN, SEAMS, Nth, dying, refusing
from tests.pipeline.observe.observing import SPEC, arithmetic_of, one_life

pytestmark = pytest.mark.slow

LENGTHS = (23, 40, 9)
STREAMS_NBYTES = 30_000
"""Streams of any of these are larger, all else is smaller."""


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    return one_life(model.folder, tmp_path_factory.mktemp("undisturbed"), LENGTHS)


def killed(model, folder, death):
    """A process that ends at that call; whether it did."""
    process = CHILDREN.Process(target=one_life, args=(model.folder, folder, LENGTHS, death))
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def whole_names(model, n_done):
    records = {f"layer-{n:02}.json" for n in range(n_done)}
    return records | set(file_names(model.config, n_done - 1) if n_done else ())


@pytest.mark.parametrize("n_records", [0, 1, 4])
def test_a_killed_run_goes_on_with_the_layer_where_it_stopped(
    n_records, model, undisturbed, tmp_path
):
    # The names of a layer's parts are given before its record is; layer 1 writes two of them.
    n_renames = {0: 1, 1: 4, 4: 20}[n_records]
    assert killed(model, tmp_path, Nth(["_replace"], n_renames, dying))
    records = Records(tmp_path, SPEC).load(model.config.n_layers)
    assert len(records) == n_records
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("layer-*.json")}
    assert np.array_equal(one_life(model.folder, tmp_path, LENGTHS), undisturbed)
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    assert names_in(tmp_path) == whole_names(model, model.config.n_layers)


def test_a_finished_run_computes_nothing_again(model, undisturbed, tmp_path):
    one_life(model.folder, tmp_path, LENGTHS)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert np.array_equal(one_life(model.folder, tmp_path, LENGTHS), undisturbed)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_death_at_every_few_calls(model, undisturbed, tmp_path):
    """Whatever stands under a final name is whole, and the sums come out the same."""
    n, n_deaths = 1, 0
    while True:
        folder = tmp_path / str(n)
        folder.mkdir()
        if not killed(model, folder, Nth(SEAMS, n, dying)):
            break
        n_deaths += 1
        done = Records(folder, SPEC).load(model.config.n_layers)
        assert whole_names(model, len(done)) <= names_in(folder)
        assert np.array_equal(one_life(model.folder, folder, LENGTHS), undisturbed)
        shutil.rmtree(folder)
        n += 113 if n > 20 else 7
    assert n_deaths > 10


def after_layers(model, folder, n_renames):
    assert killed(model, folder, Nth(["_replace"], n_renames, dying))


@pytest.mark.parametrize("name", ["streams-", "pre-", "rows-", "picks-"])
def test_a_touched_state_is_noticed(name, model, tmp_path):
    after_layers(model, tmp_path, 20)
    path = next(tmp_path.glob(f"{name}*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"not what was written.*Delete") as caught:
        one_life(model.folder, tmp_path, LENGTHS)
    assert caught.value.file == str(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda _: b"{",
        lambda _: b"[]",
        lambda whole: whole.replace(SPEC.encode(), b"another"),
        lambda whole: whole.replace(b'"gates"', b'"doors"'),
        lambda whole: whole.replace(b'"halves":[', b'"halves":[{},'),
    ],
    ids=["cut", "a list", "another spec", "no gates", "three halves"],
)
def test_a_damaged_record_is_noticed(change, model, tmp_path):
    after_layers(model, tmp_path, 20)
    path = tmp_path / "layer-01.json"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(OutputError, match="record of a layer is damaged"):
        one_life(model.folder, tmp_path, LENGTHS)


def test_a_full_disk_stops_the_run_and_leaves_it_able_to_go_on(
    model, undisturbed, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        Nth(["_pwrite"], 30, refusing(errno.ENOSPC)).install(patch)
        with pytest.raises(OutputError, match="Free some space"):
            one_life(model.folder, tmp_path, LENGTHS)
    assert 0 < len(Records(tmp_path, SPEC).load(9)) < model.config.n_layers
    assert np.array_equal(one_life(model.folder, tmp_path, LENGTHS), undisturbed)


def test_a_slow_disk_changes_nothing(model, undisturbed, tmp_path, monkeypatch):
    """Writing goes on in the background; what is read back meanwhile has to be there."""

    write = files._pwrite

    def slow(fd, content, offset):
        if len(content) > STREAMS_NBYTES:
            time.sleep(0.1)
        return write(fd, content, offset)

    monkeypatch.setattr(files, "_pwrite", slow)
    assert np.array_equal(one_life(model.folder, tmp_path, LENGTHS), undisturbed)


def test_no_more_than_two_states_lie_on_the_disk(model, tmp_path, monkeypatch):
    most, finish = [], DiskState.finish

    def watched(state):
        left = finish(state)
        sizes = [p.stat().st_size for p in tmp_path.iterdir() if p.suffix != ".json"]
        most.append(sum(sizes))
        return left

    monkeypatch.setattr(DiskState, "finish", watched)
    one_life(model.folder, tmp_path, LENGTHS)
    assert max(most) == needs.disk_nbytes(model.config, LENGTHS, arithmetic_of("float32"))
