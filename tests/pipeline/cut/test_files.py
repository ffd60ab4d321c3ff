"""Cut files byte by byte, by a reader that is not ours, against the files they were cut from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline import files
from pipeline.cut.check import check_cut
from pipeline.experts.keep import compose
from pipeline.gguf.header import FILLER_KEY, TensorInfo, encode_header
from pipeline.gguf.keys import ValueType, u32
from pipeline.gguf.model_file import GgufModel, read_draft, read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.form import form_of
from pipeline.model.contract.pair import check_pair
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.layout import Layout
from pipeline.quant.types import TYPES
from pipeline.report.inventory import inventory
from tests.gguf_builder import (
    plan_contents,
    plan_tensors,
    small_keys,
    small_plan,
    write_plan,
)
from tests.gguf_forms import tensor, with_keys, with_tensors
from tests.pipeline.cut.models import (
    CONFIG,
    MASTERS,
    N_EXPERTS,
    PER_EXPERT,
    arrays,
    begun,
    cut,
    first_file,
    keep_of,
    plan_of,
    shard_task,
    shards,
    single,
)
from tests.pipeline.filling import sha256_of

TOLD = {
    f"quantmill.experts.{name}"
    for name in ("source_count", "keep_sha256", "criterion", "honesty", "kept")
}


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


def assert_cut(before: GgufModel, after: GgufModel, keep) -> None:
    """Every promise about the bytes of ``after``."""
    whole, left = arrays(before), arrays(after)
    assert list(whole) == list(left)
    for name, content in whole.items():
        (_, old), (_, new) = before.tensors[name], after.tensors[name]
        assert (new.type, new.offset % 32) == (old.type, 0)
        if name not in PER_EXPERT:
            assert np.array_equal(left[name], content), name
            continue
        assert new.nbytes * keep.n_experts == old.nbytes * keep.n_kept
        for slot, expert in enumerate(keep.layers[layer_of(name)]):
            assert np.array_equal(left[name][slot], content[expert]), (name, slot)
    assert [str(problem) for problem in check_contract(after, form_of(after), union=False)] == []
    assert check_gguf_engram(after).problems == ()
    assert check_cut(before, after, keep) == []


@pytest.mark.parametrize("layout", Layout, ids=str)
@pytest.mark.parametrize("make", MASTERS.values(), ids=MASTERS)
def test_each_slot_holds_the_expert_that_the_list_names_and_all_else_stays(tmp_path, make, layout):
    path, keeps = make(tmp_path / "whole", layout), (keep_of(5), keep_of(2))
    before = read_model(path)
    for keep, variant in zip(keeps, cut(path, tmp_path / "out", *keeps), strict=True):
        assert variant.name == f"small-{keep.n_kept}E"
        after = read_model(first_file(variant))
        assert_cut(before, after, keep)
        assert len(after.files) == len(before.files)
        for no, (old, new) in enumerate(zip(before.files, after.files, strict=True)):
            assert list(old.tensors) == list(new.tensors)
            assert_announced(no, old.key_values, new.key_values)
        kept = after.key_values["quantmill.experts.kept"]
        assert kept.element is ValueType.INT32
        assert kept.value == tuple(e for ids in keep.layers for e in ids)


def assert_announced(no: int, before, after) -> None:
    """Metadata differ by the count and what is told of the cut, and in the filler's length."""
    differing = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    assert differing - {FILLER_KEY} == ({"deepseek41.expert_count", *TOLD} if no == 0 else set())


def test_types_of_every_kind_are_cut_by_bytes(tmp_path):
    """Also those with bytes in front of each row, and those that only ik_llama.cpp can read."""
    config = replace(CONFIG, hidden=256, expert_ff=256, n_experts=3)
    stacks = [t.name for t in small_plan(Layout.FORK, config).tensors if "_exps" in t.name]
    left, keep = list(TYPES.values()), keep_of(2, n_experts=3)
    while left:
        types = dict(zip(stacks, left, strict=False))
        left = left[len(stacks) :]
        plan = small_plan(Layout.FORK, config, types={n: t.name for n, t in types.items()})
        folder = tmp_path / str(len(left))
        contents = plan_contents(plan)
        path = write_plan(plan, folder, contents)
        after = read_model(first_file(cut(path, folder / "out", keep)[0]))
        for name, ggml_type in types.items():
            no, stored = after.tensors[name]
            assert stored.type is ggml_type
            size = 256 * ggml_type.row_nbytes(256)
            wanted = b"".join(
                contents[name][e * size : (e + 1) * size] for e in keep.layers[layer_of(name)]
            )
            path = after.files[no].path
            assert files.read_bytes(path, stored.offset, stored.nbytes) == wanted, ggml_type.name


