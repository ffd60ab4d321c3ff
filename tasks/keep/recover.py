"""The keep list of a published pruned checkpoint, read back from its routers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import luigi

from pipeline import files
from pipeline.errors import SourceError
from pipeline.experts.keep import KeepList
from pipeline.experts.notes import count_notes
from pipeline.experts.recover import SAMPLE_NBYTES, ReadBytes, recover_keep
from pipeline.experts.routing import routing_of
from pipeline.model.config import read_config
from pipeline.report.saliency_page import keep_markdown
from pipeline.report.saliency_table import keep_table
from pipeline.report.tables import render_text
from pipeline.source.checkpoint import CONFIG_NAME, Checkpoint
from pipeline.source.hub.ranges import Line, Piece, read_piece
from pipeline.source.hub.remote import HubRemote, RangeIgnored
from pipeline.source.scope import Scope
from tasks.keep.output import publish_keep, require_name
from tasks.origin import Origin, open_origin
from tasks.progress import Progress
from tasks.request import store_of
from tasks.targets import PrintedTask

TRUNK = Scope(only="layers.")
"""What routers and experts are among; no other headers are looked at."""


class RecoverExperts(PrintedTask):
    """Find the experts of a checkpoint that a pruned one still holds, by the bytes of its routers.

    From a hub only routers and the first bytes of one expert a layer are read.
    """

    base = luigi.Parameter(
        description="the checkpoint that was pruned: folder or owner/name@commit"
    )
    pruned = luigi.Parameter(description="what is left of it: folder or owner/name@commit")
    out = luigi.Parameter(default="keep.json", description="the keep list; a page goes beside it")
    work = luigi.Parameter(default="out", description="folder for the headers of hub sources")

    def show(self) -> None:
        """Match, write the list and its page, print what to know."""
        out, root = Path(self.out), store_of(self.work).root / "sources"
        require_name(out)
        base, pruned = (
            open_origin(source, root, scope=TRUNK, may_lack_shards=True)
            for source in (self.base, self.pruned)
        )
        whole, left = named(base), named(pruned)
        config = read_config(whole.config, file=base.checkpoint.path(CONFIG_NAME))
        with Progress("routers", read_nbytes(whole) + read_nbytes(left)) as progress:
            read = reading((base, pruned), progress.advance)
            keep = recover_keep(whole, left, routing_of(config), read=read)
        notes = (*count_notes(keep.n_kept), *_config_notes(left, keep))
        page = keep_markdown(keep, whole.folder.name, notes)
        publish_keep(out, keep, {out.with_suffix(".md"): page.encode()})
        sys.stdout.write(render_text(keep_table(keep, whole.folder.name, notes)))
        sys.stdout.write(f"{out}: the list; {out.with_suffix('.md')}: where it comes from\n")


def named(origin: Origin) -> Checkpoint:
    """The checkpoint under the name that messages and lists are to call it by."""
    checkpoint, snapshot = origin.checkpoint, origin.snapshot
    if snapshot is None:
        return replace(checkpoint, folder=checkpoint.folder.resolve())
    return replace(checkpoint, folder=Path(f"{snapshot.repo}@{snapshot.commit}"))


def reading(origins: tuple[Origin, ...], told: Callable[[int], None]) -> ReadBytes:
    """How bytes of these origins are read: where they lie, or by ranges from their hub.

    Args:
        origins: Where checkpoints come from.
        told: Told the bytes read.
    """
    remotes = {
        origin.checkpoint.folder: (origin.snapshot, HubRemote(origin.snapshot))
        for origin in origins
        if origin.snapshot is not None
    }

    def read(path: Path, offset: int, nbytes: int) -> bytes:
        if path.parent in remotes:
            snapshot, remote = remotes[path.parent]
            content = read_range(Line(remote, snapshot.file(path.name)), Piece(offset, nbytes))
        else:
            content = files.read_bytes(path, offset, nbytes)
        told(nbytes)
        return content

    return read


def read_range(line: Line, piece: Piece) -> bytes:
    """A range of a hub's file.

    Raises:
        SourceError: The hub refuses, failed for too long, or knows no ranges.
    """
    content = bytearray(piece.nbytes)

    def put(chunk: memoryview, at: int) -> None:
        begin = at - piece.offset
        content[begin : begin + len(chunk)] = chunk

    try:
        read_piece(line, piece, put)
    except RangeIgnored:
        raise SourceError(
            "the server sends whole files only, and a recovery reads a small part of each",
            file=line.remote.where(line.file),
            next_step="Fetch the checkpoint and name its folder.",
        ) from None
    return bytes(content)


def read_nbytes(checkpoint: Checkpoint) -> int:
    """What a recovery reads of one checkpoint where no two rows of a router are alike."""
    tensors = [tensor for file in checkpoint.files.values() for tensor in file.tensors.values()]
    routers = sum(tensor.nbytes for tensor in tensors if ".ffn.gate." in tensor.name)
    samples = (min(t.nbytes, SAMPLE_NBYTES) for t in tensors if ".ffn.experts.0." in t.name)
    return routers + sum(samples)


def _config_notes(pruned: Checkpoint, keep: KeepList) -> Iterator[str]:
    """A config that still counts the experts of the base."""
    text = pruned.config.get("text_config", pruned.config)
    said = text.get("n_routed_experts") if isinstance(text, dict) else None
    if said != keep.n_kept:
        yield (
            f"The pruned checkpoint's {CONFIG_NAME} says {said} experts, its routers have "
            f"{keep.n_kept}: most engines refuse it as it is."
        )
