"""One thing that is wrong with a file, or worth knowing, and what mends it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.model.roles import SubRole

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

MOST_NAMES = 4
"""Names that a sentence lists before it says how many more there are."""


class Severity(StrEnum):
    """What becomes of a file that has the fault, the worst first."""

    STOPS = "does not load"
    """Engines refuse the file, or abort while they run it."""
    WRONG = "runs wrong"
    """Engines take it without a word and give wrong output."""
    LOSES = "loses quality"
    """It runs, worse than it could, or in some engines only."""
    WASTES = "wastes bytes"
    NOTE = "good to know"

    @property
    def is_fault(self) -> bool:
        """Whether the file is not sound."""
        return self in (Severity.STOPS, Severity.WRONG)


@dataclass(frozen=True, slots=True)
class Graft:
    """Tensors to take from the released checkpoint in place of the file's own.

    ``layers`` is nothing where all layers are meant.
    """

    sub_role: SubRole
    type: str
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Mend:
    """What to do: a sentence, the commands to type if there are any, and what to graft.

    ``alike`` asks for a file of the same types from the checkpoint; how is told of the whole model
    (see `alike`).
    """

    what: str
    commands: tuple[str, ...] = ()
    grafts: tuple[Graft, ...] = ()
    alike: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """``where`` names files, tensors or keys; ``engine_says`` is what a user has seen of it."""

    severity: Severity
    what: str
    where: tuple[str, ...] = ()
    mend: Mend | None = None
    engine_says: str | None = None


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """``findings`` in the order of their severity, else as they were found."""
    order = list(Severity)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def spread(names: Iterable[str]) -> str:
    """Tensor names with the layers of each kind drawn together: ``blk.0-39.attn_norm.weight``."""
    kinds: dict[str, list[int]] = {}
    for name in names:
        match = _BLOCK.fullmatch(name)
        layers = kinds.setdefault(match[2] if match else name, [])
        if match:
            layers.append(int(match[1]))
    shown = [f"blk.{ranges(sorted(n))}.{kind}" if n else kind for kind, n in kinds.items()]
    return listed(shown)


def ranges(layers: Iterable[int]) -> str:
    """``0-1,5`` of 0, 1 and 5, which count up."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def listed(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """The first of ``names``, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
