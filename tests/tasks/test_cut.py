"""Cutting experts from the command line: outputs, refusals, second runs and kills."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline import files
from pipeline.errors import FormatError, OutputError, PlanError, QuantmillError, VerifyError
from pipeline.experts.criterion import Criterion
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.canonical import write_saliency
from pipeline.experts.keep_json import keep_digest, read_keep_json, write_keep
from pipeline.experts.origin import Origin
from pipeline.experts.routing import routing_of
from pipeline.experts.saliency import SaliencyTable, Sum
from pipeline.experts.select import select
from pipeline.gguf.digests import check_digests
from pipeline.gguf.model_file import read_draft, read_model
from pipeline.model.contract.pair import check_pair
from pipeline.model.layout import Layout
from pipeline.source.reader import SourceReader
from tasks.cut.experts import CutExperts
from tasks.cut.imatrix import CutImatrix
from tasks.cut.job import CutJob, CutParameters
from tasks.cut.plan import AcceptCut, PlanCut, disk_need
from tasks.naming import listed_digests
from tests.pipeline.cut.models import N_EXPERTS, N_LAYERS, keep_of, shards, write_lists
from tests.pipeline.cut.test_imatrix import entries, wanted, write_dat
from tests.pipeline.filling import refusing, sha256_of
from tests.tasks.commands import command, files_of, luigi

COUNTS = (5, 3)


def lists(folder: Path) -> str:
    """One list of our own form and one that only names experts."""
    write_keep(folder / "ours.json", keep_of(COUNTS[0]))
    write_lists(folder / "theirs.json", keep_of(COUNTS[1]).layers)
    return "ours.json,theirs.json"


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder in which a model with its draft has been cut by two lists, and what was said."""
    cwd = tmp_path_factory.mktemp("cut")
    shards(cwd / "whole", Layout.FORK, with_draft=True)
    result = luigi("CutExperts", "--path", "whole", "--keep", lists(cwd), cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return cwd, result


class TestAFinishedCut:
    def test_there_is_an_output_for_each_list(self, finished):
        cwd, _ = finished
        for n_kept in COUNTS:
            folder = cwd / f"out/small-{n_kept}E"
            model = read_model(folder)
            assert model.key_values["deepseek41.expert_count"].value == n_kept
            draft = read_draft(model.files[0].path)
            assert check_pair(model, draft) == []
            names = {path.name for path in folder.iterdir()}
            stems = (f"small-{n_kept}E", f"small-{n_kept}E-draft")
            assert {
                *(file.path.name for one in (model, draft) for file in one.files),
                *(f"{stem}.{end}" for stem in stems for end in ("inv.json", "inventory.json")),
                *("budget.md", "budget.json", "budget.png", "keep.json"),
                *("manifest.json", "plan.json", "SHA256SUMS"),
            } == names

    def test_manifest_and_keys_name_the_list(self, finished):
        cwd, _ = finished
        for n_kept in COUNTS:
            folder = cwd / f"out/small-{n_kept}E"
            manifest = json.loads((folder / "manifest.json").read_text())
            keep = read_keep_json(folder / "keep.json")
            assert keep.layers == keep_of(n_kept).layers
            digest = read_model(folder).key_values["quantmill.experts.keep_sha256"].value
            assert manifest["experts"]["keep_sha256"] == keep_digest(keep) == digest
            assert manifest["experts"]["keep_experts"] == n_kept
            assert manifest["draft"]["target_sha256"] == manifest["target"]["sha256"]
            assert manifest["source"]["name"] == "small"

    def test_store_and_read_bytes_are_told_apart(self, finished):
        cwd, _ = finished
        for n_kept in COUNTS:
            budget = json.loads((cwd / f"out/small-{n_kept}E/budget.json").read_text())
            assert [step["step"] for step in budget["steps"]] == [
                *("source", "plan", "written", "final")
            ]
            routed = [
                next(line for line in step["roles"] if line["role"] == "routed")
                for step in budget["steps"]
            ]
            store, read = ([line[key] for line in routed] for key in ("nbytes", "per_token_nbytes"))
            assert [n * N_EXPERTS for n in store[1:]] == [store[0] * n_kept] * 3
            assert read == [read[0]] * 4

    def test_every_file_is_as_it_is_listed(self, finished):
        cwd, _ = finished
        for n_kept in COUNTS:
            folder = cwd / f"out/small-{n_kept}E"
            listed = listed_digests(folder)
            assert len(listed) == 7 + 8
            assert check_digests(folder, listed) == []

    def test_what_is_shared_and_what_is_taken_was_told_first(self, finished):
        _, result = finished
        told = result.stdout.partition("written: ")[0]
        assert "small-5E: 3 of 7 files stay as they are" in told
        assert "disk: output still to be written" in told
        assert "vLLM has no routing kernel for 5 experts" in told

    def test_a_second_run_says_so_and_writes_nothing(self, finished):
        cwd, _ = finished
        before = files_of(cwd / "out")
        result = luigi("CutExperts", "--path", "whole", "--keep", lists(cwd), cwd=cwd)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("nothing to do: ") == 2
        assert files_of(cwd / "out") == before


@pytest.fixture
def whole(tmp_path):
    return shards(tmp_path / "whole", Layout.MAINLINE, with_draft=True)


def other_lists(folder: Path) -> None:
    """Lists of another model, lists that lack something, and two that keep as many."""
    write_keep(folder / "more.json", keep_of(5, n_experts=8))
    write_lists(folder / "short.json", keep_of(5).layers[:-1])
    write_lists(folder / "unlike.json", [*keep_of(5).layers[:-1], (0, 1, 2)])
    write_lists(folder / "few.json", [[0]] * N_LAYERS)
    (folder / "none.json").write_text('{"format": "expert-keep/1"}')
    write_keep(folder / "one.json", keep_of(5))
    write_keep(folder / "two.json", keep_of(5, seed=1))


BAD = {
    "more.json": "made for another number of experts in a layer",
    "short.json": "layer 5",
    "unlike.json": "layer 5 keeps another number of experts",
    "few.json": "keeps fewer experts than a token uses",
    "none.json": "not of the form expert-keep/1",
    "absent.json": "cannot open for reading",
    "one.json,two.json": "two keep lists would give outputs of one name",
    "one.json,short.json": "layer 5",
}


def task(kind, folder, keep="one.json"):
    paths = ",".join(str(folder / name) for name in keep.split(","))
    return kind(path=str(folder / "whole"), keep=paths, out=str(folder / "out"), threads=2)


@pytest.mark.parametrize(("keep", "message"), BAD.items(), ids=BAD)
def test_a_bad_list_is_refused_before_a_byte_is_written(whole, tmp_path, keep, message):
    other_lists(tmp_path)
    with pytest.raises(QuantmillError, match=message):
        task(CutExperts, tmp_path, keep).complete()
    assert not (tmp_path / "out").exists()


def test_a_model_that_no_loader_takes_is_refused(whole, tmp_path):
    other_lists(tmp_path)
    first = read_model(whole).files[0]
    content = whole.read_bytes()
    key = b"deepseek41.expert_weights_scale"
    whole.write_bytes(content.replace(key, b"deepseek41.expert_weights_scalf"))
    assert read_model(whole).files[0].nbytes == first.nbytes
    with pytest.raises(FormatError, match=r"the key deepseek41\.expert_weights_scale is missing"):
        task(CutExperts, tmp_path).complete()


def test_a_model_that_runs_wrong_is_refused(whole, tmp_path):
    """One bucket size is another: every loader takes it, and looks up wrong rows."""
    other_lists(tmp_path)
    sizes = read_model(whole).key_values["deepseek41.ple.head_vocab_sizes"].value
    stored = struct.pack("<2Q", *sizes[:2])
    content = whole.read_bytes()
    assert content.count(stored) == 1
    whole.write_bytes(content.replace(stored, struct.pack("<2Q", sizes[0] + 2, sizes[1] - 2)))
    with pytest.raises(QuantmillError, match="bucket sizes"):
        list(task(CutExperts, tmp_path).requires())


def test_the_models_own_folder_is_no_place_for_the_output(tmp_path):
    shards(tmp_path / "out" / f"small-{N_EXPERTS}E", Layout.FORK)
    write_keep(tmp_path / "all.json", keep_of(N_EXPERTS))
    (tmp_path / "whole").symlink_to(tmp_path / "out" / f"small-{N_EXPERTS}E")
    with pytest.raises(OutputError, match="the model's own"):
        task(CutExperts, tmp_path, "all.json").complete()


def test_what_does_not_fit_on_the_disk_is_refused_at_the_start(whole, tmp_path, monkeypatch):
    other_lists(tmp_path)
    accept = AcceptCut(spec="", **task(CutExperts, tmp_path, "one.json").passed_on())
    need = disk_need(accept.job)
    written = [shard for shard in accept.job.variants[0].shards if shard.existing is None]
    assert need.missing == sum(shard.nbytes for shard in written)
    monkeypatch.setattr(files, "free_nbytes", lambda _: need.missing - 1)
    with pytest.raises(OutputError, match="does not fit on the disk"):
        accept.run()
    monkeypatch.setattr(files, "is_same_disk", lambda *_: False)
    assert disk_need(accept.job).missing == sum(s.nbytes for s in accept.job.variants[0].shards)


def test_experts_that_were_copied_wrong_get_no_names(whole, tmp_path, monkeypatch):
    """Journal and read-back know only what was written; the second path knows the model."""
    other_lists(tmp_path)
    copied = SourceReader.copy_rows

    def wrong(reader, matrix, begin, out):
        copied(reader, matrix, begin, out)
        if matrix.weight == "blk.2.ffn_up_exps.weight" and begin == 0:
            out[0, 0] ^= 1

    job = task(CutExperts, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(SourceReader, "copy_rows", wrong)
        patch.setattr(files, "_copy_file_range", refusing(errno.EXDEV))
        for shard in job.requires():
            shard.run()
    with pytest.raises(VerifyError, match=r"tensor blk\.2\.ffn_up_exps.*no expert of the model"):
        job.run()
    assert not list(tmp_path.glob("out/*/*.gguf"))


def test_a_plan_tells_all_and_writes_nothing(whole, tmp_path, capsys):
    other_lists(tmp_path)
    task(PlanCut, tmp_path).run()
    told = capsys.readouterr().out
    assert "small-5E-00001-of-00006.gguf" in told
    assert "disk: output still to be written" in told
    assert not (tmp_path / "out").exists()


def test_an_importance_matrix_is_cut_by_the_same_list(tmp_path, capsys):
    made = entries()
    path = write_dat(tmp_path / "imatrix.dat", made)
    write_keep(tmp_path / "keep.json", keep_of(5))
    words = {"path": str(path), "keep": str(tmp_path / "keep.json"), "out": str(tmp_path / "cut")}
    CutImatrix(**words).run()
    assert f"{3 * N_LAYERS} entries with 5 of 7 experts" in capsys.readouterr().out
    expected = write_dat(tmp_path / "wanted.dat", wanted(made)).read_bytes()
    assert (tmp_path / "cut").read_bytes() == expected
    with pytest.raises(OutputError, match="there already"):
        CutImatrix(**words).show()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_goes_on_and_gives_the_same_bytes(finished, tmp_path, seed):
    cwd, _ = finished
    shards(tmp_path / "whole", Layout.FORK, with_draft=True)
    words = ("CutExperts", "--path", "whole", "--keep", lists(tmp_path), "--workers", 2)
    run = subprocess.Popen(
        command(*words),
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("out/.quantmill/*/shard.gguf"))) < 2 * seed:
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.001)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait(timeout=60)
    assert not list(tmp_path.glob("out/*/manifest.json"))
    result = luigi(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for n_kept in COUNTS:
        for path in (cwd / f"out/small-{n_kept}E").glob("*.gguf"):
            assert sha256_of(tmp_path / f"out/small-{n_kept}E" / path.name) == sha256_of(path)


def saliency(path):
    draw = np.random.default_rng(3)
    counts = np.full((N_LAYERS, 7), 6.0)
    norms = draw.random((N_LAYERS, 7))
    sums = {Sum.COUNTS: counts, Sum.GATES: counts / 2, Sum.NORMS: norms, Sum.WEIGHTED_NORMS: norms}
    table = SaliencyTable("observed", Honesty.TRUE_GATE, (Origin("0" * 64, "text"),), sums)
    write_saliency(path, table)
    return table


def test_one_command_goes_from_saliency_to_every_variant(whole, tmp_path):
    table = saliency(tmp_path / "observed.safetensors")
    words = {"saliency": str(tmp_path / "observed.safetensors"), "experts": "5,6"}
    parameters = CutParameters(str(whole), "", str(tmp_path / "out"), **words)
    variants = CutJob(parameters).variants
    routing = routing_of(variants[0].whole.plans[0].config)
    chosen = [select(table, Criterion.REAP, n, routing).keep for n in (5, 6)]
    assert [v.keep.layers for v in variants] == [keep.layers for keep in chosen]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"keep": ""}, "nothing says which experts stay"),
        ({"keep": "a", "saliency": "b"}, "two things say what stays"),
        ({"keep": "", "saliency": "S", "experts": "many"}, "--experts must say how many"),
    ],
)
def test_one_thing_must_say_what_stays(whole, tmp_path, words, what):
    saliency(tmp_path / "observed.safetensors")
    given = {k: v.replace("S", str(tmp_path / "observed.safetensors")) for k, v in words.items()}
    job = CutJob(CutParameters(str(whole), out=str(tmp_path / "out"), **given))
    with pytest.raises(PlanError, match=what):
        len(job.variants)
