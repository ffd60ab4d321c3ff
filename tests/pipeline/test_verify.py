"""Verification: exact types lose nothing, others stay within limits, and damage is named."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline import measure
from pipeline.gguf.digests import check_digests
from pipeline.gguf.keys import text
from pipeline.gguf.part import ShardPart
from pipeline.measure import TensorError, check_errors, errors_by_role, measure_errors, sample_rows
from pipeline.model.form import V41_FORK
from pipeline.model.layout import Layout
from pipeline.model.roles import Role
from pipeline.model.targets.tensor import Combine, TargetTensor
from pipeline.plan import Plan, Transform, make_plan
from pipeline.quant.error_limits import ERROR_LIMITS
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.types import TYPES
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.reader import SourceReader
from pipeline.source.spec import Codec, MatrixRef
from pipeline.verify import verify_files
from tests.gguf_builder import released_config, small_plan, write_plan
from tests.pipeline.filling import fill_shard
from tests.pipeline.tiny_shards import write_checkpoint

RNG = np.random.default_rng(7)
N_EXPERTS, N_ROWS = 4, 32
LOSSY = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K", "TQ1_0", "F16",
         "MXFP4")  # fmt: skip
"""Types of the dense matrices, one layer each."""


def bf16(*shape):
    return (RNG.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def fp4():
    codes = RNG.integers(0, 256, (N_ROWS, 128), np.uint8)
    return codes, RNG.integers(115, 125, (N_ROWS, 8), np.uint8)


def stored():
    tensors = {
        "norm": ("BF16", bf16(256)),
        "copied": ("BF16", bf16(N_ROWS, 256)),
        "table.weight": ("F8_E4M3", RNG.integers(0, 0x7E, (N_ROWS, 256), np.uint8)),
        "table.scale": ("F8_E8M0", RNG.integers(115, 125, (N_ROWS, 8), np.uint8)),
        "hashed": (
            "I64",
            RNG.permuted(np.tile(np.arange(N_EXPERTS), (N_ROWS, 1)), axis=1)[:, :2],
        ),
        "q": ("BF16", bf16(4, 256)),
        "k": ("BF16", bf16(4, 256)),
    }
    for layer, type_name in enumerate(LOSSY):
        values = RNG.standard_normal((N_ROWS, 256), np.float32)
        # Every normal BF16 number of this size is an F16 number too.
        is_f32 = type_name == "F16"
        tensors[f"dense{layer}"] = ("F32", values) if is_f32 else ("BF16", bf16(N_ROWS, 256))
    for expert in range(N_EXPERTS):
        codes, scales = fp4()
        tensors[f"e{expert}.weight"] = ("I8", codes)
        tensors[f"e{expert}.scale"] = ("F8_E8M0", scales)
    return tensors


def target(name, shape, *matrices, layer=None, combine=Combine.ROWS):
    return TargetTensor(name, layer, shape, None, matrices, combine)


def dense(source: str, n_rows=N_ROWS) -> MatrixRef:
    return MatrixRef(Codec.BF16, source, None, n_rows, 256)


def small_targets():
    experts = [
        MatrixRef(Codec.FP4, f"e{n}.weight", f"e{n}.scale", N_ROWS, 256, (1, 32))
        for n in range(N_EXPERTS)
    ]
    table = MatrixRef(Codec.FP8, "table.weight", "table.scale", N_ROWS, 256, (1, 32))
    stack = (N_EXPERTS, N_ROWS, 256)
    yield target("output_norm.weight", (256,), dense("norm", 1)), "F32"
    yield target("token_embd.weight", (N_ROWS, 256), dense("copied")), "BF16"
    yield target("blk.0.engram_embd.weight", (N_ROWS, 256), table, layer=0), "Q3_K"
    hashed = MatrixRef(Codec.I64, "hashed", None, N_ROWS, 2)
    ids = target("blk.0.ffn_gate_tid2eid.weight", (N_ROWS, 2), hashed, layer=0)
    yield replace(ids, id_limit=N_EXPERTS), "I32"
    gate = [dense(name, 4) for name in "qk"]
    yield (
        target("blk.0.engram_gate.weight", (4, 256), *gate, layer=0, combine=Combine.PRODUCT),
        "F32",
    )
    yield target("blk.0.ffn_gate_exps.weight", stack, *experts, layer=0), "MXFP4"
    yield target("blk.0.ffn_up_exps.weight", stack, *experts, layer=0), "Q4_K"
    for layer, type_name in enumerate(LOSSY):
        name = f"blk.{layer}.attn_kv.weight"
        matrix = dense(f"dense{layer}")
        if type_name == "F16":
            matrix = replace(matrix, codec=Codec.F32)
        yield target(name, (N_ROWS, 256), matrix, layer=layer), type_name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return open_checkpoint(write_checkpoint(folder, {"model.safetensors": stored()}))


@pytest.fixture(scope="module")
def source(checkpoint):
    with SourceReader(checkpoint) as reader:
        yield reader


@pytest.fixture(scope="module")
def plan() -> Plan:
    targets = dict(small_targets())
    return make_plan(
        name="small",
        form=V41_FORK,
        config=released_config(),
        targets=[*targets],
        types={t.name: TYPES[type_name] for t, type_name in targets.items()},
        key_values=[text("general.architecture", "deepseek41")],
        shard_nbytes=100_000,
    )


@pytest.fixture(scope="module")
def filled(plan, source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    for shard in plan.shards:
        path = folder / shard.file_name
        with ShardPart(path, header=shard.header, nbytes=shard.nbytes, spec="s") as part:
            fill_shard(part, shard, source, GgmlQuantizer(), n_threads=1)
            part.publish()
    return folder


@pytest.fixture
def folder(filled, tmp_path) -> Path:
    """A copy to damage."""
    for path in filled.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def paths_of(plan, folder):
    return [folder / shard.file_name for shard in plan.shards]


def measured(plan, folder, source, n_rows=1000) -> dict[str, TensorError]:
    errors = [
        error
        for shard in plan.shards
        for error in measure_errors(shard.tensors, folder / shard.file_name, source, n_rows=n_rows)
    ]
    return {error.name: error for error in errors}


def damage(plan: Plan, folder: Path, name: str, change) -> None:
    """Let ``change`` alter the bytes of a tensor in its file."""
    tensor = next(t for t in plan.tensors if t.name == name)
    path = folder / plan.shards[tensor.shard].file_name
    whole = bytearray(path.read_bytes())
    rows = np.frombuffer(whole, np.uint8, tensor.nbytes, tensor.offset).copy()
    rows = rows.reshape(-1, tensor.row_nbytes)
    change(rows)
    whole[tensor.offset : tensor.offset + tensor.nbytes] = rows.tobytes()
    path.write_bytes(whole)


def test_exact_tensors_lose_nothing(plan, filled, source):
    errors = measured(plan, filled, source)
    exact = ["output_norm", "token_embd", "blk.0.engram_gate", "blk.0.ffn_gate_exps"]
    exact.append("blk.0.ffn_gate_tid2eid")
    for name in exact:
        error = errors[f"{name}.weight"]
        assert (error.rmse, error.limit) == (0.0, 0.0), name
        assert error.squared_norm > 0
    transforms = {t.name: t.transform for t in plan.tensors}
    assert {transforms[f"{name}.weight"] for name in exact} == set(Transform)


def test_lossy_tensors_stay_within_the_limit_of_their_type(plan, filled, source):
    errors = measured(plan, filled, source)
    assert {*errors} == {t.name for t in plan.tensors}
    assert check_errors(errors.values()) == []
    lossy = [error for error in errors.values() if error.limit]
    assert len(lossy) == len(LOSSY) + 2
    for error in lossy:
        assert ERROR_LIMITS[error.type_name] / 20 < error.rmse, error


def test_error_is_that_of_a_plain_computation(plan, filled, source):
    error = measured(plan, filled, source)["blk.0.attn_kv.weight"]
    words = next(t for t in plan.tensors if t.name == error.name)
    wanted = np.empty((N_ROWS, 256), np.float32)
    source.decode_rows(words.target.matrices[0], 0, wanted)
    content = (filled / plan.shards[words.shard].file_name).read_bytes()
    blocks = np.frombuffer(content, np.uint8, words.nbytes, words.offset).reshape(-1, 34)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float64)
    found = (scale * blocks[:, 2:].copy().view(np.int8)).reshape(N_ROWS, 256)
    rmse = np.sqrt(np.sum((found - wanted) ** 2) / np.sum(wanted.astype(np.float64) ** 2))
    assert error.rmse == pytest.approx(rmse, rel=1e-6)


@pytest.mark.parametrize("tile", [256, 3 * 256, 1 << 18])
def test_tiles_do_not_change_the_sums(plan, filled, source, monkeypatch, tile):
    wanted = measured(plan, filled, source)
    monkeypatch.setattr(measure, "TILE_WEIGHTS", tile)
    for name, error in measured(plan, filled, source).items():
        assert error.squared_error == pytest.approx(wanted[name].squared_error)
        assert error.n_rows == wanted[name].n_rows


@pytest.mark.parametrize(
    ("n_total", "n_rows", "rows"),
    [
        (5, 9, (0, 1, 2, 3, 4)),
        (5, 5, (0, 1, 2, 3, 4)),
        (10, 1, (0,)),
        (10, 2, (0, 9)),
        (10, 4, (0, 3, 6, 9)),
        (384_006_168, 3, (0, 192_003_083, 384_006_167)),
    ],
)
def test_sample_has_first_last_and_even_steps(n_total, n_rows, rows):
    assert sample_rows(n_total, n_rows) == rows


def test_sample_reads_every_expert(plan, filled, source):
    error = measured(plan, filled, source, n_rows=N_EXPERTS)["blk.0.ffn_up_exps.weight"]
    assert (error.n_rows, error.n_rows_total) == (N_EXPERTS, N_EXPERTS * N_ROWS)
    assert {row // N_ROWS for row in sample_rows(error.n_rows_total, N_EXPERTS)} == {0, 1, 2, 3}


def swap_experts(rows):
    rows[:N_ROWS], rows[N_ROWS : 2 * N_ROWS] = (
        rows[N_ROWS : 2 * N_ROWS].copy(),
        rows[:N_ROWS].copy(),
    )


def zero(rows):
    rows[:] = 0


def flip_last(rows):
    rows[-1, -1] ^= 1


def no_number(rows):
    rows[0, :4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)


def shift(rows):
    rows[:] = np.roll(rows, 1, axis=0)


DAMAGE = {
    "swapped experts, exact": ("blk.0.ffn_gate_exps.weight", swap_experts),
    "swapped experts, lossy": ("blk.0.ffn_up_exps.weight", swap_experts),
    "zeros": ("blk.9.attn_kv.weight", zero),
    "shifted rows": ("blk.0.engram_embd.weight", shift),
    "last bit of a copy": ("token_embd.weight", flip_last),
    "last bit of F32": ("blk.0.engram_gate.weight", flip_last),
    "NaN": ("output_norm.weight", no_number),
}


@pytest.mark.parametrize(("name", "change"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(plan, folder, source, name, change):
    damage(plan, folder, name, change)
    (problem,) = check_errors(measured(plan, folder, source).values())
    assert problem.tensor == name
    type_name = next(t.type.name for t in plan.tensors if t.name == name)
    limit = 0 if name in ("token_embd.weight", "blk.0.ffn_gate_exps.weight") else None
    limit = ERROR_LIMITS[type_name] if limit is None else limit
    assert f"a relative error of {limit:g} at most for {type_name}" in str(problem)
    assert verify_files(plan, paths_of(plan, folder)) == []


def test_roles_weigh_tensors_by_their_estimated_squares():
    def error(name, role, sampled, total, squares):
        return TensorError(name, role, "Q8_0", sampled, total, *squares, 0.02)

    roles = errors_by_role(
        [
            error("a", Role.ROUTED, 2, 200, (1.0, 100.0)),
            error("b", Role.ROUTED, 4, 4, (36.0, 100.0)),
            error("c", Role.SHARED, 1, 1, (float("nan"), 1.0)),
            error("d", Role.SHARED, 1, 1, (0.0, 1.0)),
            error("e", Role.ENGRAM, 1, 1, (0.0, 0.0)),
        ]
    )
    by_role = {role.role: role for role in roles}
    routed = by_role[Role.ROUTED]
    assert routed.rmse == pytest.approx(((100 + 36) / (10_000 + 100)) ** 0.5)
    assert (routed.n_tensors, routed.worst.name) == (2, "b")
    assert by_role[Role.SHARED].worst.name == "c"
    assert by_role[Role.ENGRAM].rmse == 0.0
    assert len(roles) == 3


def test_zeros_in_the_source_must_stay_zeros():
    kept = TensorError("a", Role.ROUTED, "Q8_0", 1, 1, 0.0, 0.0, 0.02)
    assert kept.is_within
    assert not replace(kept, squared_error=1e-30).is_within


def test_types_that_cannot_be_decoded_are_left_out(plan, filled, source, monkeypatch):
    """Those of ik_llama.cpp, where its library is not installed."""
    monkeypatch.setattr(measure, "can_decode", lambda ggml_type: ggml_type.family == "mainline")
    shard = plan.shards[0]
    ik = replace(shard.tensors[0], type=TYPES["IQ4_K"])
    tensors = (ik, *shard.tensors[1:])
    errors = measure_errors(tensors, filled / shard.file_name, source, n_rows=1)
    assert {t.name for t in tensors} - {e.name for e in errors} == {ik.name}


@pytest.mark.parametrize("layout", Layout, ids=str)
def test_files_as_planned_have_no_problem(tmp_path, layout):
    plan = small_plan(layout)
    write_plan(plan, tmp_path)
    assert verify_files(plan, paths_of(plan, tmp_path)) == []


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


def other_type(path):
    whole = path.read_bytes()
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    path.write_bytes(whole[:at] + (24).to_bytes(4, "little") + whole[at + 4 :])


def other_key(path):
    path.write_bytes(path.read_bytes().replace(b"deepseek41", b"deepseek42", 1))


def other_name(path):
    path.write_bytes(path.read_bytes().replace(b"output.weight", b"outpux.weight", 1))


FILE_FAULTS = {
    "missing": (Path.unlink, ["cannot open"]),
    "cut": (cut, ["another length"]),
    "grown": (grow, ["another length", "bytes follow"]),
    "empty": (lambda path: path.write_bytes(b""), ["another length"]),
    "other type": (other_type, ["not the planned one"]),
    "other key": (other_key, ["not the planned one"]),
    "other name": (other_name, ["not the planned one", "outpux.weight", "tensor output.weight"]),
}


@pytest.mark.parametrize(("change", "messages"), FILE_FAULTS.values(), ids=FILE_FAULTS)
def test_file_that_is_not_as_planned_is_named(tmp_path, change, messages):
    plan = small_plan(Layout.FORK)
    path = write_plan(plan, tmp_path)
    change(path)
    problems = [str(problem) for problem in verify_files(plan, paths_of(plan, tmp_path))]
    assert all(path.name in problem for problem in problems)
    for message in messages:
        assert any(message in problem for problem in problems), (message, problems)


def test_swapped_shards_are_named(tmp_path):
    plan = small_plan(Layout.FORK)
    write_plan(plan, tmp_path)
    one, two = (tmp_path / plan.shards[no].file_name for no in (1, 2))
    contents = one.read_bytes(), two.read_bytes()
    one.write_bytes(contents[1])
    two.write_bytes(contents[0])
    named = " ".join(map(str, verify_files(plan, paths_of(plan, tmp_path))))
    assert all(f"blk.{layer}.engram_embd.weight" in named for layer in (1, 3))
    assert "no such tensor" in named


@pytest.fixture
def digests(plan, filled) -> dict[str, str]:
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in filled.iterdir()}
    for tensor in plan.tensors:
        name = plan.shards[tensor.shard].file_name
        content = (filled / name).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        sums[f"{name}:{tensor.name}"] = hashlib.sha256(content).hexdigest()
    return sums


def test_right_digests_pass_and_every_byte_is_read_once(plan, filled, digests):
    told: list[int] = []
    assert check_digests(filled, digests, progress=told.append) == []
    assert sum(told) == plan.nbytes


def test_flipped_bit_is_found_in_its_file_and_tensor(plan, folder, digests):
    damage(plan, folder, "blk.3.attn_kv.weight", flip_last)
    problems = check_digests(folder, digests)
    name = plan.shards[0].file_name
    assert [(Path(p.file).name, p.tensor) for p in problems] == [
        (name, "blk.3.attn_kv.weight"),
        (name, None),
    ]
    only_file = {key: value.upper() for key, value in digests.items() if ":" not in key}
    assert [p.tensor for p in check_digests(folder, only_file)] == [None]


def test_missing_file_and_tensor_are_named(plan, folder, digests):
    last = folder / plan.shards[-1].file_name
    last.unlink()
    wanted = {f"{plan.shards[0].file_name}:blk.9.none.weight": "00", last.name: "00"}
    first, second = check_digests(folder, wanted)
    assert first.tensor == "blk.9.none.weight"
    assert last.name in str(second)


def test_every_limit_tells_a_type_from_damage():
    assert list(ERROR_LIMITS.values()) == sorted(ERROR_LIMITS.values())
    assert {*ERROR_LIMITS} <= {*TYPES}
    # Weights of another matrix give 1.41, zeros give 1: every limit must tell them apart.
    assert max(ERROR_LIMITS.values()) < 1
