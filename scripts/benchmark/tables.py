"""The tables that are printed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from benchmark.lines import MEGA, lines_of
from benchmark.meter import Numbers
from benchmark.rounds import Rounds
from pipeline.report.tables import Column, Format, Row, Table

HOW = (
    "Every value is from a process of its own, the source in the page cache. Fill and copy both"
    " end when their bytes are durable (fdatasync); reading back comes after and is counted only"
    " where the line says so. It reads the output twice, for the digest of the file and for those"
    " of its tensors. The copy is a read and write loop of 1 MiB calls with as many threads, as"
    " many bytes in and out, nothing hashed."
)


def others(rounds: Rounds) -> tuple[float, float]:
    """Fewest and most cores that other processes took while a fill ran."""
    fills = [n for key in ("one", "many", "native") for n in rounds[key]]
    cores = [(n["fill_busy"] - n["fill_cpu"]) / n["fill_wall"] for n in fills]
    return max(0.0, min(cores)), max(0.0, *cores)


def bench_table(rounds: Rounds, n_threads: int) -> Table:
    low, high = others(rounds)
    right = Format.DECIMAL
    return Table(
        title=f"Fill with {n_threads} threads, rounds: {len(rounds['many'])}",
        columns=(
            Column("Measurement"),
            Column("Median", right),
            Column("Lowest", right),
            Column("Highest", right),
            Column("Goal", right),
            Column("Verdict"),
        ),
        rows=tuple(line.row(rounds) for line in lines_of(n_threads)),
        notes=(
            HOW,
            "Speed-up by CPU time is what the threads would gain if none ever waited.",
            f"Other processes took {low:.2f} to {high:.2f} cores of {os.cpu_count()} meanwhile.",
        ),
    )


def type_table(speeds: Mapping[str, Numbers]) -> Table:
    rates = ("rate", "rate_importance")
    return Table(
        title="Bare kernels: Mweights per CPU second of a thread",
        columns=(
            Column("Type"),
            Column("Bits", Format.BITS),
            Column("Plain", Format.DECIMAL),
            Column("With importance", Format.DECIMAL),
            Column("Tables, s", Format.DECIMAL),
        ),
        rows=tuple(
            Row(
                (
                    name,
                    n["bpw"],
                    *(n[rate] / MEGA if rate in n else None for rate in rates),
                    n["prepare_cpu"],
                )
            )
            for name, n in speeds.items()
        ),
        notes=("Rows are decoded FP4 experts. Tables are built once per process.",),
    )
