"""Finished files as a plan and as a source: what is there, in the words of what is to be made."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.blocks import blocks_of_shard
from pipeline.budget import final_items, plan_items
from pipeline.cut.file_plan import plan_of_file
from pipeline.errors import SourceError
from pipeline.gguf.as_source import as_checkpoint
from pipeline.gguf.model_file import read_model
from pipeline.model.layout import Layout
from pipeline.plan import Transform
from pipeline.report.inventory import inventory, planner_array
from pipeline.source.reader import SourceReader
from pipeline.source.spec import Codec, MatrixRef, Picks
from pipeline.verify import verify_files
from tests.gguf_builder import draft_plan, plan_contents, small_v4_config, write_plan
from tests.gguf_builder import small_plan as plan_in
from tests.pipeline.cut.models import CONFIG, MASTERS, plan_of

PLANS = {
    "mainline": lambda: plan_of(Layout.MAINLINE),
    "fork": lambda: plan_of(Layout.FORK),
    "V4": lambda: plan_in(Layout.MAINLINE, small_v4_config()),
    "draft": lambda: draft_plan(CONFIG),
}


@pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)
def test_what_was_planned_is_read_back(tmp_path, made):
    plan = made()
    model = read_model(write_plan(plan, tmp_path))
    found = plan_of_file(model)
    assert (found.name, found.form) == (plan.name, plan.form)
    assert [entry.key for entry in found.key_values] == [entry.key for entry in plan.key_values]
    assert (found.nbytes, found.data_nbytes) == (plan.nbytes, plan.data_nbytes)
    for one, other in zip(found.shards, plan.shards, strict=True):
        same = ("no", "kind", "file_name", "header", "nbytes", "alignment")
        assert all(getattr(one, name) == getattr(other, name) for name in same)
        assert one.existing.path == tmp_path / one.file_name
        for this, that in zip(one.tensors, other.tensors, strict=True):
            assert (this.name, this.type, this.offset) == (that.name, that.type, that.offset)
            assert this.target.shape == that.target.shape
            assert this.target.layer == that.target.layer
            assert this.transform is Transform.COPY
    assert verify_files(found, [file.path for file in model.files]) == []
    assert plan_items(found) == plan_items(plan) == final_items(found, model)
    assert planner_array(found) == planner_array(plan)
    assert inventory(found)["engram"] == inventory(plan)["engram"]


@pytest.mark.parametrize("layout", Layout, ids=str)
@pytest.mark.parametrize("make", MASTERS.values(), ids=MASTERS)
def test_blocks_cover_every_byte_and_copy_it(tmp_path, make, layout):
    model = read_model(make(tmp_path, layout))
    contents, found = plan_contents(plan_of(layout)), {}
    with SourceReader(as_checkpoint(model)) as source:
        for shard in plan_of_file(model).shards:
            for block in blocks_of_shard(shard):
                out = np.empty((block.end - block.begin, block.tensor.row_nbytes), np.uint8)
                source.copy_rows(block.matrices[0], block.begin, out)
                assert block.offset == block.tensor.offset + len(found.get(block.tensor.name, b""))
                found[block.tensor.name] = found.get(block.tensor.name, b"") + out.tobytes()
    assert found == contents


STACK, VECTOR = "blk.0.ffn_up_exps.weight", "blk.0.exp_probs_b.bias"


@pytest.fixture
def source(tmp_path):
    model = read_model(MASTERS["single"](tmp_path, Layout.FORK))
    with SourceReader(as_checkpoint(model)) as reader:
        yield reader


def rows(name, n_rows, n_cols, entries, *, n_stored=7, ggml_type="MXFP4"):
    picks = Picks(entries, n_stored)
    return MatrixRef(Codec.GGML, name, None, n_rows, n_cols, picks=picks, ggml_type=ggml_type)


@pytest.mark.parametrize("entries", [(1, 2, 6), (0,), range(2, 6)], ids=str)
@pytest.mark.parametrize("step", [1, 31, 33, 1000])
def test_matrices_picked_of_a_stack_are_their_rows(source, entries, step):
    stored = plan_contents(plan_of(Layout.FORK))[STACK]
    experts = [stored[e * 32 * 34 : (e + 1) * 32 * 34] for e in range(7)]
    matrix, found = rows(STACK, 32 * len(entries), 64, entries), b""
    for begin in range(0, matrix.n_rows, step):
        out = np.empty((min(step, matrix.n_rows - begin), 34), np.uint8)
        source.copy_rows(matrix, begin, out)
        found += out.tobytes()
    assert found == b"".join(experts[entry] for entry in entries)


def test_elements_picked_of_a_vector_are_one_row(source):
    stored = np.frombuffer(plan_contents(plan_of(Layout.FORK))[VECTOR], "<f4")
    out = np.empty((1, 12), np.uint8)
    source.copy_rows(rows(VECTOR, 1, 3, (0, 4, 5), ggml_type="F32"), 0, out)
    assert out.view("<f4")[0].tolist() == stored[[0, 4, 5]].tolist()


MISFITS = {
    "type": (rows(STACK, 32, 64, (1,), ggml_type="Q8_0"), "another dtype"),
    "number of entries": (rows(STACK, 32, 64, (1,), n_stored=6), "another shape"),
    "rows of an entry": (rows(STACK, 31, 64, (1,)), "another shape"),
    "no tensor": (rows("blk.0.nothing", 32, 64, (1,)), "no such tensor"),
}


@pytest.mark.parametrize(("matrix", "message"), MISFITS.values(), ids=MISFITS)
def test_rows_that_are_not_stored_so_are_refused(source, matrix, message):
    with pytest.raises(SourceError, match=message):
        source.copy_rows(matrix, 0, np.empty((1, 34), np.uint8))


def test_a_file_that_changed_after_its_header_was_read_is_not_read_on(tmp_path):
    model = read_model(MASTERS["single"](tmp_path, Layout.FORK))
    changed = replace(model.files[0], modified_ns=model.files[0].modified_ns - 1)
    checkpoint = as_checkpoint(replace(model, files=(changed,)))
    with SourceReader(checkpoint) as reader, pytest.raises(SourceError, match="changed after"):
        reader.copy_rows(rows(STACK, 32, 64, (1,)), 0, np.empty((1, 34), np.uint8))
