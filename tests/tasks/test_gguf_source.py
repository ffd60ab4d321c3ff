"""A finished GGUF as the source of the ordinary job."""

import json
import shutil
from dataclasses import replace

import pytest

from pipeline.errors import SourceError
from pipeline.experts.keep_json import write_keep
from pipeline.gguf.model_file import read_draft, read_model
from pipeline.miniature.hollow import write_headers_only
from pipeline.model.metadata.required import NINE_KEYS, UNION_KEYS
from pipeline.plan import Transform, make_plan
from pipeline.requant.twice import requantized
from tasks.inspect import InspectSource
from tasks.job import Job
from tasks.plan import PlanRecipe
from tasks.request import JobParameters
from tests.gguf_builder import write_hollow
from tests.pipeline.cut.models import keep_of
from tests.promises.whole_job import run_job

SERVED = """
extends = "served"

[draft]
mode = "drop"

[[graft]]
from = "original"
roles = ["engram", "shared"]

[[graft]]
from = "original"
sub_roles = ["attention", "token_embd"]

[[graft]]
from = "original"
match = 'indexer\\.attn_q_b\\.weight$'
"""


def contents(folder):
    """Type and bytes of every tensor by name."""
    model = read_model(folder)
    return {
        name: (tensor.type.name, _bytes(model.files[no].path, tensor))
        for name, (no, tensor) in model.tensors.items()
    }


def _bytes(path, tensor):
    with path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


def made(source, out, recipe, **parameters):
    outcome = run_job(source, out, recipe, **parameters)
    assert outcome.ok, outcome.text
    (folder,) = (path for path in out.iterdir() if (path / "manifest.json").exists())
    return folder


def _specs(folder):
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    return [entry["spec"] for entry in listed if "spec" in entry]


@pytest.fixture(scope="module")
def published(small_miniature, tmp_path_factory):
    out = tmp_path_factory.mktemp("published")
    return made(small_miniature, out / "out", "published-q3_k_m")


@pytest.fixture(scope="module")
def native(small_miniature, tmp_path_factory):
    out = tmp_path_factory.mktemp("native")
    return made(small_miniature, out / "out", "native", layout="fork")


@pytest.fixture(scope="module")
def served(small_miniature, published, tmp_path_factory):
    """The served file, made of the published one and of the checkpoint."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "grafted.toml").write_text(SERVED)
    return made(
        published,
        folder / "out",
        folder / "grafted.toml",
        graft=f"original={small_miniature}",
    )


def test_grafts_give_what_the_checkpoint_itself_would(small_miniature, published, served, tmp_path):
    found, old = contents(served), contents(published)
    direct = contents(made(small_miniature, tmp_path / "out", "served"))
    assert {n: t for n, (t, _) in found.items()} == {n: t for n, (t, _) in direct.items()}
    assert found == direct
    copied = [name for name in found if found[name] == old[name]]
    assert any("ffn_down_exps" in name for name in copied)
    assert not any("_shexp" in name or "engram" in name for name in copied)


def test_the_manifest_says_what_comes_from_where(served):
    manifest = json.loads((served / "manifest.json").read_text())
    source = manifest["source"]
    assert source["gguf"] == "mini-published-q3_k_m-fork"
    (graft,) = source["grafts"]
    assert graft["word"] == "original"
    assert graft["n_tensors"] > 50
    assert graft["release_sha256"] == graft["config_sha256"] != source["config_sha256"]
    assert manifest["requantized"] == []
    assert "notes" not in source


@pytest.mark.slow
def test_labels_and_places_are_no_part_of_a_shard(served, small_miniature, published, tmp_path):
    (tmp_path / "other.toml").write_text(SERVED.replace("original", "elsewhere"))
    folder = made(
        published,
        tmp_path / "out",
        tmp_path / "other.toml",
        graft=f"elsewhere={small_miniature}",
    )
    first, *here = _specs(folder)
    assert first != _specs(served)[0]  # whose header says the recipe's name
    assert here == _specs(served)[1:]


CUT = """
[roles]
routed = "Q3_K"
engram = "Q8_0"
attention = "Q8_0"
embedding = "BF16"
shared = "Q8_0"

[sub_roles]
engram_gate = "F32"
hyper_connection = "F32"
indexer = "Q8_0"
compressor = "BF16"
router = "F32"

[[override]]
match = 'indexer\\.(attn_k|proj)\\.weight$'
type = "BF16"

