"""Losses are those of really quantized rows, and are not measured twice."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import DecodeError
from pipeline.model.config import read_config
from pipeline.model.layout import Layout
from pipeline.model.targets.trunk import target_tensors
from pipeline.quant.dequant import dequantize
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.types import TYPES
from pipeline.solve.cache import ErrorCache
from pipeline.solve.measure import Measuring, measure
from pipeline.solve.sample import read_sample
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.reader import SourceReader

N_ROWS = 12
STACK, DENSE, TABLE, NORM, GATE = (
    "blk.0.ffn_down_exps.weight",
    "blk.0.attn_q_a.weight",
    "per_layer_token_embd.weight",
    "blk.0.attn_norm.weight",
    "blk.1.engram_gate.weight",
)


class Counting:
    """A quantizer that counts what it is asked for, and fails when told to."""

    name = "counting"

    def __init__(self):
        self.inner = GgmlQuantizer()
        self.asked = []
        self.fails_at = None

    def prepare(self, types):
        self.inner.prepare(types)

    def quantize(self, ggml_type, rows, out, importance):
        if len(self.asked) == self.fails_at:
            raise DecodeError("enough")
        self.asked.append((ggml_type.name, rows.shape, importance))
        self.inner.quantize(ggml_type, rows, out, importance)


@pytest.fixture(scope="module")
def targets(small_miniature):
    checkpoint = open_checkpoint(small_miniature)
    config = read_config(checkpoint.config, file=small_miniature, stored=checkpoint.weight_map)
    return {target.name: target for target in target_tensors(config, Layout.MAINLINE)}


@pytest.fixture(scope="module")
def source(small_miniature):
    with SourceReader(open_checkpoint(small_miniature)) as reader:
        yield reader


@pytest.fixture
def measuring(source, tmp_path):
    return Measuring(
        source, Counting(), ErrorCache(tmp_path), N_ROWS, lambda t: t.name, lambda _: "1"
    )


def types(*names):
    return tuple(TYPES[name] for name in names)


def all_rows(target, source):
    """Every decoded row, one matrix after the other."""
    parts = []
    for matrix in target.matrices:
        out = np.empty((matrix.n_rows, matrix.n_cols), np.float32)
        source.decode_rows(matrix, 0, out)
        parts.append(out)
    return parts


def losses(measuring, wanted, n_threads=1):
    return measure(wanted, measuring, n_threads=n_threads)


@pytest.mark.parametrize("name", [STACK, DENSE, TABLE])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q3_K"])
def test_a_loss_over_all_rows_is_that_of_the_tensor(measuring, targets, source, name, type_name):
    target, ggml_type = targets[name], TYPES[type_name]
    whole = replace(measuring, n_rows=target.n_rows)
    rows = np.concatenate(all_rows(target, source))
    packed = np.empty((len(rows), ggml_type.row_nbytes(target.n_cols)), np.uint8)
    GgmlQuantizer().quantize(ggml_type, rows, packed, None)
    lost = dequantize(ggml_type, packed, target.n_cols).astype(np.float64) - rows
    found = losses(whole, {target: (ggml_type,)})[name][type_name]
    assert found.squared_error == pytest.approx(np.square(lost).sum(), rel=1e-6)
    assert found.squared_norm == pytest.approx(np.square(rows.astype(np.float64)).sum(), rel=1e-6)
    assert (found.n_rows, found.n_rows_total) == (target.n_rows, target.n_rows)
    assert found.relative == pytest.approx(found.squared_error / found.squared_norm)


def test_a_sample_is_spread_over_experts_and_has_the_first_and_the_last_row(targets, source):
    target = targets[STACK]
    sample = read_sample(target, source, N_ROWS)
    assert {part.no for part in sample} == set(range(len(target.matrices)))
    assert sum(len(part.rows) for part in sample) == N_ROWS
    matrices = all_rows(target, source)
    assert (sample[0].rows[0] == matrices[0][0]).all()
    assert (sample[-1].rows[-1] == matrices[-1][-1]).all()
    for part in sample:
        assert all((matrices[part.no] == row).all(axis=1).any() for row in part.rows)
        assert part.bound >= np.abs(part.rows).max()


def test_runs_of_a_whole_tensor_end_where_a_matrix_does(targets, source):
    target = targets[STACK]
    sample = read_sample(target, source, target.n_rows)
    assert [part.no for part in sample] == list(range(len(target.matrices)))
    assert (
        np.concatenate([p.rows for p in sample]) == np.concatenate(all_rows(target, source))
    ).all()


def test_long_runs_are_read_in_pieces(targets, source, monkeypatch):
    monkeypatch.setattr("pipeline.solve.sample.RUN_WEIGHTS", 3 * targets[DENSE].n_cols)
    sample = read_sample(targets[DENSE], source, 10)
    whole = read_sample(targets[DENSE], source, targets[DENSE].n_rows)
    assert max(len(part.rows) for part in sample) <= 3
    assert max(len(part.rows) for part in whole) == 3
    assert sum(len(part.rows) for part in whole) == targets[DENSE].n_rows


def test_a_product_is_measured_as_a_product(targets, source):
    target = targets[GATE]
    (part,) = read_sample(target, source, target.n_rows)
    q, k = all_rows(target, source)
    assert (part.rows == q * k).all()


def test_what_loses_nothing_is_not_quantized(measuring, targets):
    found = losses(measuring, {targets[STACK]: types("MXFP4"), targets[NORM]: types("F32")})
    assert measuring.quantizer.asked == [("F32", (1, targets[NORM].n_cols), None)]
    assert found[STACK]["MXFP4"].relative == found[NORM]["F32"].relative == 0.0
    assert found[STACK]["MXFP4"].squared_norm > 0


def test_importance_is_that_of_the_expert_and_weighs_the_error(measuring, targets, source):
    target = targets[STACK]
    weights = np.ones((len(target.matrices), target.n_cols), np.float32)
    weights[1, ::2] = 50.0
    weighted = replace(measuring, importance=lambda _: weights, importance_identity=lambda _: "w")
    found = losses(weighted, {target: types("Q3_K", "Q8_0")})[target.name]
    by_type = {}
    for name, shape, importance in weighted.quantizer.asked:
        by_type.setdefault(name, []).append((shape, importance))
    # Q8_0 searches nothing, so its kernel gets none; its error is weighed all the same.
    assert all(importance is None for _, importance in by_type["Q8_0"])
    heaviest = [float(importance.max()) for _, importance in by_type["Q3_K"]]
    sample = read_sample(target, source, N_ROWS)
    assert heaviest == [50.0 if part.no == 1 else 1.0 for part in sample]
    norm = sum(
        float((np.square(part.rows.astype(np.float64)) * weights[part.no]).sum()) for part in sample
    )
    assert found["Q8_0"].squared_norm == pytest.approx(norm, rel=1e-6)
    plain = losses(measuring, {target: types("Q3_K", "Q8_0")})[target.name]
    assert found["Q8_0"].squared_error > 2 * plain["Q8_0"].squared_error


def test_the_second_time_nothing_is_read(measuring, targets):
    wanted = {targets[DENSE]: types("Q8_0", "Q4_K"), targets[STACK]: types("Q3_K")}
    first = losses(measuring, wanted, n_threads=3)
    n_asked = len(measuring.quantizer.asked)
    without = replace(measuring, source=None)
    assert losses(without, wanted) == first
    assert len(measuring.quantizer.asked) == n_asked
    # One more type of a tensor is measured alone, and what was known of it stays.
    losses(measuring, {targets[DENSE]: types("Q6_K")})
    assert {name for name, *_ in measuring.quantizer.asked[n_asked:]} == {"Q6_K"}
    assert losses(without, wanted) == first


CHANGES = {
    "another quantizer": {"version": lambda _: "2"},
    "another source": {"stamp": lambda _: "other"},
    "another matrix": {"importance_identity": lambda _: "other"},
    "another sample": {"n_rows": N_ROWS + 1},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_loss_depends_on_is_measured_anew(measuring, targets, change):
    wanted = {targets[DENSE]: types("Q8_0")}
    losses(measuring, wanted)
    before = len(measuring.quantizer.asked)
    losses(replace(measuring, **change), wanted)
    assert len(measuring.quantizer.asked) > before


def test_an_interrupted_measurement_goes_on(measuring, targets):
    wanted = {targets[DENSE]: types("Q8_0"), targets[TABLE]: types("Q8_0")}
    n_dense = len(read_sample(targets[DENSE], measuring.source, N_ROWS))
    measuring.quantizer.fails_at = n_dense
    with pytest.raises(DecodeError):
        losses(measuring, wanted)
    measuring.quantizer.fails_at = None
    measuring.quantizer.asked.clear()
    assert set(losses(measuring, wanted)) == {DENSE, TABLE}
    n_table = len(read_sample(targets[TABLE], measuring.source, N_ROWS))
    assert len(measuring.quantizer.asked) == n_table


@pytest.mark.parametrize(
    "content", ["", "[]", '{"Q8_0": 1}', '{"Q8_0": {"by": "1", "squared_error": NaN}}', "{"]
)
def test_a_damaged_cache_counts_as_none(measuring, targets, tmp_path, content):
    wanted = {targets[DENSE]: types("Q8_0")}
    first = losses(measuring, wanted)
    (path,) = tmp_path.glob("*.json")
    path.write_text(content)
    assert losses(measuring, wanted) == first
