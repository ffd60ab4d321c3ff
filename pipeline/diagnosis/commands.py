"""Every command that a diagnosis may tell a reader to type.

They stand in one place so that a test can hold each against the tasks and options there are.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from pipeline.model.layout import Layout

CHECKPOINT = "CHECKPOINT"
"""Stands for what the reader has to name: the released checkpoint."""

CHECKPOINT_NOTE = (
    f"{CHECKPOINT}: the released checkpoint the file was made from, a folder or owner/name@commit."
)

RECIPE = "RECIPE"
"""Stands for a recipe, where the file does not tell one."""

RECIPE_NOTE = (
    f"{RECIPE}: the recipe you want, a shipped one by its name (recipes/*.toml) or a file of yours."
)

RECIPE_FILE = "mend.toml"
"""What the recipe of a diagnosis is to be saved as."""

ALIKE_FILE = "alike.toml"
"""What the recipe that makes a file's like is to be saved as."""


def keep_all(path: Path, layout: Layout | None) -> str:
    """Write the model anew: keys, order and alignment as they should be, no weight touched."""
    return _run("RunRecipe", "--recipe", "as-is", "--source", str(path), *_layout(layout))


def graft(path: Path, layout: Layout | None) -> str:
    """Write the model anew by the recipe of a diagnosis, some tensors from the checkpoint."""
    words = ("--recipe", RECIPE_FILE, "--source", str(path), *_layout(layout))
    return _run("RunRecipe", *words, "--graft", f"original={CHECKPOINT}")


def make_draft() -> str:
    """Make the draft alone."""
    return _run("RunRecipe", "--recipe", "draft", "--source", CHECKPOINT)


def convert(recipe: str = RECIPE) -> str:
    """Make the model from the checkpoint."""
    return _run("RunRecipe", "--recipe", recipe, "--source", CHECKPOINT)


def convert_alike(path: Path) -> str:
    """Make a file of the same types from the checkpoint, if its recipe can be told."""
    return f"{recipe_from(path)} > {ALIKE_FILE} && {convert(ALIKE_FILE)}"


def relayout(path: Path, layout: Layout) -> str:
    """Go to the other layout."""
    return _run("Relayout", "--path", str(path), "--layout", layout.value)


def inspect(path: Path) -> str:
    """Look at a checkpoint."""
    return _run("InspectSource", "--source", str(path))


def recipe_from(path: Path) -> str:
    """Print the recipe that a file was made by, or one that makes its like."""
    return shlex.join(("scripts/recipe", "from", str(path)))


def doctor(path: Path) -> str:
    """Diagnose another file."""
    return shlex.join(("scripts/doctor", str(path)))


def move(old: Path, new: Path) -> str:
    """Rename a file, never over another."""
    return shlex.join(("mv", "-n", str(old), str(new)))


def set_key(path: Path, key: str, value: int) -> str:
    """Set a number in a header where it stands; the program comes with the gguf package."""
    return shlex.join((".venv/bin/gguf-set-metadata", "--force", str(path), key, str(value)))


def cut_to(path: Path, nbytes: int) -> str:
    """Drop what follows the first ``nbytes`` bytes."""
    return shlex.join(("truncate", "--size", str(nbytes), str(path)))


def _layout(layout: Layout | None) -> tuple[str, ...]:
    return () if layout is None else ("--layout", layout.value)


def _run(*words: str) -> str:
    return shlex.join(("scripts/run", *words))
