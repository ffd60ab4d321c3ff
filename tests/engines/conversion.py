"""What RunRecipe makes of a miniature, in this process; and recipes that are written for a test."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from pipeline.plan import Plan
from pipeline.recipe.values import ALLOWANCES
from tasks.job import open_job
from tasks.request import JobParameters
from tests.promises.whole_job import run_job

NAME = "mini"

ROLES = ("routed", "attention", "embedding", "shared")
SMALL_AND_SENSITIVE = ("hyper_connection", "router")

Tables = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The files of one run: the target's shards, the first one first, and the draft beside it."""

    target: tuple[Path, ...]
    draft: Path | None


def convert(source: Path, out: Path, recipe: Path | str, **parameters: str) -> Conversion:
    """The files that ``recipe`` makes of ``source``; what ``out`` holds already is not made again.

    The picture of the report is left out: it takes longer to draw than a miniature to convert.
    """
    with (
        mock.patch("pipeline.report.chart.chart_png", return_value=b""),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        outcome = run_job(source, out, recipe, name=NAME, **parameters)
    assert outcome.ok, outcome.text
    job = open_job(JobParameters(str(source), str(recipe), str(out), name=NAME, **parameters))
    files = {plan.form.is_draft: _files(plan, job.folder) for plan in job.plans}
    (draft,) = files.get(True, (None,))
    return Conversion(files.get(False, ()), draft)


def _files(plan: Plan, folder: Path) -> tuple[Path, ...]:
    return tuple(folder / shard.file_name for shard in plan.shards)


def write_recipe(path: Path, tables: Tables, tensors: Mapping[str, str] | None = None) -> Path:
    """A recipe of these tables that is allowed everything that can be allowed.

    ``tensors`` gives single tensors, by name, types of their own.
    """
    lines = [f"allow = {sorted(ALLOWANCES)}"]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f'{key} = "{value}"' for key, value in table.items())]
    for tensor, type_name in (tensors or {}).items():
        lines += ["[[override]]", f"match = '^{re.escape(tensor)}$'", f'type = "{type_name}"']
    path.write_text("\n".join(lines))
    return path


def uniform(type_name: str, *, has_engram: bool) -> Tables:
    """All that may have any type in one type, small sensitive matrices in F32; no draft."""
    engram, gate = (("engram",), ("engram_gate",)) if has_engram else ((), ())
    return {
        "roles": dict.fromkeys((*ROLES, *engram), type_name),
        "sub_roles": dict.fromkeys((*SMALL_AND_SENSITIVE, *gate), "F32"),
        "draft": {"mode": "drop"},
    }
