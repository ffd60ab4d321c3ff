"""Choosing the experts that stay: saliency becomes a keep list, and a page that says why."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import luigi

from pipeline.errors import PlanError, SourceError
from pipeline.experts.criterion import Criterion
from pipeline.experts.importers.content import Content, content_of
from pipeline.experts.importers.open import read_halves, read_saliency
from pipeline.experts.merge import merge
from pipeline.experts.saliency import SaliencyTable
from pipeline.experts.select import select
from pipeline.experts.stability import compare_halves
from pipeline.model.config import MOST_EXPERTS
from pipeline.report.saliency_facts import SelectionFacts, selection_facts
from pipeline.report.saliency_page import selection_markdown
from pipeline.report.saliency_table import keep_table
from pipeline.report.tables import render_text
from tasks.keep.output import publish_keep, require_name
from tasks.keep.routed_model import routed_model
from tasks.parameters import CountParameter
from tasks.targets import PrintedTask

_PLACE = re.compile(r"(\d{1,9}):(\d{1,9})")


class SelectExperts(PrintedTask):
    """Rank the experts of every layer by saliency and keep the best: a keep list and its page."""

    saliency = luigi.Parameter(
        default="", description="saliency files, with commas between them (or a JSON list)"
    )
    criterion = luigi.Parameter(
        default=str(Criterion.REAP),
        description=f"what experts are ranked by: {', '.join(Criterion)}",
    )
    experts = CountParameter(most=MOST_EXPERTS, description="how many stay in each layer")
    source = luigi.Parameter(
        description="the model: a checkpoint folder, owner/name@commit, or a GGUF; headers only"
    )
    out = luigi.Parameter(
        default="keep.json", description="the keep list; page and pictures go beside it"
    )
    forced = luigi.Parameter(
        default="", description="experts that stay whatever they score, as layer:expert,..."
    )
    halves = luigi.BoolParameter(
        description="hold two halves of the text against each other: those that one .npz file "
        "keeps, or two saliency files"
    )
    text_only = luigi.BoolParameter(
        description="leave image tokens out, where a file tells them from text"
    )

    def show(self) -> None:
        """Read, choose, write the list and what belongs to it, print what to know."""
        out = Path(self.out)
        require_name(out)
        criterion, forced = parse_criterion(self.criterion), parse_places(self.forced)
        paths = parse_files(self.saliency)
        model = routed_model(self.source)
        tables = [read_saliency(path, text_only=self.text_only) for path in paths]
        table = merge(tables)
        selection = select(table, criterion, self.experts, model.routing, forced=forced)
        halves = None
        if self.halves:
            halves = compare_halves(halves_of(paths, tables), criterion, self.experts)
        facts = selection_facts(table, selection, halves)
        publish_keep(out, selection.keep, pages(facts, model.name, out))
        sys.stdout.write(render_text(keep_table(selection.keep, model.name, facts.notes)))
        sys.stdout.write(f"{out}: the list; {out.with_suffix('.md')}: what it rests on\n")


def parse_files(text: str) -> list[Path]:
    """The files of ``--saliency``: with commas between them, or as a JSON list.

    Raises:
        PlanError: There is none.
    """
    if text.startswith("["):
        try:
            names = json.loads(text)
        except ValueError:
            names = [text]
    else:
        names = [text] if Path(text).is_file() else text.split(",")
    files = [Path(str(name).strip()) for name in names if str(name).strip()]
    if not files:
        raise PlanError(
            "no saliency is given, and experts are never chosen by their number",
            expected="--saliency with a file of an observer, a profile, an imatrix",
            next_step="RecoverExperts reads the list of a published pruned checkpoint instead.",
        )
    return files


def parse_criterion(text: str) -> Criterion:
    """The criterion of that name.

    Raises:
        PlanError: There is none.
    """
    if text not in list(Criterion):
        raise PlanError("unknown criterion", expected=" or ".join(Criterion), found=text)
    return Criterion(text)


def parse_places(text: str) -> dict[int, set[int]]:
    """Experts by layer out of ``3:17,5:2``.

    Raises:
        PlanError: It is something else.
    """
    places: dict[int, set[int]] = {}
    for word in text.replace(" ", "").split(",") if text.strip() else ():
        match = _PLACE.fullmatch(word)
        if match is None:
            raise PlanError(
                "--forced must name experts as layer:expert, with commas between them",
                expected="for instance 3:17,5:2",
                found=text,
            )
        places.setdefault(int(match[1]), set()).add(int(match[2]))
    return places


def halves_of(
    paths: Sequence[Path], tables: Sequence[SaliencyTable]
) -> tuple[SaliencyTable, SaliencyTable]:
    """Two halves of a text: two tables, or what one file keeps of both.

    Raises:
        SourceError: The file keeps no halves, or there are more files.
    """
    if len(tables) == 2:
        return tables[0], tables[1]
    if len(tables) == 1 and content_of(paths[0]) in (Content.NPZ, Content.SAFETENSORS):
        return read_halves(paths[0])
    raise SourceError(
        "there are no two halves to hold against each other",
        file=paths[0],
        expected="two saliency files, or one that keeps halves",
        found=f"{len(paths):,} files" if len(paths) > 1 else "one sum over all of the text",
        next_step="Leave --halves out, or measure two texts.",
    )


def pages(facts: SelectionFacts, model: str, out: Path) -> dict[Path, bytes]:
    """The page and the pictures of a list that goes to ``out``, by where they go."""
    # Drawing is imported only where something is drawn: matplotlib takes a second to load.
    from pipeline.report.saliency_chart import curves_png
    from pipeline.report.saliency_overlap import overlap_png

    keep = facts.keep
    title = (
        f"{out.name}: {keep.n_kept} of {keep.n_experts} experts in each of {keep.n_layers} layers"
    )
    pictures = {out.with_suffix(".png"): ("Scores of every layer", curves_png(facts, title))}
    if len(facts.criteria.criteria) > 1:
        overlap = overlap_png(facts.criteria, keep.n_experts, title, chosen=facts.criterion)
        pictures[out.with_name(f"{out.stem}-overlap.png")] = ("Overlap of criteria", overlap)
    shown = {name: path.name for path, (name, _) in pictures.items()}
    page = selection_markdown(facts, model, shown).encode()
    return {out.with_suffix(".md"): page, **{p: content for p, (_, content) in pictures.items()}}
