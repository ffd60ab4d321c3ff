"""What a tensor loses in each type that it might get, measured by really quantizing some rows.

A pair of a tensor and a type is measured by decoding a sample of the tensor's rows, quantizing it
with the quantizer that would write the file (with importance where there is some), decoding what
came out, and adding up the weighted squares of the difference and of the rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np

from pipeline.importance.columns import Importance, no_importance
from pipeline.model.targets.tensor import TargetTensor
from pipeline.plan import Transform, transform_of
from pipeline.quant.backend import Quantizer
from pipeline.quant.dequant import dequantize
from pipeline.quant.guard import check_rows, takes_importance
from pipeline.quant.types import GgmlType
from pipeline.solve.cache import ErrorCache
from pipeline.solve.sample import Floats, SampledRows, read_sample
from pipeline.source.reader import SourceReader

EXACT = frozenset({Transform.COPY, Transform.REPACK, Transform.NARROW})
"""Ways from source to file that lose nothing and call no quantizer."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a sample of a tensor loses in a type.

    With ``w`` the importance of a column (1 without), ``x`` the source's values and ``e`` the
    differences: ``squared_error`` is the sum of w e^2 and ``squared_norm`` the sum of w x^2, over
    ``n_rows`` of the tensor's ``n_rows_total`` rows.
    """

    squared_error: float
    squared_norm: float
    n_rows: int
    n_rows_total: int

    @property
    def relative(self) -> float:
        """Squared error over squared norm; 0 for a sample of zeros, which every type keeps."""
        return self.squared_error / self.squared_norm if self.squared_norm else 0.0


Losses = Mapping[str, Mapping[str, Loss]]
"""Tensor name -> type name -> loss."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """How losses are measured: from where, by what, over how many rows, and where they are kept.

    ``version`` names the quantizer that writes a type, so that losses of another are not taken for
    its own; ``stamp`` says what the values of a tensor depend on in the source.
    """

    source: SourceReader
    quantizer: Quantizer
    cache: ErrorCache
    n_rows: int
    stamp: Callable[[TargetTensor], object]
    version: Callable[[GgmlType], str]
    importance: Importance = no_importance
    importance_identity: Callable[[TargetTensor], object] = lambda _: None

    def identity(self, target: TargetTensor) -> list[object]:
        """Everything a tensor's losses depend on, but for the type and its quantizer."""
        return [
            "losses 1",
            self.stamp(target),
            [[m.codec, *m.source_names, m.n_rows, m.n_cols, m.block] for m in target.matrices],
            _picks(target),
            target.combine,
            self.n_rows,
            self.importance_identity(target),
        ]


def measure(
    wanted: Mapping[TargetTensor, Sequence[GgmlType]],
    measuring: Measuring,
    *,
    n_threads: int,
    advanced: Callable[[int], None] = lambda _: None,
) -> dict[str, dict[str, Loss]]:
    """The losses of every tensor in every type that it is ``wanted`` in.

    What the cache has is not measured again. ``advanced`` is told the bytes of each tensor's sample
    times its types (`sample_nbytes`).

    Raises:
        QuantmillError: A row cannot be read or decoded, or does not suit a type. What was measured
            before stays in the cache.
    """
    used = {t for target, ts in wanted.items() for t in ts if not _is_exact(target, t)}
    measuring.quantizer.prepare(used)
    losses: dict[str, dict[str, Loss]] = {}
    with ThreadPoolExecutor(n_threads, thread_name_prefix="measure") as pool:
        futures = {
            pool.submit(_losses_of, target, types, measuring): target
            for target, types in wanted.items()
        }
        try:
            for future in as_completed(futures):
                target = futures[future]
                losses[target.name] = future.result()
                advanced(sample_nbytes(target, measuring.n_rows) * len(losses[target.name]))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return losses


def sample_nbytes(target: TargetTensor, n_rows: int) -> int:
    """Bytes of a decoded sample."""
    return 4 * target.n_cols * min(n_rows, target.n_rows)


def _losses_of(
    target: TargetTensor, types: Iterable[GgmlType], measuring: Measuring
) -> dict[str, Loss]:
    versions = {t.name: _version(target, t, measuring) for t in types}
    identity = measuring.identity(target)
    known = measuring.cache.read(identity, versions)
    lacking = [t for t in types if t.name not in known]
    if lacking:
        sample = read_sample(target, measuring.source, measuring.n_rows)
        importance = measuring.importance(target)
        for ggml_type in lacking:
            sums = _sums(target, ggml_type, sample, importance, measuring.quantizer)
            known[ggml_type.name] = sums
        measuring.cache.write(identity, versions, known)
    n_sampled = min(measuring.n_rows, target.n_rows)
    return {name: Loss(*sums, n_sampled, target.n_rows) for name, sums in known.items()}


def _version(target: TargetTensor, ggml_type: GgmlType, measuring: Measuring) -> str:
    return "exact" if _is_exact(target, ggml_type) else measuring.version(ggml_type)


def _is_exact(target: TargetTensor, ggml_type: GgmlType) -> bool:
    return transform_of(target, ggml_type) in EXACT


def _sums(
    target: TargetTensor,
    ggml_type: GgmlType,
    sample: Sequence[SampledRows],
    importance: Floats | None,
    quantizer: Quantizer,
) -> tuple[float, float]:
    """Weighted squares of what is lost, and of the rows themselves."""
    squared_error = squared_norm = 0.0
    is_exact = _is_exact(target, ggml_type)
    for part in sample:
        weights = None if importance is None else np.ascontiguousarray(importance[part.no])
        factors = 1.0 if weights is None else weights.astype(np.float64)
        squared_norm += float((np.square(part.rows, dtype=np.float64) * factors).sum())
        if not is_exact:
            lost = _requantized(target, ggml_type, part, weights, quantizer) - part.rows
            squared_error += float((np.square(lost, dtype=np.float64) * factors).sum())
    return squared_error, squared_norm


def _requantized(
    target: TargetTensor,
    ggml_type: GgmlType,
    part: SampledRows,
    weights: Floats | None,
    quantizer: Quantizer,
) -> Floats:
    n_rows, n_cols = part.rows.shape
    # As the fill does it: importance goes where the type's search looks at it.
    weights = weights if takes_importance(ggml_type) else None
    check_rows(ggml_type, part.rows, importance=weights, bound=part.bound, tensor=target.name)
    packed = np.empty((n_rows, ggml_type.row_nbytes(n_cols)), np.uint8)
    quantizer.quantize(ggml_type, part.rows, packed, weights)
    return dequantize(ggml_type, packed, n_cols)


def _picks(target: TargetTensor) -> list[object]:
    """Which entries are taken of stored tensors that are not taken whole."""
    picks = (matrix.picks for matrix in target.matrices)
    return [p and [_short(p.entries), p.n_stored] for p in picks]


def _short(entries: tuple[int, ...] | range) -> list[object]:
    # A range may stand for millions of rows.
    return ["range", entries.start, entries.stop] if isinstance(entries, range) else list(entries)
