"""What comes of a solved budget: a recipe that says why it is so, and what is around it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pipeline import files
from pipeline.errors import OutputError
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
from pipeline.solve.choose import Answer
from pipeline.solve.frontier import Frontier, group_answers
from pipeline.solve.question import Question
from tasks.budget_job import BudgetJob
from tasks.recipe_file import recipe_path
from tasks.request import JobParameters
from tasks.weighing import Weighing

FIRST_LINE = "# The recipe that a budget was solved to; SolveBudget writes it anew."
"""By which a file is known to be ours to replace."""

RECIPE_DOCUMENT = "recipe.toml"
"""What `tasks.documents` calls the recipe of a finished output, which lies in the same folder."""


def require_ours(out: Path, parameters: JobParameters) -> None:
    """Refuse to write over a file that no run of this task has put there, or that others will.

    Raises:
        OutputError: There is one, or a document of RunRecipe has this name in the same folder.
    """
    if out.name.casefold() == RECIPE_DOCUMENT:
        raise OutputError(
            f"the answer to a recipe of this name would be {RECIPE_DOCUMENT}, and RunRecipe writes "
            "a document of that name into the same folder",
            file=out,
            next_step='Call the recipe something else: rename its file, or say name = "..." in it.',
        )
    if not out.exists():
        return
    is_asked = out.resolve() == recipe_path(parameters.recipe).resolve()
    if is_asked or not files.read_bytes(out).startswith(FIRST_LINE.encode()):
        raise OutputError(
            "another file of this name is there already",
            file=out,
            next_step="Delete it, or choose another --out or --name.",
        )


def with_importance(recipe: Recipe, asked: BudgetJob) -> Recipe:
    """``recipe`` as one that is run with the matrix it was solved with.

    One that the recipe names stays named; one from the command line has to be given there again.
    """
    if asked.weighing.weights is None or not asked.parameters.imatrix:
        return recipe
    table = recipe.imatrix.model_copy(update={"file": None, "required": True})
    return recipe.model_copy(update={"imatrix": table})


def importance_note(weighing: Weighing) -> str:
    """Which matrix losses were weighted with, as lines of a comment; nothing without one."""
    if weighing.weights is None:
        return ""
    matrix = weighing.weights.matrix
    return f"Importance matrix: {matrix.path.name}\nsha256 {matrix.sha256}"


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
    out: Path,
    recipe: Recipe,
    question: Question,
    answer: Answer,
    around: Frontier,
    *,
    note: str = "",
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
    picture = frontier_png(
        around.points,
        axis.nbytes,
        axis.title,
        f"{recipe.name}: {axis.title}",
        fixed_error=around.fixed_error,
    )
    files.write_whole(out.with_name("frontier.png"), picture)
    content = json.dumps(solve_json(recipe.name, question, answer, around, groups), indent=1)
    files.write_whole(out.with_name("frontier.json"), content.encode() + b"\n")
    table = groups_table(groups, question, answer)
    reasons = as_comments((limits, table), f"{sentence}\n\n{note}".rstrip())
    written = f"{FIRST_LINE}\n#\n{reasons}\n{recipe_toml(recipe)}".encode()
    assert parse_recipe(written, out) == recipe, "a recipe that does not load as it was solved"
    files.write_whole(out, written)
    shown = groups_table(groups, question, answer, most=MOST_ROWS)
    return (
        f"{render_text(shown)}\n{render_text(limits)}\n{sentence}\n\n"
        f"{out}: the recipe; frontier.png, frontier.json: what more or less would change\n"
    )
