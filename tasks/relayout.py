"""A finished model in the other layout."""

from __future__ import annotations

from pathlib import Path

import luigi

from pipeline.errors import OutputError, raise_problems
from pipeline.gguf.model_file import read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.layout import Layout
from pipeline.relayout.run import relayout
from tasks.targets import PrintedTarget


class Relayout(luigi.Task):
    """Rewrite engram tensors and keys for the other layout without requantizing."""

    path = luigi.Parameter(description="a V4.1 GGUF, one of its shards, or their folder")
    layout = luigi.Parameter(description="mainline or fork")
    out = luigi.Parameter(description="a new folder for the result")

    def output(self) -> PrintedTarget:
        """Done once it ran: an existing result is refused, never trusted."""
        if not hasattr(self, "_ran"):
            self._ran = PrintedTarget()
        return self._ran

    def run(self) -> None:
        """Rewrite, then check the result as a loader would."""
        if self.layout not in list(Layout):
            raise OutputError("unknown layout", expected=" or ".join(Layout), found=self.layout)
        layout = Layout(self.layout)
        model = read_model(relayout(Path(self.path), layout, Path(self.out)))
        problems = [*check_contract(model, layout), *check_gguf_engram(model).problems]
        raise_problems(f"{layout} layout of {self.path}", problems)
        self.output().done = True
