"""How long a type takes to encode, as it was measured, so that a plan can say so beforehand.

The figures are in ``speeds.json``, which ``scripts/bench --types all --speeds FILE`` writes:
weights per CPU second of one thread on the machine class named there. Other machines differ by a
factor of two or so; types differ by a thousand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.files import read_bytes
from pipeline.quant.types import GgmlType

FILE = Path(__file__).with_name("speeds.json")


@dataclass(frozen=True, slots=True)
class Speed:
    """Weights per CPU second of one thread, and the CPU seconds its tables take per process."""

    plain: float | None
    """None where the kernel needs an importance matrix."""
    weighted: float
    tables_seconds: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured, and on what."""

    machine: str
    of: Mapping[str, Speed]


@cache
def speeds() -> Speeds:
    """The measured table."""
    kept = json.loads(read_bytes(FILE))
    return Speeds(kept["machine"], {name: Speed(**speed) for name, speed in kept["types"].items()})


def cpu_seconds(ggml_type: GgmlType, n_weights: int, *, weighted: bool) -> float | None:
    """CPU seconds that encoding takes on the machine class of the table, all threads together.

    Args:
        ggml_type: Target type.
        n_weights: Weights to encode; what is copied or repacked does not count.
        weighted: Whether with importance, which takes some types several times as long.

    Returns:
        Without the seconds for tables; None for a type that was not measured so.
    """
    speed = speeds().of.get(ggml_type.name)
    rate = speed and (speed.weighted if weighted else speed.plain)
    return n_weights / rate if rate else None
