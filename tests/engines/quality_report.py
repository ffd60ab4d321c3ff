"""How far from exact each shipped recipe's miniature is, as a table: ``scripts/quality``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.miniature.checkpoint import write_miniature
from pipeline.miniature.size import MiniatureSize
from pipeline.miniature.v4_size import V4Size
from tests.engines import install
from tests.engines.engine import Engine
from tests.engines.mainline import Mainline
from tests.engines.native import Native
from tests.engines.quality import N_POSITIONS, Bench
from tests.engines.shipped import N_KEPT, WITH_TARGET, Shipped, is_for_v4

HEAD = f"""\
Mean Kullback-Leibler divergence (nats) and agreement of the likeliest token between the file that
a recipe makes and the same weights in F32, over {N_POSITIONS} positions, as one and the same engine
computes both. Bits per weight are those of the whole file.

The weights are those of a random miniature of the released layout: this ranks arithmetic, that is
how much of it each recipe keeps, and says nothing about the quality of a model. A random model
loses far more by the same rounding than a trained one: its choices of experts are all close.

| recipe | engine | bits per weight | mean KL | same top token |
|---|---|---:|---:|---:|"""

FOOT = "Pruned recipes keep {} experts and are held against F32 files with the same experts."


def rows(bench: Bench, mainline: Engine, native: Engine) -> Iterator[str]:
    """A line for each recipe and each engine that reads its target."""
    for recipe in WITH_TARGET:
        for engine in (mainline, native) if is_for_v4(recipe) else (mainline,):
            quality, bpw = bench.quality(engine, recipe), bench.made(engine, recipe).bpw
            figures = f"{bpw:.2f} | {quality.kl:.3f} | {quality.top_1:.1%}"
            yield f"| {recipe} | {engine.name} | {figures} |"


def report(folder: Path) -> Iterator[str]:
    """The report line by line; ``folder`` is for the files."""
    v41, v4 = folder / "v4.1", folder / "v4"
    write_miniature(v41, MiniatureSize(), seed=0)
    write_miniature(v4, V4Size(), seed=0)
    yield HEAD
    native = Native(install.native_package(), install.PINS["native"]["build"])
    mainline = Mainline(
        install.node(), install.mainline_packages(), install.PINS["mainline"]["build"]
    )
    try:
        yield from rows(Bench(Shipped(v41, v4, folder)), mainline, native)
    finally:
        mainline.close()
    counts = ", ".join(f"{n} of {MiniatureSize().n_experts} ({name})" for name, n in N_KEPT.items())
    yield "\n" + FOOT.format(counts)


def main() -> int:
    """Write the report to standard output; 1 if an engine cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            for line in report(Path(folder)):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
        except install.Unavailable as error:
            sys.stderr.write(f"quality: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
