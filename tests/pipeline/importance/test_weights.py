"""Weights of columns: from sums and counts, for the experts that stay, for both forms."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import RecipeError, SourceError
from pipeline.importance.matrix import read_importance
from pipeline.importance.neutral import mean_weights, searchable
from pipeline.importance.weights import Weights
from pipeline.model.layout import Layout
from pipeline.model.targets.draft import draft_tensors
from pipeline.model.targets.trunk import target_tensors
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.guard import IMPORTANCE_RANGE
from pipeline.quant.types import TYPES
from tests.gguf_builder import small_config
from tests.pipeline.importance.writing import (
    N_TOKENS,
    dat_bytes,
    gguf_bytes,
    measured,
    write_imatrix,
)

CONFIG = replace(small_config(), n_experts=7)
TARGETS = target_tensors(CONFIG, Layout.FORK)
BY_NAME = {target.name: target for target in TARGETS}
DOWN, DENSE, GROUPED = (
    f"blk.2.{name}.weight" for name in ("ffn_down_exps", "attn_q_a", "attn_output_a")
)
KEEP = tuple(tuple(sorted({0, 2, 3, (layer + 4) % 7})) for layer in range(CONFIG.n_layers))
KEEP = tuple(layer if len(layer) == 4 else (0, 2, 3, 6) for layer in KEEP)
CUT = {target.name: target for target in target_tensors(CONFIG, Layout.FORK, KEEP)}


def weights(path, prior=1.0, keep=None):
    return Weights(read_importance(path), prior, keep, CONFIG.n_experts if keep else None)


def test_the_mean_square_of_each_column_with_the_neutral_weight_as_some_tokens_more():
    sums = np.array([[8, 4], [3, 9], [5, 5]], np.float32)
    counts = np.array([4, 2, 0], np.float32)
    neutral = (6 / 4 + 6 / 2) / 2
    for prior in (0, 1, 2.5):
        expected = [
            [(8 + prior * neutral) / (4 + prior), (4 + prior * neutral) / (4 + prior)],
            [(3 + prior * neutral) / (2 + prior), (9 + prior * neutral) / (2 + prior)],
            [neutral, neutral],
        ]
        np.testing.assert_allclose(mean_weights(sums, counts, prior), expected, rtol=1e-12)


def test_a_column_that_was_always_zero_is_as_important_as_any():
    sums = np.array([[0, 4, 8], [0, 2, 0]], np.float32)
    found = mean_weights(sums, np.array([4, 1], np.float32), 1.0)
    neutral = (1 + 2 / 3) / 2
    np.testing.assert_allclose(found[:, 0], neutral)
    np.testing.assert_allclose(found[1, 2], neutral)
    np.testing.assert_allclose(found[0, 1], (4 + neutral) / 5)


def test_without_a_prior_they_are_the_floats_that_llama_quantize_divides():
    random = np.random.default_rng(3)
    sums = random.lognormal(0, 9, (5, 300)).astype(np.float32)
    counts = random.integers(1, 10**6, 5).astype(np.float32)
    np.testing.assert_array_equal(searchable(mean_weights(sums, counts, 0)), sums / counts[:, None])


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e10, 1e30])
def test_weights_at_any_scale_can_be_searched_with_and_give_the_same_bytes(scale):
    random = np.random.default_rng(5)
    plain = random.lognormal(0, 1, (1, 256))
    power = 2.0 ** np.round(np.log2(scale))
    found = searchable(plain * power)
    assert IMPORTANCE_RANGE[0] <= found.max() <= IMPORTANCE_RANGE[1]
    quantizer, q3 = GgmlQuantizer(), TYPES["Q3_K"]
    rows = random.standard_normal((4, 256)).astype(np.float32)
    made = np.empty((2, 4, q3.row_nbytes(256)), np.uint8)
    quantizer.quantize(q3, rows, made[0], found[0])
    quantizer.quantize(q3, rows, made[1], searchable(plain)[0])
    np.testing.assert_array_equal(made[0], made[1])


def test_no_weight_becomes_zero_however_small():
    found = searchable(np.array([[1e-300, 1.0], [1e-60, 1e-20]]))
    assert (found > 0).all()
    assert found[1, 1] > IMPORTANCE_RANGE[0]


@pytest.mark.parametrize("name", [DOWN, DENSE])
def test_a_gguf_matrix_gives_each_expert_its_own_row(tmp_path, name):
    path = write_imatrix(tmp_path / "m", TARGETS, unseen=[3])
    sums, counts = measured(TARGETS, seed=0, unseen=[3])[name]
    found = weights(path, 2.0).of(BY_NAME[name])
    np.testing.assert_allclose(found, mean_weights(sums, counts, 2.0), rtol=1e-6)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert not found.flags.writeable
    assert len(found) == len(BY_NAME[name].matrices)


def test_the_form_before_gguf_gives_means_alone_and_an_even_row_for_who_saw_nothing(tmp_path):
    path = write_imatrix(tmp_path / "m", TARGETS, form="dat", unseen=[3])
    sums, counts = measured(TARGETS, seed=0, unseen=[3])[DOWN]
    expected = mean_weights(sums, counts, 0.0)
    for prior in (0, 50.0):
        found = weights(path, prior).of(BY_NAME[DOWN])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(set(found[3])) == 1
    assert found[3, 0] != 1
    assert weights(path).identity == weights(path, 50.0).identity


def test_a_file_converted_to_gguf_has_one_count_for_all_and_no_prior(tmp_path):
    sums, counts = measured(TARGETS, seed=0, unseen=[3])[DOWN]
    means = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], 1)
    entry = ((means * 1024).reshape(1, -1), np.array([1024]))
    path = write_imatrix(tmp_path / "m", TARGETS, unseen=[3], changes={DOWN: entry})
    found = weights(path, 9.0)
    expected = mean_weights(sums, counts, 0.0)
    np.testing.assert_allclose(found.of(BY_NAME[DOWN]), expected, rtol=1e-5)
    assert found.counts_of(BY_NAME[DOWN]) is None
    np.testing.assert_array_equal(found.counts_of(BY_NAME[DOWN.replace("down", "up")]), counts)


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_a_cut_model_gets_the_rows_of_who_stays_in_their_order(tmp_path, form):
    whole = write_imatrix(tmp_path / "whole", TARGETS, form=form, unseen=[2])
    cut_entries = {
        name: tuple(part[list(KEEP[int(name.split(".")[1])])] for part in entry)
        for name, entry in measured(TARGETS, seed=0, unseen=[2]).items()
        if "_exps" in name
    }
    cut = write_imatrix(tmp_path / "cut", TARGETS, form=form, unseen=[2], changes=cut_entries)
    one, other, plain = weights(whole, keep=KEEP), weights(cut, keep=KEEP), weights(cut)
    for name in (DOWN, DENSE, "blk.5.ffn_gate_exps.weight"):
        expected = one.of(CUT[name])
        assert len(expected) == len(CUT[name].matrices)
        np.testing.assert_allclose(other.of(CUT[name]), expected, rtol=1e-5)
        np.testing.assert_array_equal(plain.of(CUT[name]), other.of(CUT[name]))
    sums, counts = (part[list(KEEP[2])] for part in measured(TARGETS, seed=0, unseen=[2])[DOWN])
    expected = mean_weights(sums, counts, 1.0 if form == "gguf" else 0.0)
    np.testing.assert_allclose(one.of(CUT[DOWN]), expected, rtol=1e-5)


def test_rows_that_one_matrix_multiplies_in_groups_share_the_mean_of_the_groups(tmp_path):
    target = BY_NAME[GROUPED]
    random = np.random.default_rng(1)
    sums = random.lognormal(0, 1, (4, target.n_cols)).astype(np.float32)
    made = {
        GROUPED: (sums.reshape(1, -1), np.array([50])),
        f"{GROUPED} (reshaped)": (sums, np.full(4, 50)),
    }
    expected = mean_weights(sums, np.full(4, 50), 1.0).mean(axis=0, keepdims=True)
    for name, entry in made.items():
        (tmp_path / "m").write_bytes(gguf_bytes({name: entry}))
        np.testing.assert_allclose(weights(tmp_path / "m").of(target), expected, rtol=1e-6)


def test_the_engram_projection_is_the_same_matrix_in_either_layout(tmp_path):
    fork, main = "blk.1.engram_wkv.weight", "blk.1.engram_kv.weight"
    mainline = {target.name: target for target in target_tensors(CONFIG, Layout.MAINLINE)}
    path = write_imatrix(tmp_path / "m", [BY_NAME[fork]])
    np.testing.assert_array_equal(weights(path).of(mainline[main]), weights(path).of(BY_NAME[fork]))
    path = write_imatrix(tmp_path / "n", [mainline[main]])
    np.testing.assert_array_equal(weights(path).of(mainline[main]), weights(path).of(BY_NAME[fork]))


def test_tables_vectors_drafts_and_what_was_not_measured_have_none(tmp_path):
    named = {name: (np.ones((1, 64)), np.ones(1)) for name in BY_NAME}
    (tmp_path / "m").write_bytes(gguf_bytes(named))
    found = weights(tmp_path / "m")
    without = {name for name, target in BY_NAME.items() if not found.has(target)}
    assert {"token_embd.weight", "blk.1.engram_embd.weight", "blk.2.attn_norm.weight"} <= without
    assert not without & {DOWN, DENSE, "output.weight", "blk.1.engram_wkv.weight"}
    assert all(found.of(BY_NAME[name]) is None for name in without)
    assert not any(found.has(target) for target in draft_tensors(CONFIG))
    path = write_imatrix(tmp_path / "n", TARGETS, changes={DENSE: None})
    assert weights(path).of(BY_NAME[DENSE]) is None
    assert not weights(path).has(BY_NAME[DENSE])


N_COLS = BY_NAME[DOWN].n_cols
DENSE_COLS = BY_NAME[DENSE].n_cols


def ones(n, width, n_counts=None):
    return np.ones((n, width)), np.ones(n_counts or n)


MISFITS = {
    "width of a stack": (DOWN, ones(7, N_COLS * 2), "another width.*expected 7 of 32 columns"),
    "odd width": (DENSE, ones(1, DENSE_COLS + 1), r"another width.*found 1 of 65 columns"),
    "width": (DENSE, ones(1, DENSE_COLS * 2), "another number of matrices.*found 2 of 64"),
    "experts": (DOWN, ones(5, N_COLS), r"another number.*expected 7 of 32 columns; found 5 of 32"),
    "an expert": (DOWN, ones(1, N_COLS), "another number of matrices"),
}


@pytest.mark.parametrize(("name", "entry", "message"), MISFITS.values(), ids=MISFITS)
def test_what_is_of_another_model_is_refused_by_name(tmp_path, name, entry, message):
    path = write_imatrix(tmp_path / "m", TARGETS, changes={name: entry})
    with pytest.raises(SourceError, match=message) as caught:
        weights(path).of(BY_NAME[name])
    assert (caught.value.file, caught.value.tensor) == (str(path), name)


def test_a_cut_model_takes_neither_fewer_nor_more(tmp_path):
    for n in (3, 5, 6, 8):
        path = write_imatrix(tmp_path / f"m{n}", TARGETS, changes={DOWN: ones(n, N_COLS)})
        with pytest.raises(SourceError, match=r"4 of 32 columns, or 7 before the cut; found"):
            weights(path, keep=KEEP).of(CUT[DOWN])


def spoiled(value, at=3, part=0):
    entry = [array.copy() for array in measured(TARGETS, seed=0)[DOWN]]
    entry[part].flat[at] = value
    return tuple(entry)


BAD = {
    "NaN": (spoiled(np.nan), "no sum of squares.*found nan at 3; 1 of 224 are wrong"),
    "infinite": (spoiled(np.inf), "no sum of squares.*found inf"),
    "negative": (spoiled(-1, at=40), "no sum of squares.*found -1.0 at 40"),
    "NaN count": (spoiled(np.nan, part=1), "no number of tokens.*found nan at 3"),
    "negative count": (spoiled(-2, part=1), "no number of tokens.*found -2.0"),
    "zeros": ((np.zeros((7, N_COLS)), np.ones(7)), "nothing but zeros"),
    "nobody": ((np.ones((7, N_COLS)), np.zeros(7)), "saw nothing of a tensor"),
}


@pytest.mark.parametrize(("entry", "message"), BAD.values(), ids=BAD)
def test_values_that_are_no_weights_are_refused_by_name(tmp_path, entry, message):
    path = write_imatrix(tmp_path / "m", TARGETS, changes={DOWN: entry})
    with pytest.raises(SourceError, match=message) as caught:
        weights(path).of(BY_NAME[DOWN])
    assert (caught.value.file, caught.value.tensor) == (str(path), DOWN)
    assert weights(path).of(BY_NAME[DENSE]) is not None


def test_a_nan_of_the_form_before_gguf_is_refused_too(tmp_path):
    path = write_imatrix(tmp_path / "m", TARGETS, form="dat", changes={DOWN: spoiled(np.nan)})
    with pytest.raises(SourceError, match="no sum of squares"):
        weights(path).of(BY_NAME[DOWN])


def test_experts_that_stay_must_have_seen_something(tmp_path):
    gone = [expert for expert in range(7) if expert not in KEEP[2]]
    sums, counts = measured(TARGETS, seed=0)[DOWN]
    counts[list(KEEP[2])] = 0
    assert counts[gone].all()
    path = write_imatrix(tmp_path / "m", TARGETS, changes={DOWN: (sums, counts)})
    with pytest.raises(SourceError, match="saw nothing of a tensor"):
        weights(path, keep=KEEP).of(CUT[DOWN])


def test_a_matrix_that_changes_meanwhile_is_noticed(tmp_path):
    path = write_imatrix(tmp_path / "m", TARGETS)
    found = weights(path)
    found.of(BY_NAME[DOWN])
    path.write_bytes(path.read_bytes() + bytes(32))
    found.of(BY_NAME[DOWN])
    with pytest.raises(SourceError, match="changed since it was opened"):
        found.of(BY_NAME[DENSE])


@pytest.mark.parametrize("prior", [-1, np.nan, np.inf])
def test_a_prior_is_a_number_of_tokens(tmp_path, prior):
    with pytest.raises(RecipeError, match="no number of tokens"):
        weights(write_imatrix(tmp_path / "m", TARGETS), prior)


def test_the_identity_is_of_the_file_the_prior_and_the_experts(tmp_path):
    path = write_imatrix(tmp_path / "m", TARGETS)
    write_imatrix(tmp_path / "same", TARGETS)
    write_imatrix(tmp_path / "other", TARGETS, seed=1)
    identity = weights(path).identity
    assert weights(tmp_path / "same").identity == identity
    others = [weights(tmp_path / "other"), weights(path, 2.0), weights(path, keep=KEEP)]
    others.append(weights(path, keep=KEEP[::-1]))
    assert len({str(one.identity) for one in others} | {str(identity)}) == 5


def test_threads_share_a_few_remembered_tensors(tmp_path, monkeypatch):
    path = write_imatrix(tmp_path / "m", TARGETS)
    found = weights(path)
    measured_ones = [target for target in TARGETS if found.has(target)]
    expected = {target.name: weights(path).of(target) for target in measured_ones}
    reads = []
    true = Weights._read
    monkeypatch.setattr(
        Weights,
        "_read",
        lambda self, entry, one: (reads.append(one.name), true(self, entry, one))[1],
    )
    failures = []

    def work(offset):
        for target in measured_ones[offset::4] * 2:
            for _ in range(3):
                if not np.array_equal(found.of(target), expected[target.name]):
                    failures.append(target.name)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(found._remembered) <= 4
    reads.clear()
    last = measured_ones[-1]
    found.of(last)
    assert reads.count(last.name) <= 1
    before = len(reads)
    found.of(last)
    assert len(reads) == before


def test_n_tokens_of_a_dense_tensor_count_too(tmp_path):
    found = weights(write_imatrix(tmp_path / "m", TARGETS), 1.0)
    np.testing.assert_array_equal(found.counts_of(BY_NAME[DENSE]), [N_TOKENS])
    dat = tmp_path / "d"
    dat.write_bytes(dat_bytes(measured(TARGETS, seed=0)))
    assert weights(dat).counts_of(BY_NAME[DENSE]) is None
