"""Keep lists and pruned checkpoints, from the command line and as tasks in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import luigi
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from luigi.task_register import Register

from pipeline.errors import OutputError, PlanError, SourceError
from pipeline.experts.criterion import Criterion
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.canonical import write_saliency
from pipeline.experts.keep_json import keep_digest, read_keep_json, write_keep
from pipeline.experts.merge import merge
from pipeline.experts.recover import SAMPLE_NBYTES
from pipeline.experts.routing import Routing
from pipeline.experts.select import select
from pipeline.files import sha256_of
from pipeline.model.layout import Layout
from pipeline.prune import write as write_module
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.hub.access import HubAccess
from recipes import CutCheckpoint, PlanCheckpointCut, RecoverExperts, SelectExperts
from tasks.cut.checkpoint_job import open_checkpoint_cut
from tasks.job import Job
from tasks.keep.select import halves_of, parse_files, parse_places
from tasks.naming import listed_digests
from tasks.request import JobParameters
from tests.gguf_builder import draft_plan, small_config, small_plan, write_hollow
from tests.hub_server import HubServer
from tests.pipeline.experts.tables import random_table
from tests.pipeline.prune.pruning import expected, keep_of, stored
from tests.promises.whole_job import run_job
from tests.tasks.commands import files_of
from tests.tasks.commands import luigi as luigi_command

ROUTING = Routing(6, 4, 2, 1.5)
"""Of the small miniature."""


@pytest.fixture(autouse=True)
def fresh_tasks():
    Register.clear_instance_cache()
    open_checkpoint_cut.cache_clear()


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch):
    """Drawing takes longer than all the rest, and has tests of its own."""

    def curves(facts, title):
        return f"{title} {facts.layers}".encode()

    def overlap(report, n_experts, title, *, chosen):
        return f"{title} {chosen} {n_experts} {report.shares.tolist()}".encode()

    monkeypatch.setattr("pipeline.report.saliency_chart.curves_png", curves)
    monkeypatch.setattr("pipeline.report.saliency_overlap.overlap_png", overlap)


@pytest.fixture(scope="module")
def saliency(tmp_path_factory):
    """Two texts measured on the small miniature."""
    folder = tmp_path_factory.mktemp("saliency")
    tables = [random_table(seed, ROUTING) for seed in (3, 4)]
    paths = [folder / f"{name}.safetensors" for name in "ab"]
    for path, table in zip(paths, tables, strict=True):
        write_saliency(path, table)
    return paths, tables


def choose(source, paths, out, **words):
    given = {"saliency": ",".join(map(str, paths)), "experts": 3}
    where = {"source": str(source), "out": str(out)}
    task = SelectExperts(**{**given, **where, **words})
    task.run()
    return read_keep_json(Path(task.out))


def done(task):
    """A task after all that it requires, in this process."""
    for required in luigi.task.flatten(task.requires()):
        if not required.complete():
            done(required)
    task.run()


def cut(source, keep, out):
    """The folder of a cut by a list in a file."""
    done(CutCheckpoint(source=str(source), keep=str(keep), out=str(out)))
    return out


@pytest.fixture(scope="module")
def pruned(small_miniature, tmp_path_factory):
    """A cut of the small miniature, and its list."""
    folder, keep = tmp_path_factory.mktemp("pruned"), keep_of(3)
    write_keep(folder / "keep.json", keep)
    cut(small_miniature, folder / "keep.json", folder / "cut")
    return folder / "cut", keep


WRONG = {
    "no saliency": ({"saliency": ""}, PlanError, "experts are never chosen by their number"),
    "no file": ({"saliency": "none.pt"}, SourceError, "none.pt"),
    "a criterion": ({"criterion": "luck"}, PlanError, "unknown criterion.*reap.*found luck"),
    "too few": ({"experts": 1}, PlanError, "cannot be kept; expected 2"),
    "no pair": ({"forced": "3-1"}, PlanError, "layer:expert"),
    "no such expert": ({"forced": "3:4"}, PlanError, "layer 3, expert 4"),
    "no model": ({"source": "/nowhere/at all"}, SourceError, "no model here"),
    "a name": ({"out": "keep.txt"}, OutputError, "ends in .json"),
}


class TestSelectExperts:
    def test_it_writes_the_best_of_all_texts_and_says_why(
        self, small_miniature, saliency, tmp_path, capsys
    ):
        paths, tables = saliency
        out = tmp_path / "lists" / "k3.json"
        keep = choose(small_miniature, paths, out, halves=True)
        assert keep.layers == select(merge(tables), Criterion.REAP, 3, ROUTING).keep.layers
        assert keep.honesty is Honesty.TRUE_GATE
        names = ["k3-overlap.png", "k3.json", "k3.md", "k3.png"]
        assert sorted(path.name for path in out.parent.iterdir()) == names
        page, told = (out.parent / "k3.md").read_text(), capsys.readouterr().out
        for word in (small_miniature.name, "one half of the text", "vLLM has no routing kernel"):
            assert word in page
            assert word in " ".join(told.split())
        assert all(f"({name})" in page for name in ("k3.png", "k3-overlap.png"))

    def test_the_same_again_writes_nothing_and_another_is_refused(
        self, small_miniature, saliency, tmp_path
    ):
        paths, _ = saliency
        out = tmp_path / "keep.json"
        choose(small_miniature, paths, out)
        before, digests = files_of(tmp_path), contents(tmp_path)
        choose(small_miniature, paths, out)
        assert files_of(tmp_path) == before
        with pytest.raises(OutputError, match="another file of this name"):
            choose(small_miniature, paths, out, experts=2)
        with pytest.raises(OutputError, match="another file of this name"):
            choose(small_miniature, paths[:1], out)
        assert files_of(tmp_path) == before
        (tmp_path / "keep.png").write_bytes(b"an older drawing of ours")
        choose(small_miniature, paths, out)
        assert contents(tmp_path) == digests

    def test_a_page_of_others_is_not_replaced(self, small_miniature, saliency, tmp_path):
        (tmp_path / "keep.md").write_text("theirs")
        with pytest.raises(OutputError, match=r"keep\.md"):
            choose(small_miniature, saliency[0], tmp_path / "keep.json")
        assert [path.name for path in tmp_path.iterdir()] == ["keep.md"]
        assert (tmp_path / "keep.md").read_text() == "theirs"

    def test_forced_experts_stay(self, small_miniature, saliency, tmp_path):
        paths, _ = saliency
        plain = choose(small_miniature, paths, tmp_path / "a.json")
        (lost,) = set(range(4)) - set(plain.layers[2])
        forced = choose(small_miniature, paths, tmp_path / "b.json", forced=f"2:{lost}")
        assert lost in forced.layers[2]
        assert forced.choices[0].forced == ((2, lost),)

    def test_a_finished_gguf_names_the_model_as_well(self, saliency, tmp_path):
        config = small_config()
        first = write_hollow(small_plan(Layout.FORK, config), tmp_path / "gguf")
        routing = Routing(config.n_layers, config.n_experts, config.n_experts_used, 1.5)
        write_saliency(tmp_path / "s.safetensors", random_table(3, routing))
        for source in (first, first.parent):
            Register.clear_instance_cache()
            keep = choose(source, [tmp_path / "s.safetensors"], tmp_path / "keep.json")
            assert (keep.n_experts, keep.n_layers) == (config.n_experts, config.n_layers)

    def test_a_config_alone_will_do(self, small_miniature, saliency, tmp_path):
        (tmp_path / "model").mkdir()
        shutil.copy(small_miniature / "config.json", tmp_path / "model")
        one = choose(tmp_path / "model", saliency[0], tmp_path / "a.json")
        other = choose(tmp_path / "model" / "config.json", saliency[0], tmp_path / "b.json")
        assert one == other

    @pytest.mark.parametrize(("words", "kind", "message"), WRONG.values(), ids=WRONG)
    def test_what_is_wrong_is_told(
        self, small_miniature, saliency, tmp_path, monkeypatch, words, kind, message
    ):
        monkeypatch.chdir(tmp_path)
        words = {"source": small_miniature, "out": "keep.json", **words}
        with pytest.raises(kind, match=message):
            choose(paths=saliency[0], **words)
        assert list(tmp_path.iterdir()) == []

    def test_saliency_of_another_model_is_refused(self, small_miniature, tmp_path):
        other = tmp_path / "other.safetensors"
        write_saliency(other, random_table(3, Routing(6, 5, 2, 1.5)))
        with pytest.raises(PlanError, match="another number of experts; expected 4; found 5"):
            choose(small_miniature, [other], tmp_path / "keep.json")
        assert [path.name for path in tmp_path.iterdir()] == [other.name]

    def test_v4_is_refused(self, small_v4_miniature, saliency, tmp_path):
        with pytest.raises(PlanError, match="look them up by token id"):
            choose(small_v4_miniature, saliency[0], tmp_path / "keep.json")

    def test_one_sum_has_no_halves(self, small_miniature, saliency, tmp_path):
        with pytest.raises(SourceError, match="no two halves"):
            choose(small_miniature, saliency[0][:1], tmp_path / "keep.json", halves=True)


def contents(folder):
    return {path.name: sha256_of(path) for path in folder.iterdir()}


def test_halves_of_three_files_are_none(saliency):
    paths, tables = saliency
    with pytest.raises(SourceError, match="found 3 files"):
        halves_of([*paths, paths[0]], [*tables, tables[0]])


def test_files_and_places_as_people_write_them(tmp_path):
    odd = tmp_path / "a,b.pt"
    odd.touch()
    assert parse_files(str(odd)) == [odd]
    assert [str(path) for path in parse_files("a.pt, b.pt,")] == ["a.pt", "b.pt"]
    assert [str(path) for path in parse_files('["a,b.pt", "c.pt"]')] == ["a,b.pt", "c.pt"]
    assert parse_places("3:17, 5:2,3:1") == {3: {17, 1}, 5: {2}}
    assert parse_places("") == {}


class TestRecoverExperts:
    def test_from_folders(self, small_miniature, pruned, tmp_path, capsys):
        folder, keep = pruned
        out = tmp_path / "keep.json"
        RecoverExperts(base=str(small_miniature), pruned=str(folder), out=str(out)).run()
        found = read_keep_json(out)
        assert found.layers == keep.layers
        assert found.honesty is Honesty.RECOVERED
        assert "the scores are not known" in (tmp_path / "keep.md").read_text()
        assert "kept in each" not in capsys.readouterr().err

    def test_a_config_that_counts_wrongly_is_told(self, small_miniature, pruned, tmp_path, capsys):
        copy = tmp_path / "copy"
        shutil.copytree(pruned[0], copy)
        shutil.copy(small_miniature / "config.json", copy)
        task = RecoverExperts(
            base=str(small_miniature), pruned=str(copy), out=str(tmp_path / "keep.json")
        )
        task.run()
        assert "says 4 experts, its routers have 3" in " ".join(capsys.readouterr().out.split())

    def test_from_a_hub_only_routers_and_samples_are_read(self, hub, small_miniature, tmp_path):
        server, folder, keep = hub
        out = tmp_path / "keep.json"
        task = RecoverExperts(
            base="owner/base@main",
            pruned="owner/pruned@main",
            out=str(out),
            work=str(tmp_path / "out"),
        )
        task.run()
        found = read_keep_json(out)
        assert found.layers == keep.layers
        assert [origin.name for origin in found.choices[0].origins] == [
            f"routers of base@{'a' * 40}",
            f"routers of pruned@{'b' * 40}",
        ]
        asked = [one for one in server.requests if "safetensors" in one.file and begin_of(one) > 0]
        wanted = places(small_miniature, 4) | places(folder, 3)
        assert {(begin_of(one), one.nbytes) for one in asked} <= wanted
        expert, routers = 104_448, 12_480 + 9_360
        assert sum(one.nbytes for one in asked) == routers + 2 * 6 * expert
        files = {one.file for one in server.requests if one.file.endswith(".safetensors")}
        assert not {f"model-{n:05}-of-00014.safetensors" for n in (1, 2, 9, 10, 11, 12)} & files

    def test_two_models_that_have_nothing_in_common(
        self, small_miniature, small_v4_miniature, tmp_path
    ):
        task = RecoverExperts(
            base=str(small_miniature), pruned=str(small_v4_miniature), out=str(tmp_path / "k.json")
        )
        with pytest.raises(SourceError):
            task.run()
        assert list(tmp_path.iterdir()) == []


def begin_of(request):
    return int(request.range.removeprefix("bytes=").split("-")[0]) if request.range else 0


def places(folder, n_experts):
    """Where routers lie, and the beginnings of experts: offset and bytes."""
    found = set()
    for file in open_checkpoint(folder).files.values():
        for tensor in file.tensors.values():
            if tensor.name.startswith("layers.") and ".ffn.gate." in tensor.name:
                found.add((tensor.offset, tensor.nbytes))
            if tensor.name.startswith("layers.") and ".ffn.experts." in tensor.name:
                found.add((tensor.offset, min(tensor.nbytes, SAMPLE_NBYTES)))
    return found


@pytest.fixture
def hub(small_miniature, pruned, tmp_path, monkeypatch):
    """Base and pruned checkpoint on a hub on loopback."""
    close_session()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub cache"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    with HubServer() as server:
        for module in ("remote", "resolve"):
            monkeypatch.setattr(
                f"pipeline.source.hub.{module}.HubAccess", lambda: HubAccess(server.url)
            )
        server.add_commit("owner/base", small_miniature, commit="a" * 40)
        server.add_commit("owner/pruned", pruned[0], commit="b" * 40)
        yield server, *pruned
    close_session()


def test_selecting_reads_a_hubs_config_and_nothing_else(hub, saliency, tmp_path):
    server, *_ = hub
    choose("owner/base@main", saliency[0], tmp_path / "keep.json")
    asked = {one.file for one in server.requests if not one.file.startswith("api/")}
    assert asked == {"config.json"}
    assert "owner/base@" + "a" * 40 in (tmp_path / "keep.md").read_text()
    assert not (tmp_path / "out").exists()


class TestCutCheckpoint:
    def test_what_is_left_is_a_checkpoint(self, small_miniature, pruned):
        folder, keep = pruned
        assert stored(folder) == expected(stored(small_miniature), keep)
        config = json.loads((folder / "config.json").read_text())
        assert config["text_config"]["n_routed_experts"] == 3
        assert config["text_config"]["dspark_n_routed_experts"] == 1
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (folder / name).read_bytes() == (small_miniature / name).read_bytes()
        assert read_keep_json(folder / "keep.json") == keep
        assert "chosen by REAP" in (folder / "README.md").read_text()
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert hidden == []
        assert not (folder / "generated.json").exists()

    def test_what_is_made_of_it_says_what_it_lost(self, pruned, tmp_path):
        folder, keep = pruned
        job = Job(JobParameters(str(folder), "native", str(tmp_path / "out")))
        keys = {entry.key: entry.value for entry in job.plans[0].key_values}
        assert keys["quantmill.experts.keep_sha256"] == keep_digest(keep)
        assert keys["deepseek41.expert_count"] == 3

    def test_every_file_is_listed_by_its_digest(self, pruned):
        folder, _ = pruned
        listed = listed_digests(folder)
        assert {name: sha256_of(folder / name) for name in listed} == listed
        unlisted = {path.name for path in folder.iterdir()} - listed.keys()
        assert unlisted == {"SHA256SUMS", "manifest.json"}

    def test_it_is_whole_until_something_changes(self, small_miniature, pruned, tmp_path):
        folder, _ = pruned
        keep, copy = folder.parent / "keep.json", tmp_path / "copy"
        shutil.copytree(folder, copy)
        whole = CutCheckpoint(source=str(small_miniature), keep=str(keep), out=str(folder))
        assert whole.complete()
        (copy / "model-00005-of-00014.safetensors").unlink()
        task = CutCheckpoint(source=str(small_miniature), keep=str(keep), out=str(copy))
        assert not task.complete()
        before = files_of(copy)
        done(task)
        assert contents(copy) == contents(folder)
        rewritten = {n for n, state in files_of(copy).items() if before.get(n) != state}
        assert {n for n in rewritten if n.endswith(".safetensors")} == {
            "model-00005-of-00014.safetensors"
        }

    def test_a_killed_run_goes_on_with_the_file_it_was_at(
        self, small_miniature, pruned, tmp_path, monkeypatch
    ):
        folder, _ = pruned
        keep, out = str(folder.parent / "keep.json"), tmp_path / "cut"
        real, written = write_module.files.rename, []

        def dying(part, final):
            if final.name.endswith(".safetensors"):
                written.append(final.name)
                if len(written) == 3:
                    raise KeyboardInterrupt
            real(part, final)

        with monkeypatch.context() as patched:
            patched.setattr(write_module.files, "rename", dying)
            with pytest.raises(KeyboardInterrupt):
                cut(small_miniature, keep, out)
        assert not (out / "manifest.json").exists()
        assert not (out / "config.json").exists()
        before = files_of(out)
        Register.clear_instance_cache()
        cut(small_miniature, keep, out)
        assert contents(out) == contents(folder)
        after = files_of(out)
        assert all(after[name] == before[name] for name in written[:2])

    def test_a_folder_of_something_else_is_left_alone(self, small_miniature, pruned, tmp_path):
        keep = pruned[0].parent / "keep.json"
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "notes.txt").write_text("theirs")
        with pytest.raises(OutputError, match="files of another origin"):
            cut(small_miniature, keep, tmp_path / "theirs")
        assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["notes.txt"]
        write_keep(tmp_path / "other.json", keep_of(3, seed=1))
        before = files_of(pruned[0])
        with pytest.raises(OutputError, match="holds another cut"):
            cut(small_miniature, tmp_path / "other.json", pruned[0])
        with pytest.raises(OutputError, match="the checkpoint's own"):
            cut(small_miniature, keep, small_miniature)
        assert files_of(pruned[0]) == before

    def test_a_disk_that_is_too_small_is_told_before(
        self, small_miniature, pruned, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("tasks.cut.checkpoint_job.files.free_nbytes", lambda _: 7_000_000)
        with pytest.raises(OutputError, match=r"does not fit.*expected 7,773,784 bytes"):
            cut(small_miniature, pruned[0].parent / "keep.json", tmp_path / "cut")
        assert not (tmp_path / "cut").exists()

    def test_mending_one_file_takes_the_room_of_one(
        self, small_miniature, pruned, tmp_path, monkeypatch
    ):
        copy = tmp_path / "copy"
        shutil.copytree(pruned[0], copy)
        (copy / "model-00005-of-00014.safetensors").unlink()
        monkeypatch.setattr("tasks.cut.checkpoint_job.files.free_nbytes", lambda _: 1_570_280)
        assert cut(small_miniature, pruned[0].parent / "keep.json", copy)

    def test_the_plan_tells_bytes_and_writes_nothing(
        self, small_miniature, pruned, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        keep = pruned[0].parent / "keep.json"
        PlanCheckpointCut(source=str(small_miniature), keep=str(keep)).run()
        told = capsys.readouterr().out
        for figure in ("17,884,616", "17,254,808", "-629,808", "7,773,784"):
            assert figure in told
        assert list(tmp_path.iterdir()) == []

    def test_what_lies_beside_the_shards_comes_along_or_is_named(
        self, small_miniature, pruned, tmp_path
    ):
        source = tmp_path / "source"
        shutil.copytree(small_miniature, source)
        (source / "LICENSE").write_text("MIT")
        (source / "README.md").write_text("the original card")
        (source / "inference").mkdir()
        (source / ".gitattributes").write_text("hidden")
        out = cut(source, pruned[0].parent / "keep.json", tmp_path / "cut")
        assert (out / "LICENSE").read_text() == "MIT"
        assert (out / "README.original.md").read_text() == "the original card"
        assert "Not taken along: inference/." in (out / "README.md").read_text()
        assert not (out / "inference").exists()
        assert not (out / ".gitattributes").exists()

    def test_a_second_cut_is_told_in_the_numbers_of_the_first_model(
        self, small_miniature, pruned, tmp_path
    ):
        folder = tmp_path / "first cut"
        shutil.copytree(pruned[0], folder)
        (folder / "README.original.md").write_text("the original card")
        write_keep(tmp_path / "second.json", keep_of(2, n_experts=3))
        out = cut(folder, tmp_path / "second.json", tmp_path / "cut")
        assert (out / "README.original.md").read_text() == "the original card"
        assert (out / "README.md").read_text().startswith(f"# {small_miniature.name}, 2 of 4")
        told = read_keep_json(out / "keep.json")
        assert (told.n_experts, told.n_kept, len(told.choices)) == (4, 2, 2)
        assert stored(out) == expected(stored(small_miniature), told)

    @pytest.mark.parametrize(
        ("source", "message"),
        [("owner/model@main", "this one is on a hub"), ("/nowhere/at all", "no checkpoint here")],
    )
    def test_a_source_that_is_not_here_is_told(self, pruned, tmp_path, source, message):
        with pytest.raises(SourceError, match=message):
            cut(source, pruned[0].parent / "keep.json", tmp_path / "cut")

    def test_v4_is_refused(self, small_v4_miniature, pruned, tmp_path):
        with pytest.raises(PlanError, match="look them up by token id"):
            cut(small_v4_miniature, pruned[0].parent / "keep.json", tmp_path / "cut")


def test_a_draft_is_no_model_to_choose_experts_of(tmp_path):
    first = write_hollow(draft_plan(small_config()), tmp_path / "gguf")
    with pytest.raises(PlanError, match="a draft's experts are never cut"):
        choose(first, ["none.pt"], tmp_path / "keep.json")


@pytest.mark.slow
def test_both_ways_to_a_gguf_give_the_same_tensors(small_miniature, pruned, tmp_path):
    """The checkpoint cut and converted, or converted with the list."""
    folder, _ = pruned
    jobs = [
        (small_miniature, tmp_path / "at once", {"keep": str(folder.parent / "keep.json")}),
        (folder, tmp_path / "cut first", {}),
    ]
    digests = []
    for source, out, words in jobs:
        assert run_job(source, out, **words).ok
        (path,) = out.glob("*/mini-native*-mainline.inventory.json")
        digests.append({t["name"]: t["sha256"] for t in json.loads(path.read_text())["tensors"]})
    assert digests[0] == digests[1]
    assert len(digests[0]) == 173


@pytest.mark.slow
def test_from_saliency_to_ggufs_by_command(small_miniature, saliency, tmp_path):
    """Both ways to a pruned GGUF: cut the checkpoint and convert it, or convert with the list."""
    paths = ",".join(map(str, saliency[0]))
    chosen = luigi_command(
        "SelectExperts", "--saliency", paths, "--experts", 3, "--source", small_miniature,
        "--forced", "1:0", "--halves", cwd=tmp_path,
    )  # fmt: skip
    assert chosen.returncode == 0, chosen.stderr
    made = luigi_command(
        "CutCheckpoint", "--source", small_miniature, "--keep", "keep.json", "--out", "cut",
        "--workers", 2, cwd=tmp_path,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    for words in (("InspectSource", "--source", "cut"), ("VerifyOutput", "--path", "cut")):
        assert luigi_command(*words, cwd=tmp_path).returncode == 0
    again = luigi_command(
        "CutCheckpoint", "--source", small_miniature, "--keep", "keep.json", "--out", "cut",
        cwd=tmp_path,
    )  # fmt: skip
    assert "nothing to do" in again.stdout
    refused = luigi_command("SelectExperts", "--experts", 3, "--source", "cut", cwd=tmp_path)
    assert refused.returncode == 30
    assert "experts are never chosen by their number" in refused.stderr
    assert "Traceback" not in refused.stderr
