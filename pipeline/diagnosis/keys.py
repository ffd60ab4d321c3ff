"""Metadata keys that engines look for: missing, of a wrong type, misnamed, or contradicting.

What an engine does without a key was found by dropping each once in a running one (llama.cpp's
loaders of `deepseek4`, `deepseek41` and `dflash`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeline.diagnosis.case import Case
from pipeline.diagnosis.finding import Finding, Mend, Severity, counted, listed
from pipeline.errors import FormatError
from pipeline.model.contract.keys import check_keys
from pipeline.model.contract.ratios import check_ratios
from pipeline.model.contract.values import check_values
from pipeline.model.metadata.required import required_keys, spare_keys
from pipeline.model.prefix import Renamed

_HARMLESS = re.compile(
    r"general\.(name|file_type|quantization_version)|tokenizer\.(chat_template|ggml\.(add_\w+_token"
    r"|padding_token_id|bos_token_id|eos_token_id|pre|token_type))|\w+\.(vocab_size|rope\.freq_base"
    r"|rope\.scaling\.yarn_beta_\w+|swiglu_clamp_shexp|attention\.value_length)"
)
"""Loaders have a default, and it is right for these models or hardly matters."""

_SILENT = re.compile(
    r"\w+\.(rope\.dimension_count|rope\.scaling\.(type|factor|original_context_length)"
    r"|attention\.indexer\.candidate_source_layer)"
)
"""Loaders have a default, and it is wrong for these models."""

_ENGRAM = re.compile(r"\w+\.(engram|ple)\..+|\w+\.embedding_length_per_layer_input")
_REFUSED = re.compile(
    r"shorter than block_count|another length|compresses at ratio|do not divide|does not fit"
)
"""Contradictions that stop a loader; others it does not see."""

_MEND_ENGRAM = (
    "They follow from the rows of the tables and the token list, so nothing has to be fetched and "
    "no weight changes:"
)
_NOT_TOLD = (
    "The file does not tell what belongs there. Ask its maker, or make its like from the "
    "checkpoint:"
)
_MEND_KEYS = "Write it anew; what the file tells in another way is put where loaders look for it:"


def check_prefix(case: Case, renamed: Renamed) -> Iterator[Finding]:
    """Keys under V4's name, or under none, and a file that calls itself another architecture."""
    right = case.form.architecture.value
    if renamed.architecture is not None:
        yield Finding(
            Severity.STOPS,
            f"general.architecture is {renamed.architecture}, but the tensors are {right}'s",
            (case.path.name,),
            case.rewritten("Write it anew under its right name:"),
            f"unknown model architecture: '{renamed.architecture}', or a missing tensor",
        )
    if renamed.keys:
        found = sorted(renamed.keys.values())
        first = next(iter(renamed.keys))
        yield Finding(
            Severity.STOPS,
            f"{counted(len(found), 'key')} under a wrong prefix; loaders look for {right}.*",
            (listed(found),),
            case.rewritten("Write it anew; every key goes where it belongs:"),
            f"key not found in model: {first}",
        )


def missing_keys(case: Case) -> tuple[str, ...]:
    """The keys that a loader of the form asks for and that the file lacks."""
    spared = spare_keys(case.form)
    entries = case.model.key_values
    wanted = required_keys(case.form)
    return tuple(key for key in wanted if key not in spared and key not in entries)


def check_case_keys(case: Case) -> Iterator[Finding]:
    """Findings about keys alone; the arithmetic of engram constants is `engram`'s."""
    missing = missing_keys(case)
    yield from _missing_findings(case, missing)
    problems = list(check_keys(case.model.key_values, case.form, union=False))
    absent = {f"the key {key} is missing" for key in missing}
    typed = [p for p in problems if p.found is not None]
    stray = [p for p in problems if p.found is None and p.what not in absent]
    yield from (_typed_finding(case, problem) for problem in typed)
    yield from _stray_findings(case, stray)
    for problem in (
        *check_values(case.model.key_values, case.form),
        *check_ratios(case.model.key_values, case.form),
    ):
        if not re.search(r"\.(engram|ple)\.", problem.what):
            yield _value_finding(case, problem)


def _missing_findings(case: Case, missing: Sequence[str]) -> Iterator[Finding]:
    engram = [key for key in missing if _ENGRAM.fullmatch(key)]
    if engram:
        yield _missing_engram(case, engram)
    rest = [key for key in missing if key not in engram]
    groups: dict[Severity, list[str]] = {}
    for key in rest:
        groups.setdefault(_severity_without(key), []).append(key)
    for severity, keys in groups.items():
        yield _missing_plain(severity, keys)


def _severity_without(key: str) -> Severity:
    if _SILENT.fullmatch(key):
        return Severity.WRONG
    return Severity.NOTE if _HARMLESS.fullmatch(key) else Severity.STOPS


def _missing_engram(case: Case, missing: Sequence[str]) -> Finding:
    spared, wanted = spare_keys(case.form), required_keys(case.form)
    n_wanted = sum(1 for key in wanted if _ENGRAM.fullmatch(key) and key not in spared)
    pad = f"{case.form.architecture}.engram.pad_id"
    return Finding(
        Severity.STOPS,
        f"{len(missing)} of {n_wanted} engram keys are missing: {', '.join(missing)}",
        (case.path.name,),
        case.rewritten(_MEND_ENGRAM),
        _not_found(pad if pad in missing else missing[0]),
    )


def _missing_plain(severity: Severity, keys: Sequence[str]) -> Finding:
    verb = "is" if len(keys) == 1 else "are"
    reason = {
        Severity.STOPS: "",
        Severity.WRONG: "; engines take a default, which is wrong for this model, without a word",
        Severity.NOTE: "; engines do without",
    }[severity]
    return Finding(
        severity,
        f"{counted(len(keys), 'key')} {verb} missing{reason}",
        (listed(keys, most=8),),
        None if severity is Severity.NOTE else Mend(_NOT_TOLD, alike=True),
        _not_found(keys[0]) if severity is Severity.STOPS else None,
    )


def _not_found(key: str) -> str:
    return f"key not found in model: {key}"


def _typed_finding(case: Case, problem: FormatError) -> Finding:
    return Finding(
        Severity.STOPS,
        f"{problem.what}: {problem.found}, expected {problem.expected}",
        (case.path.name,),
        case.rewritten(_MEND_KEYS),
    )


def _stray_findings(case: Case, stray: Sequence[FormatError]) -> Iterator[Finding]:
    """Keys that must not be there, one finding for each reason."""
    reasons: dict[str, list[FormatError]] = {}
    for problem in stray:
        reasons.setdefault(str(problem.expected), []).append(problem)
    for reason, problems in reasons.items():
        first = problems[0]
        yield Finding(
            Severity.WRONG,
            f"{counted(len(problems), 'key')} that must not be there; expected {reason}. "
            f"{first.next_step or ''}".strip(),
            (listed([problem.what.split()[2] for problem in problems]),),
            case.rewritten("Write it anew, without them:"),
        )


def _value_finding(case: Case, problem: FormatError) -> Finding:
    found = "" if problem.found is None else f": {problem.found}, expected {problem.expected}"
    reason = f". {problem.next_step}" if problem.next_step else ""
    severity = Severity.STOPS if _REFUSED.search(problem.what) else Severity.WRONG
    return Finding(
        severity,
        f"{problem.what}{found}{reason}",
        (case.path.name,),
        Mend(_NOT_TOLD, alike=True),
    )
