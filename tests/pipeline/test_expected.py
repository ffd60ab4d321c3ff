"""The expected tensors of both released models, held against public counts, bytes and digests."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from pipeline.digest import sha256
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.expected.tensors import expected_tensors, structure_digest
from pipeline.source.spec import TensorSpec

DATA = Path(__file__).parents[1] / "data"
V41, V4 = "deepseek-v4.1-flash", "deepseek-v4-flash-0731"


@cache
def released_config(name: str) -> ModelConfig:
    return read_config(json.loads((DATA / f"{name}.config.json").read_bytes()))


@cache
def released_tensors(name: str) -> tuple[TensorSpec, ...]:
    return expected_tensors(released_config(name))


@dataclass(frozen=True)
class Facts:
    n_tensors: int
    nbytes: int
    digest: str
    dtype_counts: dict[str, int]


FACTS = {
    V41: Facts(
        96_085,
        510_286_023_000,
        "834a3fd1840230036c63b3edf4467d9356784f69bcc4a7fb156ffec536b8ef2c",
        {"I8": 47_232, "F8_E4M3": 357, "F8_E8M0": 47_589, "BF16": 520, "F32": 387},
    ),
    V4: Facts(
        72_317,
        166_878_536_440,
        "18285fe60ca3655be488bbabb88b59489b8ee03cff7fc4f4729424051ca83e0e",
        {"I8": 35_328, "F8_E8M0": 35_718, "F8_E4M3": 390, "BF16": 445, "F32": 433, "I64": 3},
    ),
}


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        (V41, "8be45ce0476004a3f529fd896115a4a2e800a129ad2d3ec05b16050f52e21879"),
        (V4, "6c8f3d2d3b48707541b88f32f22ef3f0f8a6b57d8523281e2b8d3cdb0ae9a023"),
    ],
)
def test_the_config_is_the_released_file(name: str, digest: str) -> None:
    assert sha256((DATA / f"{name}.config.json").read_bytes()) == digest


@pytest.mark.parametrize("name", FACTS)
def test_counts_and_bytes_are_those_of_the_release(name: str) -> None:
    specs, facts = released_tensors(name), FACTS[name]
    assert len(specs) == facts.n_tensors
    assert sum(spec.nbytes for spec in specs) == facts.nbytes
    assert Counter(spec.dtype for spec in specs) == facts.dtype_counts


@pytest.mark.parametrize("name", FACTS)
def test_structure_digest_is_that_of_the_released_headers(name: str) -> None:
    assert structure_digest(released_tensors(name)) == FACTS[name].digest


def test_v41_bytes_by_dtype() -> None:
    nbytes: Counter[str] = Counter()
    for spec in released_tensors(V41):
        nbytes[spec.dtype] += spec.nbytes
    assert nbytes == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
    }


@pytest.mark.parametrize(
    ("prefix", "n_tensors", "nbytes"),
    [
        pytest.param("layers.0.", 2_334, 170_055_128 + 7_219_445_760, id="window only"),
        pytest.param("layers.2.", 2_342, 186_248_920 + 7_219_445_760, id="full, ratio 2"),
        pytest.param("layers.20.", 2_341, 181_006_040 + 7_219_445_760, id="full, ratio 1"),
        pytest.param("layers.24.", 2_337, 175_630_808 + 7_219_445_760, id="reindex"),
        pytest.param("layers.39.", 2_334, 170_055_128 + 7_219_445_760, id="reuse"),
        pytest.param("layers.1.engram.", 6, 101_535_150_272, id="engram of layer 1"),
        pytest.param("layers.14.engram.", 6, 101_537_925_968, id="engram of layer 14"),
        pytest.param("mtp.0.", 801, 2_652_643_800, id="first draft stage"),
        pytest.param("mtp.1.", 798, 2_573_913_560, id="middle draft stage"),
        pytest.param("mtp.2.", 802, 2_706_317_272, id="last draft stage"),
        pytest.param(("vision.", "aligner.", "image_"), 266, 970_536_960, id="vision"),
    ],
)
def test_v41_parts(prefix: str | tuple[str, ...], n_tensors: int, nbytes: int) -> None:
    part = [spec for spec in released_tensors(V41) if spec.name.startswith(prefix)]
    assert (len(part), sum(spec.nbytes for spec in part)) == (n_tensors, nbytes)


def test_digest_ignores_order_and_notices_a_shape() -> None:
    specs = (TensorSpec("b", "BF16", (2, 3)), TensorSpec("a", "F32", (4,)))
    assert structure_digest(specs) == structure_digest(specs[::-1])
    assert structure_digest(specs) != structure_digest((specs[0], TensorSpec("a", "F32", (2, 2))))
