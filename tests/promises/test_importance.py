"""Importance matrices with gaps and faults, through the whole job."""

import numpy as np
import pytest

from pipeline.experts.keep_json import write_keep
from tasks.job import Job
from tasks.request import JobParameters
from tests.pipeline.cut.models import keep_of
from tests.pipeline.importance.writing import measured, write_imatrix
from tests.promises.whole_job import run_job

RECIPE = """
extends = "lowbit-q2_k"

[sub_roles]
routed_up = "Q2_K"

[draft]
mode = "drop"
"""
FOLDER = "mini-low-mainline"
STACK = "blk.2.ffn_down_exps.weight"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "low.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def targets(small_miniature, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "out"
    plan = Job(JobParameters(str(small_miniature), "lowbit-q2_k", str(out))).plans[0]
    return [tensor.target for tensor in plan.tensors]


def changed(targets, name, change):
    sums, counts = (one.copy() for one in measured(targets, seed=0)[name])
    change(sums, counts)
    return {name: (sums, counts)}


def poisoned(sums, _):
    sums[1, 3] = np.nan


def unseen(sums, counts):
    sums[:] = counts[:] = 0


FAULTS = {
    "one NaN": (poisoned, "no sum of squares|NaN|nan"),
    "all zero": (unseen, "saw nothing|zero"),
}


def test_fd_14_a_matrix_with_gaps_makes_a_file_that_says_what_was_missing(
    small_miniature, tmp_path, recipe, targets, capfd
):
    """None of it for the engram's projections, experts unseen, nothing ever for tables."""
    gaps = {name: None for name in measured(targets, seed=0) if "engram" in name}
    imatrix = write_imatrix(tmp_path / "i.gguf", targets, unseen=[0, 2], changes=gaps)
    outcome = run_job(small_miniature, tmp_path / "out", recipe, imatrix=str(imatrix))
    assert outcome.ok, outcome.text
    told = capfd.readouterr().out
    assert "tensors without an entry" in told
    assert "engram_kv" in told
    assert (tmp_path / "out" / FOLDER / "imatrix.json").exists()
    assert "without imatrix" in told


@pytest.mark.parametrize("fault", FAULTS)
def test_fd_14_a_value_that_is_no_weight_stops_the_job_before_it_begins(
    small_miniature, tmp_path, recipe, targets, fault
):
    change, message = FAULTS[fault]
    changes = changed(targets, STACK, change)
    imatrix = write_imatrix(tmp_path / "i.gguf", targets, changes=changes)
    outcome = run_job(small_miniature, tmp_path / "out", recipe, imatrix=str(imatrix))
    assert not outcome.ok
    assert STACK in outcome.text
    assert any(word in outcome.text for word in message.split("|")), outcome.text
    assert not list(tmp_path.rglob("*.part"))


def test_fd_14_another_width_is_named(small_miniature, tmp_path, recipe, targets):
    sums, counts = measured(targets, seed=0)[STACK]
    changes = {STACK: (sums[:, :-32], counts)}
    imatrix = write_imatrix(tmp_path / "i.gguf", targets, changes=changes)
    outcome = run_job(small_miniature, tmp_path / "out", recipe, imatrix=str(imatrix))
    assert not outcome.ok
    assert f"{STACK}" in outcome.text
    assert "another width" in outcome.text


def test_fd_14_types_that_need_one_are_refused_before_the_library_is_called(
    small_miniature, tmp_path, recipe
):
    recipe.write_text(RECIPE.replace("Q2_K", "IQ2_S"))
    outcome = run_job(small_miniature, tmp_path / "out", recipe)
    assert not outcome.ok
    assert "IQ2_S" in outcome.text
    assert "--imatrix" in outcome.text


def test_fd_14_a_matrix_of_the_uncut_model_is_cut_with_the_keep_list(
    small_miniature, tmp_path, targets
):
    """Each kept expert keeps its own weights: those of a matrix that holds only the kept ones."""
    keep = keep_of(2, n_experts=4, n_layers=6, seed=3)
    write_keep(tmp_path / "keep.json", keep)
    recipe = tmp_path / "low.toml"
    recipe.write_text(RECIPE)
    whole = write_imatrix(tmp_path / "whole.gguf", targets)
    entries = measured(targets, seed=0)
    for name, (sums, counts) in entries.items():
        if "_exps" in name:
            kept = list(keep.layers[int(name.split(".")[1])])
            entries[name] = (sums[kept], counts[kept])
    own = write_imatrix(tmp_path / "own.gguf", targets, changes=entries)
    jobs = [
        Job(
            JobParameters(
                str(small_miniature),
                str(recipe),
                str(tmp_path / "out"),
                keep=str(tmp_path / "keep.json"),
                imatrix=str(path),
            )
        )
        for path in (whole, own)
    ]
    stacks = [t.target for t in jobs[0].plans[0].tensors if "_exps" in t.name]
    assert stacks
    for target in stacks:
        cut, given = (job.weighing.importance(target) for job in jobs)
        # The mean of all experts is the prior of one matrix, that of the kept ones of the other.
        assert cut.shape == given.shape == (2, target.n_cols)
        assert np.corrcoef(cut[0], given[0])[0, 1] > 0.999
        assert np.corrcoef(cut[0], given[1])[0, 1] < 0.9
