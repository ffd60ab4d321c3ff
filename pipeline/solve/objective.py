"""What a choice of types is judged by: one number per tensor and type, added up over the file.

Both ways start from the loss of a sample (`pipeline.solve.measure`): with ``W`` a matrix, ``dW``
what its type changes, and ``w_j`` the importance of column j (the mean square of what the matrix is
multiplied with there; 1 without an imatrix), the sample estimates

    E = sum over j of w_j * sum over i of dW_ij^2      expected squared error of the matrix' output
    S = sum over j of w_j * sum over i of W_ij^2       expected square of the output itself

``relative`` (the default) adds E / S: noise to signal, one vote for each matrix a token passes.

- A token passes a stack of experts once, whichever experts it uses and however many there are: the
  noise of a sum of experts, relative to the sum, is that of one. A joined lookup table counts as
  often as it holds tables. What no token of text reads counts nothing.
- It does not change when a matrix is scaled and what follows undoes it (a norm, the next matrix).
  Absolute errors do, so adding those of an attention projection that is normed and of an expert
  that is added to the stream adds unlike things, and the larger numbers win.
- That losses of this very form add up to the growth of perplexity, each with a factor of its
  matrix, is the linearity theorem of Malinovskii et al. (HIGGS, arXiv 2411.17525). Those factors
  take a calibration on the real model; here all of them are 1, times the recipe's own weights.

``absolute`` adds E over what one token reads of the matrix, in rows: a dense matrix whole, of a
stack used over all experts, of a lookup table the rows looked up. That is the energy of the noise
that a token meets; it suits tensors of one kind, such as stacks of experts among themselves.

Limits of both: they rank choices and are no perplexity. Columns are taken as uncorrelated, experts
as used equally often, errors of different matrices as independent, and a sample of 64 rows knows E
to a few per cent, which choices tensor by tensor may exploit.
"""

from __future__ import annotations

from enum import StrEnum

from pipeline.model.config import ModelConfig
from pipeline.model.roles import ReadMode
from pipeline.model.targets.tensor import TargetTensor
from pipeline.plan import per_token_nbytes
from pipeline.solve.measure import Loss


class Objective(StrEnum):
    """How losses of different tensors are made comparable."""

    RELATIVE = "relative"
    ABSOLUTE = "absolute"


def error_of(
    target: TargetTensor,
    loss: Loss,
    *,
    objective: Objective,
    config: ModelConfig,
    weight: float = 1.0,
) -> float:
    """What ``target`` adds to the sum that is to become least.

    Args:
        target: The tensor.
        loss: Its loss in the type in question.
        objective: How losses are compared.
        config: The model, for what a token reads.
        weight: What the recipe multiplies this tensor's error by.
    """
    if objective is Objective.RELATIVE:
        return weight * n_passed(target) * loss.relative
    # Rows are to per_token_nbytes what bytes are: each read mode takes its part of them.
    n_read = per_token_nbytes(target, target.n_rows, config)
    return weight * n_read * loss.squared_error / loss.n_rows


def n_passed(target: TargetTensor) -> int:
    """How many matrices one token of text passes in ``target``."""
    if target.read_mode is ReadMode.NONE:
        return 0
    return len(target.matrices) if target.is_table else 1
