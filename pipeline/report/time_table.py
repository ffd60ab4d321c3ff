"""How long a plan takes to quantize, told before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.model.targets.tensor import TargetTensor
from pipeline.plan import Plan
from pipeline.quant.fitness import advice
from pipeline.quant.guard import takes_importance
from pipeline.quant.speed import cpu_seconds, speeds
from pipeline.quant.types import GgmlType
from pipeline.report.tables import Column, Format, Row, RowKind, Table

DAY = 86_400.0
HOUR = 3_600.0


@dataclass(frozen=True, slots=True)
class TypeTime:
    """Weights to encode in one type; ``seconds`` of one CPU thread, None where not measured."""

    type: GgmlType
    is_weighted: bool
    n_weights: int
    seconds: float | None


def type_times(
    plans: Iterable[Plan], is_weighted: Callable[[TargetTensor], bool]
) -> tuple[TypeTime, ...]:
    """The quantizing that ``plans`` ask for, the longest first; copies and repacks take none."""
    n_weights: dict[tuple[GgmlType, bool], int] = {}
    for plan in plans:
        for tensor in plan.tensors:
            if tensor.is_encoded:
                weighted = takes_importance(tensor.type) and is_weighted(tensor.target)
                kind = tensor.type, weighted
                n_weights[kind] = n_weights.get(kind, 0) + tensor.target.n_params
    times = [
        TypeTime(ggml_type, weighted, n, cpu_seconds(ggml_type, n, weighted=weighted))
        for (ggml_type, weighted), n in n_weights.items()
    ]
    return tuple(sorted(times, key=lambda t: -(t.seconds or 0)))


def time_table(times: Iterable[TypeTime], *, n_threads: int) -> Table:
    """CPU time by type, and what it comes to on ``n_threads`` threads."""
    times = tuple(times)
    total = sum(time.seconds or 0 for time in times)
    rows = [
        Row((time.type.name, _how(time), time.n_weights, *_spans(time.seconds, n_threads)))
        for time in times
        if time.seconds is None or time.seconds >= total / 1000
    ]
    rows.append(
        Row(
            ("total", None, sum(t.n_weights for t in times), *_spans(total, n_threads)),
            RowKind.TOTAL,
        )
    )
    columns = (
        Column("type"),
        Column("importance"),
        Column("weights", Format.COUNT),
        Column("CPU time"),
        Column(f"on {n_threads} threads"),
    )
    return Table("time to quantize (estimate)", columns, tuple(rows), _notes(times, n_threads))


def _notes(times: tuple[TypeTime, ...], n_threads: int) -> tuple[str, ...]:
    long = [t for t in times if (t.seconds or 0) / n_threads > DAY]
    notes = [
        f"{time.type.name} alone would run for {_span((time.seconds or 0) / n_threads)}: think of "
        "another type, or of more threads."
        for time in long
    ]
    against = (advice(time.type, weighted=time.is_weighted) for time in times)
    notes += [sentence for sentence in against if sentence]
    notes.append(
        f"Speeds as measured on {speeds().machine}; another machine may take half or twice as "
        "long. Reading and writing come on top where the disk is slower than that."
    )
    return tuple(notes)


def _how(time: TypeTime) -> str | None:
    return "yes" if time.is_weighted else None


def _spans(seconds: float | None, n_threads: int) -> tuple[str, str]:
    if seconds is None:
        return "not measured", ""
    return _span(seconds), _span(seconds / n_threads)


def _span(seconds: float) -> str:
    """A span of time in the unit that suits it."""
    for unit, length in (("days", DAY), ("hours", HOUR), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"
