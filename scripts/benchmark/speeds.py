"""The table of kernel speeds that `pipeline.quant.speed` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.quant.libraries import Libraries
from pipeline.quant.types import TYPES, find_type

DIGITS = 3
"""Significant digits that are kept: rounds differ in the second."""


def measured_types(words: str) -> list[str]:
    """The names in ``Q3_K,Q4_K``, or of all types that can be written.

    Raises:
        TypeRuleError: An unknown name.
    """
    if words.lower() == "all":
        libraries = Libraries()
        return [t.name for t in TYPES.values() if libraries.can_write(t)]
    return [find_type(word.strip()).name for word in words.split(",")]


def speeds_file(numbers: Mapping[str, Any]) -> bytes:
    """What `Session.types` gives, as the file."""
    types = {
        name: {
            "plain": n.get("rate") and _rounded(n["rate"]),
            "weighted": _rounded(n["rate_importance"]),
            "tables_seconds": round(n["prepare_cpu"], 2),
        }
        for name, n in numbers["types"].items()
    }
    lines = ",\n".join(f'  "{name}": {json.dumps(speed)}' for name, speed in types.items())
    machine = json.dumps(f"{numbers['machine']['cpu']}, one thread; weights per CPU second")
    return f'{{\n "machine": {machine},\n "types": {{\n{lines}\n }}\n}}\n'.encode()


def _rounded(rate: float) -> int:
    return int(float(f"{rate:.{DIGITS}g}"))
