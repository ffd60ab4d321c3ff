"""Saliency tables and keep lists out of files of any known form, told by content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.experts.importers import canonical, imatrix, keep_lists, npz, observer, paired_sums
from pipeline.experts.importers import profile as profile_json
from pipeline.experts.importers.content import Content, content_of
from pipeline.experts.importers.text import decoded, has_lines, read_text
from pipeline.experts.importers.torch_file import load_torch
from pipeline.experts.keep import KeepList, check_fits
from pipeline.experts.keep_json import parse_keep
from pipeline.experts.located import located
from pipeline.experts.routing import Routing
from pipeline.experts.saliency import SaliencyTable
from pipeline.source.json_object import parse_json_object, shown


def read_saliency(path: Path, *, text_only: bool = False) -> SaliencyTable:
    """The saliency in ``path``: a file of an observer, a profiler, an imatrix, or our own.

    Args:
        path: The file.
        text_only: Leave image tokens out, where the file tells them from text.

    Raises:
        SourceError: The file is damaged, of no known form, or only a list of experts.
        Problems: Several sums are unusable, each with its own message.
    """
    content = content_of(path)
    with located(path):
        table = _table(content, path, text_only=text_only)
    if text_only and not table.kind.startswith(paired_sums.KIND):
        raise SourceError(
            "the file does not tell text from images",
            file=path,
            expected="sal and cnt beside sal_img and cnt_img",
            found=f"saliency of kind {table.kind}",
        )
    return table


def read_halves(path: Path) -> tuple[SaliencyTable, SaliencyTable]:
    """The saliency of two halves of the text, where one file keeps both.

    Raises:
        SourceError: The file is damaged, or keeps no halves.
    """
    match content_of(path):
        case Content.NPZ:
            return npz.read_halves(path)
        case Content.SAFETENSORS:
            return canonical.read_canonical_halves(path)
        case content:
            raise SourceError(
                "the file keeps no two halves of the text",
                file=path,
                expected="our own saliency of an observation, or an .npz of a calibration script",
                found=content.name,
            )


def read_keep(path: Path, routing: Routing, *, n_best: int | None = None) -> KeepList:
    """The keep list in ``path``, for a model with this routing.

    Args:
        path: A list of our own form, or ids in JSON, JSON lines or CSV.
        routing: The model that is cut.
        n_best: The lists are rankings, best first: keep this many of each.

    Raises:
        SourceError: The file is damaged, of no known form, or holds no list.
        PlanError: The list breaks a rule or does not fit the model; several raise `Problems`.
    """
    content = content_of(path)
    if content not in (Content.JSON, Content.TEXT):
        raise SourceError(
            "the file holds no keep list",
            file=path,
            expected="JSON, JSON lines or CSV",
            found=content.name,
            next_step="Saliency becomes a keep list by a criterion and a number of experts.",
        )
    text = read_text(path)
    if content is Content.TEXT:
        lists = keep_lists.lists_of_csv(decoded(text, path), path)
    elif has_lines(text, path):
        lists = keep_lists.lists_of_lines(text, routing, path)
    else:
        entries = parse_json_object(text, path)
        if "format" in entries:
            return _own_keep(entries, routing, path)
        lists = keep_lists.lists_of_json(entries, routing, path)
    return keep_lists.keep_of_lists(lists, routing, path, n_best=n_best)


def _own_keep(entries: Mapping[str, object], routing: Routing, path: Path) -> KeepList:
    keep = parse_keep(entries, path)
    with located(path):
        check_fits(keep, routing)
    return keep


def _table(content: Content, path: Path, *, text_only: bool) -> SaliencyTable:
    match content:
        case Content.TORCH:
            return _torch_table(path, text_only=text_only)
        case Content.NPZ:
            return npz.read_npz(path)
        case Content.SAFETENSORS:
            return canonical.read_canonical(path)
        case Content.GGUF:
            return imatrix.read_imatrix(path)
        case Content.JSON:
            return _json_table(path)
        case Content.TEXT:
            raise _no_saliency(path)


def _torch_table(path: Path, *, text_only: bool) -> SaliencyTable:
    content = load_torch(path)
    if observer.is_observer(content):
        return observer.read_observer(content, path)
    if paired_sums.is_paired_sums(content):
        return paired_sums.read_paired_sums(content, path, text_only=text_only)
    raise SourceError(
        "the torch file is of no known observer",
        file=path,
        expected="layers by number, or sal and cnt",
        found=shown(", ".join(map(str, content))),
    )


def _json_table(path: Path) -> SaliencyTable:
    text = read_text(path)
    entries = {} if has_lines(text, path) else parse_json_object(text, path)
    if profile_json.is_profile(entries):
        return profile_json.read_profile(entries, path)
    raise _no_saliency(path)


def _no_saliency(path: Path) -> SourceError:
    return SourceError(
        "the file holds no saliency",
        file=path,
        expected="an observer's sums, a profile with activation_counts, or an imatrix",
        found="text of another kind",
        next_step="A keep list is used as it is: it has no scores to choose by.",
    )
