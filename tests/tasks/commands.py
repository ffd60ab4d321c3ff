"""Running luigi as a person does: a process of its own, in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

LUIGI = Path(sys.executable).with_name("luigi")


def command(*words):
    return [str(LUIGI), "--module", "recipes", *map(str, words)]


def luigi(*words, cwd, **environment):
    return subprocess.run(
        command(*words),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_recipe(source, recipe="native", *more):
    words = ("--source", source, "--recipe", recipe, "--name", "mini", *more)
    return ("RunRecipe", *words)


def files_of(folder):
    """Every file below ``folder`` with what would change if it were written again."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
