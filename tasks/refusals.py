"""What a request may not be, though each of its parts is sound."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import OutputError, RecipeError
from pipeline.model.engines import engines_of
from pipeline.model.layout import Layout
from pipeline.plan import Plan
from pipeline.recipe.schema import Recipe
from pipeline.source.checkpoint import Checkpoint
from tasks.gguf_source import is_gguf


def require_engine(plan: Plan, recipe: Recipe) -> None:
    """Refuse a V4.1 layout whose engines do not read the types, where the other's would.

    Raises:
        RecipeError: The layout is mainline's and a type is ik_llama.cpp's.
    """
    types = {tensor.type for tensor in plan.tensors}
    if plan.layout is Layout.MAINLINE and not engines_of(plan.form, types):
        raise RecipeError(
            f"recipe {recipe.name}: no engine reads its types in the mainline layout",
            found=", ".join(sorted(t.name for t in types if t.family == "ik")),
            expected="the fork layout, which ik_llama.cpp reads, or types of llama.cpp",
            next_step='Say --layout fork, or layout = "fork" in [output].',
        )


def refuse_own_folder(folder: Path, checkpoint: Checkpoint) -> None:
    """Refuse to put the files of one model where those of another are.

    A checkpoint may lie there: its files have other names, and stay.

    Args:
        folder: Where the output is shown.
        checkpoint: All that is read, what is grafted included.

    Raises:
        OutputError: One of it is a GGUF in the output folder.
    """
    output = folder.resolve()
    for file in checkpoint.files.values():
        folders = (file.path.parent.resolve(), file.path.resolve().parent)
        if is_gguf(file.path) and output in folders:
            raise OutputError(
                "the output folder is that of a source",
                file=folder,
                found=f"{file.path.name}, which is read",
                next_step="Choose another --out or --name.",
            )


def refuse_idle_words(recipe: Recipe, *, keep: str, imatrix: str) -> None:
    """Refuse what would change nothing where ``recipe`` makes a draft alone.

    Raises:
        RecipeError: A keep list or an importance matrix is given.
    """
    said = {"--keep": keep, "--imatrix": imatrix}
    idle = [word for word, value in said.items() if value]
    if idle:
        raise RecipeError(
            f"recipe {recipe.name} makes a draft alone, whose experts are never cut and "
            "which no importance matrix knows",
            found=" and ".join(idle),
            next_step=f"Leave {' and '.join(idle)} out: the draft goes with every cut.",
        )
