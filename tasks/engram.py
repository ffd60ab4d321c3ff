"""The engram check as a task, for checkpoints and finished files alike."""

from __future__ import annotations

import sys
from pathlib import Path

import luigi

from pipeline.errors import raise_problems
from pipeline.gguf.model_file import read_model
from pipeline.model.engram.check import EngramReport, check_gguf_engram
from pipeline.report.engram_report import engram_table
from pipeline.report.tables import render_text
from tasks.model_source import ModelSource, SourceParameters
from tasks.targets import PrintedTask


class CheckEngram(PrintedTask):
    """Check engram rows, hash constants and offsets; exit code 30 when something does not fit."""

    path = luigi.Parameter(description="a checkpoint folder, a GGUF, or a folder that holds one")

    def show(self) -> None:
        """Print every row of the check; raise what does not fit."""
        report = check_engram(Path(self.path))
        sys.stdout.write(render_text(engram_table(report)))
        sys.stdout.flush()
        raise_problems(f"engram check of {self.path}", report.problems)


def check_engram(path: Path) -> EngramReport:
    """The engram report of whatever lies at ``path``."""
    is_checkpoint = path.suffix == ".safetensors" or (path / "config.json").exists()
    if is_checkpoint:
        return ModelSource(SourceParameters(str(path), Path())).engram
    return check_gguf_engram(read_model(path))
