"""What is a file, what is wrong with it, which command mends it: one page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.diagnosis.diagnose import Verdict, diagnose
from pipeline.errors import QuantmillError
from pipeline.report.diagnosis_page import diagnosis_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page of each path; return the gravest verdict."""
    parser = argparse.ArgumentParser(prog="scripts/doctor", description=__doc__)
    parser.add_argument("path", nargs="+", type=Path, help="a GGUF, any of its shards, or a folder")
    paths: list[Path] = parser.parse_args(arguments).path
    return max(_examine(path) for path in paths)


def _examine(path: Path) -> Verdict:
    try:
        diagnosis = diagnose(path)
    except QuantmillError as error:
        sys.stderr.write(f"{error}\n")
        return Verdict.NO_MODEL
    sys.stdout.write(diagnosis_page(diagnosis))
    sys.stdout.flush()
    return diagnosis.verdict


if __name__ == "__main__":
    sys.exit(main())