def test_a_cut_that_cuts_nothing_is_the_same_files(tmp_path):
    for name, make in MASTERS.items():
        path = make(tmp_path / name, Layout.MAINLINE)
        variant = cut(path, tmp_path / name / "out", keep_of(N_EXPERTS))[0]
        for shard, file in zip(variant.shards, read_model(path).files, strict=True):
            assert (variant.folder / shard.file_name).samefile(file.path)


@pytest.mark.parametrize("make", [shards, single])
def test_a_cut_of_a_cut_holds_the_bytes_of_a_direct_cut(tmp_path, make):
    path = make(tmp_path / "whole", Layout.FORK)
    first, second = keep_of(5), keep_of(3, n_experts=5)
    once = cut(path, tmp_path / "once", first)[0]
    twice = cut(first_file(once), tmp_path / "twice", second)[0]
    direct = cut(path, tmp_path / "direct", compose(first, second))[0]
    assert twice.name == direct.name == "small-3E"
    one, other = (read_model(first_file(variant)) for variant in (twice, direct))
    found, wanted = arrays(one), arrays(other)
    assert list(found) == list(wanted)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    for ours, theirs in list(zip(one.files, other.files, strict=True))[1:]:
        assert sha256_of(ours.path) == sha256_of(theirs.path)


def test_a_file_of_another_alignment_goes_back_to_the_usual_one(tmp_path):
    """Nothing else is lost of it, and where nothing changes it stays as it is."""
    path = aligned(tmp_path / "whole" / "small.gguf", 4096)
    before, keep = read_model(path), keep_of(5)
    assert before.files[0].alignment == 4096
    after = read_model(first_file(cut(path, tmp_path / "out", keep)[0]))
    assert_cut(before, after, keep)
    assert before.key_values.keys() - after.key_values.keys() == {"general.alignment"}
    same = cut(path, tmp_path / "same", keep_of(N_EXPERTS))[0]
    assert first_file(same).samefile(path)
    assert inventory(same.plans[0])["shards"][0]["alignment"] == 4096


def aligned(path: Path, alignment: int) -> Path:
    """The small model in one file whose tensors begin at multiples of ``alignment``."""
    plan = plan_of(Layout.FORK)
    contents, data, infos = plan_contents(plan), b"", []
    for name, ne, type_name in plan_tensors(plan):
        infos.append(TensorInfo(name, ne, TYPES[type_name].type_id, len(data)))
        data += contents[name] + bytes(-len(contents[name]) % alignment)
    # The writer refuses this key with any other value than the usual one.
    keys = (u32("general.alignmenX", alignment), *small_keys(CONFIG, Layout.FORK))
    header = encode_header(keys, infos).replace(b"general.alignmenX", b"general.alignment")
    path.parent.mkdir()
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path


def test_what_does_not_change_is_shared_and_the_draft_with_it(tmp_path):
    path = shards(tmp_path / "whole", Layout.FORK, with_draft=True)
    for variant in cut(path, tmp_path / "out", keep_of(5), keep_of(3)):
        model = read_model(first_file(variant))
        shared = [
            file.path.samefile(whole.path)
            for file, whole in zip(model.files, read_model(path).files, strict=True)
        ]
        assert shared == [False, True, True, False, False, False]
        draft = read_draft(first_file(variant))
        assert draft.files[0].path.name == f"{variant.name}-draft-00001-of-00001.gguf"
        assert draft.files[0].path.samefile(read_draft(path).files[0].path)
        assert check_pair(model, draft) == []


def test_where_there_are_no_links_unchanged_files_are_copied(tmp_path, monkeypatch):
    path = shards(tmp_path / "whole", Layout.FORK, with_draft=True)

    def refuse(existing, name):
        raise OSError(18, "Invalid cross-device link")

    job = begun(path, tmp_path / "out", keep_of(5))
    with monkeypatch.context() as patch:
        patch.setattr(files, "_link", refuse)
        shard_task(job, 1).run()
    copy = job.store.path(job.variants[0].shard_specs[1])
    whole = job.whole.model.files[1].path
    assert not copy.samefile(whole)
    assert copy.read_bytes() == whole.read_bytes()


