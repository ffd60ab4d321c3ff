"""One logical model over one or many GGUF files.

Split naming and keys after llama.cpp ``tools/gguf-split`` and its loader: shard numbers in names
count from 1, in ``split.no`` from 0; the first shard carries the model's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import FormatError
from pipeline.gguf.header import ALIGNMENT_KEY, FILLER_KEY
from pipeline.gguf.keys import KeyValue, i32, u16
from pipeline.gguf.reader import GgufFile, GgufTensor, read_gguf

SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS_COUNT = "split.tensors.count"
SPLIT_KEYS = (SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS_COUNT)

FILE_KEYS = (*SPLIT_KEYS, ALIGNMENT_KEY, FILLER_KEY)
"""What is true of one file only, not of the model."""

MAX_SHARDS = 65535
"""``split.count`` is an unsigned 16-bit number."""

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")

_DRAFT = "-draft"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The files of one model, in shard order."""

    files: tuple[GgufFile, ...]

    @property
    def key_values(self) -> Mapping[str, KeyValue]:
        """Metadata of the model: the first shard's."""
        return self.files[0].key_values

    @property
    def tensors(self) -> Mapping[str, tuple[int, GgufTensor]]:
        """Every tensor by name, with the number (from 0) of the shard that holds it."""
        return {
            name: (no, tensor)
            for no, file in enumerate(self.files)
            for name, tensor in file.tensors.items()
        }


@dataclass(frozen=True, slots=True)
class ShardName:
    """What the name of a shard says: its set, its number from 1, and how many there are."""

    stem: str
    number: int
    count: int


def shard_name(path: Path) -> ShardName | None:
    """What the name of ``path`` says, if it is one that loaders take for a shard's."""
    match = _SHARD_NAME.fullmatch(path.name)
    return match and ShardName(match["stem"], int(match["no"]), int(match["count"]))


def shard_file_name(stem: str, no: int, count: int) -> str:
    """Name of shard ``no`` (from 0) of ``count``; loaders accept no other spelling."""
    return f"{stem}-{no + 1:05d}-of-{count:05d}.gguf"


def split_keys(no: int, count: int, n_tensors: int) -> tuple[KeyValue, KeyValue, KeyValue]:
    """What every shard says of the set: its number (from 0), their count, all their tensors."""
    return u16(SPLIT_NO, no), u16(SPLIT_COUNT, count), i32(SPLIT_TENSORS_COUNT, n_tensors)


def draft_stem(stem: str) -> str:
    """What the files of a model's draft are called, for a model whose files are called ``stem``."""
    return stem + _DRAFT


def model_stem(path: Path) -> str:
    """What all files of the model that ``path`` belongs to are called, before number and suffix."""
    match = _SHARD_NAME.fullmatch(path.name)
    return path.name.removesuffix(".gguf") if match is None else match["stem"]


def models_in(folder: Path) -> tuple[Path, ...]:
    """The first file of every model in ``folder``, in the order of their names.

    Raises:
        FormatError: A file has an impossible shard number.
    """
    firsts = {_shard_paths(file)[0]: file for file in sorted(folder.glob("*.gguf"), reverse=True)}
    return tuple(sorted(firsts.values()))


def read_model(path: Path) -> GgufModel:
    """The model at ``path``: a single file, any shard of a set, or a folder that holds one model.

    A draft that lies beside the model of its name does not count: the folder's model is the target.

    Raises:
        FormatError: A file breaks the format, a shard is missing, renamed or from another set, or
            the folder holds no model or several.
        SourceError: A file cannot be opened or read.
    """
    paths = _shard_paths(_only_model(path) if path.is_dir() else path)
    if len(paths) == 1:
        file = read_gguf(paths[0])
        _check_single(file)
        return GgufModel((file,))
    _check_present(paths)
    return read_shards(paths)


def read_draft(path: Path) -> GgufModel | None:
    """The draft that lies beside the model of which ``path`` is a file, where there is one.

    Raises:
        FormatError: As `read_model`, or two drafts of this name lie there.
        SourceError: A file cannot be opened or read.
    """
    wanted = draft_stem(model_stem(path))
    drafts = [file for file in models_in(path.parent) if model_stem(file) == wanted]
    if len(drafts) > 1:
        raise FormatError(
            "the model has two drafts beside it",
            file=path,
            found=", ".join(file.name for file in drafts),
            next_step="Move the one away that is not meant.",
        )
    return read_model(drafts[0]) if drafts else None


def read_shards(paths: Sequence[Path]) -> GgufModel:
    """The model whose shards lie under ``paths``, in order, whatever they are called.

    Raises:
        FormatError: A file breaks the format, or is not the shard of the set for its place.
        SourceError: A file cannot be opened or read.
    """
    files = tuple(read_gguf(shard) for shard in paths)
    _check_set(files)
    return GgufModel(files)


def _only_model(folder: Path) -> Path:
    """The first file of the only model in ``folder`` that is not the draft of another there."""
    found = models_in(folder)
    drafts = {draft_stem(model_stem(file)) for file in found}
    models = [file for file in found if model_stem(file) not in drafts]
    if len(models) != 1:
        names = ", ".join(file.name for file in models)
        raise FormatError(
            "the folder does not hold exactly one model",
            file=folder,
            found=names or "no .gguf file",
            next_step="Name one of the files.",
        )
    return models[0]


def _shard_paths(path: Path) -> tuple[Path, ...]:
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    no, count = int(match["no"]), int(match["count"])
    if not 1 <= no <= count <= MAX_SHARDS:
        raise FormatError("the shard number in the name is impossible", file=path)
    return tuple(path.with_name(shard_file_name(match["stem"], i, count)) for i in range(count))


def _check_present(paths: Sequence[Path]) -> None:
    missing = [path for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise FormatError(
            f"a shard is missing{more}",
            file=missing[0],
            expected=f"{len(paths):,} files",
            next_step="Complete the set, or give back the names the shards were made with.",
        )


def _check_single(file: GgufFile) -> None:
    count = file.key_values.get(SPLIT_COUNT)
    if count is not None and count.value != 1:
        raise FormatError(
            "the file is one shard of a set but not named as one",
            file=file.path,
            found=f"{SPLIT_COUNT} {count.value}",
            next_step="Give it back the name ending in -00001-of-00002.gguf or the like.",
        )


def _check_set(files: Sequence[GgufFile]) -> None:
    n_tensors = sum(len(file.tensors) for file in files)
    for no, file in enumerate(files):
        for expected in split_keys(no, len(files), n_tensors):
            found = file.key_values.get(expected.key)
            # Loaders take the counts from the first shard, so the others may leave them out.
            is_optional = no > 0 and expected.key != SPLIT_NO
            if found != expected and not (found is None and is_optional):
                raise FormatError(
                    f"{expected.key} does not fit this place in the set",
                    file=file.path,
                    expected=f"{expected.type.name} {expected.value}",
                    found="nothing" if found is None else f"{found.type.name} {found.value}",
                )
    _refuse_duplicates(files)


def _refuse_duplicates(files: Sequence[GgufFile]) -> None:
    owner: dict[str, str] = {}
    for name, file in _names(files):
        if name in owner:
            raise FormatError(
                "two shards hold the same tensor", file=file, tensor=name, found=f"in {owner[name]}"
            )
        owner[name] = file


def _names(files: Sequence[GgufFile]) -> Iterator[tuple[str, str]]:
    return ((name, file.path.name) for file in files for name in file.tensors)