[output]
layout = "mainline"
"""
"""What native has, in the other layout, with other experts: nothing of it is quantized twice."""


def test_what_lost_nothing_yet_becomes_what_the_checkpoint_gives(small_miniature, native, tmp_path):
    write_keep(tmp_path / "keep.json", keep_of(3, n_experts=4, n_layers=6, top_k=2))
    (tmp_path / "cut.toml").write_text(CUT)
    asked = {"recipe": tmp_path / "cut.toml", "keep": str(tmp_path / "keep.json")}
    found = made(native, tmp_path / "of file", **asked)
    direct = made(small_miniature, tmp_path / "direct", **asked)
    assert contents(found) == contents(direct)
    assert contents(_draft(found)) == contents(_draft(direct))
    assert (found / "keep.json").read_bytes() == (direct / "keep.json").read_bytes()


def _draft(folder):
    draft = read_draft(read_model(folder).files[0].path)
    assert draft is not None
    return draft.files[0].path


def test_a_draft_alone_is_a_source(native, tmp_path):
    alone = tmp_path / "alone.gguf"
    shutil.copy2(_draft(native), alone)
    found = made(alone, tmp_path / "out", "draft")
    assert contents(found) == contents(_draft(native))


@pytest.mark.slow
def test_a_v4_file_is_a_source(small_v4_miniature, tmp_path):
    native = made(small_v4_miniature, tmp_path / "native", "v4-native")
    again = made(native, tmp_path / "again", "v4-native")
    assert contents(again) == contents(native)
    assert contents(_draft(again)) == contents(_draft(native))
    coarse = contents(made(native, tmp_path / "coarse", "v4-q3_k"))
    direct = contents(made(small_v4_miniature, tmp_path / "direct", "v4-q3_k"))
    assert coarse.keys() == direct.keys()
    differing = {contents(native)[name][0] for name in coarse if coarse[name] != direct[name]}
    assert differing <= {"Q8_0"}


P = "deepseek41."
FIRST_KEYS = {f"{P}engram.{n}" for n in ("layer_ids", "head_count", "key_length", "max_ngram_size")}


def test_a_file_without_its_constants_is_completed(small_miniature, tmp_path):
    asked = JobParameters(str(small_miniature), "published-q3_k_m", str(tmp_path / "out"))
    whole = Job(asked).plans[0]
    missing = {*NINE_KEYS, *UNION_KEYS} - FIRST_KEYS
    # Only the released sizes tell how candidates are selected.
    missing = {key for key in missing if "candidate" not in key}
    bare = make_plan(
        name=whole.name,
        form=whole.form,
        config=whole.config,
        targets=[tensor.target for tensor in whole.tensors],
        types={tensor.name: tensor.type for tensor in whole.tensors},
        key_values=[entry for entry in whole.key_values if entry.key not in missing],
        shard_nbytes=whole.shard_nbytes,
    )
    source = write_hollow(bare, tmp_path / "bare")
    job = Job(replace(asked, source=str(source)))
    keys = {entry.key: entry for entry in job.plans[0].key_values}
    assert keys.pop("quantmill.source.recipe").value == "published-q3_k_m"
    assert keys == {entry.key: entry for entry in whole.key_values}
    (note,) = job.notes()
    assert all(key in note for key in NINE_KEYS.keys() - FIRST_KEYS)
    (table,) = job.origin_tables()
    assert table.notes == (note,)


@pytest.mark.slow
def test_the_released_file_becomes_the_served_one(tmp_path):
    """At full size, from headers alone."""
    checkpoint, out = tmp_path / "checkpoint", str(tmp_path / "out")
    write_headers_only(checkpoint, like="v4.1-flash", tokenizer=None)
    published = Job(JobParameters(str(checkpoint), "published-q3_k_m", out)).plans[0]
    served = Job(JobParameters(str(checkpoint), "served", out)).plans[0]
    (tmp_path / "grafted.toml").write_text(SERVED)
    again = Job(
        JobParameters(
            str(write_hollow(published, tmp_path / "published")),
            str(tmp_path / "grafted.toml"),
            out,
            graft=f"original={checkpoint}",
        )
    )
    (plan,) = again.plans
    assert described(plan) == described(served)
    assert (plan.data_nbytes, len(plan.tensors)) == (476_985_618_400, 1046)
    assert requantized(plan.typed) == ()
    copied = [t for t in plan.tensors if t.transform is Transform.COPY]
    assert sum(t.nbytes for t in copied if t.target.role == "routed") == 258_767_585_280


def described(plan):
    return [(t.name, t.type.name, t.target.shape, t.nbytes, t.shard) for t in plan.tensors]


def test_what_is_rounded_twice_is_told(native, tmp_path, capsys):
    task = PlanRecipe(source=str(native), recipe="published-q3_k_m", out=str(tmp_path / "out"))
    task.run()
    shown = capsys.readouterr().out
    assert "quantized a second time" in shown
    rows = [line.split() for line in shown.splitlines() if " Q8_0 " in line and " Q3_K " in line]
    assert {row[0] for row in rows} == {"engram", "attention", "shared"}


def test_tasks_for_checkpoints_say_what_to_do_with_a_gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    task = InspectSource(source=str(tmp_path))
    with pytest.raises(SourceError, match="scripts/doctor"):
        task.show()


def test_what_decodes_a_source_is_part_of_what_is_made_of_it(
    small_miniature, tmp_path, monkeypatch
):
    """As what encodes it is; what is copied depends on neither."""
    source = tmp_path / "native.gguf"
    plan = Job(JobParameters(str(small_miniature), "native", str(tmp_path / "a"))).plans[0]
    path = write_hollow(plan, source.with_suffix(""))
    specs = []
    for version in ("1", "2"):
        monkeypatch.setattr("pipeline.store.decoders_of", lambda _, v=version: v)
        job = Job(JobParameters(str(path), "published-q3_k_m", str(tmp_path / "b"), "mainline"))
        specs.append(job.shard_specs)
    changed = [one != other for one, other in zip(*specs, strict=True)]
    encodes = [any(t.is_encoded for t in shard.tensors) for shard in job.shards]
    assert changed == encodes
    assert any(changed)
