"""What is read, told by what lies there: a checkpoint, of a folder or a hub, or a finished GGUF."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import SourceError
from pipeline.recipe.values import DraftMode
from pipeline.source.hub.address import is_address
from tasks.gguf_source import GgufSource, is_gguf
from tasks.model_source import ModelSource, SourceParameters
from tasks.source import Source


def source_of(parameters: SourceParameters) -> Source:
    """The source of a job.

    Raises:
        SourceError: A GGUF is given what only checkpoints take.
    """
    source = parameters.source
    if not source or is_address(source) or not is_gguf(Path(source)):
        return ModelSource(parameters)
    if parameters.supplement or parameters.checksums:
        raise SourceError(
            "a supplement and a checksum list go with a checkpoint",
            file=source,
            found="a GGUF",
            next_step="What a GGUF lacks is taken from another source by a [[graft]].",
        )
    return GgufSource(Path(source), parameters.draft)


def open_source(path: str, root: Path) -> Source:
    """A local source that need not have a draft, nor any shard that nothing is taken from."""
    return source_of(SourceParameters(path, root, draft=DraftMode.DROP, may_lack_shards=True))
