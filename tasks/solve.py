"""A recipe with a budget becomes one that can be run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import luigi

from pipeline import files
from pipeline.errors import OutputError, SourceError
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.recipe.budget_table import BudgetTable
from pipeline.recipe.dump import recipe_toml
from pipeline.recipe.schema import Recipe, parse_recipe
from pipeline.report.solve_json import solve_json
from pipeline.report.solve_table import (
    MOST_ROWS,
    as_comments,
    groups_table,
    limits_table,
    next_sentence,
)
from pipeline.report.tables import render_text
from pipeline.solve.cache import ErrorCache
from pipeline.solve.choose import Answer, choose
from pipeline.solve.frontier import Frontier, frontier, group_answers
from pipeline.solve.limits import limits_of
from pipeline.solve.measure import Losses, Measuring, measure, sample_nbytes
from pipeline.solve.objective import Objective
from pipeline.solve.question import Question
from pipeline.source.reader import SourceReader
from tasks.budget_job import BudgetJob, target_plan
from tasks.parameters import CountParameter, JobTask
from tasks.progress import Progress
from tasks.recipe_file import recipe_path
from tasks.request import JobParameters
from tasks.targets import PrintedTask

FIRST_LINE = "# The recipe that a budget was solved to; SolveBudget writes it anew."
"""By which a file is known to be ours to replace."""

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
        out = asked.folder / f"{asked.recipe.name}.toml"
        require_ours(out, asked.parameters)
        question = self._question(asked)

        def file_nbytes(types: Mapping[str, GgmlType]) -> int:
            return target_plan(asked.become(types)).nbytes

        answer = choose(question, file_nbytes, seconds=self.seconds)
        around = frontier(question, answer, seconds=min(float(self.seconds), _POINT_SECONDS))
        recipe = moved(asked.become(answer.types).recipe, asked.parameters, out.parent)
        text = write_answer(out, recipe, question, answer, around)
        sys.stdout.write(text)

    def _question(self, asked: BudgetJob) -> Question:
        return Question(
            asked.model,
            asked.targets,
            asked.groups,
            asked.fixed,
            self._losses(asked),
            limits_of(asked.budget, asked.model),
            Objective(self.objective),
            lambda target: weight_of(asked.budget, target),
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


def require_ours(out: Path, parameters: JobParameters) -> None:
    """Refuse to write over a file that no run of this task has put there.

    Raises:
        OutputError: There is one.
    """
    if not out.exists():
        return
    is_asked = out.resolve() == recipe_path(parameters.recipe).resolve()
    if is_asked or not files.read_bytes(out).startswith(FIRST_LINE.encode()):
        raise OutputError(
            "another file of this name is there already",
            file=out,
            next_step="Delete it, or choose another --out or --name.",
        )


def moved(recipe: Recipe, parameters: JobParameters, folder: Path) -> Recipe:
    """``recipe`` in ``folder``: the files that it names beside itself are where they were."""
    before = recipe_path(parameters.recipe).parent

    def there(name: str) -> str:
        path = before / name
        return os.path.relpath(path.resolve(), folder.resolve()) if path.exists() else name

    experts, imatrix = recipe.experts, recipe.imatrix
    return recipe.model_copy(
        update={
            "experts": experts.model_copy(update={"keep": experts.keep and there(experts.keep)}),
            "imatrix": imatrix.model_copy(update={"file": imatrix.file and there(imatrix.file)}),
            "graft": tuple(
                graft.model_copy(update={"origin": there(graft.origin)}) for graft in recipe.graft
            ),
        }
    )


def write_answer(
    out: Path, recipe: Recipe, question: Question, answer: Answer, around: Frontier
) -> str:
    """Write the recipe and the frontier beside it; gives what a terminal is shown.

    Raises:
        OutputError: A file cannot be written.
    """
    # Drawing is imported only where something is drawn: matplotlib takes a second to load.
    from pipeline.report.frontier_chart import frontier_png

    groups = group_answers(question, answer)
    limits, sentence = limits_table(question, answer), next_sentence(around, question, answer)
    axis = question.limits[around.axis]
    picture = frontier_png(around.points, axis.nbytes, axis.title, f"{recipe.name}: {axis.title}")
    files.write_whole(out.with_name("frontier.png"), picture)
    content = json.dumps(solve_json(recipe.name, question, answer, around, groups), indent=1)
    files.write_whole(out.with_name("frontier.json"), content.encode() + b"\n")
    reasons = as_comments((limits, groups_table(groups, question, answer)), sentence)
    written = f"{FIRST_LINE}\n#\n{reasons}\n{recipe_toml(recipe)}".encode()
    assert parse_recipe(written, out) == recipe, "a recipe that does not load as it was solved"
    files.write_whole(out, written)
    shown = groups_table(groups, question, answer, most=MOST_ROWS)
    return (
        f"{render_text(shown)}\n{render_text(limits)}\n{sentence}\n\n"
        f"{out}: the recipe; frontier.png, frontier.json: what more or less would change\n"
    )
