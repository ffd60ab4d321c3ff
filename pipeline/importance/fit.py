"""How an entry of an importance matrix fits a tensor: which of its rows belong to which matrix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.importance.entry import Entry
from pipeline.model.roles import ReadMode
from pipeline.model.targets.tensor import Combine, TargetTensor

RESHAPED = " (reshaped)"
"""What ggml adds to the name of a tensor that a graph reshapes before it multiplies."""

_TWINS = (("engram_wkv.", "engram_kv."), ("engram_kv.", "engram_wkv."))
"""One matrix, called differently in the two layouts."""

_IN_GROUPS = re.compile(r"attn_output_a\.weight")
"""Its rows are multiplied in groups of equal size, each with an input of its own, and llama.cpp's
imatrix tool measures each group (``src0`` of three dimensions in ``collect_imatrix``)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """``n_stored`` rows of the tensor's width lie in the file; ``entries`` of them are meant.

    ``is_grouped``: they belong to groups of rows of one matrix, not to matrices of their own.
    """

    n_stored: int
    entries: tuple[int, ...] | None = None
    is_grouped: bool = False


def n_matrices(target: TargetTensor) -> int:
    """How many matrices ``target`` is a stack of."""
    return target.shape[0] if len(target.shape) > 2 else 1


def names_for(target: TargetTensor) -> tuple[str, ...]:
    """What an engine may have called ``target`` while it measured; none where it cannot have.

    Looked-up rows and vectors are multiplied with nothing. A draft's tensors bear the names of the
    target's, of which the matrix is.
    """
    if (
        target.is_draft
        or target.read_mode is ReadMode.ROWS
        or target.combine is not Combine.ROWS
        or len(target.shape) < 2
    ):
        return ()
    twins = (target.name.replace(*pair) for pair in _TWINS if pair[0] in target.name)
    return tuple(name + suffix for name in (target.name, *twins) for suffix in ("", RESHAPED))


def fit(
    entry: Entry,
    target: TargetTensor,
    keep: tuple[tuple[int, ...], ...] | None,
    n_experts: int | None,
    file: Path,
) -> Fit:
    """The rows of ``entry`` that belong to ``target``.

    Args:
        entry: Of ``target``.
        target: A tensor of the model that is made.
        keep: For every layer the experts that stay, if some go.
        n_experts: Experts of a layer before that.
        file: The matrix, for the message.

    Raises:
        SourceError: ``entry`` is of a tensor of another width, or of another number of matrices.
    """
    n_stored, rest = divmod(entry.n_values, target.n_cols)
    # Without counts, or with one for all, a file does not say where a row ends.
    if rest or not n_stored or entry.n_counts not in (0, 1, n_stored):
        width = f"{entry.shape[0]:,} of {entry.shape[1]:,} columns"
        raise _misfit("of another width", entry, target, file, width)
    expected = n_matrices(target)
    if n_stored == expected:
        return Fit(n_stored)
    if expected == 1:
        if _IN_GROUPS.search(target.name) and target.n_rows % n_stored == 0:
            return Fit(n_stored, is_grouped=True)
    elif keep is not None and n_stored == n_experts:
        assert target.layer is not None
        return Fit(n_stored, keep[target.layer])
    found = f"{n_stored:,} of {target.n_cols:,} columns"
    whole = n_experts if expected > 1 and keep is not None else None
    raise _misfit("of another number of matrices", entry, target, file, found, whole)


def _misfit(
    what: str, entry: Entry, target: TargetTensor, file: Path, found: str, whole: int | None = None
) -> SourceError:
    expected = f"{n_matrices(target):,} of {target.n_cols:,} columns"
    return SourceError(
        f"the importance matrix has an entry of a tensor {what}",
        file=file,
        tensor=entry.name,
        expected=f"{expected}, or {whole:,} before the cut" if whole else expected,
        found=found,
        next_step="Use the matrix of this very model, or of the one that it was cut from.",
    )
