"""Cases of sizes, types and file formats: FD-8, 9, 12, 13, 15, 16, 17, 19 (see test_cases)."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.blocks import blocks_of
from pipeline.errors import FormatError, Problems, TypeRuleError
from pipeline.gguf.header import TensorInfo, encode_header
from pipeline.gguf.keys import ValueType, array, u32
from pipeline.gguf.model_file import GgufModel, read_draft, read_model
from pipeline.gguf.reader import read_gguf
from pipeline.model.contract.check import check_contract
from pipeline.model.form import V41_FORK
from pipeline.model.layout import Layout
from pipeline.model.targets.trunk import target_tensors
from pipeline.quant.types import TYPES
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import parse_recipe
from pipeline.report.plan_report import shard_table
from pipeline.report.tables import render_text
from tests.gguf_builder import small_plan
from tests.pipeline.released_plans import released_config, released_plan
from tests.promises.whole_job import NAME, run_job


def test_fd_09_a_table_of_a_hundred_billion_weights_has_64_bit_sizes():
    """Beyond every 32-bit number; that memory stays small is P14's."""
    plan = released_plan("native")
    tables = [t for t in plan.tensors if t.target.is_table]
    assert [math.prod(t.target.shape) for t in tables] == [98_305_579_008, 98_308_270_592]
    for tensor in tables:
        blocks = list(blocks_of(tensor))
        assert tensor.nbytes == math.prod(tensor.target.shape) // 32 * 34 > 1 << 32
        assert sum(block.nbytes for block in blocks) == tensor.nbytes
        assert blocks[-1].offset + blocks[-1].nbytes == tensor.offset + tensor.nbytes
        assert max(block.nbytes for block in blocks) <= 17 << 20


ROLES = """
[roles]
routed = "Q2_K"
engram = "Q2_K"
attention = "Q2_K"
embedding = "Q2_K"
shared = "Q2_K"
"""


def recipe_of(content):
    return parse_recipe(content.encode(), Path("everything.toml"))


