"""One session: a checkpoint, what is measured on it, what is printed and kept."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmark.checkpoint import checkpoint_nbytes
from benchmark.lines import lines_of
from benchmark.rounds import Rounds, run_child, run_rounds, steps
from benchmark.tables import bench_table, type_table
from benchmark.together import measure_together, together_table
from pipeline.files import write_whole
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.report.tables import render_text
from pipeline.report.units import GB

PURE_Q3_K = """\
description = "All experts at Q3_K; the other roles are planned but not timed."

[roles]
routed = "Q3_K"
engram = "Q3_K"
attention = "Q3_K"
embedding = "Q3_K"
shared = "Q3_K"

[sub_roles]
engram_gate = "BF16"
hyper_connection = "F32"
router = "BF16"
"""


@dataclass(frozen=True, slots=True)
class Session:
    """A checkpoint to read, and the folder for the recipe and for what fills write."""

    checkpoint: Path
    work: Path

    @property
    def out(self) -> Path:
        """Where the fills write; removed after each."""
        return self.work / "out"

    @property
    def places(self) -> tuple[str, ...]:
        """The options that tell a measuring process where to read and write."""
        return ("--source", str(self.checkpoint), "--out", str(self.out))

    def begin(self) -> dict[str, str]:
        """Print and give what is measured on, the checkpoint's size included."""
        about = machine() | {"checkpoint_gb": f"{checkpoint_nbytes(self.checkpoint) / GB:.2f}"}
        print(", ".join(f"{key} {value}" for key, value in about.items()) + "\n")
        return about

    def recipe(self) -> Path:
        """The file of the recipe under which experts are timed, written anew."""
        path = self.work / "pure-q3_k.toml"
        write_whole(path, PURE_Q3_K.encode())
        return path

    def types(self, names: Sequence[str]) -> dict[str, object]:
        """Measure the kernels of these types only, print them, and give what `--json` keeps."""
        about, recipe = self.begin(), str(self.recipe())
        words = ("type", *self.places, "--recipe", recipe, "--kind", "experts", "--type")
        bar = tqdm(names, unit="type", disable=None)
        speeds = {name: run_child((*words, name)) for name in bar}
        print(render_text(type_table(speeds)))
        return {"machine": about, "types": speeds}

    def rounds(self, n_rounds: int, *, n_threads: int) -> dict[str, object]:
        """Measure everything, print it, and give what `--json` keeps."""
        about, recipe = self.begin(), self.recipe()
        todo = {key: (*words, *self.places) for key, words in steps(recipe, n_threads).items()}
        rounds = run_rounds(todo, n_rounds, self.out)
        print(render_text(bench_table(rounds, n_threads)))
        lines = kept_lines(rounds, n_threads)
        return {"machine": about, "threads": n_threads, "lines": lines, "rounds": rounds}

    def together(
        self, recipes: Sequence[str], n_rounds: int, *, n_threads: int
    ) -> dict[str, object]:
        """Measure these recipes one by one and in one pass, print it, give what `--json` keeps."""
        about = self.begin()
        rounds = measure_together(
            self.checkpoint, self.out, recipes, n_rounds=n_rounds, n_threads=n_threads
        )
        print(render_text(together_table(rounds, recipes)))
        return {"machine": about, "threads": n_threads, "together": rounds}


def kept_lines(rounds: Rounds, n_threads: int) -> list[dict[str, object]]:
    """The lines of the table as `--json` keeps them."""
    return [
        {
            "name": line.name,
            "values": line.values(rounds),
            "goal": line.goal and line.goal.text,
            "verdict": line.verdict(rounds),
        }
        for line in lines_of(n_threads)
    ]


def machine() -> dict[str, str]:
    """Processor, cores, Python and quantizer."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    family = f" (family {facts['cpu family']})" if "cpu family" in facts else ""
    return {
        "cpu": facts.get("model name", platform.machine()) + family,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "quantizer": GgmlQuantizer().version,
    }
