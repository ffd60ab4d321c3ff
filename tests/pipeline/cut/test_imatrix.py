"""Importance matrices of cut models: the entries of the experts that stay, in their order."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from pipeline.cut.imatrix import cut_imatrix
from pipeline.errors import FormatError, QuantmillError, SourceError
from tests.pipeline.cut.models import N_EXPERTS, N_LAYERS, keep_of

KEEP = keep_of(5)
WIDTHS = {"gate": 6, "up": 6, "down": 3}
RNG = np.random.default_rng(5)


def entries() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums of squares [n_matrices, n_in] and counts [n_matrices, 1] by tensor."""
    made = {}
    for layer in range(N_LAYERS):
        made[f"blk.{layer}.attn_kv.weight"] = floats(1, 6), np.full((1, 1), 40, np.float32)
        counts = RNG.integers(1, 20, (N_EXPERTS, 1)).astype(np.float32)
        for part, width in WIDTHS.items():
            made[f"blk.{layer}.ffn_{part}_exps.weight"] = floats(N_EXPERTS, width), counts
    # A stage beside the trunk has experts of its own, as many by chance.
    made[f"blk.{N_LAYERS}.ffn_up_exps.weight"] = floats(N_EXPERTS, 6), floats(N_EXPERTS, 1)
    return made


def floats(*shape: int) -> np.ndarray:
    return RNG.random(shape, np.float32)


def write_gguf(path: Path, made, *, kind: str = "imatrix") -> Path:
    writer = GGUFWriter(path, "imatrix")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (squares, counts) in made.items():
        writer.add_tensor(f"{name}.in_sum2", squares)
        writer.add_tensor(f"{name}.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(path: Path, made, tail: bytes = struct.pack("<ii", 3, 8) + b"text.txt") -> Path:
    content = struct.pack("<i", len(made))
    for name, (squares, _) in made.items():
        content += struct.pack("<i", len(name)) + name.encode()
        content += struct.pack("<ii", 40, squares.size) + squares.astype("<f4").tobytes()
    path.write_bytes(content + tail)
    return path


def wanted(made, keep=KEEP):
    cut = {}
    for name, pair in made.items():
        layer = int(name.split(".")[1])
        is_cut = "_exps" in name and layer < keep.n_layers
        cut[name] = tuple(a[list(keep.layers[layer])] for a in pair) if is_cut else pair
    return cut


def test_entries_of_kept_experts_stay_in_the_order_of_the_list(tmp_path):
    made, out = entries(), tmp_path / "cut.gguf"
    path = write_gguf(tmp_path / "whole.gguf", made)
    assert cut_imatrix(path, KEEP, out) == 2 * 3 * N_LAYERS
    assert out.read_bytes() == write_gguf(tmp_path / "wanted.gguf", wanted(made)).read_bytes()
    before, after = GGUFReader(path), GGUFReader(out)
    assert list(before.fields) == list(after.fields)


@pytest.mark.parametrize("tail", [b"", struct.pack("<ii", 3, 8) + b"text.txt"], ids=["old", "new"])
def test_the_form_before_gguf_keeps_its_calls_and_its_tail(tmp_path, tail):
    made, out = entries(), tmp_path / "cut.dat"
    path = write_dat(tmp_path / "whole.dat", made, tail)
    assert cut_imatrix(path, KEEP, out) == 3 * N_LAYERS
    assert out.read_bytes() == write_dat(tmp_path / "wanted.dat", wanted(made), tail).read_bytes()


@pytest.mark.parametrize("write", [write_gguf, write_dat])
def test_a_list_of_all_experts_changes_no_byte(tmp_path, write):
    path = write(tmp_path / "whole", entries())
    cut_imatrix(path, keep_of(N_EXPERTS), tmp_path / "cut")
    assert (tmp_path / "cut").read_bytes() == path.read_bytes()


def spoiled(made, name, value):
    made[name][0].flat[3] = value
    return made


def without_layer(made, layer):
    return {n: parts for n, parts in made.items() if not n.startswith(f"blk.{layer}.ffn_")}


def less(made, name):
    made[name] = tuple(part[:-1] for part in made[name])
    return made


UP = "blk.3.ffn_up_exps.weight"
REFUSED = {
    "GGUF of fewer experts": (
        lambda folder: write_gguf(folder / "a", less(entries(), UP)),
        rf"this many experts.*tensor {UP}.in_sum2; expected F32, 7 entries",
    ),
    "a sum that is no number": (
        lambda folder: write_gguf(folder / "a", spoiled(entries(), UP, np.nan)),
        rf"no sum of squares.*tensor {UP}.in_sum2; .*found nan at",
    ),
    "a sum below zero": (
        lambda folder: write_gguf(folder / "a", spoiled(entries(), UP, -1)),
        rf"no sum of squares.*tensor {UP}.in_sum2; .*found -1.0 at",
    ),
    "no word of a layer": (
        lambda folder: write_gguf(folder / "a", without_layer(entries(), 2)),
        "no entries for the experts of some layers.*none for layer 2",
    ),
    "values that do not divide": (
        lambda folder: write_dat(folder / "a", less(entries(), UP)),
        rf"this many experts.*tensor {UP}; expected a multiple of 7 values; found 36",
    ),
    "no experts": (
        lambda folder: write_dat(folder / "a", {"blk.0.attn_kv.weight": (floats(1, 6), None)}),
        "knows none of the model's experts",
    ),
    "a model": (
        lambda folder: write_gguf(folder / "a", entries(), kind="model"),
        "no importance matrix; .* expected general.type imatrix; found model",
    ),
    "text": (lambda folder: text(folder / "a"), "no importance matrix, or a damaged one"),
    "nothing": (lambda folder: text(folder / "a", b""), "the number of entries cannot be right"),
}


def text(path, content=b"plainly something else"):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path, make, message):
    path = make(tmp_path)
    with pytest.raises(SourceError, match=message):
        cut_imatrix(path, KEEP, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("write", [write_gguf, write_dat])
def test_a_cut_or_lying_file_is_refused_wherever_it_ends(tmp_path, write):
    content = write(tmp_path / "whole", {UP: entries()[UP]}).read_bytes()
    # What follows the entries is not read.
    end = content.index(b"text.txt") - 8 if write is write_dat else len(content) - 32
    for length in range(0, end, 7):
        (tmp_path / "a").write_bytes(content[:length])
        with pytest.raises((SourceError, FormatError)):
            cut_imatrix(tmp_path / "a", KEEP, tmp_path / "out")
    for number in (2**31 - 1, -1):
        for place in (0, 4, 8 + len(UP), 12 + len(UP)):
            lying = bytearray(content)
            lying[place : place + 4] = struct.pack("<i", number)
            (tmp_path / "a").write_bytes(lying)
            try:
                cut_imatrix(tmp_path / "a", KEEP, tmp_path / "out")
            except QuantmillError:
                continue
            assert write is write_gguf or (place, number) == (8 + len(UP), 2**31 - 1)
