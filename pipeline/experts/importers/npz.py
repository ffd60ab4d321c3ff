"""``.npz`` files of two calibration scripts for MLX runtimes; both keep two halves of the text.

Router weights only: ``method`` is ``normalized_routing_weight``, ``saliency`` the sum of g
(Rapid-MLX ``scripts/calibrate_deepseek_v41_reap.py``): a proxy. With outputs: ``total`` is the sum
of g |f|, ``saliency`` its mean, ``saliency_halves`` means too (``reap_calibrate.py`` of MLX ports
of V4.1-Flash and others); its gates are those that the runtime applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import SourceError
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.layers import all_equal
from pipeline.experts.importers.npy import read_arrays
from pipeline.experts.origin import Origin, origin_of
from pipeline.experts.saliency import F64, SaliencyTable, Sum, count_top_k
from pipeline.source.json_object import shown

_METHOD = "normalized_routing_weight"
_NAMES = (
    "saliency",
    "total",
    "counts",
    "saliency_halves",
    "counts_halves",
    "tokens",
    "method",
)
_ROUNDING = 1e-5

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class _Form:
    """What the arrays of one script mean: which sum, under which name, and what the halves are."""

    kind: str
    honesty: Honesty
    sums: Sum
    stored: str
    halves_are_means: bool


_WEIGHTS = _Form("routing-weights", Honesty.PROXY, Sum.GATES, "saliency", halves_are_means=False)
_OUTPUTS = _Form(
    "reap-calibrate", Honesty.TRUE_GATE, Sum.WEIGHTED_NORMS, "total", halves_are_means=True
)


def read_npz(path: Path) -> SaliencyTable:
    """The table of an ``.npz`` file.

    Raises:
        SourceError: It is damaged or of neither script, or its arrays contradict each other.
    """
    arrays = read_arrays(path, _NAMES)
    form = _form(arrays, path)
    counts = _floats(arrays, "counts", 2, path)
    sums = _floats(arrays, form.stored, 2, path)
    if form is _OUTPUTS:
        _check_means(_floats(arrays, "saliency", 2, path), sums, counts, path)
    tokens = _tokens(arrays, counts, path)
    return _table(form, (origin_of(path),), counts, sums, tokens)


def read_halves(path: Path) -> tuple[SaliencyTable, SaliencyTable]:
    """The two halves of the text as tables of their own.

    Raises:
        SourceError: As `read_npz`, or the file does not keep halves.
    """
    arrays = read_arrays(path, _NAMES)
    form = _form(arrays, path)
    counts = _floats(arrays, "counts_halves", 3, path)
    sums = _floats(arrays, "saliency_halves", 3, path)
    if counts.shape != sums.shape or len(sums) != 2:
        raise SourceError(
            "the halves are not two tables of one shape", file=path, found=shown(sums.shape)
        )
    if form.halves_are_means:
        sums = sums * counts
    origin = origin_of(path)
    one, other = (
        _table(form, (Origin(origin.sha256, f"{origin.name} half {n + 1}"),), counts[n], sums[n])
        for n in range(2)
    )
    return one, other


def _table(
    form: _Form,
    origins: tuple[Origin, ...],
    counts: F64,
    sums: F64,
    tokens: tuple[int, ...] | None = None,
) -> SaliencyTable:
    return SaliencyTable(
        form.kind,
        form.honesty,
        origins,
        {Sum.COUNTS: counts, form.sums: sums},
        tokens,
        count_top_k(counts, tokens) if tokens else None,
    )


def _form(arrays: Arrays, path: Path) -> _Form:
    method = str(arrays["method"]) if "method" in arrays else None
    if method == _METHOD and "saliency" in arrays:
        return _WEIGHTS
    if method is None and {"saliency", "total"} <= arrays.keys():
        return _OUTPUTS
    raise SourceError(
        "it is not said whether these saliencies are sums or means, and of what",
        file=path,
        expected=f"method {_METHOD}, or the array total beside saliency",
        found=f"method {shown(method)}, arrays {', '.join(sorted(arrays)) or 'of other names'}",
    )


def _check_means(means: F64, sums: F64, counts: F64, path: Path) -> None:
    fits = means.shape == sums.shape == counts.shape
    if not fits or not all_equal(means, sums / np.maximum(counts, 1), _ROUNDING):
        raise SourceError("saliency is not the mean of total over counts", file=path)


def _tokens(arrays: Arrays, counts: F64, path: Path) -> tuple[int, ...] | None:
    if "tokens" not in arrays:
        return None
    tokens = _floats(arrays, "tokens", 0, path).item()
    if tokens < 0 or tokens != round(tokens):
        raise SourceError("tokens is not a count", file=path, found=tokens)
    return (int(tokens),) * len(counts)


def _floats(arrays: Arrays, name: str, n_dims: int, path: Path) -> F64:
    array = arrays.get(name)
    if array is None or array.ndim != n_dims or array.dtype.kind not in "iuf":
        raise SourceError(
            f"the file has no array {name} of {n_dims} dimensions with numbers",
            file=path,
            found="none" if array is None else f"{array.dtype} {array.shape}",
        )
    return array.astype(np.float64)
