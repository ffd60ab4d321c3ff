"""`general.file_type`: one number that says which type most of a file has."""

from __future__ import annotations

from pipeline.errors import TypeRuleError

_LLAMA_FTYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "Q2_K_S": 21,
    "IQ3_XS": 22,
    "IQ3_XXS": 23,
    "IQ1_S": 24,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ3_M": 27,
    "IQ2_S": 28,
    "IQ2_M": 29,
    "IQ4_XS": 30,
    "IQ1_M": 31,
    "BF16": 32,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4_MOE": 38,
    "NVFP4": 39,
    "Q1_0": 40,
    "Q2_0": 41,
}
"""``enum llama_ftype`` of llama.cpp, include/llama.h, without the prefix MOSTLY."""

_IK_FTYPES = {
    "Q6_0": 135,
    "IQ2_K": 138,
    "IQ3_K": 139,
    "IQ4_K": 140,
    "IQ5_K": 141,
    "IQ6_K": 142,
    "IQ4_KS": 145,
    "IQ3_KL": 146,
    "IQ2_KS": 147,
    "IQ4_KSS": 148,
    "IQ5_KS": 150,
    "IQ2_KT": 151,
    "IQ3_KT": 152,
    "IQ4_KT": 153,
    "IQ3_KS": 154,
    "IQ2_KL": 155,
    "IQ1_KT": 156,
}
"""The same enum in ik_llama.cpp, which goes on from 135."""

_MIXES_OF_TYPES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}
"""Tensor types that name no ftype of their own -> the mix that is mostly of that type."""


def file_type_id(type_name: str) -> int:
    """The LLAMA_FTYPE number for a file whose experts are mostly ``type_name``.

    Args:
        type_name: A tensor type (``Q3_K``) or the name of a mix (``Q3_K_M``).

    Raises:
        TypeRuleError: Neither llama.cpp nor ik_llama.cpp has a number for it.
    """
    name = _MIXES_OF_TYPES.get(type_name, type_name)
    number = _LLAMA_FTYPES.get(name, _IK_FTYPES.get(name))
    if number is None:
        raise TypeRuleError(
            "no file type number is known for this type",
            expected=", ".join([*_MIXES_OF_TYPES, *_LLAMA_FTYPES, *_IK_FTYPES]),
            found=type_name,
        )
    return number
