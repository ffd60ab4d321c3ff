"""What a draft does to an output folder, over several runs of one recipe in other modes."""

import json
import re

import pytest

from tests.promises.whole_job import run_job

ROLES = "".join(f'{role} = "Q8_0"\n' for role in ("engram", "attention", "embedding", "shared"))
RECIPE = f"""name = "r"
allow = ["below_bf16"]
[roles]
routed = "MXFP4"
{ROLES}
[draft]
mode = "MODE"
"""


@pytest.fixture
def run(tmp_path):
    def run(source, mode):
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(RECIPE.replace("MODE", mode))
        return run_job(source, tmp_path / "out", recipe)

    return run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_nothing_of_a_dropped_draft_stays(small_miniature, tmp_path, run):
    folder = tmp_path / "out/mini-r-mainline"
    assert run(small_miniature, "drop").ok
    without = names(folder)
    assert not [name for name in without if "draft" in name]
    assert run(small_miniature, "keep").ok
    drafts = set(names(folder)) - set(without)
    assert {re.sub(r"^mini-r-mainline-", "", name) for name in drafts} == {
        *("draft-00001-of-00001.gguf", "draft.inventory.json", "draft.inv.json")
    }
    assert run(small_miniature, "drop").ok
    assert names(folder) == without
    plan, manifest = (json.loads((folder / f"{n}.json").read_text()) for n in ("plan", "manifest"))
    assert plan["spec"] == manifest["spec"]


@pytest.mark.parametrize("source", ["small_miniature", "small_v4_miniature"])
def test_a_draft_alone_is_the_kept_one_in_a_folder_of_its_own(source, tmp_path, run, request):
    checkpoint = request.getfixturevalue(source)
    assert run(checkpoint, "keep").ok
    (kept,) = tmp_path.glob("out/mini-r*/*-draft-00001-of-00001.gguf")
    before = names(kept.parent)
    assert run(checkpoint, "only").ok
    alone = tmp_path / "out/mini-r-draft/mini-r-draft-00001-of-00001.gguf"
    assert alone.samefile(kept)
    assert names(kept.parent) == before


def test_target_and_draft_name_each_other(small_miniature, tmp_path, run):
    assert run(small_miniature, "keep").ok
    manifest = json.loads((tmp_path / "out/mini-r-mainline/manifest.json").read_text())
    target, draft = manifest["target"], manifest["draft"]
    assert (target["draft_sha256"], draft["target_sha256"]) == (draft["sha256"], target["sha256"])
    assert (target["architecture"], draft["architecture"]) == ("deepseek41", "dflash")
    assert draft["n_tensors"] == 78
