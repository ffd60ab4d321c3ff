"""A trial: a few layers of the job, before the long download and the hours of the rest."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import luigi

from pipeline.errors import RecipeError
from pipeline.measure import TensorError, merged_errors
from pipeline.report.error_report import error_table
from pipeline.report.tables import render_text
from tasks.parameters import JobTask
from tasks.shard import FillFrom
from tasks.targets import PrintedTask

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class TryLayers(PrintedTask, JobTask):
    """Fetch and fill what comes from some layers, and show what they lost.

    Nothing gets a final name. What is filled stays journaled, so that `RunRecipe` with the same
    parameters goes on from there.
    """

    layers = luigi.Parameter(description="one layer or a range, for instance 0-3")

    def requires(self) -> Iterator[luigi.Task]:
        """What each of the layers' files gives to each shard."""
        for no, file in self._pairs():
            yield FillFrom(no=no, spec=self.job.shard_specs[no], file=file, **self.passed_on())

    def show(self) -> None:
        """Print the measured errors."""
        sys.stdout.write(render_text(error_table(merged_errors(self._errors()))))

    def _errors(self) -> Iterator[TensorError]:
        for no, file in self._pairs():
            spec = self.job.shard_specs[no]
            if self.store.has_errors(spec, file):
                yield from self.store.errors(spec, file)

    def _pairs(self) -> list[tuple[int, str]]:
        """Shard and source file of everything that the layers' own shards hold."""
        job, (first, last) = self.job, self._range()
        wanted = {
            file
            for name, file in job.checkpoint.weight_map.items()
            for layer in range(first, last + 1)
            if name.startswith(f"layers.{layer}.") and ".engram." not in name
        }
        return [(no, file) for file in sorted(wanted) for no in job.shards_of(file)]

    def _range(self) -> tuple[int, int]:
        if all(plan.form.is_draft for plan in self.job.plans):
            raise RecipeError(
                f"recipe {self.job.recipe.name} makes a draft only, which has no layers to try",
                next_step="Run it: a draft is a small file.",
            )
        if not any(name.startswith("layers.") for name in self.job.checkpoint.weight_map):
            raise RecipeError(
                "a trial fetches and fills the files of a few layers, and this source is a GGUF",
                found=self.source,
                next_step="Run the recipe: what is filled stays, whenever it is stopped.",
            )
        match = _RANGE.fullmatch(self.layers)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not 0 <= first <= last < self.job.config.n_layers:
            raise RecipeError(
                "--layers must be a layer or a range of layers",
                expected=f"within 0-{self.job.config.n_layers - 1}",
                found=self.layers,
            )
        return first, last
