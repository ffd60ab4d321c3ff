"""Files that are no GGUF, told by their first bytes or their names: what each is, what to do.

Sources: git-lfs ``docs/spec.md``, the safetensors format, fairydreaming/llama.cpp 456d203f (the
``DSE1`` file of hash constants), old llama.cpp (``ggjt`` and its like), and the names that
FreeToken (FTW), basalt, vLLM-Moet and ds4 give to their own formats.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.diagnosis import commands
from pipeline.diagnosis.finding import Mend
from pipeline.files import read_bytes, reading
from pipeline.gguf.header import MAGIC

_HEAD_NBYTES = 64
_LARGEST_JSON = 1 << 24


@dataclass(frozen=True, slots=True)
class Stranger:
    """What something is that is no model this project reads, and what to do with it."""

    what: str
    mend: Mend


@dataclass(frozen=True, slots=True)
class _Sign:
    """``head`` matches the first bytes of a file, ``name`` its name."""

    what: str
    mend: Callable[[Path], Mend]
    head: bytes = rb"(?!)"
    name: str = r"(?!)"


def _say(sentence: str, command: Callable[[Path], str] | None = None) -> Callable[[Path], Mend]:
    return lambda path: Mend(sentence, () if command is None else (command(path),))


def _convert(_: Path) -> str:
    return commands.convert()


_OWN_FORMAT = _say("Nothing else reads it. Convert the released checkpoint:", _convert)
_AGAIN = _say("Fetch the file again; what lies there is no model.")

_SIGNS = (
    _Sign("an empty file", _AGAIN, head=rb"\Z"),
    _Sign(
        "a git-lfs pointer: a few lines of text that stand for a file that was never fetched",
        lambda path: Mend(
            "Fetch the content, in its folder:", (f"git lfs pull --include {path.name}",)
        ),
        head=rb"version https://git-lfs",
    ),
    _Sign(
        "a safetensors file: a checkpoint's shard, or a whole small one",
        _say("Look at the checkpoint, then convert it:", commands.inspect),
        head=rb".{4}\0{4}\{",
        name=r".*\.safetensors",
    ),
    _Sign(
        "hash constants of the engram for a GGUF beside it (DSE1, fairydreaming's fork)",
        _say("It is no model: name the GGUF it lies beside. Other engines want these as keys."),
        head=rb"DSE1",
        name=r".*\.engram-constants\.bin",
    ),
    _Sign("a page of a web site, saved in place of the file", _AGAIN, head=rb"\s*<(!DOCTYPE|html)"),
    _Sign(
        "a llama.cpp file from before GGUF",
        _say("No engine of today reads it."),
        head=rb"tjgg|fmgg|algg|lmgg|ggjt|ggmf|ggla|ggml",
    ),
    _Sign(
        "a PyTorch or zip archive", _say("Take the safetensors form of it."), head=rb"PK\x03\x04"
    ),
    _Sign(
        "an unfinished download or an unfinished shard",
        _say("Let the job that began it go on; it is no model yet."),
        head=rb"\0{%d}" % _HEAD_NBYTES,
        name=r".*\.(part|incomplete|aria2|crdownload|tmp)",
    ),
    _Sign("a basalt model, a format of its own", _OWN_FORMAT, name=r".*\.basalt"),
    _Sign("an FTW model, FreeToken's own format", _OWN_FORMAT, name=r".*\.ftw"),
    _Sign("a vLLM-Moet expert file, a format of its own", _OWN_FORMAT, name=r".*\.moet2pf"),
    _Sign("ds4's bundle of experts, copied from a GGUF", _OWN_FORMAT, name=r".*\.expertbundle"),
)

_QUANTIZED = {
    "exl3": "an EXL3 checkpoint (ExLlamaV3's own trellis codes)",
    "exl2": "an EXL2 checkpoint (ExLlamaV2's own codes)",
    "gptq": "a GPTQ checkpoint",
    "awq": "an AWQ checkpoint",
}
"""``quantization_config.quant_method`` of checkpoints that are not in the released form."""


def stranger_at(path: Path) -> Stranger | None:
    """What the file or folder ``path`` is, if that is anything but a GGUF; else nothing.

    Raises:
        SourceError: The file cannot be read.
    """
    if path.is_dir():
        return _strange_folder(path)
    head = _head(path)
    for sign in _SIGNS:
        is_named = re.fullmatch(sign.name, path.name, re.IGNORECASE)
        if is_named or re.match(sign.head, head, re.DOTALL):
            return Stranger(sign.what, sign.mend(path))
    if head.startswith(MAGIC):
        return None
    return Stranger(
        f"no GGUF: it begins with {head[:4]!r}, not with {MAGIC!r}",
        Mend("Fetch it again, or ask its maker what it is."),
    )


def _head(path: Path) -> bytes:
    with reading(path) as fd:
        nbytes = min(_HEAD_NBYTES, os.fstat(fd).st_size)
    return read_bytes(path, 0, nbytes)


def _strange_folder(folder: Path) -> Stranger | None:
    if any(folder.glob("*.gguf")):
        return None
    config = folder / "config.json"
    if not config.is_file():
        return Stranger(
            "a folder without a .gguf file or a config.json",
            Mend("Name the file, or the folder that holds it."),
        )
    method = _quant_method(config)
    if method in _QUANTIZED:
        return Stranger(_QUANTIZED[method], _OWN_FORMAT(folder))
    return Stranger(
        "a checkpoint folder",
        Mend("Look at it, then convert it:", (commands.inspect(folder), commands.convert())),
    )


def _quant_method(config: Path) -> str:
    if config.stat().st_size > _LARGEST_JSON:
        return ""
    try:
        content = json.loads(config.read_bytes())
        return str(content["quantization_config"]["quant_method"]).lower()
    except (ValueError, KeyError, TypeError):
        return ""
