"""The model whose experts are to be chosen, whatever names it: only its description is read."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline import files
from pipeline.errors import PlanError, SourceError
from pipeline.experts.routing import Routing, routing_of
from pipeline.gguf.model_file import model_stem, read_model
from pipeline.model.config import read_config
from pipeline.model.contract.form import form_of
from pipeline.model.metadata.file_config import config_of
from pipeline.source.checkpoint import CONFIG_NAME
from pipeline.source.hub.address import is_address, parse_address
from pipeline.source.hub.cache import cached_file
from pipeline.source.hub.fetch import fetch_file
from pipeline.source.hub.remote import HubRemote
from pipeline.source.hub.resolve import resolve
from pipeline.source.json_object import parse_json_object

GGUF_SUFFIX = ".gguf"


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """What a page calls a model, and its routed experts."""

    name: str
    routing: Routing


def routed_model(source: str) -> RoutedModel:
    """The routed experts of a checkpoint (folder or hub) or of a finished GGUF.

    Of a checkpoint config.json is read and nothing else, of a GGUF the headers.

    Raises:
        SourceError: Nothing there, refused, or damaged.
        FormatError: The GGUF is of no form that this project knows.
        PlanError: The model cannot lose experts.
    """
    if is_address(source):
        return _on_hub(source)
    path = Path(source)
    if not (path.parent if path.is_file() else path).is_dir():
        raise SourceError(
            "no model here",
            file=path,
            expected="a checkpoint folder, owner/name@commit, or a GGUF",
        )
    if path.suffix == GGUF_SUFFIX or _holds_gguf_only(path):
        return _finished(path)
    folder = path.parent if path.is_file() else path
    return _described(folder.resolve().name, folder / CONFIG_NAME)


def _holds_gguf_only(folder: Path) -> bool:
    return not (folder / CONFIG_NAME).exists() and any(folder.glob(f"[!.]*{GGUF_SUFFIX}"))


def _finished(path: Path) -> RoutedModel:
    model = read_model(path)
    form, first = form_of(model), model.files[0].path
    if form.is_draft:
        raise PlanError("a draft's experts are never cut", file=first)
    return RoutedModel(model_stem(first), routing_of(config_of(model, form)))


def _described(name: str, path: Path) -> RoutedModel:
    if not path.exists():
        raise SourceError(
            f"the checkpoint has no {CONFIG_NAME}",
            file=path,
            next_step="Copy it from the release that the shards come from.",
        )
    entries: Mapping[str, object] = parse_json_object(files.read_bytes(path), path)
    return RoutedModel(name, routing_of(read_config(entries, file=path)))


def _on_hub(source: str) -> RoutedModel:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        snapshot, _ = resolve(parse_address(source), pinned=folder / "pin.json", looks=False)
        config = cached_file(snapshot, CONFIG_NAME, notes=folder)
        if config is None:
            config = folder / CONFIG_NAME
            fetch_file(HubRemote(snapshot), snapshot.file(CONFIG_NAME), config, n_connections=1)
        return _described(f"{snapshot.repo}@{snapshot.commit}", config)
