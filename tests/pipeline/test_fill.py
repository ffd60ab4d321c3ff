"""What a fill writes, what it reads, and what it does when something fails or stops it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from pipeline import blocks as blocks_module
from pipeline import files
from pipeline import fill as fill_module
from pipeline.blocks import blocks_of
from pipeline.errors import DecodeError, OutputError, QuantmillError
from pipeline.fill import FillEvents
from pipeline.gguf.committer import outlast_interrupts
from pipeline.gguf.journal import read_journal
from pipeline.source.reader import SourceReader
from tests.pipeline.filling import (
    MIXED,
    SEAMS,
    Nth,
    fill,
    job_of,
    journal_path,
    part_path,
    refusing,
    sha256_of,
    shard_path,
)
from tests.pipeline.oracle import Oracle

VARIANTS = [("native", "mainline"), ("native", "fork"), ("mixed", "mainline"), ("mixed", "fork")]
DENSE, ENGRAM, EXPERTS = 0, 1, 3


@pytest.fixture
def make_job(small_miniature, tmp_path):
    def make(recipe="native", layout="mainline", source=small_miniature):
        if recipe == "mixed":
            recipe = tmp_path / "mixed.toml"
            recipe.write_text(MIXED)
        return job_of(source, tmp_path / "out", recipe, layout)

    return make


@pytest.fixture
def job(make_job):
    return make_job()


@pytest.fixture(scope="module")
def digests(small_miniature, tmp_path_factory):
    """sha256 of every shard of the native recipe, from one undisturbed run."""
    whole = job_of(small_miniature, tmp_path_factory.mktemp("undisturbed"))
    return [fill(whole, no).file_sha256 for no in range(len(whole.shards))]


def small_blocks(monkeypatch, nbytes=20_000, weights=1 << 12):
    """Many blocks and tiles even in a small tensor."""
    monkeypatch.setattr(blocks_module, "BLOCK_WEIGHTS", nbytes)
    monkeypatch.setattr(fill_module, "TILE_WEIGHTS", {})
    monkeypatch.setattr(fill_module, "BYTE_TILE_WEIGHTS", weights)


@pytest.mark.parametrize(("recipe", "layout"), VARIANTS)
def test_every_tensor_equals_what_whole_tensor_tools_make_of_it(make_job, recipe, layout):
    job = make_job(recipe, layout)
    oracle = Oracle(job.checkpoint)
    for no in range(4) if layout == "mainline" else (1, 2):
        shard = job.shards[no]
        fill(job, no)
        stored = {t.name: t for t in gguf.GGUFReader(shard_path(job, no)).tensors}
        assert list(stored) == [tensor.name for tensor in shard.tensors]
        for tensor in shard.tensors:
            assert stored[tensor.name].data.tobytes() == oracle.encoded(tensor), tensor.name


def test_the_recipes_above_need_every_transform_and_type(make_job):
    tensors = [t for recipe, layout in VARIANTS for t in make_job(recipe, layout).plans[0].tensors]
    kinds = {(t.transform.value, t.target.matrices[0].codec.value, t.type.name) for t in tensors}
    assert kinds >= {
        ("repack", "fp4", "MXFP4"),
        ("encode", "fp4", "Q3_K"),
        ("encode", "fp4", "Q4_K"),
        ("encode", "fp4", "Q6_K"),
        ("encode", "fp8", "Q8_0"),
        ("encode", "fp8", "Q3_K"),
        ("copy", "bf16", "BF16"),
        ("encode", "bf16", "F32"),
        ("copy", "f32", "F32"),
        ("product", "bf16", "F32"),
    }


def test_repacked_experts_decode_to_the_stored_values_bit_for_bit(job):
    oracle = Oracle(job.checkpoint)
    fill(job, EXPERTS)
    for stored in gguf.GGUFReader(shard_path(job, EXPERTS)).tensors:
        tensor = next(t for t in job.plans[0].tensors if t.name == stored.name)
        values = dequantize(stored.data, stored.tensor_type).reshape(-1, tensor.target.n_cols)
        expected = oracle.values(tensor)
        # gguf-py gives code 8 as +0, the source as -0.
        assert np.array_equal(values + 0.0, expected + 0.0), stored.name
        assert values.dtype == expected.dtype


def test_the_joined_table_is_both_tables_in_layer_order(job):
    fill(job, ENGRAM)
    (stored,) = gguf.GGUFReader(shard_path(job, ENGRAM)).tensors
    oracle = Oracle(job.checkpoint)
    rows = [oracle.decoded(matrix) for matrix in job.shards[ENGRAM].tensors[0].target.matrices]
    assert len(rows) == 2
    assert stored.shape.tolist() == [256, sum(len(table) for table in rows)]
    found = dequantize(stored.data, stored.tensor_type)
    step = np.abs(found).max() / 127
    assert np.abs(found - np.concatenate(rows)).max() <= step


@pytest.mark.parametrize(
    ("recipe", "n_threads", "block_weights", "weights"),
    [
        ("native", 2, 16 << 20, 1 << 17),
        ("native", 4, 50_000, 3_000),
        ("mixed", 4, 16 << 20, 1 << 17),
        pytest.param("mixed", 2, 3_000, 700, marks=pytest.mark.slow),
        pytest.param("mixed", 1, 9_999, 1 << 30, marks=pytest.mark.slow),
    ],
)
def test_threads_blocks_and_tiles_change_no_byte(
    make_job, tmp_path, monkeypatch, recipe, n_threads, block_weights, weights
):
    job = make_job(recipe)
    expected = [fill(job, no, n_threads=1).file_sha256 for no in range(4)]
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(blocks_module, "BLOCK_WEIGHTS", block_weights)
    monkeypatch.setattr(
        fill_module, "TILE_WEIGHTS", dict.fromkeys(fill_module.TILE_WEIGHTS, weights)
    )
    monkeypatch.setattr(fill_module, "BYTE_TILE_WEIGHTS", weights)
    assert [fill(job, no, n_threads=n_threads).file_sha256 for no in range(4)] == expected


@pytest.mark.parametrize("nbytes", [16 << 20, 20_000], ids=["whole tensors", "many blocks"])
def test_each_carried_byte_is_read_once_and_each_output_byte_written_once(job, monkeypatch, nbytes):
    small_blocks(monkeypatch, nbytes)
    written = []
    real = files._pwrite

    def pwrite(fd, content, offset):
        written.append((os.fstat(fd).st_ino, offset, len(content)))
        return real(fd, content, offset)

    monkeypatch.setattr(files, "_pwrite", pwrite)
    specs = {spec.name: spec for spec in job.source.specs}
    for no, shard in enumerate(job.shards):
        written.clear()
        source = SourceReader(job.checkpoint)
        fill(job, no, source=source)
        names = {name for t in shard.tensors for name in t.target.source_names}
        assert source.nbytes_read == sum(specs[name].nbytes for name in names)
        inode = shard_path(job, no).stat().st_ino
        spans = sorted((offset, n) for node, offset, n in written if node == inode)
        ends = [offset + n for offset, n in spans]
        assert all(end <= begin for end, (begin, _) in zip(ends, spans[1:], strict=False))
        assert sum(n for _, n in spans) == len(shard.header) + shard.data_nbytes


def test_blocks_cover_a_tensor_and_cut_no_scale_block(make_job, monkeypatch):
    small_blocks(monkeypatch)
    for tensor in make_job("mixed").plans[0].tensors:
        position = tensor.offset
        for block in blocks_of(tensor):
            matrix = block.matrices[0]
            assert block.offset == position
            assert block.begin % matrix.block[0] == 0
            assert block.end % matrix.block[0] == 0 or block.end == matrix.n_rows
            position += block.nbytes
        assert position == tensor.offset + tensor.nbytes


def test_progress_counts_every_byte_once(job):
    seen, lock = [], threading.Lock()

    def advanced(n):
        with lock:
            seen.append(n)

    fill(job, DENSE, events=FillEvents(advanced=advanced))
    assert sum(seen) == job.shards[DENSE].data_nbytes


def damaged(small_miniature, tmp_path, edit):
    """A copy of the checkpoint whose ``layers.3.ffn.experts.2.w1.scale`` was edited."""
    copy = tmp_path / "damaged"
    shutil.copytree(small_miniature, copy)
    name = "layers.3.ffn.experts.2.w1.scale"
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    path = copy / index["weight_map"][name]
    content = bytearray(path.read_bytes())
    n_header = int.from_bytes(content[:8], "little")
    begin = 8 + n_header + json.loads(content[8 : 8 + n_header])[name]["data_offsets"][0]
    edit(content, begin)
    path.write_bytes(content)
    return copy, path


def test_a_scale_of_255_stops_the_fill_with_its_place(
    small_miniature, make_job, tmp_path, monkeypatch
):
    small_blocks(monkeypatch)
    n_scales = 256 // 32

    def edit(content, begin):
        content[begin + 70 * n_scales + 3] = 255

    copy, path = damaged(small_miniature, tmp_path, edit)
    job = make_job(source=copy)
    with pytest.raises(DecodeError) as caught:
        fill(job, EXPERTS)
    message = str(caught.value)
    assert str(path) in message
    assert "layers.3.ffn.experts.2.w1.scale" in message
    assert "row 70, column 96" in message
    assert caught.value.__notes__ == ["while making blk.3.ffn_gate_exps.weight as MXFP4"]
    assert not shard_path(job, EXPERTS).exists()
    assert read_journal(journal_path(job, EXPERTS), job.shard_specs[EXPERTS])


FAULTS = [
    ("_pwrite", errno.ENOSPC),
    ("_pwrite", errno.EIO),
    ("_preadv", errno.EIO),
    ("_fdatasync", errno.EIO),
    ("_write", errno.ENOSPC),
    ("_fallocate", errno.ENOSPC),
    ("_replace", errno.EACCES),
    ("_open", errno.EMFILE),
    ("_fsync", errno.EIO),
]


def runs_of(n):
    """1, 2, 3, then ever larger steps: every early call and a sample of the late ones."""
    while True:
        yield n
        n += 1 + n // 4


def outcome(job, no):
    """The error of ours that a fill ended with, if it did; any other escapes."""
    try:
        fill(job, no)
    except QuantmillError as error:
        return [error]
    return []


def n_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("seam", "code"), FAULTS, ids=lambda v: v if isinstance(v, str) else errno.errorcode[v]
)
def test_whichever_call_fails_the_error_is_ours_and_the_next_run_ends_it(
    job, digests, monkeypatch, seam, code
):
    small_blocks(monkeypatch, 60_000)
    n_open, n_threads = n_open_files(), threading.active_count()
    errors = []
    for n in runs_of(1):
        shutil.rmtree(job.store.root, ignore_errors=True)
        with monkeypatch.context() as patch:
            fault = Nth([seam], n, refusing(code)).install(patch)
            errors += outcome(job, ENGRAM)
        final = shard_path(job, ENGRAM)
        if not fault.happened:
            break
        assert not final.exists() or sha256_of(final) == digests[ENGRAM]
        assert threading.active_count() == n_threads
        assert n_open_files() == n_open
        assert fill(job, ENGRAM).file_sha256 == digests[ENGRAM]
        assert sha256_of(final) == digests[ENGRAM]
    assert errors
    assert all(os.strerror(code) in str(error) and error.file for error in errors)


def test_any_seam_may_fail_on_a_resumed_part_too(job, digests, monkeypatch):
    small_blocks(monkeypatch, 60_000)
    for n in runs_of(1):
        shutil.rmtree(job.store.root, ignore_errors=True)
        with monkeypatch.context() as patch:
            Nth(["_pwrite"], 9, refusing(errno.ENOSPC)).install(patch)
            with pytest.raises(OutputError):
                fill(job, ENGRAM)
        with monkeypatch.context() as patch:
            fault = Nth(SEAMS, n, refusing(errno.EIO)).install(patch)
            outcome(job, ENGRAM)
        final = shard_path(job, ENGRAM)
        assert not final.exists() or sha256_of(final) == digests[ENGRAM]
        if not fault.happened:
            break
        fill(job, ENGRAM)
        assert sha256_of(final) == digests[ENGRAM]


def test_a_disk_that_cannot_sync_ends_the_fill_at_once(job, digests, monkeypatch):
    """The committer's failure is the fill's; blocks after it are not made in vain."""
    small_blocks(monkeypatch)
    started = []
    events = FillEvents(started=lambda slot, block: started.append(block))
    with monkeypatch.context() as patch:
        # The head line is synced first; the first batch of blocks is the second call.
        Nth(["_fdatasync"], 2, refusing(errno.EIO)).install(patch)
        with pytest.raises(OutputError, match=r"cannot make writes durable.*shard\.gguf\.part"):
            fill(job, EXPERTS, events=events)
    n_blocks = sum(1 for t in job.shards[EXPERTS].tensors for _ in blocks_of(t))
    assert len(started) < n_blocks / 2
    assert read_journal(journal_path(job, EXPERTS), job.shard_specs[EXPERTS]) == {}
    assert fill(job, EXPERTS).file_sha256 == digests[EXPERTS]


@pytest.mark.parametrize("seam", ["_preadv", "_pwrite"])
def test_calls_that_move_one_byte_are_completed(job, digests, monkeypatch, seam):
    small_blocks(monkeypatch)
    real = getattr(files, seam)
    n_calls = 0

    def short(fd, content, offset):
        nonlocal n_calls
        n_calls += 1
        if n_calls % 7:
            return real(fd, content, offset)
        one = [content[0][:1]] if seam == "_preadv" else content[:1]
        return real(fd, one, offset)

    monkeypatch.setattr(files, seam, short)
    assert fill(job, ENGRAM).file_sha256 == digests[ENGRAM]
    assert n_calls >= 7


def test_a_file_size_limit_is_told_and_finished_blocks_stay(job, digests):
    """In a process of its own: a short write comes first, then EFBIG."""
    shard = job.shards[EXPERTS]
    part = part_path(job, EXPERTS)
    part.parent.mkdir(parents=True)
    with part.open("wb") as opened:
        opened.truncate(shard.nbytes)
    script = (
        "import resource, sys\n"
        "from pipeline import blocks as blocks_module\n"
        "from tests.pipeline.filling import fill, job_of\n"
        "blocks_module.BLOCK_WEIGHTS = 20_000\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)\n"
        "fill(job_of(sys.argv[1], sys.argv[2]), 3, n_threads=1)\n"
    )
    parameters = job.parameters
    words = [parameters.source, parameters.out, str(shard.nbytes // 2 + 77)]
    result = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 1
    assert "OutputError: cannot write" in result.stderr
    assert "ulimit -f" in result.stderr
    assert read_journal(journal_path(job, EXPERTS), job.shard_specs[EXPERTS])
    assert not shard_path(job, EXPERTS).exists()
    assert fill(job, EXPERTS).file_sha256 == digests[EXPERTS]


SLOW_FILL = """
import os, signal, sys, time
from pipeline import blocks as blocks_module
from pipeline import fill as fill_module
from pipeline.fill import FillEvents
from tests.pipeline.filling import fill, job_of

