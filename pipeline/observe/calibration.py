"""Calibration text: documents out of a file or a folder, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer

from pipeline.errors import SourceError
from pipeline.files import read_bytes
from pipeline.source.json_object import parse_json_object, shown

_KEY = "text"


def documents_of(path: Path) -> Iterator[str]:
    """The documents in ``path``, a file or a folder of files in the order of their names.

    A ``.txt`` or ``.md`` file is one document, a ``.jsonl`` file has one in ``text`` of every line.
    In a folder, also below it, other files and hidden ones are passed over.

    Raises:
        SourceError: Nothing there to read, not UTF-8, or a line that is no such object.
    """
    if path.is_file():
        yield from _of_file(path)
        return
    found = [p for p in sorted(path.rglob("*")) if _is_text(p, path)] if path.is_dir() else []
    if not found:
        raise SourceError(
            "no calibration text here",
            file=path,
            expected=f"a file, or a folder of files, that end in {', '.join(_READERS)}",
        )
    for file in found:
        yield from _of_file(file)


def encoded(
    documents: Iterable[str], tokenizer_json: bytes, *, refused: int | None = None
) -> Iterator[list[int]]:
    """Token ids of each document, by the checkpoint's own tokenizer and nothing added.

    Control tokens that a text spells out are taken for what they are, so that conversations can be
    given as the model sees them.

    Args:
        documents: Texts.
        tokenizer_json: The file.
        refused: A token that no text may hold: what the model does there needs more than text.

    Raises:
        SourceError: A document holds it.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    for number, document in enumerate(documents):
        ids = tokenizer.encode(document, add_special_tokens=False).ids
        if refused in ids:
            raise SourceError(
                f"document {number + 1:,} of the calibration text holds the token of an image",
                found=f"token {refused}",
                next_step="Images are not observed; leave the document out.",
            )
        yield ids


def _is_text(path: Path, root: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and path.suffix in _READERS and not is_hidden


def _of_file(path: Path) -> Iterator[str]:
    read = _READERS.get(path.suffix)
    if read is None:
        raise SourceError(
            "calibration text of unknown form",
            file=path,
            expected=f"a name that ends in {', '.join(_READERS)}",
        )
    content = read_bytes(path)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            "the text is not UTF-8",
            file=path,
            offset=error.start,
            found=f"0x{content[error.start]:02X}",
        ) from None
    yield from read(text, path)


def _whole(text: str, path: Path) -> Iterator[str]:
    del path
    yield text


def _lines(text: str, path: Path) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        said = parse_json_object(line.encode(), path, f"line {number}").get(_KEY)
        if not isinstance(said, str):
            raise SourceError(
                f"line {number} holds no document",
                file=path,
                expected=f'an object with a string under "{_KEY}"',
                found=shown(line),
            )
        yield said


_READERS: dict[str, Callable[[str, Path], Iterator[str]]] = {
    ".txt": _whole,
    ".md": _whole,
    ".jsonl": _lines,
}
"""How a name ends -> how documents are read."""
