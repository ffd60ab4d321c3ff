"""A source of which everything counts, everything but the draft, or the draft alone."""

import json
import shutil

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from pipeline.errors import Problems, QuantmillError, SourceError
from pipeline.model.targets.draft import draft_tensors
from pipeline.recipe.values import DraftMode
from pipeline.source.checkpoint import INDEX_NAME
from pipeline.source.hub.fetch import fetch_file
from pipeline.source.hub.remote import HubRemote
from pipeline.source.reader import SourceReader
from tasks.model_source import ModelSource, SourceParameters
from tasks.sources import Sources
from tests.pipeline.hub_side import access_to
from tests.tasks.hub_runs import ADDRESS, REPO

KEEP, DROP, ONLY = DraftMode.KEEP, DraftMode.DROP, DraftMode.ONLY
EMBEDDING = "model-00002-of-00014.safetensors"
DRAFT = tuple(f"model-000{number}-of-00014.safetensors" for number in (10, 11, 12))
ENGRAM = tuple(f"model-000{number}-of-00014.safetensors" for number in (13, 14))
SMALL_FILES = ("config.json", INDEX_NAME, "tokenizer.json", "tokenizer_config.json")


def copy_of(source, target, *names):
    """A folder with links to some of a checkpoint's files, and copies of those that tests edit."""
    target.mkdir()
    for name in names or [path.name for path in source.iterdir()]:
        if name in SMALL_FILES:
            shutil.copyfile(source / name, target / name)
        else:
            (target / name).hardlink_to(source / name)
    return target


def without(folder, names, *, listed):
    for name in names:
        (folder / name).unlink()
    if not listed:
        index = json.loads((folder / INDEX_NAME).read_text())
        weight_map = {t: file for t, file in index["weight_map"].items() if file not in names}
        (folder / INDEX_NAME).write_text(json.dumps(index | {"weight_map": weight_map}))
    return folder


@pytest.fixture
def whole(small_miniature, tmp_path):
    return copy_of(small_miniature, tmp_path / "whole")


@pytest.fixture
def draft(small_miniature, tmp_path):
    """Nothing but what a draft is made of."""
    return copy_of(small_miniature, tmp_path / "draft", *SMALL_FILES, *DRAFT)


def opened(folder, mode, **more):
    return ModelSource(SourceParameters(str(folder), folder / "root", draft=mode, **more))


def refusal(source):
    with pytest.raises(QuantmillError) as caught:
        source.require_sound()
    error = caught.value
    return list(error.problems) if isinstance(error, Problems) else [error]


def names(source):
    return {spec.name for spec in source.specs}


def first_row(reader, matrix):
    row = np.zeros((1, matrix.n_cols), np.float32)
    reader.decode_rows(matrix, 0, row)
    return row