blocks_module.BLOCK_WEIGHTS, fill_module.BYTE_TILE_WEIGHTS = 200_000, 256

n_tiles = 0

def advanced(n):
    global n_tiles
    os.write(1, b".")
    time.sleep(0.2)
    n_tiles += 1

def deaf():
    signal.signal(signal.SIGINT, signal.SIG_IGN)

try:
    try:
        fill(job_of(*sys.argv[1:3]), 3, events=FillEvents(advanced=advanced))
    except KeyboardInterrupt:
        deaf()
except KeyboardInterrupt:
    deaf()
n_before = n_tiles
time.sleep(0.3)
assert n_tiles == n_before, "a thread outlived the fill"
os.write(1, b"stopped")
"""


def test_ctrl_c_stops_within_a_block_and_leaves_a_part_that_resumes(job, digests):
    words = [sys.executable, "-c", SLOW_FILL, job.parameters.source, job.parameters.out]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"."
        start = time.monotonic()
        while process.poll() is None:  # an impatient user
            process.send_signal(signal.SIGINT)
            time.sleep(0.004)
        assert time.monotonic() - start < 20
        assert process.returncode == 0, process.stderr.read()
        told = process.stdout.read()
        assert told.endswith(b"stopped")
        assert told.count(b".") < 10
    assert part_path(job, EXPERTS).stat().st_size == job.shards[EXPERTS].nbytes
    assert fill(job, EXPERTS).file_sha256 == digests[EXPERTS]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_interrupts_wait_until_the_threads_have_ended(n):
    handler = signal.getsignal(signal.SIGINT)
    ended = []

    def wait():
        for _ in range(n):
            signal.raise_signal(signal.SIGINT)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt) if n else nullcontext():
        outlast_interrupts(wait)
    assert ended == [True]
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_event_that_raises_ends_the_fill(job):
    def started(slot, block):
        raise RuntimeError("listener")

    with pytest.raises(RuntimeError, match="listener"):
        fill(job, DENSE, events=FillEvents(started=started))
    assert not shard_path(job, DENSE).exists()


HUGE_FILL = """
import json, resource, sys
from pathlib import Path
from pipeline import blocks as blocks_module
from pipeline import fill as fill_module
from tests.pipeline.filling import PeakAnonymous, fill_huge_table, status_nbytes

n_threads = int(sys.argv[3])
allowed = fill_module.MEMORY_BASE_NBYTES + n_threads * fill_module.MEMORY_THREAD_NBYTES
limit = status_nbytes("VmData") + allowed
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
with PeakAnonymous() as peak:
    read = fill_huge_table(Path(sys.argv[1]), n_rows=int(sys.argv[2]), n_threads=n_threads)
print(json.dumps({"read": read, "peak": peak.nbytes, "growth": peak.nbytes - peak.before}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("n_threads", [2, 4])
def test_memory_is_bounded_by_threads_and_not_by_tensors(tmp_path, n_threads):
    n_rows = 8_400_000
    words = [sys.executable, "-c", HUGE_FILL, str(tmp_path), str(n_rows), str(n_threads)]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    finally:
        shutil.rmtree(tmp_path)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert measured["read"] == n_rows * (256 + 8) > 2 << 30
    thread_nbytes = n_threads * fill_module.MEMORY_THREAD_NBYTES
    assert measured["peak"] <= fill_module.MEMORY_BASE_NBYTES + thread_nbytes
    assert measured["growth"] <= thread_nbytes
