"""The generated checkpoint that is measured, and its size."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from pipeline.digest import spec_digest
from pipeline.miniature.checkpoint import write_miniature
from pipeline.miniature.size import MiniatureSize
from pipeline.report.units import GB

FIXED_NBYTES = 839_000_000
"""What `sized` cannot change: dense tensors, vision, draft."""


def sized(gigabytes: float) -> MiniatureSize:
    """About that many GB, in experts of the released shape.

    Three quarters of what the fixed tensors leave are trunk experts.
    """
    least = MiniatureSize(
        n_layers=6, hidden=5120, expert_ff=2304, n_experts=4, n_draft_experts=2, engram_base=1000
    )
    left = max(0.0, gigabytes * GB - FIXED_NBYTES)
    expert_nbytes = 3 * least.hidden * least.expert_ff * 17 // 32 * least.n_layers
    table_nbytes = 2 * 3 * least.engram_heads * 264
    return replace(
        least,
        n_experts=max(4, round(0.75 * left / expert_nbytes)),
        engram_base=max(1000, round(0.25 * left / table_nbytes)),
    )


def generated(work: Path, size: MiniatureSize) -> Path:
    """The generated checkpoint of that size in the work folder, made if it is not there."""
    folder = work / f"checkpoint-{spec_digest(asdict(size))[:8]}"
    with tqdm(desc="checkpoint", unit="B", unit_scale=True, disable=None) as bar:
        write_miniature(folder, size, seed=0, progress=bar.update)
    return folder


def checkpoint_nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
