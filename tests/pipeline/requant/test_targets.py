"""What the tensors of a job are made of where the source is a GGUF."""

import numpy as np
import pytest

from pipeline.errors import DecodeError, FormatError, Problems
from pipeline.gguf.as_source import as_checkpoint
from pipeline.gguf.model_file import read_model
from pipeline.model.contract.form import form_of
from pipeline.model.layout import Layout
from pipeline.model.metadata.file_config import config_of
from pipeline.model.targets.draft import draft_tensors
from pipeline.model.targets.trunk import target_tensors
from pipeline.plan import Transform, make_plan, transform_of
from pipeline.quant.types import TYPES
from pipeline.requant.decodable import check_decodable
from pipeline.requant.targets import carried_targets, stored_targets
from pipeline.requant.twice import lossy_source, requantized
from pipeline.source.reader import SourceReader
from pipeline.source.spec import Codec
from tests.gguf_builder import (
    draft_plan,
    plan_contents,
    small_config,
    small_plan,
    small_v4_config,
    write_plan,
)
from tests.gguf_forms import extra, with_tensors


def model_of(plan, folder):
    return read_model(write_plan(plan, folder))


@pytest.fixture(scope="module", params=list(Layout))
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def model(layout, tmp_path_factory):
    return model_of(small_plan(layout), tmp_path_factory.mktemp("model"))


def targets(model, layout, keep=None):
    config = config_of(model, form_of(model))
    return stored_targets(target_tensors(config, layout, keep), model, config, keep)


def read(model, target):
    """The rows of a target as they are stored, in its order."""
    parts = []
    with SourceReader(as_checkpoint(model)) as source:
        for matrix in target.matrices:
            ggml_type = TYPES[matrix.ggml_type or matrix.codec.name]
            out = np.empty((matrix.n_rows, ggml_type.row_nbytes(matrix.n_cols)), np.uint8)
            source.copy_rows(matrix, 0, out)
            parts.append(out.tobytes())
    return b"".join(parts)


def test_a_model_is_made_of_itself(model, layout):
    contents = plan_contents(small_plan(layout))
    found = targets(model, layout)
    assert {t.name: read(model, t) for t in found} == contents
    for target in found:
        stored = model.tensors[target.name][1].type
        assert transform_of(target, stored) is Transform.COPY
        other = TYPES["F16" if stored.name != "F16" else "F32"]
        assert transform_of(target, other) is Transform.ENCODE


def test_each_expert_is_a_matrix(model, layout):
    found = {t.name: t for t in targets(model, layout)}
    stack = found["blk.2.ffn_up_exps.weight"]
    assert [m.picks.entries for m in stack.matrices] == [(e,) for e in range(4)]
    assert {m.codec for m in stack.matrices} == {Codec.GGML}


def test_experts_that_stay_keep_their_bytes(model, layout):
    keep = tuple((layer % 2, 2 + layer % 2) for layer in range(6))
    whole = {t.name: read(model, t) for t in targets(model, layout)}
    for target in targets(model, layout, keep):
        is_per_expert = "_exps" in target.name or "gate_inp" in target.name
        if is_per_expert or "exp_probs" in target.name:
            old = np.frombuffer(whole[target.name], np.uint8).reshape(4, -1)
            kept = old[list(keep[target.layer])]
            assert read(model, target) == kept.tobytes(), target.name
        else:
            assert read(model, target) == whole[target.name]


def test_the_other_layout_is_made_of_the_same_rows(tmp_path):
    fork = model_of(small_plan(Layout.FORK), tmp_path)
    contents = plan_contents(small_plan(Layout.FORK))
    found = {t.name: t for t in targets(fork, Layout.MAINLINE)}
    tables = (contents[f"blk.{layer}.engram_embd.weight"] for layer in (1, 3))
    assert read(fork, found["per_layer_token_embd.weight"]) == b"".join(tables)
    kv = found["blk.3.engram_kv.weight"]
    assert read(fork, kv) == contents["blk.3.engram_wkv.weight"]
    gate = found["blk.1.engram_gate.weight"]
    assert [m.weight for m in gate.matrices] == [f"blk.1.engram_{f}.weight" for f in "qk"]
    assert transform_of(gate, TYPES["F32"]) is Transform.PRODUCT


def test_tables_of_two_types_are_both_encoded(tmp_path):
    types = {"blk.3.engram_embd.weight": "Q4_0"}
    fork = model_of(small_plan(Layout.FORK, types=types), tmp_path)
    found = {t.name: t for t in targets(fork, Layout.MAINLINE)}
    table = found["per_layer_token_embd.weight"]
    for type_name in ("Q8_0", "Q4_0"):
        assert transform_of(table, TYPES[type_name]) is Transform.ENCODE


