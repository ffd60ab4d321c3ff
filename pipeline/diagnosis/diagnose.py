"""A diagnosis of whatever lies at a path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from pipeline.diagnosis import commands
from pipeline.diagnosis.alike import with_alike
from pipeline.diagnosis.case import Case
from pipeline.diagnosis.draft import check_draft
from pipeline.diagnosis.engram import check_case_engram
from pipeline.diagnosis.files import check_files
from pipeline.diagnosis.finding import Finding, Mend, Severity, worst_first
from pipeline.diagnosis.folder import holding
from pipeline.diagnosis.identity import Fact, RoleRow, facts_of, general_facts, role_rows
from pipeline.diagnosis.keys import check_case_keys, check_prefix
from pipeline.diagnosis.matrix import (
    importance_at,
    matrix_facts,
    matrix_findings,
    why_no_importance,
)
from pipeline.diagnosis.opened import Opened, open_model
from pipeline.diagnosis.quality import check_quality
from pipeline.diagnosis.repair import repair_recipe
from pipeline.diagnosis.strangers import stranger_at
from pipeline.diagnosis.tensors import check_case_tensors
from pipeline.errors import FormatError
from pipeline.gguf.model_file import GgufModel
from pipeline.model.contract.form import form_of
from pipeline.model.dialects import NO_TABLE, Dialect, dialect_of
from pipeline.model.form import V41_FORK, Architecture, Form
from pipeline.model.prefix import Renamed, with_right_prefix


class Verdict(IntEnum):
    """What a diagnosis comes to; the exit code of `scripts/doctor`."""

    SOUND = 0
    FAULTY = 1
    """Engines refuse the file or run it wrong."""
    NO_MODEL = 2
    """It is no model of a kind that this project knows."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A recipe for all that is to be taken from the checkpoint, and the command that follows it."""

    recipe: str
    command: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What something is, what is wrong with it, the worst first, and a recipe that mends it."""

    path: Path
    verdict: Verdict
    facts: tuple[Fact, ...]
    findings: tuple[Finding, ...] = ()
    roles: tuple[RoleRow, ...] = ()
    repair: Repair | None = None
    alike: str | None = None
    """The file's own recipe, where a command asks for it and `scripts/recipe` cannot tell it."""


def diagnose(path: Path) -> Diagnosis:
    """What lies at ``path``: a GGUF of any maker, one of its shards, a folder, or anything else.

    Raises:
        SourceError: There is nothing at ``path``, or it cannot be read.
    """
    stranger = stranger_at(path)
    if stranger is not None:
        matrix = None if path.is_dir() else importance_at(path)
        if matrix is not None:
            return _no_model(path, tuple(matrix_facts(matrix)), tuple(matrix_findings(matrix)))
        finding = Finding(Severity.STOPS, "it is no GGUF model", (path.name,), stranger.mend)
        return _no_model(path, (Fact("what", stranger.what),), (finding,))
    if path.is_dir():
        return _diagnose_folder(path)
    return _diagnose_file(path)


def _diagnose_folder(folder: Path) -> Diagnosis:
    held = holding(folder)
    if held.only is not None:
        return _diagnose_file(held.only)
    finding = Finding(
        Severity.NOTE,
        "the folder holds several models",
        (),
        Mend("Name one of them:", tuple(commands.doctor(path) for path in held.models)),
    )
    what = f"a folder of {held.n_files:,} GGUF files"
    return _no_model(folder, (Fact("what", what),), (finding,))


def _diagnose_file(path: Path) -> Diagnosis:
    try:
        opened = open_model(path)
    except FormatError as error:
        return _broken(path, error)
    kind = opened.model.key_values.get("general.type")
    if kind is not None and kind.value == "imatrix":
        return _diagnose_matrix(path)
    return examine(path, opened)


def examine(path: Path, opened: Opened) -> Diagnosis:
    """The diagnosis of a model whose headers are read."""
    renamed = with_right_prefix(opened.model)
    dialect = dialect_of(renamed.model)
    if dialect is NO_TABLE and not opened.is_whole:
        dialect = None
    form = _form(renamed.model, dialect)
    if form is None:
        return _unknown(path, opened, renamed.model, dialect)
    first = opened.model.files[0].path
    case = Case(first, renamed.model, form, opened.is_readable, opened.is_whole)
    found = worst_first([*opened.findings, *_findings(case, renamed, dialect)])
    findings, alike = with_alike(found, first, renamed.model)
    return Diagnosis(
        path,
        Verdict.FAULTY if any(f.severity.is_fault for f in findings) else Verdict.SOUND,
        (*_dialect_facts(dialect), *facts_of(case)),
        findings,
        tuple(role_rows(case)),
        _repair(case, findings),
        alike,
    )