def test_fd_12_rows_that_do_not_divide_are_all_listed_with_alternatives():
    targets = target_tensors(released_config(), Layout.MAINLINE)
    odd = [
        replace(t, shape=(64, 200))
        for t in targets
        if t.name.endswith(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"))
    ]
    content = ROLES.replace('shared = "Q2_K"', 'shared = "Q4_K"')
    with pytest.raises(TypeRuleError, match="block does not divide") as caught:
        resolve_types(recipe_of(content), odd)
    assert len(odd) == 80
    assert all(f"{t.name} [64 x 200]" in str(caught.value) for t in odd)
    assert "BF16 (2,048,000 bytes)" in str(caught.value)


def test_fd_13_what_must_not_be_quantized_is_not():
    """Everything Q2_K is refused; allowed by name, norms, sinks and biases are F32 all the same."""
    targets = target_tensors(released_config(), Layout.FORK)
    with pytest.raises(Problems) as caught:
        resolve_types(recipe_of(ROLES), targets)
    told = str(caught.value)
    for name in ("hc_attn_fn", "engram_q", "ffn_gate_inp"):
        assert name in told
    types = resolve_types(recipe_of('allow = ["below_bf16"]\n' + ROLES), targets)
    for part in ("norm", "sinks", "bias", "base", "hc_attn_scale"):
        assert {types[t.name].name for t in targets if part in t.name} == {"F32"}
    assert types["blk.0.hc_attn_fn.weight"].name == "Q2_K"
    assert "F16" not in {t.name for t in types.values()}


WRITER_TRAPS = {
    "a key twice": ([u32("k", 1), u32("k", 2)], (), "metadata key stands twice"),
    "an empty list": ([array("k", ValueType.INT32, [])], (), "empty array"),
    "beyond int32": ([array("k", ValueType.INT32, [1, 2**31])], (), "does not fit its type"),
    "a float among integers": ([array("k", ValueType.INT32, [1.5])], (), "does not fit its type"),
    "a name of 64 bytes": ([], [TensorInfo("n" * 64, (32,), 0, 0)], "1 to 63 bytes"),
    "five dimensions": ([], [TensorInfo("n", (1,) * 5, 0, 0)], "1 to 4 dimensions"),
    "a tensor twice": ([], [TensorInfo("n", (32,), 0, 0)] * 2, "tensor name stands twice"),
}


@pytest.mark.parametrize(("keys", "infos", "message"), WRITER_TRAPS.values(), ids=WRITER_TRAPS)
def test_fd_15_the_writer_refuses_what_loaders_would_not_read(keys, infos, message):
    with pytest.raises(FormatError, match=message):
        encode_header(keys, infos)


def test_fd_15_numpy_integers_are_numbers(tmp_path):
    path = tmp_path / "numpy.gguf"
    path.write_bytes(encode_header([array("k", ValueType.UINT32, [np.int64(7), np.uint8(9)])], []))
    assert read_gguf(path).key_values["k"].value == (7, 9)


def test_fd_16_bytes_in_front_of_rows_are_counted(tmp_path):
    """IQ4_KSS, 8 rows: 32 bytes more than the blocks; without them the next tensor overlaps."""
    kind = TYPES["IQ4_KSS"]
    nbytes = 8 * kind.row_nbytes(512)
    assert nbytes == 8 * 2 * kind.block_nbytes + 32
    path = tmp_path / "rows.gguf"
    for offset, is_right in ((nbytes, True), (nbytes - 32, False)):
        infos = [
            TensorInfo("a", (512, 8), kind.type_id, 0),
            TensorInfo("b", (32,), TYPES["F32"].type_id, offset),
        ]
        path.write_bytes(encode_header((), infos) + bytes(offset + 128))
        if is_right:
            assert read_gguf(path).tensors["a"].nbytes == nbytes
        else:
            with pytest.raises(FormatError, match="overlaps the one before"):
                read_gguf(path)


NINE = "layer_ids head_count key_length max_ngram_size pad_id multipliers primes offsets token_map"


def test_fd_17_every_key_that_a_loader_needs_is_there(small_miniature, tmp_path):
    out = tmp_path / "out"
    assert run_job(small_miniature, out, layout="fork").ok
    model = read_model(out / NAME.replace("mainline", "fork"))
    assert check_contract(model, V41_FORK) == []
    for key in NINE.split():
        name = f"deepseek41.engram.{key}"
        assert name in model.key_values
        first = model.files[0]
        keys = {k: entry for k, entry in first.key_values.items() if k != name}
        poorer = GgufModel((replace(first, key_values=keys), *model.files[1:]))
        problems = check_contract(poorer, V41_FORK)
        assert any(name in str(problem) for problem in problems), key


def test_fd_19_a_tensor_larger_than_the_limit_stands_alone_and_limits_are_told():
    plan = small_plan(Layout.FORK, shard_nbytes=1)
    experts = [shard for shard in plan.shards if shard.kind == "experts"]
    assert len(experts) == 6
    assert all(len(shard.tensors) == 3 for shard in experts)
    assert "More than 64 files" not in render_text(shard_table(plan))
    many = replace(plan, shards=plan.shards * 10)
    assert "More than 64 files" in render_text(shard_table(many))
    joined = released_plan("native", Layout.MAINLINE)
    (large,) = [shard for shard in joined.shards if shard.nbytes > 200 * 10**9]
    assert f"{large.file_name} is larger than 200 GB" in render_text(shard_table(joined))


def keep_list(path, *layers):
    path.write_text(json.dumps({"layers": {str(n): ids for n, ids in enumerate(layers)}}))
    return path


def test_fd_08_pruned_counts_agree_everywhere(small_miniature, tmp_path):
    keep = keep_list(tmp_path / "keep.json", *([0, 2, 3], [1, 2, 3]) * 3)
    outcome = run_job(small_miniature, tmp_path / "out", keep=str(keep))
    assert outcome.ok, outcome.text
    folder = tmp_path / "out" / NAME.replace("native", "native-3E")
    assert "some were cut, by unknown (list-only)" in (folder / "budget.md").read_text()
    model = read_model(folder)
    keys = {key: entry.value for key, entry in model.key_values.items()}
    assert keys["deepseek41.expert_count"] == 3
    assert keys["quantmill.experts.source_count"] == 4
    assert keys["quantmill.experts.honesty"] == ("list-only",)
    assert keys["quantmill.experts.kept"] == (0, 2, 3, 1, 2, 3) * 3
    counted = [
        tensor.ne[-1]
        for name, (_, tensor) in model.tensors.items()
        if re.search(r"_exps\.|ffn_gate_inp\.|exp_probs_b", name)
    ]
    assert counted == [3] * 6 * 6
    draft = read_draft(model.files[0].path)
    assert draft.key_values["dflash.expert_count"].value == 1


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        (([0, 1],) * 5, "has no layer 5"),
        (([0, 1],) * 5 + ([0, 1, 2],), "another number of experts than the other layers"),
        (([0, 4],) * 6, "an expert that the model does not have"),
        (([0],) * 6, "fewer experts than a token uses"),
        (([1, 1, 2],) * 6, "keeps an expert twice"),
    ],
    ids=["missing layer", "uneven", "out of range", "fewer than top-k", "twice"],
)
def test_fd_08_a_bad_list_fails_before_a_weight_is_read(small_miniature, tmp_path, layers, what):
    keep = keep_list(tmp_path / "keep.json", *layers)
    outcome = run_job(small_miniature, tmp_path / "out", keep=str(keep))
    assert not outcome.ok
    assert what in outcome.text, outcome.text
    assert not (tmp_path / "out").exists()