def test_two_factors_are_not_made_of_their_product(tmp_path):
    mainline = model_of(small_plan(Layout.MAINLINE), tmp_path)
    with pytest.raises(Problems) as error:
        targets(mainline, Layout.FORK)
    assert len(error.value.problems) == 4
    assert all("Relayout" in str(problem) for problem in error.value.problems)
    config = config_of(mainline, form_of(mainline))
    wanted = [t for t in target_tensors(config, Layout.FORK) if "engram_embd" in t.name]
    split = stored_targets(wanted, mainline, config, None)
    whole = plan_contents(small_plan(Layout.MAINLINE))["per_layer_token_embd.weight"]
    assert b"".join(read(mainline, target) for target in split) == whole


def test_what_is_optional_is_left_out_and_what_is_not_is_missed(model, layout):
    config = config_of(model, form_of(model))
    frame = target_tensors(config, layout)
    biases = {t.name for t in frame if "_vl" in t.name}
    bare = with_tensors(model, without=[*biases, "blk.0.attn_kv.weight"])
    carried = carried_targets(frame, bare)
    assert {t.name for t in frame} - {t.name for t in carried} == biases
    with pytest.raises(FormatError, match=r"lacks a tensor.*blk\.0\.attn_kv.*graft"):
        stored_targets(carried, bare, config, None)


def test_another_shape_is_refused_before_anything_is_read(model, layout):
    wrong = with_tensors(model, extra("blk.0.attn_kv.weight", (32, 64), "Q8_0"))
    with pytest.raises(FormatError, match=r"another shape.*\(64, 32\).*\(32, 64\)"):
        targets(wrong, layout)


@pytest.mark.parametrize("config", [small_config(), small_v4_config()], ids=["V4.1", "V4"])
def test_a_draft_is_made_of_itself(tmp_path, config):
    draft = model_of(draft_plan(config), tmp_path)
    own = config_of(draft, form_of(draft))
    found = stored_targets(draft_tensors(own), draft, own, None)
    assert {t.name: read(draft, t) for t in found} == plan_contents(draft_plan(config))


def test_a_v4_target_is_made_of_itself(tmp_path):
    plan = small_plan(Layout.MAINLINE, small_v4_config())
    contents = plan_contents(plan)
    model = model_of(plan, tmp_path)
    assert {t.name: read(model, t) for t in targets(model, Layout.MAINLINE)} == contents


def requantized_plan(model, layout, types):
    found = targets(model, layout)
    stored = {t.name: model.tensors[t.name][1].type for t in found}
    return make_plan(
        name="again",
        form=form_of(model),
        config=config_of(model, form_of(model)),
        targets=found,
        types=stored | {name: TYPES[type_name] for name, type_name in types.items()},
        key_values=(),
        shard_nbytes=10**9,
    )


def test_only_what_was_lossy_and_changes_is_lost_twice(model, layout):
    types = {
        "blk.0.attn_kv.weight": "Q4_0",  # of Q8_0
        "blk.1.attn_kv.weight": "Q4_0",
        "blk.2.attn_kv.weight": "F32",  # loses nothing more
        "blk.0.ffn_up_exps.weight": "Q4_0",  # of MXFP4, which lost nothing
        "blk.0.ffn_up_shexp.weight": "BF16",
    }
    plan = requantized_plan(model, layout, types)
    found = requantized(plan.typed)
    told = [(str(one.role), one.source_type, one.type, one.n_tensors) for one in found]
    assert told == [("attention", "Q8_0", "Q4_0", 2), ("shared", "Q8_0", "BF16", 1)]
    assert found[0].nbytes == 2 * 32 * (64 // 32 * 18)
    assert sum(lossy_source(*typed) is not None for typed in plan.typed) == 3


def test_a_type_that_nobody_here_decodes_is_copied_or_refused(model, layout, monkeypatch):
    monkeypatch.setattr("pipeline.requant.decodable.can_decode", lambda t: t.name != "Q8_0")
    same = requantized_plan(model, layout, {})
    assert list(check_decodable(same.typed)) == []
    (problem,) = check_decodable(requantized_plan(model, layout, {"output.weight": "BF16"}).typed)
    assert "Q8_0 cannot be decoded here" in str(problem)
    assert problem.tensor == "output.weight"


def test_values_that_are_no_numbers_are_refused_with_their_place(tmp_path):
    plan = small_plan(Layout.FORK)
    contents = plan_contents(plan)
    rows = np.full((64, 2, 34), 1, np.uint8)
    rows[5, 1, :2] = np.array([0x7E00], "<u2").view(np.uint8)
    target = next(t for t in plan.tensors if t.type.name == "Q8_0" and t.target.n_cols == 64)
    rows = np.resize(rows, target.nbytes)
    contents[target.name] = rows.tobytes()
    model = read_model(write_plan(plan, tmp_path, contents))
    matrix = {t.name: t for t in targets(model, Layout.FORK)}[target.name].matrices[0]
    out = np.empty((matrix.n_rows, matrix.n_cols), np.float32)
    with SourceReader(as_checkpoint(model)) as source:
        assert source.decode_rows(matrix, 0, out[:5]) == np.abs(out[:5]).max() > 0
        with pytest.raises(DecodeError, match=r"row 5, column 32") as error:
            source.decode_rows(matrix, 2, out[2:])
    assert target.name in str(error.value)
