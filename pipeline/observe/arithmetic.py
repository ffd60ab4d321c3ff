"""In which types and where an observation computes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

_CPU_SCRATCH_NBYTES = 256 << 20
_GPU_SCRATCH_NBYTES = 2 << 30


class Precision(StrEnum):
    """Types of values and of matrices.

    ``bfloat16`` is for GPUs: matrices that the release stores in eight bits or fewer are multiplied
    in it, everything else stays float32. ``float64`` is for comparisons.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


_TYPES = {
    Precision.FLOAT32: (torch.float32, torch.float32),
    Precision.BFLOAT16: (torch.float32, torch.bfloat16),
    Precision.FLOAT64: (torch.float64, torch.float64),
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A device, the type of ``values`` and that of ``matrices``.

    ``scratch_nbytes`` bounds what one block of tokens may take beside weights and state.
    """

    device: torch.device
    values: torch.dtype
    matrices: torch.dtype
    scratch_nbytes: int

    @classmethod
    def of(cls, device: str, precision: Precision) -> Arithmetic:
        """The arithmetic of ``--device`` and ``--precision``."""
        values, matrices = _TYPES[precision]
        is_cpu = torch.device(device).type == "cpu"
        scratch = _CPU_SCRATCH_NBYTES if is_cpu else _GPU_SCRATCH_NBYTES
        return cls(torch.device(device), values, matrices, scratch)

    @property
    def is_cpu(self) -> bool:
        """Whether weights are used where they are decoded."""
        return self.device.type == "cpu"
