"""Files made to run a program, to fill the memory, or to pass for something else."""

import io
import os
import pickle
import tarfile
import time
import tracemalloc
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import QuantmillError, SourceError
from pipeline.experts.importers.npz import read_halves
from pipeline.experts.importers.open import read_keep, read_saliency
from pipeline.experts.routing import Routing
from tests.pipeline.experts.tables import observer_layers, random_table

ROUTING = Routing(3, 12, 2)


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


class Tracker:
    """Stands for the running-mean objects of an observer's intermediate files."""


def saved(content, **words):
    buffer = io.BytesIO()
    torch.save(content, buffer, **words)
    return buffer.getvalue()


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def old_tar():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("sys_info"))
    return buffer.getvalue()


def npz_of(array):
    buffer = io.BytesIO()
    np.savez(buffer, saliency=np.ones((1, 2)), total=array, counts=np.ones((1, 2)))
    return buffer.getvalue()


def npy_header(shape):
    buffer = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def bombs(made):
    """Every file that would make ``made`` if it were unpickled, with the words that refuse it."""
    more = "holds more than tensors"
    bare = "a bare pickle"
    return {
        "in a layer": (saved({0: {"reap": Bomb(made)}}), more),
        "beside good layers": (saved(observer_layers(random_table(1)) | {99: Bomb(made)}), more),
        "as a key": (saved({Bomb(made): 1}), more),
        "alone": (saved(Bomb(made)), more),
        "a bare pickle": (pickle.dumps(Bomb(made)), bare),
        "torch before 1.6": (saved({0: Bomb(made)}, _use_new_zipfile_serialization=False), bare),
        "in an array": (npz_of(np.array([[Bomb(made)]], object)), "npz file cannot be read"),
        "named data.pkl": (zipped({"x/data.pkl": pickle.dumps(Bomb(made))}), "."),
    }


@pytest.mark.parametrize("name", bombs("x"))
def test_no_pickle_is_executed(tmp_path, name):
    made = tmp_path / "made"
    content, message = bombs(made)[name]
    path = tmp_path / "observations.pt"
    path.write_bytes(content)
    for read in (read_saliency, lambda path: read_keep(path, ROUTING)):
        with pytest.raises(SourceError) as caught:
            read(path)
        assert caught.value.file == str(path)
        assert not made.exists()
    with pytest.raises(SourceError, match=message):
        read_saliency(path)


def test_the_bombs_would_work(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "made")))
    assert (tmp_path / "made").is_dir()


def test_an_intermediate_file_is_refused_with_the_class_it_holds(tmp_path):
    path = tmp_path / "block_000_metrics.pt"
    path.write_bytes(saved({0: {"reap": Tracker()}}))
    with pytest.raises(
        SourceError, match=r"could run a program.*found .*Tracker.*intermediate one"
    ):
        read_saliency(path)


HOSTILE = {
    "empty": (b"", "an empty file"),
    "zeros": (bytes(64), "no form of saliency"),
    "an empty zip": (zipped({}), "."),
    "another zip": (zipped({"word/document.xml": "x"}), "neither a torch file nor an .npz"),
    "half a zip": (saved({0: torch.ones(3)})[:-40], "zip archive is damaged"),
    "a torch file without storages": (
        zipped({"a/data.pkl": b"\x80\x02}q\x00.", "a/version": "3"}),
        ".",
    ),
    "no pickle at all": (zipped({"a/data.pkl": b"\x80\x02garbage"}), "no whole torch file"),
    "torch's tar form": (old_tar(), "a bare pickle"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs"),
    "legacy imatrix": (
        b"\x02\0\0\0\x1a\0\0\0blk.0.ffn_down_exps.weight\x05\0\0\0",
        "legacy imatrix does not say how often",
    ),
    "a model": (b"GGUF\x03\0\0\0" + bytes(16), "no importance matrix"),
    "half a GGUF": (b"GGUF\x03\0\0\0", "file ends inside"),
    "safetensors of weights": (
        b"\x0c\0\0\0\0\0\0\0{}          ",
        "this safetensors file holds no saliency",
    ),
    "a web page": (b"<!DOCTYPE html><html></html>", "holds no saliency"),
    "a list": (b"[1, 2]", "not a JSON object"),
    "a keep list": (b'{"0": [1, 2]}', "A keep list is used as it is"),
    "lines": (b'{"0": [1, 2]}\n{"1": [1, 2]}\n', "A keep list is used as it is"),
    "deep JSON": (b'{"a":' + b"[" * 500_000, "nested too deep"),
    "array of 8 TB": (
        zipped(
            {
                "total.npy": npy_header((10**6, 10**6)) + bytes(64),
                "saliency.npy": npy_header((1, 2)) + bytes(16),
                "counts.npy": npy_header((1, 2)) + bytes(16),
            }
        ),
        "npz file cannot be read",
    ),
    "array that unpacks to 300 MB": (
        zipped({"total.npy": bytes(300_000_000)}),
        "cannot be read.*total.npy is too large: 300,000,000",
    ),
    "array of negative size": (zipped({"total.npy": npy_header((-1, 2))}), "cannot be read"),
    "array without header": (zipped({"saliency.npy": b"x", "total.npy": b"y"}), "cannot be read"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_each_hostile_file_has_its_message(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    tracemalloc.start()
    begin = time.thread_time()
    with pytest.raises(QuantmillError, match=message) as caught:
        read_saliency(path)
    took, (_, peak) = time.thread_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.file == str(path)
    assert len(str(caught.value)) < 600
    assert took < 20
    assert peak < 64_000_000


def test_halves_are_read_as_carefully(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(npz_of(np.array([[Bomb(tmp_path / "made")]], object)))
    with pytest.raises(SourceError, match="cannot be read"):
        read_halves(path)
    assert not (tmp_path / "made").exists()


def test_nothing_in_place_of_a_file_is_told(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        for read in (read_saliency, lambda path: read_keep(path, ROUTING)):
            with pytest.raises(SourceError, match=path.name):
                read(path)


GOOD = saved(observer_layers(random_table(1)))


@settings(max_examples=60)
@given(place=st.integers(0, len(GOOD) - 1), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_torch_file_is_read_or_refused_in_our_words(tmp_path_factory, place, flip, cut):
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    content = bytearray(GOOD)
    content[place] ^= flip
    path.write_bytes(content[:place] if cut else content)
    with suppress(QuantmillError):
        assert read_saliency(path).shape == (3, 12)


@settings(max_examples=60)
@given(content=st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes_are_read_or_refused_in_our_words(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any bytes"
    path.write_bytes(content)
    for read in (read_saliency, lambda path: read_keep(path, ROUTING)):
        with pytest.raises(QuantmillError):
            read(path)
