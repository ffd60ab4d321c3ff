"""Looking at a checkpoint before anything is done with it."""

from __future__ import annotations

import sys
from pathlib import Path

import luigi

from pipeline.errors import SourceError
from pipeline.report.source_report import dtype_table
from pipeline.report.tables import render_text
from tasks.gguf_source import is_gguf
from tasks.model_source import ModelSource, SourceParameters
from tasks.targets import PrintedTask


class InspectSource(PrintedTask):
    """Hold index, shards and config of a checkpoint against each other; print what it stores."""

    source = luigi.Parameter(
        description="checkpoint folder, one of its shards, or owner/name@commit"
    )
    out = luigi.Parameter(default="out", description="folder for the headers of a hub source")

    def show(self) -> None:
        """Check, then print."""
        if is_gguf(Path(self.source)):
            raise SourceError(
                "this is a finished GGUF, not a checkpoint",
                file=self.source,
                next_step="scripts/doctor says what it is and whether it is sound.",
            )
        root = Path(self.out) / ".quantmill" / "sources"
        source = ModelSource(SourceParameters(self.source, root))
        specs, n_files = source.specs, len(source.checkpoint.files)
        title = f"{self.source}: {source.config.family}, {n_files} shards, all parts agree"
        sys.stdout.write(render_text(dtype_table(title, specs)))
