"""Every mistake by name, who saw how much, and the tables that say so."""

import json
from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import Problems, SourceError
from pipeline.importance.check import (
    check_heads,
    check_values,
    unmeasured_names,
    unused_names,
)
from pipeline.importance.coverage import coverage_json, coverage_of
from pipeline.importance.matrix import read_importance
from pipeline.importance.weights import Weights
from pipeline.model.layout import Layout
from pipeline.model.targets.trunk import target_tensors
from pipeline.report.importance_table import importance_tables
from pipeline.report.tables import WIDTH, render_markdown, render_text
from tests.gguf_builder import small_config
from tests.pipeline.importance.writing import measured, write_imatrix

N_EXPERTS = 9
CONFIG = replace(small_config(), n_experts=N_EXPERTS)
TARGETS = target_tensors(CONFIG, Layout.MAINLINE)
KEEP = ((1, 2, 4, 5, 8),) * CONFIG.n_layers
UP, GATE, DOWN = (f"blk.3.ffn_{part}_exps.weight" for part in ("up", "gate", "down"))
DENSE = "blk.4.attn_q_b.weight"


def weights(path, keep=None):
    return Weights(read_importance(path), 1.0, keep, N_EXPERTS if keep else None)


def counted(name, counts):
    sums, _ = measured(TARGETS, seed=0)[name]
    return sums, np.array(counts, np.float32)


def test_a_matrix_of_this_model_passes(tmp_path):
    for form in ("gguf", "dat"):
        path = write_imatrix(tmp_path / form, TARGETS, form=form, unseen=[4])
        check_values(weights(path), TARGETS)


def test_all_mistakes_are_told_at_once(tmp_path):
    made = measured(TARGETS, seed=0)
    made[UP][0][2, 5] = np.nan
    wrong = {
        UP: made[UP],
        DOWN: (np.ones((4, 32)), np.ones(4)),
        DENSE: (np.ones((1, 7)), np.ones(1)),
        "output.weight": (np.zeros_like(made["output.weight"][0]), np.ones(1)),
    }
    found = weights(write_imatrix(tmp_path / "m", TARGETS, changes=wrong))
    with pytest.raises(Problems) as caught:
        check_values(found, TARGETS)
    # What does not fit is told before any value is read.
    assert {problem.tensor for problem in caught.value.problems} == {DOWN, DENSE}
    del wrong[DOWN], wrong[DENSE]
    found = weights(write_imatrix(tmp_path / "n", TARGETS, changes=wrong))
    check_heads(found, TARGETS)
    with pytest.raises(Problems) as caught:
        check_values(found, TARGETS)
    assert {problem.tensor for problem in caught.value.problems} == {UP, "output.weight"}


def test_a_matrix_of_another_model_is_refused(tmp_path):
    entry = np.ones((1, 8)), np.ones(1)
    path = write_imatrix(tmp_path / "m", (), changes={"blk.0.attn_q.weight": entry})
    with pytest.raises(
        SourceError, match=r"none of the model's tensors.*found blk.0.attn_q.weight"
    ):
        check_heads(weights(path), TARGETS)


def test_entries_without_a_tensor_and_tensors_without_an_entry_are_named(tmp_path):
    fused, draft = "blk.3.ffn_gate_up_exps.weight", "blk.9.ffn_up_exps.weight"
    entry = np.ones((N_EXPERTS, 64)), np.ones(N_EXPERTS)
    changes = {UP: None, GATE: None, fused: entry, draft: entry}
    found = weights(write_imatrix(tmp_path / "m", TARGETS, changes=changes))
    assert unused_names(found, TARGETS) == (fused, draft)
    assert unmeasured_names(found, TARGETS) == (GATE, UP)
    coverage = coverage_of(found, TARGETS)
    assert (coverage.unused, coverage.unmeasured) == ((fused, draft), (GATE, UP))
    assert coverage.n_used == found.matrix.n_entries - 2
    page = "".join(map(render_text, importance_tables(coverage)))
    assert f"{fused}, {draft}" in page
    assert f"2: {GATE}, {UP}" in page
    assert "as if there were no importance matrix" in page


COUNTS = (0, 3, 20, 9, 0, 10, 400, 30, 2)


