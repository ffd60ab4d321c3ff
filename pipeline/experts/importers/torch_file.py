"""Tensors out of a ``torch.save`` file, without ever running what else may be in it.

Such a file is a zip archive around a pickle, and a pickle can run any program. It is opened with
torch's own ``weights_only`` reader, which knows tensors and plain containers and nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import SourceError
from pipeline.experts.importers.layers import MOST_EXPERTS, MOST_LAYERS
from pipeline.experts.saliency import F64
from pipeline.source.json_object import shown

if TYPE_CHECKING:
    from torch import Tensor

_CLASS = re.compile(r"GLOBAL ([\w.]+)")
_MOST_ELEMENTS = MOST_LAYERS * MOST_EXPERTS


def load_torch(path: Path) -> Mapping[object, object]:
    """The dictionary in ``path``; its tensors stay on disk until they are looked at.

    Raises:
        SourceError: The file is damaged, holds no dictionary, or holds more than tensors.
    """
    import torch  # here, so that nothing else of this project has to wait for it

    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever a hostile pickle makes torch's reader stumble over
        named = _CLASS.search(str(error))
        raise SourceError(
            "the file holds more than tensors and is not opened further: that could run a program"
            if named
            else "this is no whole torch file of tensors",
            file=path,
            expected="a dictionary of tensors",
            found=named[1] if named else type(error).__name__,
            next_step="Save plain tensors (an observer's finished file, not an intermediate one).",
        ) from None
    if not isinstance(content, dict):
        raise SourceError(
            "the torch file holds no dictionary", file=path, found=type(content).__name__
        )
    return content


def as_floats(value: object, what: str, path: Path) -> F64:
    """A tensor of real numbers as float64; ``what`` names it in errors.

    Raises:
        SourceError: It is no tensor, or larger than any table of experts.
    """
    import torch

    if not isinstance(value, torch.Tensor) or not _is_plain(value):
        raise SourceError(f"{what} is not a plain tensor", file=path, found=type(value).__name__)
    # By shape and not by bytes stored: a view can claim any number of elements.
    if value.numel() > _MOST_ELEMENTS:
        raise SourceError(
            f"{what} is too large", file=path, expected=f"{_MOST_ELEMENTS:,}", found=value.shape
        )
    return np.array(value.detach().to(torch.float64).numpy(), np.float64)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the elements lie in memory as real numbers."""
    import torch

    is_dense = tensor.layout == torch.strided and not tensor.is_meta
    return is_dense and not tensor.is_complex() and not tensor.is_quantized


def as_count(value: object, what: str, path: Path) -> int:
    """A whole number, stored as such or as a tensor of one element.

    Raises:
        SourceError: It is something else.
    """
    number = float(value) if type(value) is int else _one(as_floats(value, what, path))
    if not number >= 0 or not number.is_integer():
        raise SourceError(f"{what} is not a count", file=path, found=shown(value))
    return int(number)


def _one(values: F64) -> float:
    return float(values.item()) if values.size == 1 else -1.0
