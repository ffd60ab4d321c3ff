"""Observing experts from the command line, up to the keep list that is made of it."""

import json
import os
import signal
import subprocess

import numpy as np
import pytest

from pipeline.experts.importers.canonical import read_provenance
from pipeline.experts.importers.open import read_halves, read_saliency
from pipeline.experts.saliency import Sum
from tasks.observe.job import ObserveJob, ObserveParameters
from tests.pipeline.observe.observing import Model, arithmetic_of, observed
from tests.promises.sessions import alive, wait_until
from tests.tasks.commands import command, files_of, luigi

N_TOKENS = 300
LONGEST = 64
WORDS = ("--calibration", "text", "--tokens", N_TOKENS, "--sequence", LONGEST, "--threads", 1)


def write_text(folder):
    random = np.random.default_rng(0)
    syllables = [first + second for first in "bcdfg" for second in "aeiou"]

    def words(count):
        return " ".join("".join(random.choice(syllables, 2)) for _ in range(count))

    (folder / "text").mkdir()
    (folder / "text" / "a.md").write_text(words(60))
    lines = [json.dumps({"text": words(count)}) for count in (3, 40, 200)]
    (folder / "text" / "b.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def folder(small_miniature, tmp_path_factory):
    """A folder in which an observation has run."""
    cwd = write_text(tmp_path_factory.mktemp("observation"))
    result = luigi("ObserveExperts", "--source", small_miniature, *WORDS, cwd=cwd)
    assert result.returncode == 0, result.stderr
    (cwd / "said").write_text(result.stdout)
    return cwd


def test_the_file_is_what_the_pipeline_measures(folder, small_miniature):
    path = folder / "observed.safetensors"
    table, model = read_saliency(path), Model(small_miniature)
    said = read_provenance(path)
    assert table.tokens == (N_TOKENS,) * model.config.n_layers
    assert table.origins[0].sha256 == said["calibration"]["sha256"]
    assert said["calibration"]["tokens"] == N_TOKENS
    assert said["calibration"]["longest"] == LONGEST
    assert sum(half.tokens[0] for half in read_halves(path)) == N_TOKENS
    job = ObserveJob(
        ObserveParameters(
            str(small_miniature),
            str(folder / "text"),
            str(path),
            N_TOKENS,
            LONGEST,
            "cpu",
            "float32",
        )
    )
    assert job.is_observed
    sums = observed(model, job.sequences.tokens, arithmetic_of("float64")).sums.sum(axis=0)
    for n, name in enumerate(Sum):
        np.testing.assert_allclose(table.sums[name], sums[n], rtol=1e-4)
    assert list(folder.glob(".quantmill/observe/*")) == []


def test_the_cost_is_told_beforehand(folder):
    said = (folder / "said").read_text()
    before, _, after = said.partition("layer 0: ")
    for words in (
        "floating-point operations",
        "memory: at most",
        "disk: two states",
        "time, roughly",
    ):
        assert words in before
    assert "perplexity of the text's beginning" in after


@pytest.mark.slow
def test_a_second_run_does_nothing_and_a_plan_writes_nothing(folder, small_miniature):
    before = files_of(folder)
    again = luigi("ObserveExperts", "--source", small_miniature, *WORDS, cwd=folder)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    plan = luigi("PlanObservation", "--source", small_miniature, *WORDS, cwd=folder)
    assert plan.returncode == 0, plan.stderr
    assert f"{N_TOKENS}" in plan.stdout
    assert files_of(folder) == before


REFUSED = {
    "another observation": (("--tokens", 200), "not of this observation"),
    "no such device": (("--out", "b", "--device", "cuda:77"), "there is no such device"),
    "no text": (("--out", "b", "--calibration", "said"), "calibration text of unknown form"),
    "a short sequence": (("--out", "b", "--sequence", 1), "--sequence must be"),
    "no tokens": (("--out", "b", "--tokens", 1), "the calibration text is empty"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_observed_is_refused(words, message, folder, small_miniature):
    given = dict(zip(WORDS[::2], WORDS[1::2], strict=True)) | dict(
        zip(words[::2], words[1::2], strict=True)
    )
    flat = [word for pair in given.items() for word in pair]
    result = luigi("ObserveExperts", "--source", small_miniature, *flat, cwd=folder)
    assert result.returncode == 30
    assert message in result.stderr
    assert not (folder / "b").exists()


@pytest.mark.slow
def test_v4_is_refused_with_the_reason(small_v4_miniature, folder):
    result = luigi(
        "ObserveExperts", "--source", small_v4_miniature, *WORDS, "--out", "v4", cwd=folder
    )
    assert result.returncode == 30
    assert "first layers look them up by token id" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", [1, 4])
def test_a_killed_observation_goes_on(n_layers, folder, small_miniature, tmp_path):
    write_text(tmp_path)
    words = command("ObserveExperts", "--source", small_miniature, *WORDS)
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stdout:
        if line.startswith(f"layer {n_layers - 1}: "):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert wait_until(lambda: alive(process.pid) == [])  # its task process ends itself
    assert not (tmp_path / "observed.safetensors").exists()
    records = list(tmp_path.glob(".quantmill/observe/*/layer-*.json"))
    assert len(records) >= n_layers
    result = luigi("ObserveExperts", "--source", small_miniature, *WORDS, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"{len(records)} of 6 layers are done already" in result.stdout
    whole = (folder / "observed.safetensors").read_bytes()
    assert (tmp_path / "observed.safetensors").read_bytes() == whole


@pytest.mark.slow
def test_the_file_becomes_a_keep_list(folder, small_miniature):
    words = ("--saliency", "observed.safetensors", "--experts", 3, "--source", small_miniature)
    result = luigi("SelectExperts", *words, cwd=folder)
    assert result.returncode == 0, result.stderr
    keep = json.loads((folder / "keep.json").read_bytes())
    assert "true-gate" in json.dumps(keep)