def set_key(folder, key, value):
    config = json.loads((folder / "config.json").read_text())
    if value is None:
        del config["text_config"][key]
    else:
        config["text_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))


class TestADraftAlone:
    def test_its_shards_and_the_small_files_are_enough(self, draft, whole):
        source = opened(draft, ONLY)
        source.require_sound()
        assert list(source.checkpoint.files) == list(source.origins) == list(DRAFT)
        assert names(source) == {n for n in names(opened(whole, KEEP)) if n.startswith("mtp.")}
        assert source.tokenizer == opened(whole, KEEP).tokenizer
        assert source.identity == opened(whole, KEEP).identity

    def test_every_tensor_of_its_file_can_be_read(self, draft):
        source = opened(draft, ONLY)
        matrices = [m for target in draft_tensors(source.config) for m in target.matrices]
        with SourceReader(source.checkpoint) as reader:
            for matrix in matrices:
                assert first_row(reader, matrix).any()

    def test_faults_of_the_trunk_are_none_of_its_business(self, whole):
        for name in (EMBEDDING, *ENGRAM):
            (whole / name).unlink()
            (whole / name).write_bytes(b"broken")
        opened(whole, ONLY).require_sound()
        assert len(refusal(opened(whole, KEEP))) == 3

    def test_a_second_source_may_have_it(self, whole, draft):
        first = without(whole, (*DRAFT, *ENGRAM), listed=False)
        source = opened(first, ONLY, supplement=str(draft))
        source.require_sound()
        assert source.first.checkpoint.files == {}
        assert {name: origin is source.second for name, origin in source.origins.items()} == (
            dict.fromkeys(DRAFT, True)
        )
        assert source.checkpoint.folder == first

    def test_a_second_source_may_have_some_of_it(self, whole, draft):
        first = without(whole, DRAFT[:1], listed=True)
        source = opened(first, ONLY, supplement=str(draft))
        source.require_sound()
        assert [name for name, o in source.origins.items() if o is source.second] == [DRAFT[0]]

    def test_a_second_source_without_it_is_refused(self, whole, small_miniature, tmp_path):
        without(whole, DRAFT, listed=False)
        other = without(copy_of(small_miniature, tmp_path / "other"), DRAFT, listed=False)
        (error,) = refusal(opened(whole, ONLY, supplement=str(other)))
        assert "supplies nothing that the first lacks" in error.what
        assert error.tensor.startswith("mtp.0.")
        assert error.next_step == "Name one that has them."


class TestADraftLeftOut:
    @pytest.mark.parametrize("listed", [True, False])
    def test_it_may_be_absent(self, whole, listed):
        source = opened(without(whole, DRAFT, listed=listed), DROP)
        source.require_sound()
        assert not any(name.startswith("mtp.") for name in names(source))
        assert len(source.checkpoint.files) == 11

    def test_it_may_be_absent_where_a_second_source_has_the_rest(
        self, whole, small_miniature, tmp_path
    ):
        first = without(whole, (*DRAFT, *ENGRAM), listed=True)
        second = copy_of(small_miniature, tmp_path / "second", *SMALL_FILES, *ENGRAM)
        index = json.loads((second / INDEX_NAME).read_text())
        kept = {t: file for t, file in index["weight_map"].items() if file in ENGRAM}
        (second / INDEX_NAME).write_text(json.dumps({"weight_map": kept}))
        source = opened(first, DROP, supplement=str(second))
        source.require_sound()
        assert not any(name.startswith("mtp.") for name in names(source))
        (error,) = refusal(opened(first, KEEP, supplement=str(second)))
        assert "holds no draft" in error.what

    def test_where_it_is_there_it_is_checked(self, whole, small_miniature):
        assert names(opened(whole, DROP)) == names(opened(small_miniature, KEEP))
        (whole / DRAFT[1]).unlink()
        (whole / DRAFT[1]).write_bytes(b"broken")
        (error,) = refusal(opened(whole, DROP))
        assert error.file == str(whole / DRAFT[1])

    def test_some_of_it_is_not_enough(self, whole):
        (error,) = refusal(opened(without(whole, DRAFT[2:], listed=True), DROP))
        assert (error.what, error.file) == ("a shard is missing", str(whole / DRAFT[2]))


@pytest.mark.parametrize("mode", DraftMode)
class TestFaultsOfADraft:
    def test_no_count_of_stages(self, whole, mode):
        set_key(whole, "num_nextn_predict_layers", None)
        (error,) = refusal(opened(whole, mode))
        assert "lacks text_config.num_nextn_predict_layers" in error.what
        assert error.file == str(whole / "config.json")
        n_tensors = sum(n.startswith("mtp.") for n in opened(whole, mode).checkpoint.weight_map)
        assert error.found == f"{n_tensors:,} tensors mtp.*"

    def test_no_count_of_stages_where_a_second_source_has_them(self, whole, small_miniature, mode):
        set_key(without(whole, DRAFT, listed=False), "num_nextn_predict_layers", None)
        (error,) = refusal(opened(whole, mode, supplement=str(small_miniature)))
        assert "num_nextn_predict_layers" in error.what
        assert "mtp.*" in error.found

    def test_a_stage_less(self, whole, mode):
        (error,) = refusal(opened(without(whole, DRAFT[2:], listed=False), mode))
        assert "a part of the model that is nowhere" in error.what
        assert error.expected.endswith("tensors mtp.2.*")

    def test_no_stage(self, whole, mode):
        source = opened(without(whole, DRAFT, listed=False), mode)
        if mode is DROP:
            source.require_sound()
        else:
            (error,) = refusal(source)
            assert "holds no draft" in error.what
            assert error.file == str(whole / "config.json")

    def test_a_ratio_less(self, whole, mode):
        ratios = opened(whole, mode).config.compress_ratios
        set_key(whole, "compress_ratios", list(ratios[:-1]))
        (error,) = refusal(opened(whole, mode))
        assert "compress_ratios" in error.what

    def test_the_trunks_number_of_experts(self, whole, mode):
        n_trunk = opened(whole, mode).config.n_experts
        set_key(whole, "dspark_n_routed_experts", n_trunk)
        errors = refusal(opened(whole, mode))
        assert [(e.expected, e.found) for e in errors] == [
            (f"{n_trunk} experts (config.json)", "1 experts")
        ] * 3
        assert [e.file for e in errors] == [str(whole / name) for name in DRAFT]


@pytest.fixture
def hub_here(hub, tmp_path, monkeypatch):
    """The hub as this process's own."""
    for module in ("remote", "resolve"):
        monkeypatch.setattr(f"pipeline.source.hub.{module}.HubAccess", lambda: access_to(hub))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    close_session()
    yield hub
    close_session()


def asked(hub):
    return {one.file for one in hub.requests if not one.file.startswith("api/")}


class TestADraftFromAHub:
    def test_nothing_but_its_files_is_asked_for(self, hub_here, tmp_path, draft):
        source = ModelSource(SourceParameters(ADDRESS, tmp_path / "root", draft=ONLY))
        source.require_sound()
        source.tokenizer  # noqa: B018 - reads its files
        assert asked(hub_here) == {*SMALL_FILES, *DRAFT}
        hub_here.clear_requests()
        sources = Sources(source.checkpoint, source.origins, list(DRAFT))
        assert sources.fetched() == DRAFT
        for name in sources.fetched():
            origin = sources.origin(name)
            fetch_file(HubRemote(origin.snapshot), sources.hub_file(name), origin.target(name))
        assert asked(hub_here) == set(DRAFT)
        with (
            SourceReader(sources.readable()) as fetched,
            SourceReader(opened(draft, ONLY).checkpoint) as local,
        ):
            matrix = draft_tensors(source.config)[0].matrices[0]
            rows = [first_row(reader, matrix) for reader in (fetched, local)]
        np.testing.assert_array_equal(*rows)

    def test_a_repository_without_it_may_be_dropped_from_or_supplemented(
        self, hub_here, whole, tmp_path
    ):
        hub_here.add_commit("other/pruned", without(whole, DRAFT, listed=True))
        root, pruned = tmp_path / "root", "other/pruned@main"
        ModelSource(SourceParameters(pruned, root, draft=DROP)).require_sound()
        lacking = "lacks shards that its own index names"
        for mode in (KEEP, ONLY):
            with pytest.raises(SourceError, match=lacking):
                ModelSource(SourceParameters(pruned, root, draft=mode)).require_sound()
        hub_here.clear_requests()
        source = ModelSource(SourceParameters(pruned, root, supplement=ADDRESS, draft=ONLY))
        source.require_sound()
        assert {origin.names["repo"] for origin in source.origins.values()} == {REPO}
        assert asked(hub_here) == {*SMALL_FILES, *DRAFT}
