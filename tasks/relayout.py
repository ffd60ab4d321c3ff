"""A finished model in the other layout."""

from __future__ import annotations

import sys
from pathlib import Path

import luigi

from pipeline import files
from pipeline.errors import OutputError, raise_problems
from pipeline.gguf.digests import check_digests
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.model.contract.check import check_contract, layout_of
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.layout import Layout
from pipeline.relayout.run import plan_relayout, relaid_name, relayout
from tasks.naming import SUMS, listed_digests, sums_text
from tasks.targets import PrintedTask


class Relayout(PrintedTask):
    """Rewrite engram tensors and keys for the other layout without requantizing."""

    path = luigi.Parameter(description="a V4.1 GGUF, one of its shards, or their folder")
    layout = luigi.Parameter(description="mainline or fork")
    out = luigi.Parameter(default="", description="a new folder (default: beside the model's)")

    def show(self) -> None:
        """Check what is there, rewrite, check the result as a loader would, then name it."""
        if self.layout not in list(Layout):
            raise OutputError("unknown layout", expected=" or ".join(Layout), found=self.layout)
        layout, model = Layout(self.layout), read_model(Path(self.path))
        out = Path(self.out) if self.out else beside(model, layout)
        refuse_standing(model, layout, out)
        known = known_digests(model)
        staged = out / ".unchecked"
        files.remove_folder(staged)
        relaid = read_model(relayout(Path(self.path), layout, staged))
        problems = [*check_contract(relaid, layout), *check_gguf_engram(relaid).problems]
        raise_problems(f"{layout} layout of {self.path}", problems)
        publish(relaid, out, known)
        files.remove_folder(staged)
        sys.stdout.write(f"{out}: {len(relaid.files)} shards in the {layout} layout\n")


def beside(model: GgufModel, layout: Layout) -> Path:
    """A folder next to the model's, named after the new layout."""
    folder = model.files[0].path.absolute().parent
    name = relaid_name(folder.name, layout_of(model), layout)
    return folder.with_name(name if name != folder.name else f"{name}-{layout}")


def refuse_standing(model: GgufModel, layout: Layout, out: Path) -> None:
    """Refuse an output folder that is the model's own or that has files of the same names.

    Raises:
        OutputError: It is, or it has.
    """
    if out.resolve() == model.files[0].path.resolve().parent:
        raise OutputError(
            "the output folder is the model's own", file=out, next_step="Choose another --out."
        )
    for shard in plan_relayout(model, layout):
        if (out / shard.file_name).exists():
            raise OutputError(
                "the file is there already",
                file=out / shard.file_name,
                next_step="Delete it or choose another --out.",
            )


def known_digests(model: GgufModel) -> dict[tuple[int, int], str]:
    """The digest of each input file by device and inode, once all of them are as listed.

    Nothing where the input has no SHA256SUMS.

    Raises:
        Problems: A file is not what it is listed as: it would be carried on.
    """
    folder = model.files[0].path.parent
    if not (folder / SUMS).exists():
        return {}
    listed = listed_digests(folder)
    ours = {f.path.name: listed[f.path.name] for f in model.files if f.path.name in listed}
    raise_problems(f"digests of {folder}", check_digests(folder, ours))
    return {files.inode(folder / name): digest for name, digest in ours.items()}


def publish(model: GgufModel, out: Path, known: dict[tuple[int, int], str]) -> None:
    """Give checked files their final names, the first shard and the digests last."""
    paths = [file.path for file in model.files]
    digests = {p.name: known.get(files.inode(p)) or files.sha256_of(p) for p in paths}
    for path in reversed(paths):
        files.rename(path, out / path.name)
    files.write_whole(out / SUMS, sums_text(digests))
