"""Shards made with an importance matrix: which weights reach which rows, and what it gains."""

import gguf
import numpy as np
import pytest

from pipeline.errors import Problems, RecipeError
from pipeline.measure import errors_by_role, measure_errors
from pipeline.model.roles import Role
from pipeline.report.error_report import error_table
from pipeline.report.tables import render_text
from pipeline.source.reader import SourceReader
from tasks.job import Job
from tasks.request import JobParameters
from tests.pipeline.filling import fill, shard_path
from tests.pipeline.importance.writing import measured, write_imatrix
from tests.pipeline.oracle import Oracle, encode

DENSE, ENGRAM, EXPERTS = 0, 1, 3

RECIPE = """
[roles]
routed = "Q3_K"
engram = "Q4_K"
attention = "Q4_K"
embedding = "BF16"
shared = "Q6_K"

[sub_roles]
routed_up = "Q2_K"
hyper_connection = "F32"
engram_gate = "F32"
output = "Q8_0"

[draft]
mode = "drop"
"""


def job_with(source, folder, *, imatrix="", recipe=RECIPE):
    path = folder / "weighted.toml"
    path.write_text(recipe)
    return Job(JobParameters(str(source), str(path), str(folder / "out"), imatrix=str(imatrix)))


@pytest.fixture(scope="module")
def targets(small_miniature, tmp_path_factory):
    job = job_with(
        small_miniature,
        tmp_path_factory.mktemp("targets"),
        recipe=RECIPE,
    )
    return [tensor.target for tensor in job.plans[0].tensors]


@pytest.fixture(scope="module")
def weighted(small_miniature, tmp_path_factory, targets):
    """The job, with dense and expert shards made."""
    folder = tmp_path_factory.mktemp("weighted")
    imatrix = write_imatrix(folder / "imatrix.gguf", targets, seed=3, unseen=[1])
    job = job_with(small_miniature, folder, imatrix=imatrix)
    fill(job, DENSE)
    fill(job, EXPERTS)
    return job


def test_every_expert_is_searched_with_its_own_weights(weighted, targets):
    """By hand: sums over counts with one token of the mean, a call of ggml for each expert."""
    oracle, made = Oracle(weighted.checkpoint), measured(targets, seed=3, unseen=[1])
    stored = {t.name: t for t in gguf.GGUFReader(shard_path(weighted, EXPERTS)).tensors}
    assert len(stored) == 3 * weighted.config.n_layers
    for tensor in weighted.shards[EXPERTS].tensors[-3:]:
        sums, counts = (one.astype(np.float64) for one in made[tensor.name])
        mean = (sums[counts > 0] / counts[counts > 0, None]).mean()
        weights = ((sums + mean) / (counts[:, None] + 1)).astype(np.float32)
        values = oracle.values(tensor).reshape(len(counts), -1, tensor.target.n_cols)
        expected = b"".join(map(encode, [tensor.type.name] * len(counts), values, weights))
        found = stored[tensor.name].data.tobytes()
        # The mean is a sum whose order is free: a weight may differ in its last bit.
        same = np.frombuffer(found, np.uint8) == np.frombuffer(expected, np.uint8)
        assert same.mean() > 0.999, tensor.name
        assert found != b"".join(
            encode(tensor.type.name, one, np.ones_like(weights[0])) for one in values
        )


def test_lookups_vectors_and_types_that_search_nothing_take_none(
    weighted, small_miniature, tmp_path
):
    plain = job_with(small_miniature, tmp_path)
    pairs = list(zip(weighted.shard_specs, plain.shard_specs, strict=True))
    assert weighted.weighing.importance(weighted.shards[ENGRAM].tensors[0].target) is None
    assert [a == b for a, b in pairs] == [False, True, False, False]


def test_the_gain_is_measured_and_shown(weighted):
    shard = weighted.shards[EXPERTS]
    with SourceReader(weighted.checkpoint) as source:
        errors = measure_errors(
            shard.tensors,
            shard_path(weighted, EXPERTS),
            source,
            n_rows=64,
            importance=weighted.weighing.importance,
            quantizer=weighted.quantizer,
        )
    assert all(error.is_weighted for error in errors)
    (routed,) = errors_by_role(errors)
    assert routed.role is Role.ROUTED
    assert routed.weighted.n_tensors == len(errors)
    assert 0 < routed.weighted.rmse < 0.9 * routed.weighted.without
    text = render_text(error_table(errors))
    assert f"{routed.weighted.rmse:.5f}" in text
    assert f"{routed.weighted.without:.5f}" in text


def test_the_metadata_names_the_matrix(weighted):
    fields = gguf.GGUFReader(shard_path(weighted, DENSE)).fields
    assert fields["quantize.imatrix.file"].contents() == "imatrix.gguf"
    assert fields["quantmill.imatrix.sha256"].contents() == weighted.weighing.weights.matrix.sha256


def test_types_that_need_one_are_refused_without(small_miniature, tmp_path):
    with pytest.raises((RecipeError, Problems), match="IQ2_XXS"):
        job_with(small_miniature, tmp_path, recipe=RECIPE.replace("Q2_K", "IQ2_XXS")).plans  # noqa: B018


def test_another_prior_makes_other_shards(small_miniature, tmp_path, weighted):
    recipe = RECIPE + "\n[imatrix]\nprior = 100.0\n"
    other = job_with(small_miniature, tmp_path, imatrix=weighted.parameters.imatrix, recipe=recipe)
    assert other.shard_specs[EXPERTS] != weighted.shard_specs[EXPERTS]
    assert other.shard_specs[ENGRAM] == weighted.shard_specs[ENGRAM]


def test_a_recipe_made_for_one_says_so(small_miniature, tmp_path):
    recipe = RECIPE + "\n[imatrix]\nrequired = true\n"
    with pytest.raises(RecipeError, match="made for an importance matrix"):
        job_with(small_miniature, tmp_path, recipe=recipe).plans  # noqa: B018
