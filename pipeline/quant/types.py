"""The ggml tensor types a GGUF file can name: ids, blocks and exact row sizes.

Mainline rows after ggml ``ggml.h`` (``enum ggml_type``) and ``ggml-common.h`` (block structs); ik
rows after ikawrakow/ik_llama.cpp ``ggml/include/ggml.h`` and what its ``ggml_row_size`` answers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pipeline.errors import TypeRuleError

Family = Literal["mainline", "ik"]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One tensor type: how many bytes a row of weights takes.

    ``block`` weights are stored in ``block_nbytes`` bytes; some ik types put ``row_meta_nbytes``
    more in front of every row.
    """

    name: str
    type_id: int
    block: int
    block_nbytes: int
    row_meta_nbytes: int = 0
    family: Family = "mainline"

    def row_nbytes(self, n_cols: int) -> int:
        """Bytes of one row of ``n_cols`` weights.

        Raises:
            TypeRuleError: ``n_cols`` is not a positive multiple of the block.
        """
        n_blocks, rest = divmod(n_cols, self.block)
        if rest or n_blocks < 1:
            raise TypeRuleError(
                f"the block of {self.name} does not divide the row",
                expected=f"a multiple of {self.block} weights a row",
                found=f"{n_cols:,}",
            )
        return self.row_meta_nbytes + n_blocks * self.block_nbytes

    @property
    def bpw(self) -> float:
        """Nominal bits per weight: without the bytes in front of a row."""
        return 8 * self.block_nbytes / self.block

    @property
    def planner_name(self) -> str:
        """The name ggml itself prints (``ggml_type_name``): ``q3_K``, ``bf16``, ``iq2_xxs``."""
        if self.name.startswith("Q") and self.name.endswith("_K"):
            return self.name[:-1].lower() + "K"
        return self.name.lower()


_MAINLINE = (
    GgmlType("F32", 0, 1, 4),
    GgmlType("F16", 1, 1, 2),
    GgmlType("Q4_0", 2, 32, 18),
    GgmlType("Q4_1", 3, 32, 20),
    GgmlType("Q5_0", 6, 32, 22),
    GgmlType("Q5_1", 7, 32, 24),
    GgmlType("Q8_0", 8, 32, 34),
    GgmlType("Q8_1", 9, 32, 36),
    GgmlType("Q2_K", 10, 256, 84),
    GgmlType("Q3_K", 11, 256, 110),
    GgmlType("Q4_K", 12, 256, 144),
    GgmlType("Q5_K", 13, 256, 176),
    GgmlType("Q6_K", 14, 256, 210),
    GgmlType("Q8_K", 15, 256, 292),
    GgmlType("IQ2_XXS", 16, 256, 66),
    GgmlType("IQ2_XS", 17, 256, 74),
    GgmlType("IQ3_XXS", 18, 256, 98),
    GgmlType("IQ1_S", 19, 256, 50),
    GgmlType("IQ4_NL", 20, 32, 18),
    GgmlType("IQ3_S", 21, 256, 110),
    GgmlType("IQ2_S", 22, 256, 82),
    GgmlType("IQ4_XS", 23, 256, 136),
    GgmlType("I8", 24, 1, 1),
    GgmlType("I16", 25, 1, 2),
    GgmlType("I32", 26, 1, 4),
    GgmlType("I64", 27, 1, 8),
    GgmlType("F64", 28, 1, 8),
    GgmlType("IQ1_M", 29, 256, 56),
    GgmlType("BF16", 30, 1, 2),
    GgmlType("TQ1_0", 34, 256, 54),
    GgmlType("TQ2_0", 35, 256, 66),
    GgmlType("MXFP4", 39, 32, 17),
    GgmlType("NVFP4", 40, 64, 36),
    GgmlType("Q1_0", 41, 128, 18),
    GgmlType("Q2_0", 42, 64, 18),
    # Forks gave 43 to other types; the header reader holds it against the bytes in the file.
    GgmlType("F8_E4M3", 43, 1, 1),
)

_IK = (
    GgmlType("Q6_0", 133, 32, 26, 0, "ik"),
    GgmlType("IQ2_K", 137, 256, 76, 0, "ik"),
    GgmlType("IQ3_K", 138, 256, 110, 0, "ik"),
    GgmlType("IQ4_K", 139, 256, 144, 0, "ik"),
    GgmlType("IQ5_K", 140, 256, 176, 0, "ik"),
    GgmlType("IQ6_K", 141, 256, 212, 0, "ik"),
    GgmlType("IQ4_KS", 144, 256, 136, 4, "ik"),
    GgmlType("IQ2_KS", 145, 256, 70, 2, "ik"),
    GgmlType("IQ4_KSS", 146, 256, 128, 4, "ik"),
    GgmlType("IQ5_KS", 152, 256, 168, 4, "ik"),
    GgmlType("IQ2_KT", 153, 256, 68, 4, "ik"),
    GgmlType("IQ3_KT", 154, 256, 100, 4, "ik"),
    GgmlType("IQ4_KT", 155, 256, 128, 4, "ik"),
    GgmlType("IQ3_KS", 156, 256, 102, 2, "ik"),
    GgmlType("IQ2_KL", 157, 256, 86, 2, "ik"),
    GgmlType("IQ1_KT", 158, 256, 56, 4, "ik"),
)

TYPES: Mapping[str, GgmlType] = MappingProxyType({t.name: t for t in (*_MAINLINE, *_IK)})
"""Every known type by its upper-case name."""

TYPES_BY_ID: Mapping[int, GgmlType] = MappingProxyType({t.type_id: t for t in TYPES.values()})
"""Every known type by the number that a GGUF file stores."""


def find_type(name: str) -> GgmlType:
    """The type called ``name``, in either case.

    Raises:
        TypeRuleError: No such type; the message offers the nearest names.
    """
    found = TYPES.get(name.upper())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.upper(), TYPES, n=3)
    raise TypeRuleError(
        "no ggml type has this name",
        found=repr(name),
        next_step=f"Did you mean {' or '.join(near)}?"
        if near
        else f"Known types: {', '.join(TYPES)}.",
    )
