"""The importance matrix of a job: which one, cut for which experts, and what it is good for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RecipeError
from pipeline.experts.keep import KeepList
from pipeline.gguf.keys import KeyValue
from pipeline.importance.check import check_heads, check_values
from pipeline.importance.coverage import Coverage, coverage_of
from pipeline.importance.keys import importance_keys
from pipeline.importance.matrix import ImportanceMatrix, read_importance
from pipeline.importance.weights import Weights
from pipeline.model.targets.tensor import TargetTensor
from pipeline.plan import PlannedShard, Transform, transform_of
from pipeline.quant.guard import takes_importance
from pipeline.quant.types import GgmlType
from pipeline.recipe.schema import Recipe

_STACK = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight")


@dataclass(frozen=True, slots=True)
class Cuts:
    """What of the experts is cut ``here``, and ``in_all``, which is more if the source was cut."""

    here: KeepList | None
    in_all: KeepList | None
    n_cols: Mapping[str, int]
    """Columns of an expert's matrix: gate, up, down."""

    def for_matrix(self, matrix: ImportanceMatrix) -> KeepList | None:
        """The cut that ``matrix`` has to follow: the one that begins with as many experts."""
        stacks = ((_STACK.fullmatch(name), entry) for name, entry in matrix.entries.items())
        counts = (entry.n_values // self.n_cols[match[1]] for match, entry in stacks if match)
        n_experts = next(counts, None)
        cuts = [cut for cut in (self.here, self.in_all) if cut is not None]
        return next((cut for cut in cuts if cut.n_experts == n_experts), next(iter(cuts), None))


class Weighing:
    """Everything that a job asks of an importance matrix; without one, all columns count alike.

    Args:
        recipe: What is made.
        path: The matrix; empty for none.
        cuts: The experts that stay; asked for only where there is a matrix.

    Raises:
        RecipeError: The recipe is made for a matrix and ``path`` is empty.
    """

    def __init__(self, recipe: Recipe, path: str, cuts: Callable[[], Cuts]) -> None:
        if recipe.imatrix.required and not path:
            raise RecipeError(
                f"recipe {recipe.name} is made for an importance matrix, and none is given",
                expected="a file (--imatrix, or imatrix.file in the recipe)",
                next_step="Any imatrix of the model will do, in llama.cpp's GGUF form or .dat.",
            )
        self._recipe = recipe
        self._path = path
        self._cuts = cuts

    @cached_property
    def weights(self) -> Weights | None:
        """What the matrix says, where there is one.

        A matrix of the model before an earlier cut is cut for both.

        Raises:
            SourceError: The file is none, or damaged.
        """
        if not self._path:
            return None
        matrix, prior = read_importance(Path(self._path)), self._recipe.imatrix.prior
        keep = self._cuts().for_matrix(matrix)
        if keep is None:
            return Weights(matrix, prior)
        return Weights(matrix, prior, keep.layers, keep.n_experts)

    def importance(self, target: TargetTensor) -> NDArray[np.float32] | None:
        """What each column of a tensor counts, ``[n_matrices, n_cols]``, where that is known."""
        return self.weights.of(target) if self.weights else None

    def knows(self, target: TargetTensor) -> bool:
        """Whether the matrix has weights for ``target``."""
        return self.weights is not None and self.weights.has(target)

    def require_fit(self, targets: Sequence[TargetTensor]) -> None:
        """Refuse a matrix of another model; nothing but its head is read.

        Raises:
            SourceError: It is one.
        """
        if self.weights:
            check_heads(self.weights, targets)

    def coverage(self, targets: Sequence[TargetTensor]) -> Coverage | None:
        """What the matrix knows of the target, where there is one; all of it is read.

        Raises:
            SourceError: It holds values that are no weights.
        """
        if self.weights is None:
            return None
        check_values(self.weights, targets)
        return coverage_of(self.weights, targets, threshold=self._recipe.imatrix.threshold)

    def identity(self, shard: PlannedShard) -> list[object] | None:
        """What identifies the importance that a shard's bytes depend on."""
        uses = any(
            tensor.is_encoded and takes_importance(tensor.type) and self.knows(tensor.target)
            for tensor in shard.tensors
        )
        return self.weights.identity if self.weights and uses else None

    def keys(
        self, targets: Iterable[TargetTensor], types: Mapping[str, GgmlType]
    ) -> tuple[KeyValue, ...]:
        """What the metadata of ``targets`` says of the matrix: nothing where none is made with it.

        A recipe may search no type at all, and be run with the matrix of another beside it.
        """
        searched = (t for t in targets if takes_importance(types[t.name]) and self.knows(t))
        uses = any(transform_of(t, types[t.name]) is Transform.ENCODE for t in searched)
        return importance_keys(self.weights.matrix) if self.weights and uses else ()
