"""The V4 model of transformers, float32 on the CPU, in a process of its own.

It reads the checkpoint itself: names, FP8 and FP4 decoding and arithmetic are all its own, so what
it says owes nothing to this project. The packages lie in a folder of their own and are seen by that
process only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

CHILD = Path(__file__).with_name("transformers_child.py")
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Forward:
    """One text through the model.

    ``logits`` ``[T, vocab]``; ``outputs`` ``[n_layers, T, hidden]``, each layer's output as the
    mean of its residual streams; ``parameters``, those asked for, by transformers' names.
    """

    logits: Floats
    outputs: Floats
    parameters: Mapping[str, Floats]


def forward(
    folder: Path, tokens: Sequence[int], packages: Path, parameters: Sequence[str] = ()
) -> Forward:
    """Run the checkpoint in ``folder`` over ``tokens``.

    Args:
        folder: A V4 checkpoint in the released layout.
        tokens: One text.
        packages: The folder that holds transformers and what it needs beyond this environment.
        parameters: Names of weights to hand over as the model has them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "forward.npz"
        request = {
            "folder": str(folder),
            "tokens": [int(token) for token in tokens],
            "parameters": list(parameters),
            "answer": str(answer),
        }
        done = subprocess.run(
            [sys.executable, "-P", str(CHILD), json.dumps(request)],
            env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        with np.load(answer) as arrays:
            return Forward(
                arrays["logits"], arrays["outputs"], {name: arrays[name] for name in parameters}
            )
