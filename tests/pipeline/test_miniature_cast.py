"""The caster of the miniatures against torch and against the nearest code found by search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.miniature.cast import (
    E2M1,
    E4M3,
    MiniFloat,
    bf16_bits,
    cast_blocks,
    codes,
    pack_nibbles,
    scale_exponents,
)
from pipeline.miniature.draws import row_chunks

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def spread_values(most: float) -> np.ndarray:
    """Random values of every size down to far below the smallest code, both signs, and zeros."""
    draw = np.random.default_rng(3)
    sizes = np.exp2(draw.uniform(-16, np.log2(most), 20_000)).astype(np.float32)
    return np.concatenate([sizes, -sizes, np.zeros(2, np.float32), np.float32([most, -most])])


def e4m3_values() -> np.ndarray:
    return torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def with_midpoints(values: np.ndarray) -> np.ndarray:
    middles = (values[1:] + values[:-1]) / 2
    return np.concatenate([values, middles, -middles]).astype(np.float32)


@pytest.mark.parametrize(
    "values", [spread_values(448), with_midpoints(e4m3_values())], ids=["spread", "ties"]
)
def test_fp8_codes_are_those_of_torch(values: np.ndarray) -> None:
    cast = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes(values, E4M3), cast)


@pytest.mark.parametrize(
    "values", [spread_values(6), with_midpoints(FP4_VALUES)], ids=["spread", "ties"]
)
def test_fp4_codes_are_the_nearest_and_even_in_a_tie(values: np.ndarray) -> None:
    distances = np.abs(np.abs(values)[:, None].astype(np.float64) - FP4_VALUES)
    tied = distances == distances.min(axis=1, keepdims=True)
    odd = np.arange(8) % 2
    nearest = np.argmin(np.where(tied, odd, 2), axis=1)
    np.testing.assert_array_equal(codes(values, E2M1), nearest | (np.signbit(values) << 3))


def test_values_above_the_largest_code_saturate() -> None:
    values = np.float32([449, -1e30, 6.5])
    assert codes(values, E4M3).tolist()[:2] == [0x7E, 0xFE]
    assert codes(values, E2M1).tolist() == [7, 15, 7]


@pytest.mark.parametrize("to", [E4M3, E2M1], ids=["fp8", "fp4"])
def test_scale_is_the_smallest_power_of_two_that_fits(to: MiniFloat) -> None:
    values = spread_values(1e4)[:2048].reshape(64, 32) * np.float32(1e-6)
    exponents = scale_exponents(values, (1, 32), to.most)
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (largest <= to.most * np.exp2(exponents.astype(np.float64))).all()
    assert (largest > to.most * np.exp2(exponents - 1.0)).all()


@pytest.mark.parametrize(("most", "exponent"), [(6.0, 0), (12.0, 1), (6.000001, 1), (0.75, -3)])
def test_scale_at_its_edges(most: float, exponent: int) -> None:
    values = np.full((1, 32), most, np.float32)
    assert scale_exponents(values, (1, 32), E2M1.most).tolist() == [[exponent]]


def test_a_block_of_zeros_gets_a_scale_that_is_a_number() -> None:
    stored, scales = cast_blocks(np.zeros((1, 32), np.float32), (1, 32), E2M1)
    assert not stored.any()
    assert 0 < scales[0, 0] < 255


def test_nibbles_hold_the_even_element_low() -> None:
    assert pack_nibbles(np.arange(16, dtype=np.uint8)[None]).tolist() == [
        [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    ]


def test_bf16_bits_are_those_of_torch() -> None:
    values = spread_values(1e30)
    cast = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bf16_bits(values), cast)


@pytest.mark.parametrize(
    ("to", "block", "low", "high"),
    [
        pytest.param(E4M3, (32, 32), 0.02, 0.04, id="fp8 dense"),
        pytest.param(E4M3, (1, 32), 0.02, 0.04, id="fp8 table"),
        pytest.param(E2M1, (1, 32), 0.08, 0.2, id="fp4 expert"),
    ],
)
def test_relative_error_of_drawn_weights(
    to: MiniFloat, block: tuple[int, int], low: float, high: float
) -> None:
    (_, floats), *_ = row_chunks("layers.0.attn.wq_a.weight", (256, 512), 0)
    stored, scales = cast_blocks(floats, block, to)
    values = np.append(e4m3_values(), 0) if to is E4M3 else FP4_VALUES
    size = values[stored & ((1 << to.sign_bit) - 1)]
    signed = np.where(stored >> to.sign_bit, -size, size)
    factors = np.exp2(scales.astype(np.float32) - 127).repeat(block[0], 0).repeat(block[1], 1)
    error = np.linalg.norm(signed * factors - floats) / np.linalg.norm(floats)
    assert low < error < high


def test_drawn_weights_are_heavy_tailed_with_outlier_columns() -> None:
    floats = np.concatenate([rows for _, rows in row_chunks("head.weight", (8192, 512), 0)])
    column_scales = np.sqrt((floats**2).mean(axis=0))
    assert column_scales.max() > 4 * np.median(column_scales)
    ordinary = floats[:, column_scales < 2 * np.median(column_scales)]
    ordinary = ordinary / ordinary.std(axis=0) / ordinary.std(axis=1, keepdims=True)
    kurtosis = (ordinary**4).mean() / (ordinary**2).mean() ** 2
    assert kurtosis > 4  # 3 would be normal
