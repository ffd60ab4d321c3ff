"""The names in an output folder: which are ours, giving them, and the digests they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pipeline import files, sharing
from pipeline.errors import OutputError, VerifyError
from tasks.targets import read_document

MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"

_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0]+)")


def name_shards(folder: Path, named: Mapping[str, Path]) -> None:
    """Show stored shards in ``folder`` under their names; drop names that only older plans had.

    Args:
        folder: The output folder.
        named: File name -> stored shard, for all files of the output.

    Raises:
        OutputError: A file that is not ours stands in the way.
    """
    ours = _listed(read_document(folder / MANIFEST) or {})
    for name in named:
        refuse_foreign(folder / name, ours)
    files.remove(folder / MANIFEST)
    # Reports among them: those of the new plans are written again.
    for name in sorted(ours.keys() - named.keys()):
        files.remove(folder / name)
    for name, path in named.items():
        sharing.show_as(path, folder / name)


def refuse_foreign(path: Path, ours: Mapping[str, str]) -> None:
    """Refuse to replace a file that no run of ours has put there.

    A file is ours when the manifest lists it, or when it is a link into a shard store.

    Raises:
        OutputError: It is somebody else's.
    """
    is_link = path.is_symlink() or (path.exists() and path.stat().st_nlink > 1)
    if path.exists() and path.name not in ours and not is_link:
        raise OutputError(
            "a file of this name stands there already, and no run of ours made it",
            file=path,
            next_step="Move it away, or choose another --out or --name.",
        )


def refuse_other_source(folder: Path, identity: Mapping[str, object]) -> None:
    """Refuse to replace a finished output that came from another checkpoint.

    Raises:
        OutputError: The manifest in ``folder`` names another source.
    """
    said = (read_document(folder / MANIFEST) or {}).get("source")
    if isinstance(said, dict) and any(said.get(key) != value for key, value in identity.items()):
        raise OutputError(
            "the folder holds the output of another checkpoint under the same name",
            file=folder,
            expected=identity,
            found={key: said.get(key) for key in identity},
            next_step="Choose another --name or --out, or move the folder away.",
        )


def refuse_other_experts(folder: Path, keep_sha256: object) -> None:
    """Refuse to replace a finished cut that kept as many other experts.

    Raises:
        OutputError: The manifest in ``folder`` names another keep list.
    """
    said = (read_document(folder / MANIFEST) or {}).get("experts")
    if isinstance(said, dict) and said.get("keep_sha256") != keep_sha256:
        raise OutputError(
            "the folder holds a model with as many other experts under the same name",
            file=folder,
            expected=keep_sha256,
            found=said.get("keep_sha256"),
            next_step="Choose another --out, or move the folder away.",
        )


def listed_digests(folder: Path) -> dict[str, str]:
    """File name -> sha256 of everything that a finished output lists.

    Manifest and SHA256SUMS must agree; an output of `Relayout` has only the latter.

    Raises:
        VerifyError: There is neither, one is damaged, they differ, or a shard is in none.
    """
    sums = _sums(folder / SUMS)
    manifest = folder / MANIFEST
    if manifest.exists():
        document = read_document(manifest)
        if document is None or _listed(document) != sums:
            raise VerifyError(
                "manifest and SHA256SUMS do not list the same files",
                file=manifest,
                next_step="One of them was changed; run the recipe again to write both anew.",
            )
    unlisted = {path.name for path in folder.glob("*.gguf")} - sums.keys()
    if unlisted or not sums:
        raise VerifyError(
            "SHA256SUMS does not list every shard",
            file=folder / SUMS,
            found=", ".join(sorted(unlisted)) or "an empty list",
            next_step="Run the recipe again to write it anew.",
        )
    return sums


def _sums(path: Path) -> dict[str, str]:
    if not path.exists():
        raise VerifyError(
            "this is no finished output",
            file=path,
            found="no such file",
            next_step="Name the folder that RunRecipe says at its end.",
        )
    entries = {}
    for line in files.read_bytes(path).decode(errors="replace").splitlines():
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise VerifyError("not a line of sha256sum", file=path, found=line)
        entries[match[2]] = match[1]
    return entries


def sums_text(digests: Mapping[str, str]) -> bytes:
    """A SHA256SUMS file."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()


def _listed(document: Mapping[str, object]) -> dict[str, str]:
    listed = document.get("files", [])
    entries = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
    return {str(entry.get("file")): str(entry.get("sha256")) for entry in entries}
