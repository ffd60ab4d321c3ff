"""Properties of the files that every tensor in them shares."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.diagnosis.case import Case
from pipeline.diagnosis.finding import Finding, Severity, listed
from pipeline.gguf.header import ALIGNMENT

_POISON = (
    "engines read it, but llama-quantize writes a corrupt file from it and gguf-py's split writer "
    "corrupt shards, both without a word"
)


def check_files(case: Case) -> Iterator[Finding]:
    """Findings about alignment."""
    odd = [file for file in case.model.files if file.alignment != ALIGNMENT]
    if odd:
        yield Finding(
            Severity.NOTE,
            f"general.alignment is {odd[0].alignment:,} instead of {ALIGNMENT}: {_POISON}",
            (listed([file.path.name for file in odd]),),
            case.rewritten(f"Write it anew, aligned to {ALIGNMENT}:"),
        )
