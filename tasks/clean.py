"""Freeing the disk: shards in the store that no finished output shows any more."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline import files
from tasks.naming import MANIFEST
from tasks.request import store_of
from tasks.targets import read_document


def unused(out: Path) -> list[Path]:
    """Folders of the store of ``out`` that no manifest beside it names; unfinished ones too."""
    used = {spec[:16] for path in out.glob(f"*/{MANIFEST}") for spec in _specs(path)}
    root = store_of(str(out)).root
    folders = root.iterdir() if root.is_dir() else ()
    return sorted(f for f in folders if len(f.name) == 16 and f.name not in used)


def _specs(manifest: Path) -> list[str]:
    listed = (read_document(manifest) or {}).get("files", [])
    entries = listed if isinstance(listed, list) else []
    return [str(entry["spec"]) for entry in entries if isinstance(entry, dict) and "spec" in entry]


def main() -> int:
    """List what is unused; delete it when asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("out"), help="the --out folder")
    parser.add_argument("--delete", action="store_true", help="delete what is listed")
    arguments = parser.parse_args()
    total = 0
    for folder in unused(arguments.out):
        nbytes = sum(map(files.allocated_nbytes, folder.iterdir()))
        total += nbytes
        sys.stdout.write(f"{nbytes:>18,}  {folder}\n")
        if arguments.delete:
            files.remove_folder(folder)
    done = "freed" if arguments.delete else "would be freed by --delete"
    sys.stdout.write(f"{total:>18,}  bytes {done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
