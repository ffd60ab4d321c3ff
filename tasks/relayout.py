"""A finished model in the other layout."""

from __future__ import annotations

import sys
from pathlib import Path

import luigi

from pipeline.errors import OutputError, raise_problems
from pipeline.gguf.model_file import read_model
from pipeline.model.contract.check import check_contract, layout_of
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.layout import Layout
from pipeline.relayout.run import relaid_name, relayout
from tasks.targets import PrintedTarget


class Relayout(luigi.Task):
    """Rewrite engram tensors and keys for the other layout without requantizing."""

    path = luigi.Parameter(description="a V4.1 GGUF, one of its shards, or their folder")
    layout = luigi.Parameter(description="mainline or fork")
    out = luigi.Parameter(default="", description="a new folder (default: beside the model's)")

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
        out = Path(self.out) if self.out else self._beside(layout)
        model = read_model(relayout(Path(self.path), layout, out))
        problems = [*check_contract(model, layout), *check_gguf_engram(model).problems]
        raise_problems(f"{layout} layout of {self.path}", problems)
        sys.stdout.write(f"{out}: {len(model.files)} shards in the {layout} layout\n")
        sys.stdout.flush()
        self.output().done = True

    def _beside(self, layout: Layout) -> Path:
        """A folder next to the model's, named after the new layout."""
        model = read_model(Path(self.path))
        folder, have = model.files[0].path.absolute().parent, layout_of(model)
        name = relaid_name(folder.name, have, layout)
        return folder.with_name(name if name != folder.name else f"{name}-{layout}")
