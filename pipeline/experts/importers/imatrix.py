"""What an importance matrix tells of experts: how often each was used, and a stand-in for norms.

Of a stack of experts the count (see `pipeline.importance.gguf_form`) is the number of tokens routed
to each. Gates and outputs are not in it, so REAP is not either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import SourceError
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.layers import stack_layers
from pipeline.experts.origin import origin_of
from pipeline.experts.saliency import F64, SaliencyTable, Sum, count_top_k
from pipeline.gguf.reader import GgufFile
from pipeline.importance.gguf_form import IMATRIX, open_imatrix, read_floats

KIND = IMATRIX
EAN_RMS_KIND = "proxy-ean-rms-imatrix"

F32 = NDArray[np.float32]

_STACK = re.compile(r"blk\.(\d+)\.ffn_(down|up|gate|gate_up)_exps\.weight\.counts")
_EXACT = 1 << 24
"""Whole numbers up to here are exact in 32-bit floats."""


def read_imatrix(path: Path) -> SaliencyTable:
    """How often each expert was used: the exact frequencies of the text it was made with.

    Raises:
        FormatError: The file is damaged.
        SourceError: It is no importance matrix, or its counts contradict each other.
    """
    file = open_imatrix(path)
    counts = stack_layers(_expert_counts(file), "the counts of experts", path)
    tokens = _tokens(file, len(counts))
    is_exact = counts.max() < _EXACT and (tokens is None or max(tokens) < _EXACT)
    top_k = count_top_k(counts, tokens) if tokens and is_exact else None
    if tokens and is_exact and top_k is None:
        raise SourceError(
            "the counts of experts do not add up to the same number for every token",
            file=path,
            found=f"{counts.sum(axis=1)[0]:,.0f} for {tokens[0]:,} tokens in layer 0",
        )
    return SaliencyTable(
        KIND, Honesty.PROXY, (origin_of(path),), {Sum.COUNTS: counts}, tokens, top_k
    )


def down_input_squares(path: Path, layer: int) -> F32:
    """Sums of squares of what layer ``layer``'s down matrices were multiplied with.

    Returns:
        ``[n_experts, n_in]``: over the tokens of each expert, before the gate.

    Raises:
        FormatError: The file is damaged.
        SourceError: It does not have them.
    """
    file = open_imatrix(path)
    name = f"blk.{layer}.ffn_down_exps.weight.in_sum2"
    if name not in file.tensors:
        raise SourceError(f"the imatrix has no inputs of layer {layer}'s experts", file=path)
    return read_floats(file, file.tensors[name])


def with_ean_rms(
    table: SaliencyTable, squares: Iterable[F32], column_norms: Iterable[F64]
) -> SaliencyTable:
    """An imatrix's table with a stand-in for the sums of norms, named ``proxy-ean-rms-imatrix``.

    For expert e with N tokens, ``sqrt(sum_j squares[e, j] * column_norms[e, j] / N)`` is the root
    of the mean squared norm of its output, if the hidden coordinates are uncorrelated; the mean
    norm, which it stands in for, is never larger.

    Args:
        table: Frequencies, from the same file as ``squares``.
        squares: For each layer ``[n_experts, n_in]``, from `down_input_squares`.
        column_norms: For each layer ``[n_experts, n_in]``: squared lengths of the columns of the
            down matrices, ``sum_i W[e][i, j]^2``.

    Raises:
        SourceError: A layer is missing, or shapes do not fit.
    """
    counts = table.sums[Sum.COUNTS]
    norms = np.zeros_like(counts)
    n_done = 0
    for layer, (s, c) in enumerate(zip(squares, column_norms, strict=True)):
        if layer >= len(counts) or s.shape != c.shape or len(s) != counts.shape[1]:
            raise SourceError(
                f"inputs and matrices of layer {layer} do not fit together",
                expected=f"{counts.shape[1]} experts in {len(counts)} layers",
                found=f"{s.shape} and {c.shape}",
            )
        # N times the root of a mean: a sum, so that tables can be merged.
        norms[layer] = np.sqrt(counts[layer] * np.einsum("ej,ej->e", s, c, dtype=np.float64))
        n_done += 1
    if n_done != len(counts):
        raise SourceError(f"layer {n_done} lacks its inputs and matrices")
    return SaliencyTable(
        EAN_RMS_KIND,
        Honesty.PROXY,
        table.origins,
        {Sum.COUNTS: counts, Sum.NORMS: norms},
        table.tokens,
        table.top_k,
    )


def _expert_counts(file: GgufFile) -> Mapping[int, F64]:
    """Counts of every layer; the stacks of a layer saw the same tokens."""
    rows: dict[int, F64] = {}
    for name, tensor in file.tensors.items():
        match = _STACK.fullmatch(name)
        if match is None:
            continue
        layer, counts = int(match[1]), read_floats(file, tensor).reshape(-1).astype(np.float64)
        if not np.array_equal(rows.setdefault(layer, counts), counts):
            raise SourceError(
                f"the stacks of layer {layer} were used by different tokens",
                file=file.path,
                tensor=name,
                next_step="The matrix was merged from unlike parts; make it in one run.",
            )
    return rows


def _tokens(file: GgufFile, n_layers: int) -> tuple[int, ...] | None:
    """Tokens that each layer's router saw, where the matrix has routers."""
    names = [f"blk.{layer}.ffn_gate_inp.weight.counts" for layer in range(n_layers)]
    if not all(name in file.tensors for name in names):
        return None
    return tuple(round(float(read_floats(file, file.tensors[name]).max())) for name in names)
