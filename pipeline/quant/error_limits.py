"""How much a type may lose before something else must be wrong."""

from __future__ import annotations

from collections.abc import Mapping

ERROR_LIMITS: Mapping[str, float] = {
    "F32": 0.0,
    "F16": 0.001,
    "BF16": 0.005,
    "Q8_0": 0.02,
    "Q6_K": 0.04,
    "Q6_0": 0.05,
    "Q5_K": 0.08,
    "IQ5_KS": 0.08,
    "Q5_0": 0.10,
    "Q5_1": 0.10,
    "IQ5_K": 0.10,
    "IQ6_K": 0.12,
    "IQ4_K": 0.13,
    "Q4_K": 0.15,
    "IQ4_KS": 0.15,
    "IQ4_NL": 0.16,
    "IQ4_XS": 0.16,
    "Q4_0": 0.20,
    "Q4_1": 0.20,
    "NVFP4": 0.22,
    "IQ4_KSS": 0.22,
    "MXFP4": 0.25,
    "F8_E4M3": 0.25,
    "IQ4_KT": 0.25,
    "IQ3_K": 0.30,
    "Q3_K": 0.30,
    "IQ3_KS": 0.33,
    "IQ3_XXS": 0.42,
    "IQ3_S": 0.45,
    "IQ3_KT": 0.45,
    "IQ2_KL": 0.48,
    "Q2_K": 0.55,
    "IQ2_S": 0.55,
    "IQ2_K": 0.58,
    "IQ2_XS": 0.60,
    "IQ2_KS": 0.65,
    "IQ2_XXS": 0.70,
    "IQ2_KT": 0.75,
    "Q2_0": 0.85,
    "IQ1_M": 0.90,
    "IQ1_KT": 0.90,
    "IQ1_S": 0.92,
    "TQ1_0": 0.95,
    "TQ2_0": 0.95,
    "Q1_0": 0.95,
}
"""Largest relative error of a sample that a type explains: about twice what was measured for it on
normal and on FP4 weights, room for an imatrix (which trades plain error for weighted error) and for
heavier tails. Weights of another matrix give 1.4, zeros give 1. IQ6_K, IQ5_K and IQ4_K have room
for small weights: below a standard deviation of about 0.006 their f16 scales are subnormal, and at
0.0006 IQ6_K loses more than Q4_K."""
