"""P7: headers made to hurt cost neither time nor memory, and only errors of our own come out."""

import json
import os
import re
import struct
import subprocess
import sys

import pytest

from tests.promises.whole_job import say

HOSTILE_READS = """
import json, resource, sys, time
from pathlib import Path
from pipeline.errors import QuantmillError
from pipeline.gguf.model_file import read_model
from pipeline.source.checkpoint import open_checkpoint

limit = 700 << 20
with open("/proc/self/statm") as opened:
    used = int(opened.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + limit,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
path = Path(sys.argv[1])
begin = time.process_time()
try:
    (read_model if path.suffix == ".gguf" else open_checkpoint)(path)
    told = ""
except QuantmillError as error:
    told = str(error)
print(json.dumps({"told": told, "seconds": time.process_time() - begin}))
"""


def safetensors_header(path, json_bytes, length=None, payload=b""):
    length = len(json_bytes) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + json_bytes + payload)


def many_tensors(path, n_tensors=50_000):
    one = b'"t%07d":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}'
    safetensors_header(path, b"{" + b",".join(one % n for n in range(n_tensors)) + b"}")


def deep_json(path):
    safetensors_header(path, b'{"t":' + b"[" * 9_000_000)


def many_dims(path, n_dims=1_000_000):
    shape = b",".join([b"1"] * n_dims)
    entry = b'{"t":{"dtype":"I8","shape":[' + shape + b'],"data_offsets":[0,1]}}'
    safetensors_header(path, entry, payload=b"\0")


def huge_length(path):
    safetensors_header(path, b"{}", length=2**60)
    os.truncate(path, 1 << 40)


def wide_numbers(path):
    number = b"9" * 4000
    entry = b'{"t":{"dtype":"I8","shape":[%s],"data_offsets":[0,%s]}}'
    safetensors_header(path, entry % (b",".join([number] * 8), number))


def gguf_start(n_tensors, n_keys):
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys)


def gguf_key(name, kind):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


def endless_zeros(path):
    path.write_bytes(gguf_start(1 << 17, 1 << 16))
    os.truncate(path, 1 << 40)


def many_strings(path):
    array = gguf_key(b"k", 9) + struct.pack("<IQ", 8, 1 << 21)
    path.write_bytes(gguf_start(0, 1) + array + bytes(8 << 21))


def long_string(path):
    path.write_bytes(gguf_start(0, 1) + gguf_key(b"k", 8) + struct.pack("<Q", 60 << 20))
    os.truncate(path, 1 << 40)


def wrapping_shape(path):
    info = struct.pack("<Q", 1) + b"t" + struct.pack("<I4QIQ", 4, 2**32, 2**32, 2**32, 4, 0, 0)
    path.write_bytes(gguf_start(1, 0) + info + bytes(4096))


def as_many_tensors_as_fit(path):
    many_tensors(path, 1_400_000)


def as_many_dims_as_fit(path):
    many_dims(path, 40_000_000)


HOSTILE = {
    "50,000 tensors": ("safetensors", many_tensors, ""),
    "9 million brackets": ("safetensors", deep_json, "nested too deep"),
    "a million dimensions": ("safetensors", many_dims, "shape must be"),
    "a header of 2^60 bytes": ("safetensors", huge_length, "header length is too large"),
    "numbers of 4000 digits": ("safetensors", wide_numbers, "shape must be"),
    "a terabyte of zeros": ("gguf", endless_zeros, "empty or too long"),
    "two million strings": ("gguf", many_strings, ""),
    "a string of 60 MiB": ("gguf", long_string, "bytes follow the last tensor"),
    "a product of 2^98": ("gguf", wrapping_shape, "impossible shape"),
}
LARGEST = {
    "1.4 million tensors": ("safetensors", as_many_tensors_as_fit, "too large to parse|^$"),
    "40 million dimensions": ("safetensors", as_many_dims_as_fit, "shape must|too large to parse"),
}
"""What the largest header that is read at all can hold."""


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        *(pytest.param(*case, id=name) for name, case in HOSTILE.items()),
        *(pytest.param(*c, id=n, marks=pytest.mark.slow) for n, c in LARGEST.items()),
    ],
)
def test_p07_hostile_headers_cost_neither_time_nor_memory(tmp_path, kind, make, message):
    """At most 700 MiB beside the interpreter, 20 seconds, and only errors of our own."""
    if kind == "gguf":
        path = tmp_path / "hostile.gguf"
        make(path)
    else:
        path = tmp_path
        (path / "config.json").write_text('{"model_type": "deepseek_v41"}')
        make(path / "model.safetensors")
    result = subprocess.run(
        [sys.executable, "-c", HOSTILE_READS, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    read = json.loads(result.stdout)
    assert re.search(message, read["told"]), read
    assert len(read["told"]) < 1000
    assert read["seconds"] < 20
    say(read)
