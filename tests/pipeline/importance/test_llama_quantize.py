"""ik_llama.cpp's llama-quantize reads the same weights out of the same file as we do."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from pipeline import files
from pipeline.gguf.reader import read_gguf
from pipeline.importance.keys import importance_keys
from pipeline.importance.matrix import read_importance
from pipeline.importance.weights import Weights
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.ik import IkQuantizer
from pipeline.quant.types import TYPES
from tests.engines import plain_model
from tests.pipeline.importance.writing import write_imatrix

TYPE = TYPES["IQ3_K"]
STACK = "blk.1.ffn_up_exps.weight"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ik_llama_cpp") is None, reason="the extra [ik] is not installed"),
]


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model whose rows are as long as a block, with a stack of experts in place of a matrix."""
    monkeypatch.setattr(plain_model, "WIDTH", 256)
    monkeypatch.setattr(plain_model, "FF", 256)
    shapes = plain_model._shapes()
    del shapes["blk.1.ffn_up.weight"]
    shapes[STACK] = (5, 16, 256)
    monkeypatch.setattr(plain_model, "_shapes", lambda: shapes)
    plain_model.write(tmp_path / "model.gguf")
    return read_gguf(tmp_path / "model.gguf")


def test_tensors_come_out_byte_for_byte(tmp_path, model):
    targets = [
        TargetTensor(tensor.name, 1, tensor.shape, None, ()) for tensor in model.tensors.values()
    ]
    path = write_imatrix(tmp_path / "imatrix.dat", targets, form="dat", unseen=[3])
    out = _quantized(model.path, path)
    found, quantizer = Weights(read_importance(path)), IkQuantizer()
    quantizer.prepare([TYPE])
    names = []
    for target in targets:
        weights, made = found.of(target), out.tensors[target.name]
        if weights is None:
            continue
        names.append(target.name)
        # Where all columns weigh the same our common weight is not 1: the last bit may differ.
        experts = [expert for expert in range(len(weights)) if expert != 3]
        rows = _floats(model, target).reshape(len(weights), -1, target.n_cols)
        expected = files.read_bytes(out.path, made.offset, made.nbytes)
        nbytes = len(expected) // len(weights)
        for expert in experts:
            encoded = np.empty((len(rows[expert]), TYPE.row_nbytes(target.n_cols)), np.uint8)
            quantizer.quantize(TYPE, rows[expert], encoded, weights[expert])
            assert encoded.tobytes() == expected[expert * nbytes : (expert + 1) * nbytes]
    assert {STACK, "output.weight", "blk.0.attn_q.weight"} <= set(names)
    ours = {entry.key: entry.value for entry in importance_keys(found.matrix)}
    theirs = {key: entry.value for key, entry in out.key_values.items() if "imatrix" in key}
    assert Path(str(theirs.pop("quantize.imatrix.file"))).name == ours["quantize.imatrix.file"]
    assert theirs.items() <= ours.items()


def _quantized(model, imatrix):
    """What the tool makes of a model, every tensor in the one type."""
    site = Path(find_spec("ik_llama_cpp").origin).parent
    out = model.with_name("quantized.gguf")
    command = [site / "bin/llama-quantize", "--pure", "--imatrix", imatrix, model, out, TYPE.name]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(site / "lib")}
    subprocess.run([*command, "2"], env=environment, check=True, capture_output=True)
    return read_gguf(out)


def _floats(model, target):
    tensor = model.tensors[target.name]
    content = files.read_bytes(model.path, tensor.offset, tensor.nbytes)
    return np.frombuffer(content, "<f4").copy()
