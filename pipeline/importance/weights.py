"""Weights of the columns of a model's tensors, out of an importance matrix."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from pipeline.digest import spec_digest
from pipeline.errors import RecipeError, SourceError
from pipeline.importance.entry import Entry
from pipeline.importance.fit import Fit, fit, names_for
from pipeline.importance.matrix import Form, ImportanceMatrix
from pipeline.importance.neutral import mean_weights, searchable
from pipeline.model.targets.tensor import TargetTensor

F32 = NDArray[np.float32]

PRIOR = 1.0
"""Tokens that the neutral weight counts for where nothing else is said (llama.cpp PR 15060)."""

_VERSION = 1
"""Of the arithmetic: weights of another version are other weights."""

_REMEMBERED = 4
"""Tensors held at a time: the three stacks of a layer and the one before; 8 MB each in V4.1."""


class Weights:
    """Weights of the columns of each tensor; one object serves many threads.

    Args:
        matrix: What was measured.
        prior: Tokens that the neutral weight counts for (see `pipeline.importance.neutral`).
            Without effect where the file does not count tokens by expert, as before GGUF.
        keep: For every layer the experts that stay, if some go. A matrix of the whole model is cut
            with it; one of the model that is left is taken as it is.
        n_experts: Experts of a layer before that; given with ``keep``.

    Raises:
        RecipeError: ``prior`` is not a number from 0 on.
    """

    def __init__(
        self,
        matrix: ImportanceMatrix,
        prior: float = PRIOR,
        keep: tuple[tuple[int, ...], ...] | None = None,
        n_experts: int | None = None,
    ) -> None:
        assert (keep is None) == (n_experts is None)
        if not (math.isfinite(prior) and prior >= 0):
            raise RecipeError(
                "the neutral prior is no number of tokens", expected="0 or more", found=prior
            )
        self.matrix = matrix
        self.prior = prior
        self.keep = keep
        self.n_experts = n_experts
        self._remembered: OrderedDict[str, F32] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def identity(self) -> list[object]:
        """Everything that the weights depend on, for digests of what is made with them."""
        keep = None if self.keep is None else spec_digest([self.n_experts, self.keep])
        prior = None if self.matrix.form is Form.DAT else self.prior
        return [_VERSION, self.matrix.sha256, prior, keep]

    def has(self, target: TargetTensor) -> bool:
        """Whether `of` gives weights, told without reading any."""
        return self.entry_of(target) is not None

    def of(self, target: TargetTensor) -> F32 | None:
        """Weights of the columns of every matrix of ``target``.

        Returns:
            ``[len(target.matrices), n_cols]``, read-only, all above 0, in the order of
            ``target.matrices``; a stack that is stored as one has a row for each of its matrices
            all the same. None where nothing was measured: lookup tables, vectors, tensors of a
            draft (whose names are those of another model's tensors) or without an entry.

        Raises:
            SourceError: The entry does not fit ``target``, or holds values that are no weights.
        """
        entry = self.entry_of(target)
        if entry is None:
            return None
        with self._lock:
            found = self._remembered.get(target.name)
            if found is None:
                found = self._remembered[target.name] = self._read(entry, target)
                found.setflags(write=False)
                while len(self._remembered) > _REMEMBERED:
                    self._remembered.popitem(last=False)
            self._remembered.move_to_end(target.name)
            return found

    def counts_of(self, target: TargetTensor) -> F32 | None:
        """Tokens that each matrix of ``target`` saw: ``[n_matrices]`` in the order of `of`.

        None where there is no entry or the file does not say.

        Raises:
            SourceError: The entry does not fit ``target``, or holds values that are no counts.
        """
        entry = self.entry_of(target)
        if entry is None:
            return None
        fitted, counts = self._fit(entry, target), self.matrix.counts(entry.name)
        if counts is None or len(counts) != fitted.n_stored or fitted.is_grouped:
            return None
        return counts if fitted.entries is None else counts[list(fitted.entries)]

    def unseen_of(self, target: TargetTensor) -> NDArray[np.bool_] | None:
        """Which matrices of ``target`` saw no token: ``[n_matrices]`` in the order of `of`.

        Where the file does not count tokens by expert, those whose means are all 1.

        Raises:
            SourceError: As `of`.
        """
        entry, counts = self.entry_of(target), self.counts_of(target)
        if entry is None:
            return None
        if counts is None:
            _, counts, _ = self._sums(entry, self._fit(entry, target))
        return np.asarray(counts == 0)

    def check_fit(self, target: TargetTensor) -> None:
        """Refuse an entry that does not fit ``target``; reads nothing.

        Raises:
            SourceError: It is of another width or of another number of matrices.
        """
        entry = self.entry_of(target)
        if entry is not None:
            self._fit(entry, target)

    def entry_of(self, target: TargetTensor) -> Entry | None:
        """What the matrix says of ``target``, whether it fits or not; None if nothing."""
        entries = self.matrix.entries
        return next((entries[name] for name in names_for(target) if name in entries), None)

    def _fit(self, entry: Entry, target: TargetTensor) -> Fit:
        return fit(entry, target, self.keep, self.n_experts, self.matrix.path)

    def _read(self, entry: Entry, target: TargetTensor) -> F32:
        fitted = self._fit(entry, target)
        sums, counts, prior = self._sums(entry, fitted)
        if not sums[counts > 0].any():
            raise SourceError(
                "the importance matrix saw nothing of a tensor that it has an entry of",
                file=self.matrix.path,
                tensor=entry.name,
                next_step="Measure it on more text.",
            )
        weights = mean_weights(sums, counts, prior)
        return searchable(weights.mean(axis=0, keepdims=True) if fitted.is_grouped else weights)

    def _sums(self, entry: Entry, fitted: Fit) -> tuple[F32, F32, float]:
        """Sums, what to divide them by, and the prior that suits them."""
        values = self.matrix.values(entry.name).reshape(fitted.n_stored, -1)
        counts, prior = self.matrix.counts(entry.name), self.prior
        if counts is None or (len(counts) < len(values) and not fitted.is_grouped):
            counts, prior = _calls_as_counts(values, entry, counts), 0.0
        counts = np.broadcast_to(counts, len(values))
        if fitted.entries is None:
            return values, counts, prior
        picked = list(fitted.entries)
        return values[picked], counts[picked], prior


def _calls_as_counts(values: F32, entry: Entry, counts: F32 | None) -> F32:
    """What to divide means times calls by; 0 for an expert that saw no token: its means are 1.

    A file that was converted to GGUF has, for the calls, one count.
    """
    n_calls = np.float32(entry.n_calls if counts is None else counts[0])
    is_seen = (values != n_calls).any(axis=1) | (len(values) == 1)
    return np.where(is_seen, n_calls, np.float32(0))
