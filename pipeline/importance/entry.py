"""Where one entry of an importance matrix lies in its file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured of one tensor: 32-bit floats, little endian, matrix by matrix.

    GGUF form: sums of squares, and at ``counts_offset`` how many tokens each sum is of. Form before
    it: means times ``n_calls``, and no counts (``n_counts`` is 0).
    """

    name: str
    n_values: int
    offset: int
    n_counts: int = 0
    counts_offset: int = 0
    n_calls: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """``(n_matrices, n_cols)`` as the file says it.

        All in one row where it does not say: in the form before GGUF, in a file converted from it,
        and for a matrix that its engine multiplies in groups.
        """
        n_matrices = max(self.n_counts, 1)
        return n_matrices, self.n_values // n_matrices