def test_a_table_that_is_a_link_to_another_place_is_shared_all_the_same(tmp_path):
    path = shards(tmp_path / "whole", Layout.FORK)
    table = read_model(path).files[1].path
    (tmp_path / "elsewhere").mkdir()
    moved = table.rename(tmp_path / "elsewhere" / "table")
    table.symlink_to(Path("..") / "elsewhere" / "table")
    model = read_model(first_file(cut(path, tmp_path / "out", keep_of(5))[0]))
    assert model.files[1].path.samefile(moved)
    assert not model.files[1].path.is_symlink()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model and its cut."""
    folder = tmp_path_factory.mktemp("pair")
    path = shards(folder / "whole", Layout.FORK)
    return read_model(path), read_model(first_file(cut(path, folder / "out", keep_of(5))[0]))


class TestTheSecondPath:
    """What the writer cannot get wrong unseen."""

    @pytest.fixture
    def mine(self, pair, tmp_path):
        shutil.copytree(pair[1].files[0].path.parent, tmp_path / "mine")
        return read_model(tmp_path / "mine" / pair[1].files[0].path.name)

    @pytest.mark.parametrize(
        "name",
        ["ffn_gate_inp.weight", "exp_probs_b.bias", "exp_probs_b_vl.bias", "ffn_down_exps.weight"],
    )
    def test_experts_in_another_order_than_the_list_are_named(self, pair, mine, name):
        no, stored = mine.tensors[f"blk.2.{name}"]
        size, path = stored.nbytes // 5, mine.files[no].path
        content = files.read_bytes(path, stored.offset, 2 * size)
        overwrite(path, stored.offset, content[size:] + content[:size])
        ids = keep_of(5).layers[2]
        problems = check_cut(pair[0], mine, keep_of(5))
        assert len(problems) == 2
        assert f"blk.2.{name}; expected expert {ids[0]}; found expert {ids[1]}" in str(problems[0])

    def test_bytes_of_no_expert_are_named(self, pair, mine):
        no, stored = mine.tensors["blk.4.ffn_up_exps.weight"]
        overwrite(mine.files[no].path, stored.offset + stored.nbytes - 1, b"\x55\x55"[:1])
        problems = check_cut(pair[0], mine, keep_of(5))
        assert len(problems) == 1
        assert "found no expert of the model" in str(problems[0])

    def test_another_list_is_found_out_in_every_tensor(self, pair):
        keep = keep_of(5)
        others = tuple(tuple({*range(6)} - {ids[0]}) for ids in keep.layers)
        problems = check_cut(*pair, replace(keep, layers=others))
        assert {problem.tensor for problem in problems} == PER_EXPERT

    def test_a_tensor_that_lost_something_else_is_named(self, pair):
        odd = with_tensors(pair[1], tensor(pair[1], "blk.0.attn_norm.weight", ne=(63,)))
        assert "lost something else than experts" in str(check_cut(pair[0], odd, keep_of(5))[0])
        less = with_tensors(pair[1], without=["blk.0.attn_norm.weight"])
        assert "other tensors" in str(check_cut(pair[0], less, keep_of(5))[0])

    UNCUT = ("ffn_gate_inp.weight", "exp_probs_b.bias", "exp_probs_b_vl.bias", "ffn_up_exps.weight")

    @pytest.mark.parametrize("name", UNCUT)
    def test_loaders_refuse_a_model_of_which_one_tensor_was_not_cut(self, pair, name):
        whole, left = pair
        old = whole.tensors[f"blk.3.{name}"][1]
        uncut = with_tensors(left, tensor(left, old.name, ne=old.ne))
        problems = check_contract(uncut, form_of(uncut))
        assert [problem.tensor for problem in problems] == [old.name]
        assert "another shape" in str(problems[0])

    @pytest.mark.parametrize("count", [N_EXPERTS, 6])
    def test_loaders_refuse_a_model_with_another_count_in_its_keys(self, pair, count):
        wrong = with_keys(pair[1], u32("deepseek41.expert_count", count))
        problems = check_contract(wrong, form_of(wrong))
        assert {problem.tensor for problem in problems} == PER_EXPERT


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
