"""The arithmetic of engram tables: what loads and runs wrong, because nothing else looks at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pipeline.diagnosis.case import Case
from pipeline.diagnosis.finding import Finding, Mend, Severity
from pipeline.errors import EngramError
from pipeline.gguf.keys import KeyValue, ValueType
from pipeline.gguf.model_file import GgufModel
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.layout import Layout
from pipeline.model.metadata.required import MAINLINE_KEYS, NINE_KEYS

_SMALL_INTEGERS = (ValueType.INT32, ValueType.UINT32)

_ELSEWHERE = ("engram keys of another layout", "shape of ", "width of ")
"""What `keys` and `tensors` tell already."""

_LOST_ROWS = (
    "Rows are missing or of another table: no key can mend that. Make its like from the checkpoint:"
)
_WRONG_NUMBERS = (
    "The numbers follow from the rows of the tables and the token list. Write it anew; they are "
    "computed again, and no weight changes:"
)


def check_case_engram(case: Case) -> Iterator[Finding]:
    """Findings about rows, offsets, primes, multipliers, token map and pad id.

    Only where all keys for it are there, of types that loaders take (see `keys`).
    """
    model = _as_written(case)
    if case.layout is None or model is None or not case.is_whole:
        return
    for problem in check_gguf_engram(model).problems:
        if not any(word in problem.what for word in _ELSEWHERE):
            yield _finding(case, problem)


def _finding(case: Case, problem: EngramError) -> Finding:
    cause = f" {problem.next_step}" if problem.next_step else ""
    is_rows = " rows of " in problem.what or problem.what.startswith("engram: rows")
    is_lost = is_rows and case.refusal is not None
    return Finding(
        Severity.WRONG,
        f"{problem.what}: {problem.found}, expected {problem.expected}.{cause}",
        (problem.tensor or case.path.name,),
        Mend(_LOST_ROWS, alike=True) if is_lost else case.rewritten(_WRONG_NUMBERS),
    )


def _as_written(case: Case) -> GgufModel | None:
    """The model with lists of small integers in the type we write; nothing where one cannot be."""
    entries, fixed = case.model.key_values, dict[str, KeyValue]()
    wanted = MAINLINE_KEYS if case.layout is Layout.MAINLINE else NINE_KEYS
    for key, (kind, element) in wanted.items():
        entry = entries.get(key)
        if entry is None:
            return None
        if entry.element in _SMALL_INTEGERS and element in _SMALL_INTEGERS:
            fixed[key] = replace(entry, element=element)
        elif (entry.type, entry.element) != (kind, element):
            return None
    return _with(case.model, {**entries, **fixed})


def _with(model: GgufModel, entries: Mapping[str, KeyValue]) -> GgufModel:
    return GgufModel((replace(model.files[0], key_values=entries), *model.files[1:]))
