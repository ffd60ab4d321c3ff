"""Sums of text and of images, side by side, as collectors for V4.1-Flash write them.

``torch.save`` of a dictionary: ``sal`` (sum of g |f|, with the gates that the model applies) and
``cnt``, both ``[n_layers, n_experts]``; ``sal_img`` and ``cnt_img`` the same for image tokens,
which select with another bias; ``n_layers``, ``n_experts``, ``tokens_seen``. After the description
of LibertAIDAI's pruned V4.1-Flash checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.torch_file import as_count, as_floats
from pipeline.experts.origin import origin_of
from pipeline.experts.saliency import SaliencyTable, Sum, count_top_k

KIND = "paired-sums"

_TEXT = ("sal", "cnt")
_IMAGES = ("sal_img", "cnt_img")
_SIZES = ("n_layers", "n_experts")


def is_paired_sums(content: Mapping[object, object]) -> bool:
    """Whether a torch file's dictionary holds sums and counts under these names."""
    return content.keys() >= set(_TEXT)


def read_paired_sums(
    content: Mapping[object, object], path: Path, *, text_only: bool
) -> SaliencyTable:
    """The table of a torch file's dictionary, with its image tokens or without.

    Raises:
        SourceError: The matrices do not fit the sizes that the file gives, or each other.
    """
    has_images = content.keys() >= set(_IMAGES) and not text_only
    names = (*_TEXT, *_IMAGES) if has_images else _TEXT
    matrices = {name: as_floats(content[name], name, path) for name in names}
    shape = _shape(content, matrices["sal"].shape, path)
    for name, matrix in matrices.items():
        if matrix.shape != shape:
            raise SourceError(
                f"{name} is not a matrix of layers and experts",
                file=path,
                expected=shape,
                found=matrix.shape,
            )
    sal, cnt = (matrices[name] for name in _TEXT)
    if has_images:
        sal, cnt = sal + matrices["sal_img"], cnt + matrices["cnt_img"]
    tokens = None
    # How the tokens divide into text and images is not said.
    if "tokens_seen" in content and not (text_only and content.keys() >= set(_IMAGES)):
        tokens = (as_count(content["tokens_seen"], "tokens_seen", path),) * shape[0]
    return SaliencyTable(
        KIND if has_images else f"{KIND}-text",
        Honesty.TRUE_GATE,
        (origin_of(path),),
        {Sum.COUNTS: cnt, Sum.WEIGHTED_NORMS: sal},
        tokens,
        count_top_k(cnt, tokens) if tokens else None,
    )


def _shape(
    content: Mapping[object, object], stored: tuple[int, ...], path: Path
) -> tuple[int, ...]:
    """Layers and experts: as the file says, or as its first matrix has them."""
    if not all(name in content for name in _SIZES):
        return stored if len(stored) == 2 else (0, 0)
    return tuple(as_count(content[name], name, path) for name in _SIZES)
