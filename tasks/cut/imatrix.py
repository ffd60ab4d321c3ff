"""An importance matrix for a model that lost experts."""

from __future__ import annotations

import sys
from pathlib import Path

import luigi

from pipeline.cut.imatrix import cut_imatrix
from pipeline.errors import OutputError
from pipeline.experts.keep_json import read_keep_json
from tasks.targets import PrintedTask


class CutImatrix(PrintedTask):
    """Write the entries of an importance matrix that belong to the experts that stay."""

    path = luigi.Parameter(description="an importance matrix, GGUF or the form before it")
    keep = luigi.Parameter(description="a keep list, as SelectExperts writes it")
    out = luigi.Parameter(description="a new file")

    def show(self) -> None:
        """Cut, and say how much was cut."""
        path, out = Path(self.path), Path(self.out)
        if out.exists():
            raise OutputError(
                "the file is there already", file=out, next_step="Choose another --out."
            )
        keep = read_keep_json(Path(self.keep))
        n_cut = cut_imatrix(path, keep, out)
        sys.stdout.write(f"{out}: {n_cut} entries with {keep.n_kept} of {keep.n_experts} experts\n")
