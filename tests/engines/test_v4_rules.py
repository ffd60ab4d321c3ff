"""V4 files with one tensor wrong: what llama.cpp says of each, or does without a word.

Both builds use the same words. Where they say nothing, our own checks are all there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.gguf.keys import u32
from tests.engines.edited import Content, Edited
from tests.engines.engine import Engine, EngineDied, Refused
from tests.engines.v4_edits import (
    WRONG,
    Edit,
    P,
    V4Edits,
    also_as,
    first_of,
    transposed,
    untouched,
    with_key,
    without,
)

pytestmark = pytest.mark.engine

N_LAYERS, N_EXPERTS, N_USED = 5, 4, 2
"""Hash-routed: two windows and one at ratio 4. By score: one at ratio 128, one at 4."""

HASHES = "blk.1.ffn_gate_tid2eid.weight"


@pytest.fixture(scope="module")
def edits(small_v4_miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> V4Edits:
    return V4Edits(small_v4_miniature, tmp_path_factory.mktemp("V4 rules"))


@pytest.fixture(params=["mainline", "native"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


def test_the_untouched_model_breaks_no_rule(native: Engine, edits: V4Edits) -> None:
    file = edits(untouched)
    assert file.distance(native) == 0
    assert file.told == []


def pruned(m: Edited) -> Edited:
    """With an expert less everywhere, and counted so, but for the hashes."""
    by_expert = re.compile(r"_exps\.|ffn_gate_inp\.|exp_probs_b\.")
    for name in filter(by_expert.search, m.tensors):
        m = first_of(m, name, N_EXPERTS - 1)
    return m.key(u32(f"{P}expert_count", N_EXPERTS - 1))


def one_too_many(tensor: str, name: str) -> tuple[Edit, str]:
    return also_as(tensor, name), "wrong number of tensors; expected 151, got 150"


def missing(tensor: str) -> tuple[Edit, str]:
    return without(tensor), f"tensor '{tensor}' not found"


REFUSED = {
    "unknown": one_too_many("output_norm.weight", "blk.0.odd.weight"),
    "a stage under its own name": one_too_many("blk.0.attn_norm.weight", "mtp.0.attn_norm.weight"),
    "a bias beside hashes": one_too_many("blk.3.exp_probs_b.bias", "blk.0.exp_probs_b.bias"),
    "hashes beside a bias": one_too_many(HASHES, "blk.4.ffn_gate_tid2eid.weight"),
    "an indexer at ratio 128": one_too_many(
        "blk.2.indexer.proj.weight", "blk.3.indexer.proj.weight"
    ),
    "a compressor in a window": one_too_many(
        "blk.3.attn_compressor_kv.weight", "blk.0.attn_compressor_kv.weight"
    ),
    "no head": missing("output.weight"),
    "no hashes": missing(HASHES),
    "no bias": missing("blk.4.exp_probs_b.bias"),
    "no mixing at the end": missing("output_hc_fn.weight"),
    "no norm": missing("blk.2.indexer_compressor_norm.weight"),
    "places transposed": (
        transposed("blk.3.attn_compressor_ape.weight"),
        r"'blk.3.attn_compressor_ape.weight' has wrong shape; expected +256, +128, got +128, +256",
    ),
    "pruned but not counted": (
        lambda m: pruned(m).key(u32(f"{P}expert_count", N_EXPERTS)),
        "'blk.0.ffn_gate_inp.weight' has wrong shape",
    ),
    "counted but not pruned": (
        with_key(u32(f"{P}expert_count", N_EXPERTS - 1)),
        "'blk.0.ffn_gate_inp.weight' has wrong shape",
    ),
    "one layer pruned": (
        lambda m: first_of(m, "blk.4.ffn_up_exps.weight", N_EXPERTS - 1),
        "'blk.4.ffn_up_exps.weight' has wrong shape",
    ),
}


@pytest.mark.parametrize(("edit", "words"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_by_the_engine_and_by_us(
    engine: Engine, edits: V4Edits, edit: Edit, words: str
) -> None:
    file = edits(edit)
    with pytest.raises(Refused, match=words):
        file.said(engine)
    assert file.told


F32_ONLY = {
    "blk.3.attn_norm.weight": "unsupported types",
    "blk.3.attn_compressor_norm.weight": "unsupported types",
    "blk.3.exp_probs_b.bias": "unsupported types",
    "output_norm.weight": "unsupported types",
    "output_hc_base.weight": "unsupported types",
    "output_hc_scale.weight": "unsupported types",
    "blk.3.attn_sinks.weight": "sinks->type == GGML_TYPE_F32",
    "blk.3.hc_attn_base.weight": "base->type == GGML_TYPE_F32",
    "blk.3.hc_ffn_scale.weight": "scale->type == GGML_TYPE_F32",
}


@pytest.mark.parametrize(("name", "words"), F32_ONLY.items(), ids=F32_ONLY)
def test_what_must_be_f32_makes_the_engine_abort_otherwise(
    engine: Engine, edits: V4Edits, name: str, words: str
) -> None:
    file = edits(lambda m: m.in_f16(name))
    with pytest.raises(EngineDied, match=re.escape(words)):
        file.said(engine)
    (problem,) = file.told
    assert f"tensor {name}" in problem
    assert "must be F32" in problem


def with_hashes(change: Callable[[NDArray[np.int32]], NDArray], type_name: str = "I32") -> Edit:
    """An edit of the experts of every token, ``[n_vocab, n_used]``, of one layer."""

    def edit(m: Edited) -> Edited:
        old = m.tensors[HASHES]
        ids = np.frombuffer(old.data, "<i4").reshape(old.ne[::-1])
        return m.tensor(HASHES, Content(old.ne, type_name, change(ids).tobytes()))

    return edit


@pytest.mark.parametrize(("type_name", "dtype"), [("F32", "<f4"), ("I64", "<i8"), ("I16", "<i2")])
def test_hashes_must_be_i32(engine: Engine, edits: V4Edits, type_name: str, dtype: str) -> None:
    file = edits(with_hashes(lambda ids: ids.astype(dtype), type_name))
    with pytest.raises(EngineDied, match="b->type == GGML_TYPE_I32"):
        file.said(engine)
    (problem,) = file.told
    assert "must be I32" in problem


NOT_THERE = {
    "past the last": with_hashes(lambda ids: ids + 1),
    "negative": with_hashes(lambda ids: ids - 1),
    "pruned": pruned,
}


@pytest.mark.parametrize("edit", NOT_THERE.values(), ids=NOT_THERE)
def test_an_expert_that_is_not_there_makes_decoding_abort(
    engine: Engine, edits: V4Edits, edit: Edit
) -> None:
    """No header tells: whoever writes the ids must hold them against the number of experts."""
    with pytest.raises(EngineDied, match="i01 >= 0 && i01 < ne01"):
        edits(edit).said(engine)


def test_a_pruned_model_with_its_hashes_renumbered_runs(native: Engine, edits: V4Edits) -> None:
    def edit(m: Edited) -> Edited:
        m = pruned(m)
        for name in filter(re.compile("tid2eid").search, m.tensors):
            old = m.tensors[name]
            first = np.frombuffer(old.data, "<i4").reshape(old.ne[::-1])[:, 0] % (N_EXPERTS - 1)
            both = np.stack([first, (first + 1) % (N_EXPERTS - 1)], axis=1).astype("<i4")
            m = m.tensor(name, Content(old.ne, "I32", both.tobytes()))
        return m

    assert np.isfinite(edits(edit).said(native)).all()


def test_an_expert_named_twice_is_used_twice_without_a_word(native: Engine, edits: V4Edits) -> None:
    twice = with_hashes(lambda ids: np.repeat(ids[:, :1], N_USED, axis=1))
    assert edits(twice).distance(native) > WRONG


def with_stage(draft: Edited, n_layers: int) -> Edit:
    """The first stage behind the trunk; ``n_layers`` is what the file says it has."""

    def edit(m: Edited) -> Edited:
        stage = {
            name.replace("blk.0.", f"blk.{N_LAYERS}."): content
            for name, content in draft.tensors.items()
            if name.startswith("blk.0.")
        }
        with_it = reduce(lambda model, item: model.tensor(*item), stage.items(), m)
        return with_it.key(u32(f"{P}block_count", n_layers))

    return edit


def test_a_stage_that_is_not_counted_is_refused(engine: Engine, edits: V4Edits) -> None:
    file = edits(with_stage(edits.draft, N_LAYERS))
    with pytest.raises(Refused, match="wrong number of tensors; expected 174, got 150"):
        file.said(engine)
    assert any("A DSpark stage is no layer" in problem for problem in file.told)


def test_lists_as_long_as_the_trunk_keep_a_stage_from_being_counted(
    engine: Engine, edits: V4Edits
) -> None:
    file = edits(with_stage(edits.draft, N_LAYERS + 1))
    with pytest.raises(Refused, match="swiglu_clamp_exp has wrong array length; expected 6, got 5"):
        file.said(engine)
    assert any("compress_ratios is shorter than block_count" in problem for problem in file.told)


def test_a_stage_that_is_counted_runs_as_one_more_layer_and_only_we_say_so(
    engine: Engine, edits: V4Edits
) -> None:
    """With lists for the stages too, as config.json has them, and the key that announces one."""

    def edit(m: Edited) -> Edited:
        m = with_stage(edits.draft, N_LAYERS + 1)(m)
        for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
            m = m.values(f"{P}{name}", lambda clamps: [*clamps, clamps[0]])
        m = m.values(f"{P}attention.compress_ratios", lambda ratios: [*ratios, 0, 0, 0])
        return m.key(u32(f"{P}nextn_predict_layers", 1))

    file = edits(edit)
    assert file.distance(engine) > WRONG
    (problem,) = file.told
    assert "is run as one more layer, without a word" in problem