def _repair(case: Case, findings: tuple[Finding, ...]) -> Repair | None:
    recipe = repair_recipe(findings)
    return Repair(recipe, commands.graft(case.path, case.layout)) if recipe else None


def _findings(case: Case, renamed: Renamed, dialect: Dialect | None) -> Iterator[Finding]:
    yield from check_prefix(case, renamed)
    if dialect is not None:
        yield Finding(
            Severity.LOSES,
            f"a dialect: {dialect.name}. {dialect.why}",
            (),
            case.rewritten(dialect.next_step),
        )
    yield from check_case_keys(case)
    yield from check_case_tensors(case)
    yield from check_case_engram(case)
    yield from check_quality(case)
    yield from check_files(case)
    yield from check_draft(case)


def _form(model: GgufModel, dialect: Dialect | None) -> Form | None:
    """The form to hold ``model`` against; that of the fork layout where only keys differ."""
    if dialect is not None:
        return V41_FORK if dialect.tensors_fit else None
    try:
        return form_of(model)
    except FormatError:
        return None


def _dialect_facts(dialect: Dialect | None) -> Iterator[Fact]:
    if dialect is not None:
        yield Fact("dialect", f"{dialect.name} ({dialect.makers})")


def _broken(path: Path, error: FormatError) -> Diagnosis:
    finding = Finding(
        Severity.STOPS,
        error.message(),
        (path.name,),
        Mend(
            "The header itself is damaged or was never finished: fetch the file again. If it stays "
            "so, its maker has to write it anew; no loader reads on."
        ),
        "failed to read magic, key-value pairs or tensor info",
    )
    return Diagnosis(
        path, Verdict.FAULTY, (Fact("what", "a GGUF with a broken header"),), (finding,)
    )


def _unknown(path: Path, opened: Opened, model: GgufModel, dialect: Dialect | None) -> Diagnosis:
    """A GGUF that is nothing of ours: a foreign dialect is a broken model, the rest is none."""
    entry = model.key_values.get("general.architecture")
    architecture = "none" if entry is None else str(entry.value)
    if dialect is not None:
        mend = Mend(dialect.next_step, (commands.convert(),))
        finding = Finding(Severity.STOPS, f"{dialect.name}. {dialect.why}", (), mend)
        facts = (
            Fact("what", f"a {architecture} in a dialect that only its makers' engines read"),
            *_dialect_facts(dialect),
            *general_facts(model, architecture),
        )
        # The dialect first: what its makers mean by a type may explain the rest.
        findings, _ = with_alike(worst_first([finding, *opened.findings]), path, model)
        return Diagnosis(path, Verdict.FAULTY, facts, findings)
    try:
        form_of(model)
        why = ""
    except FormatError as error:
        why = error.message()
    facts = (
        Fact("what", f"a GGUF of architecture {architecture}"),
        *general_facts(model, architecture),
    )
    if architecture in list(Architecture) and any(f.severity.is_fault for f in opened.findings):
        findings, _ = with_alike(worst_first(opened.findings), path, model)
        return Diagnosis(path, Verdict.FAULTY, facts, findings)
    findings, _ = with_alike(
        worst_first([*opened.findings, Finding(Severity.NOTE, why)]), path, model
    )
    return _no_model(path, facts, findings)


def _diagnose_matrix(path: Path) -> Diagnosis:
    matrix = importance_at(path)
    if matrix is None:
        return _no_model(
            path,
            (Fact("what", "an importance matrix that cannot be read"),),
            (Finding(Severity.STOPS, why_no_importance(path)),),
        )
    return _no_model(path, tuple(matrix_facts(matrix)), tuple(matrix_findings(matrix)))


def _no_model(path: Path, facts: tuple[Fact, ...], findings: tuple[Finding, ...]) -> Diagnosis:
    return Diagnosis(path, Verdict.NO_MODEL, facts, findings)
