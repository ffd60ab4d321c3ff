"""P6: damaged sources are named, not converted."""

import json
import os
import random
import shutil

import pytest

from pipeline.errors import DecodeError, SourceError
from pipeline.source.checkpoint import INDEX_NAME, open_checkpoint
from tests.pipeline.filling import job_of
from tests.promises.whole_job import (
    finals,
    linked_copy,
    run_job,
    say,
)

N_SHARDS = 14


def header_nbytes(content):
    return 8 + int.from_bytes(content[:8], "little")


def cut(nbytes):
    return lambda content, rng: content[:-nbytes]


def cut_in_half(content, rng):
    return content[: len(content) // 2]


def cut_in_the_header(content, rng):
    return content[: rng.randint(9, header_nbytes(content) - 1)]


def appended(content, rng):
    return content + b"\0"


def zeroed(content, rng):
    """A page of the header, or the part of it that there is, lost."""
    end = header_nbytes(content)
    begin = rng.randrange(8, end, 512)
    n = min(512, end - begin)
    return content[:begin] + bytes(n) + content[begin + n :]


def flipped(content, rng):
    """One bit of the length or the text of a header that describes tensors."""
    at = rng.randrange(header_nbytes(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


HEADER_FAULTS = {
    "cut by one byte": cut(1),
    "cut in half": cut_in_half,
    "cut in the header": cut_in_the_header,
    "a byte more": appended,
    "a hole in the header": zeroed,
    "a flipped bit in the header": flipped,
}


def spoilt(source, folder, name, change, seed=0):
    """A copy of a checkpoint one of whose files was changed."""
    copy = linked_copy(source, folder, but=[name])
    path = copy / name
    path.write_bytes(change(path.read_bytes(), random.Random(f"{name} {seed}")))
    return copy


def shard_names(source):
    return sorted(path.name for path in source.glob("*.safetensors"))


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_p06_every_damaged_header_is_named_and_nothing_is_written(small_miniature, tmp_path, fault):
    """Every shard in turn; flipped bits several times over, at places that a seed decides."""
    names = shard_names(small_miniature)
    assert len(names) == N_SHARDS
    for name in names:
        for seed in range(3 if fault == "a flipped bit in the header" else 1):
            say(f"{name}, seed {seed}")
            copy = spoilt(small_miniature, tmp_path / "copy", name, HEADER_FAULTS[fault], seed)
            outcome = run_job(copy, tmp_path / "out")
            assert not outcome.ok
            assert all(isinstance(problem, SourceError) for problem in outcome.problems)
            assert outcome.problems
            assert names_the_place(outcome.problems, copy, name)
            assert not (tmp_path / "out").exists()
            shutil.rmtree(copy)


def names_the_place(problems, copy, name):
    """Whether the file, or a tensor that it holds, is told."""
    weight_map = json.loads((copy / INDEX_NAME).read_text())["weight_map"]
    held = {tensor for tensor, file in weight_map.items() if file == name}
    return all(p.file == str(copy / name) or p.tensor in held for p in problems)


CUT_OR_REMOVED = {
    "config.json": True,
    INDEX_NAME: False,  # without it the headers are the index
    "tokenizer.json": True,
    "tokenizer_config.json": False,  # it says only what is usual
}
"""Description -> whether a checkpoint without it is refused."""


@pytest.mark.parametrize("name", CUT_OR_REMOVED)
def test_p06_damaged_descriptions_are_named_and_nothing_is_written(small_miniature, tmp_path, name):
    copy = spoilt(small_miniature, tmp_path / "copy", name, cut_in_half)
    outcome = run_job(copy, tmp_path / "out")
    assert not outcome.ok
    assert all(isinstance(problem, SourceError) for problem in outcome.problems)
    assert name in outcome.text
    assert not (tmp_path / "out").exists()
    (copy / name).unlink()
    outcome = run_job(copy, tmp_path / "out")
    assert outcome.ok is not CUT_OR_REMOVED[name]
    assert outcome.ok or name in outcome.text


BAD_VALUES = {
    "FP8 code is NaN": ("F8_E4M3", "weight", b"\x7f", "0x7f"),
    "FP8 scale is 255": ("F8_E8M0", "scale of FP8", b"\xff", "255"),
    "FP4 scale is 255": ("F8_E8M0", "scale of FP4", b"\xff", "255"),
    "BF16 value is infinite": ("BF16", "weight", b"\x80\x7f", "inf"),
    "F32 value is NaN": ("F32", "weight", b"\0\0\xc0\x7f", "nan"),
}


def kind_of(tensor, tensors):
    """What a stored tensor is, in the words of `BAD_VALUES`."""
    weight = tensors.get(tensor.name.removesuffix("scale") + "weight")
    if tensor.dtype == "F8_E8M0":
        return "scale of FP4" if weight.dtype == "I8" else "scale of FP8"
    return "weight"


def carried_tensors(source):
    """Stored tensors that become output, with their kinds, by file."""
    names = {name for tensor in job_of(source, "out").tensors for name in tensor.source_names}
    files = open_checkpoint(source).files
    return {
        name: [(t, kind_of(t, file.tensors)) for t in file.tensors.values() if t.name in names]
        for name, file in files.items()
    }


def spoil_value(path, tensor, code, rng):
    """Put ``code`` in the place of a random element; gives the element's number."""
    element = rng.randrange(tensor.nbytes // len(code))
    with path.open("r+b") as opened:
        opened.seek(tensor.offset + element * len(code))
        opened.write(code)
    return element


def check_bad_value(source, tmp_path, wanted_kind, name, seed):
    dtype, kind, code, _ = BAD_VALUES[wanted_kind]
    rng = random.Random(f"{seed} {wanted_kind} {name}")
    fitting = [t for t, k in carried_tensors(source)[name] if (t.dtype, k) == (dtype, kind)]
    tensor = rng.choice(fitting)
    copy = linked_copy(source, tmp_path / "copy", but=[name])
    say(
        f"seed {seed}: {name}, {tensor.name}, element {spoil_value(copy / name, tensor, code, rng)}"
    )
    outcome = run_job(copy, tmp_path / "out")
    assert not outcome.ok
    (error,) = outcome.errors
    assert isinstance(error, DecodeError)
    assert error.file == str(copy / name)
    assert error.tensor in (tensor.name, tensor.name.removesuffix("scale") + "weight")
    assert "row" in str(error.found)
    assert not (tmp_path / "out" / "mini-native-mainline" / "manifest.json").exists()
    assert list(tmp_path.glob("out/**/*.gguf"))  # the shards that do not read it are made
    shutil.rmtree(copy)
    shutil.rmtree(tmp_path / "out")


def places(source):
    """(kind of bad value, file) for all kinds and every file that can hold them."""
    return [
        (wanted_kind, name)
        for wanted_kind, (dtype, kind, *_) in BAD_VALUES.items()
        for name, tensors in carried_tensors(source).items()
        if any((t.dtype, k) == (dtype, kind) for t, k in tensors)
    ]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if "scale" in kind else pytest.mark.slow) for kind in BAD_VALUES],
)
def test_p06_a_value_that_cannot_be_decoded_is_named_and_not_published(
    small_miniature, tmp_path, kind
):
    files_of_kind = [name for wanted_kind, name in places(small_miniature) if wanted_kind == kind]
    check_bad_value(small_miniature, tmp_path, kind, random.Random(kind).choice(files_of_kind), 0)


@pytest.mark.slow
def test_p06_values_that_cannot_be_decoded_are_named_in_every_file(small_miniature, tmp_path):
    kinds = places(small_miniature)
    assert len({name for _, name in kinds}) == N_SHARDS - 1
    for kind, name in kinds:
        check_bad_value(small_miniature, tmp_path, kind, name, 13)


FLIPPED = "model-00005-of-00014.safetensors"


def flip_an_expert_code(path):
    """Another value that can be decoded; the modification time is the test's to set."""
    tensor = next(
        t for t in open_checkpoint(path.parent).files[path.name].tensors.values() if t.dtype == "I8"
    )
    content = bytearray(path.read_bytes())
    content[tensor.offset] ^= 1
    path.write_bytes(content)


def stored(out):
    return {path.parent.name: path.stat().st_ino for path in out.glob(".quantmill/*/shard.gguf")}


def test_p06_a_flip_that_can_be_decoded_shows_only_by_the_modification_time(
    small_miniature, tmp_path
):
    """The limit of a local source, stated: bytes that change without their time go unnoticed.

    A hub source is verified by sha256; for a folder that is `sha256sum --check`'s work.
    """
    copy = linked_copy(small_miniature, tmp_path / "copy", but=[FLIPPED])
    out, times = tmp_path / "out", (copy / FLIPPED).stat()
    assert run_job(copy, out).ok
    before, shards = finals(out), stored(out)

    flip_an_expert_code(copy / FLIPPED)
    os.utime(copy / FLIPPED, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run_job(copy, out).ok
    assert finals(out) == before

    os.utime(copy / FLIPPED)
    outcome = run_job(copy, out)
    assert outcome.ok, outcome.text
    made = {name: inode for name, inode in stored(out).items() if name not in shards}
    job = job_of(copy, out)
    readers = job.shards_of(FLIPPED)
    assert len(made) == len(readers) < len(job.shards)
    assert stored(out) | shards == stored(out)  # what was there is kept as it was
    shown = {p.name: p.stat().st_ino for p in (out / "mini-native-mainline").glob("*.gguf")}
    assert set(made.values()) < set(shown.values())
    experts = "mini-native-mainline/mini-native-mainline-00004-of-00004.gguf"
    assert finals(out)[experts] != before[experts]


def test_p06_files_that_become_no_output_are_not_read(small_miniature, tmp_path, wanted):
    """The vision part is checked by its headers alone."""
    carried = carried_tensors(small_miniature)
    unread = [name for name, tensors in carried.items() if not tensors]
    assert len(unread) == 1
    copy = linked_copy(small_miniature, tmp_path / small_miniature.name, but=unread)
    for name in unread:
        content = (copy / name).read_bytes()
        n_header = header_nbytes(content)
        (copy / name).write_bytes(content[:n_header] + b"\xff" * (len(content) - n_header))
    assert run_job(copy, tmp_path / "out").ok
    assert finals(tmp_path / "out") == wanted