def test_experts_are_counted_layer_by_layer(tmp_path):
    changes = {name: counted(name, COUNTS) for name in (UP, GATE, DOWN)}
    coverage = coverage_of(
        weights(write_imatrix(tmp_path / "m", TARGETS, changes=changes)), TARGETS
    )
    assert [layer.layer for layer in coverage.layers] == list(range(6))
    layer = coverage.layers[3]
    assert (layer.unseen, layer.rare, layer.least, layer.median) == ((0, 4), (1, 3, 8), 0, 9)
    assert coverage.is_counted
    assert coverage.n_unseen == 2
    assert coverage.n_rare == sum(len(one.rare) for one in coverage.layers) >= 3
    assert layer.n_experts == N_EXPERTS


def test_the_threshold_is_the_callers(tmp_path):
    changes = {name: counted(name, COUNTS) for name in (UP, GATE, DOWN)}
    found = weights(write_imatrix(tmp_path / "m", TARGETS, changes=changes))
    assert coverage_of(found, TARGETS, 4).layers[3].rare == (1, 8)
    assert coverage_of(found, TARGETS, 31).layers[3].rare == (1, 2, 3, 5, 7, 8)


def test_parts_put_together_count_where_they_saw_least(tmp_path):
    fewer = [min(count, 8) for count in COUNTS]
    changes = {UP: counted(UP, COUNTS), GATE: counted(GATE, COUNTS), DOWN: counted(DOWN, fewer)}
    found = weights(write_imatrix(tmp_path / "m", TARGETS, changes=changes))
    assert coverage_of(found, TARGETS).layers[3].rare == (1, 2, 3, 5, 6, 7, 8)


def test_experts_of_a_cut_model_bear_their_old_ids(tmp_path):
    changes = {name: counted(name, COUNTS) for name in (UP, GATE, DOWN)}
    path = write_imatrix(tmp_path / "m", TARGETS, changes=changes)
    cut = target_tensors(CONFIG, Layout.MAINLINE, KEEP)
    layer = coverage_of(weights(path, KEEP), cut).layers[3]
    assert (layer.n_experts, layer.unseen, layer.rare) == (5, (4,), (1, 8))


def test_without_counts_only_who_saw_nothing_is_known(tmp_path):
    path = write_imatrix(tmp_path / "m", TARGETS, form="dat", unseen=[2, 7])
    coverage = coverage_of(weights(path), TARGETS)
    assert not coverage.is_counted
    for layer in coverage.layers:
        assert (layer.unseen, layer.rare, layer.least, layer.median) == ((2, 7), None, None, None)
    facts, layers = importance_tables(coverage)
    assert "neutral prior" not in facts.values("what")
    assert layers.values("below 10 tokens") == (None,) * 7
    assert "does not say how many tokens" in render_markdown(layers)
    assert coverage_json(coverage)["prior"] is None


def test_the_tables_say_what_the_coverage_says(tmp_path):
    changes = {name: counted(name, COUNTS) for name in (UP, GATE, DOWN)}
    coverage = coverage_of(
        weights(write_imatrix(tmp_path / "m", TARGETS, changes=changes)), TARGETS
    )
    facts, layers = importance_tables(coverage)
    assert layers.rows[3].cells == ("3", 9, 2, 3, 0, 9.0, "0, 4; 1, 3, 8")
    assert layers.rows[-1].cells == ("total", 54, 2, coverage.n_rare, None, None, None)
    assert ("neutral prior", "worth 1 token") in [row.cells for row in facts.rows]
    assert ("sha256", coverage.matrix.sha256) in [row.cells for row in facts.rows]
    for table in (facts, layers):
        assert all(len(line) <= WIDTH for line in render_text(table).splitlines())


def test_long_lists_are_cut_short(tmp_path):
    path = write_imatrix(tmp_path / "m", TARGETS)
    coverage = coverage_of(weights(path), TARGETS)
    many = replace(coverage.layers[0], unseen=tuple(range(300)), rare=())
    _, layers = importance_tables(replace(coverage, layers=(many,)))
    assert layers.rows[0].cells[-1] == "0, 1, 2, 3, 4, 5 and 294 more; -"
    (facts,) = importance_tables(replace(coverage, layers=()))
    assert facts.title == "Importance matrix"


def test_json_holds_everything(tmp_path):
    changes = {name: counted(name, COUNTS) for name in (UP, GATE, DOWN)}
    path = write_imatrix(tmp_path / "m", TARGETS, changes=changes)
    written = coverage_json(coverage_of(weights(path), TARGETS))
    assert json.loads(json.dumps(written)) == written
    assert written["layers"][3] == {
        "layer": 3,
        "experts": 9,
        "unseen": [0, 4],
        "below_threshold": [1, 3, 8],
        "least_tokens": 0,
        "median_tokens": 9.0,
    }
    assert (written["file"], written["form"], written["threshold"]) == ("m", "gguf", 10)
