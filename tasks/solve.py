"""A recipe with a budget becomes one that can be run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import luigi

from pipeline.errors import PlanError, SourceError
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.recipe.budget_table import BudgetTable
from pipeline.solve.cache import ErrorCache
from pipeline.solve.choose import choose, require_fits
from pipeline.solve.frontier import frontier
from pipeline.solve.limits import limits_of
from pipeline.solve.measure import Losses, Measuring, measure, sample_nbytes
from pipeline.solve.objective import Objective
from pipeline.solve.question import Question
from pipeline.source.reader import SourceReader
from tasks.budget_answer import importance_note, moved, require_ours, with_importance, write_answer
from tasks.budget_job import BudgetJob, draft_nbytes
from tasks.parameters import CountParameter, JobTask
from tasks.progress import Progress
from tasks.targets import PrintedTask

_POINT_SECONDS = 10.0
"""How long one point of the frontier may be searched for."""


class SolveBudget(PrintedTask, JobTask):
    """Choose types that lose the least within a recipe's budget: a recipe, and why it is so."""

    rows = CountParameter(most=1 << 20, default=64, description="rows measured of each tensor")
    seconds = CountParameter(most=86_400, default=60, description="longest search for the choice")
    objective = luigi.ChoiceParameter(
        default=Objective.RELATIVE.value,
        choices=[one.value for one in Objective],
        description="relative: noise to signal of each matrix; absolute: energy of the noise",
    )

    @cached_property
    def asked(self) -> BudgetJob:
        """The recipe with the budget, and what it is to be solved for."""
        return BudgetJob(self.job_parameters)

    def show(self) -> None:
        """Measure, choose, write the recipe and its frontier, print what was chosen."""
        asked = self.asked
        require_rows(self.rows)
        out = asked.folder / f"{asked.recipe.name}.toml"
        require_ours(out, asked.parameters)
        sizes = self._sizes(asked)

        def file_nbytes(types: Mapping[str, GgmlType]) -> int:
            return asked.become(types).nbytes

        # A matter of headers, told before anything is measured for hours.
        require_fits(sizes, file_nbytes)
        question = replace(sizes, losses=self._losses(asked))
        answer = choose(question, file_nbytes, seconds=self.seconds)
        around = frontier(question, answer, seconds=min(float(self.seconds), _POINT_SECONDS))
        recipe = moved(asked.become(answer.types).recipe, asked.parameters, out.parent)
        recipe = with_importance(recipe, asked)
        text = write_answer(
            out, recipe, question, answer, around, note=importance_note(asked.weighing)
        )
        sys.stdout.write(text)

    def _sizes(self, asked: BudgetJob) -> Question:
        """The question, as far as headers tell it: nothing is measured."""
        smallest = {t.name: group.types[0] for group in asked.groups for t in group.targets}
        return Question(
            asked.model,
            asked.targets,
            asked.groups,
            asked.fixed,
            {},
            limits_of(asked.budget, asked.model),
            Objective(self.objective),
            lambda target: weight_of(asked.budget, target),
            asked.fixed_by,
            draft_nbytes(asked.become({**asked.fixed, **smallest})),
        )

    def _losses(self, asked: BudgetJob) -> Losses:
        wanted: dict[TargetTensor, tuple[GgmlType, ...]] = {
            target: group.types for group in asked.groups for target in group.targets
        }
        wanted |= {t: (asked.fixed[t.name],) for t in asked.targets if t.name in asked.fixed}
        smallest = {t.name: types[0] for t, types in wanted.items()}
        sources = asked.become(smallest).sources
        missing = [name for name in sources.needed if not sources.has(name)]
        if missing:
            raise SourceError(
                "a budget is solved by reading rows of the weights, and they are not here yet",
                found=f"{len(missing):,} files to fetch",
                next_step="Fetch the checkpoint first, and name its folder.",
            )
        weight_map, weights = asked.checkpoint.weight_map, asked.weighing.weights
        nbytes = sum(sample_nbytes(t, self.rows) * len(types) for t, types in wanted.items())

        def stamp(target: TargetTensor) -> object:
            names = {weight_map[name] for name in target.source_names}
            return [sources.stamp(name) for name in sorted(names)]

        with SourceReader(sources.readable()) as source, Progress("measuring", nbytes) as progress:
            measuring = Measuring(
                source,
                asked.quantizer,
                ErrorCache(asked.store.root / "errors"),
                self.rows,
                stamp,
                lambda ggml_type: asked.quantizer.version_of([ggml_type]),
                asked.weighing.importance,
                lambda target: weights.identity if weights and weights.has(target) else None,
            )
            return measure(wanted, measuring, n_threads=self.n_threads, advanced=progress.advance)


def weight_of(budget: BudgetTable, target: TargetTensor) -> float:
    """What the budget multiplies a tensor's error by."""
    said = budget.weights.of(target)
    return 1.0 if said is None else said


def require_rows(n_rows: int) -> None:
    """Refuse to measure nothing.

    Raises:
        PlanError: There are no rows to measure.
    """
    if n_rows < 1:
        raise PlanError(
            "a type is judged by rows that are quantized to it",
            expected="--rows 1 or more",
            found=n_rows,
            next_step="Leave --rows out: it is 64 then.",
        )
