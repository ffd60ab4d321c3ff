"""The draft beside a target: whether there is one, and whether it belongs to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.diagnosis import commands
from pipeline.diagnosis.case import Case
from pipeline.diagnosis.finding import Finding, Mend, Severity, listed
from pipeline.errors import QuantmillError
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.gguf.reader import read_header
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.form import form_of
from pipeline.model.contract.pair import check_pair
from pipeline.model.form import Architecture

_WITHOUT = (
    "no draft (MTP/DSpark) beside it: the model runs, without speculative decoding. No engine "
    "reads the module from the target's own file"
)
_MEND = "Make it from the checkpoint; only the shards of mtp.* are read, and nothing here changes:"


def drafts_beside(case: Case) -> tuple[Path, ...]:
    """The drafts in the folder of a target, whatever they are called."""
    own = {file.path for file in case.model.files}
    others = (path for path in sorted(case.path.parent.glob("*.gguf")) if path not in own)
    return tuple(path for path in others if _is_draft(path))


def check_draft(case: Case) -> Iterator[Finding]:
    """Findings about the draft of a target; nothing for a file that is a draft itself."""
    if case.form.is_draft:
        return
    drafts = drafts_beside(case)
    if not drafts:
        yield Finding(Severity.NOTE, _WITHOUT, (), Mend(_MEND, (commands.make_draft(),)))
    for path in drafts:
        problems = _problems(case, path)
        if problems:
            shown = "; ".join(problem.message() for problem in problems[:2])
            yield Finding(
                Severity.LOSES,
                f"the draft beside it does not fit: {shown}",
                (listed([path.name]),),
                Mend(
                    "Make one that does from the target's own checkpoint:",
                    (commands.make_draft(),),
                ),
            )


def _is_draft(path: Path) -> bool:
    try:
        entry = read_header(path).key_values.get("general.architecture")
    except QuantmillError:
        return False
    return entry is not None and entry.value == Architecture.DFLASH


def _problems(case: Case, path: Path) -> list[QuantmillError]:
    """What keeps a draft from drafting for the target."""
    try:
        draft = read_model(path)
        return [*check_contract(draft, form_of(draft), union=False), *_pair(case.model, draft)]
    except QuantmillError as error:
        return [error]


def _pair(target: GgufModel, draft: GgufModel) -> list[QuantmillError]:
    return [*check_pair(target, draft)]
