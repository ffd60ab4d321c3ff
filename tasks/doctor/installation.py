"""Is this installation fit to run? Looks for what has bitten: shadowed packages, missing libraries.

`recipes`, `tasks` and `pipeline` are generic names. Another project's package of the same name,
earlier on the path or installed over ours, would be run instead without a word.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

PACKAGES = ("pipeline", "tasks", "recipes")
ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "quantmill"
LIBRARIES = (
    "gguf",
    "huggingface_hub",
    "luigi",
    "matplotlib.figure",
    "numpy",
    "sympy",
    "tokenizers",
    "tqdm",
)
"""What the main job imports."""


def shadowed(root: Path = ROOT) -> list[str]:
    """One sentence for each of our packages that would be imported from somewhere else."""
    complaints = []
    for name in PACKAGES:
        found = _origin(name)
        if found is None:
            complaints.append(f"the package {name} cannot be found; install this project again")
        elif found.parent.parent != root:
            complaints.append(
                f"the package {name} is another project's: {found.parent}; expected under {root}. "
                "Take that folder off PYTHONPATH, or use a virtual environment of our own."
            )
    return complaints


def claimed() -> list[str]:
    """One sentence for each other installed distribution that brings a package of our names."""
    owners = packages_distributions()
    return [
        f"the distribution {owner} also installs a package {name}; "
        "use a virtual environment without it"
        for name in PACKAGES
        for owner in sorted(set(owners.get(name, ())))
        if owner.lower() != DISTRIBUTION
    ]


def _origin(name: str) -> Path | None:
    # The finders are asked anew: an already imported package of ours would hide a shadow.
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None) if hasattr(finder, "find_spec") else None
        if spec is not None and spec.origin:
            return Path(spec.origin).resolve()
    return None


def missing_libraries() -> list[str]:
    """One sentence for each library that the main job needs and that does not load."""
    missing = []
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name} does not load ({error}); install this project again")
    try:
        # Imported here: the checks above must still run where our own packages are shadowed.
        from pipeline.quant.ggml import GgmlQuantizer

        GgmlQuantizer()
    except Exception as error:
        missing.append(f"the quantizer library does not load: {error}")
    return missing


CHECKS: Sequence[tuple[str, Callable[[], list[str]]]] = (
    ("no other package shadows ours", shadowed),
    ("no other distribution claims our package names", claimed),
    ("the libraries load", missing_libraries),
)


def main() -> int:
    """Run every check, print one line each, and return the exit code."""
    failed = 0
    for title, check in CHECKS:
        complaints = check()
        failed += bool(complaints)
        sys.stdout.write(f"{'ok  ' if not complaints else 'FAIL'}  {title}\n")
        sys.stdout.writelines(f"      {complaint}\n" for complaint in complaints)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
