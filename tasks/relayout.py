"""A finished model in the other layout."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import luigi

from pipeline import files
from pipeline.errors import OutputError, QuantmillError, raise_problems
from pipeline.gguf.digests import check_digests
from pipeline.gguf.model_file import GgufModel, read_draft, read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.form import V41_FORMS, form_of
from pipeline.model.contract.pair import check_pair
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.layout import Layout
from pipeline.relayout.run import relayout
from pipeline.relayout.shards import plan_relayout, present_layout, relaid_name
from tasks.naming import SUMS, listed_digests, sums_text
from tasks.targets import PrintedTask


class Relayout(PrintedTask):
    """Rewrite engram tensors and keys for the other layout without requantizing.

    A draft beside the model goes with it, as it is.
    """

    path = luigi.Parameter(description="a V4.1 GGUF, one of its shards, or their folder")
    layout = luigi.Parameter(description="mainline or fork")
    out = luigi.Parameter(default="", description="a new folder (default: beside the model's)")

    def show(self) -> None:
        """Check what is there, rewrite, check the result as a loader would, then name it."""
        if self.layout not in list(Layout):
            raise OutputError("unknown layout", expected=" or ".join(Layout), found=self.layout)
        layout, model = Layout(self.layout), read_model(Path(self.path))
        draft = read_draft(model.files[0].path)
        if draft is not None:
            raise_problems(f"the draft beside {self.path}", check_pair(model, draft))
        out = Path(self.out) if self.out else beside(model, layout)
        refuse_standing(model, draft, layout, out)
        known = known_digests(paths_of(model, draft))
        staged = out / ".unchecked"
        files.remove_folder(staged)
        first = relayout(Path(self.path), layout, staged)
        relaid, moved = read_model(first), read_draft(first)
        raise_problems(f"{layout} layout of {self.path}", problems_of(relaid, moved, layout))
        publish(paths_of(relaid, moved), out, known)
        files.remove_folder(staged)
        sys.stdout.write(f"{out}: {len(relaid.files)} shards in the {layout} layout\n")
        if moved:
            sys.stdout.write(f"{out}: the draft as it was, {moved.files[0].path.name}\n")


def paths_of(model: GgufModel, draft: GgufModel | None) -> list[Path]:
    """The files of a model and of its draft."""
    return [file.path for one in (model, draft) if one is not None for file in one.files]


def problems_of(model: GgufModel, draft: GgufModel | None, layout: Layout) -> list[QuantmillError]:
    """What loaders would refuse or misread in a relaid model and in the draft that goes with it."""
    problems: list[QuantmillError] = [
        *check_contract(model, V41_FORMS[layout]),
        *check_gguf_engram(model).problems,
    ]
    if draft is not None:
        # It may be of another maker, and is none of ours to complete.
        problems += check_contract(draft, form_of(draft), union=False)
        problems += check_pair(model, draft)
    return problems


def beside(model: GgufModel, layout: Layout) -> Path:
    """A folder next to the model's, named after the new layout."""
    folder = model.files[0].path.absolute().parent
    name = relaid_name(folder.name, present_layout(model), layout)
    return folder.with_name(name if name != folder.name else f"{name}-{layout}")


def refuse_standing(model: GgufModel, draft: GgufModel | None, layout: Layout, out: Path) -> None:
    """Refuse an output folder that is the model's own or that has files of the same names.

    Raises:
        OutputError: It is, or it has.
    """
    if out.resolve() == model.files[0].path.resolve().parent:
        raise OutputError(
            "the output folder is the model's own", file=out, next_step="Choose another --out."
        )
    for shard in plan_relayout(model, layout, draft):
        if (out / shard.file_name).exists():
            raise OutputError(
                "the file is there already",
                file=out / shard.file_name,
                next_step="Delete it or choose another --out.",
            )


def known_digests(paths: Sequence[Path]) -> dict[tuple[int, int], str]:
    """The digest of each input file by device and inode, once all of them are as listed.

    Nothing where the input has no SHA256SUMS.

    Raises:
        Problems: A file is not what it is listed as: it would be carried on.
    """
    folder = paths[0].parent
    if not (folder / SUMS).exists():
        return {}
    listed = listed_digests(folder)
    ours = {path.name: listed[path.name] for path in paths if path.name in listed}
    raise_problems(f"digests of {folder}", check_digests(folder, ours))
    return {files.inode(folder / name): digest for name, digest in ours.items()}


def publish(paths: Sequence[Path], out: Path, known: Mapping[tuple[int, int], str]) -> None:
    """Give checked files their final names, the first shard and the digests last."""
    digests = {p.name: known.get(files.inode(p)) or files.sha256_of(p) for p in paths}
    for path in reversed(paths):
        files.rename(path, out / path.name)
    files.write_whole(out / SUMS, sums_text(digests))
