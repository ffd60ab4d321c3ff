"""Filling shards as the shard task does, without luigi; used by tests and their subprocesses."""

import hashlib
import multiprocessing
import os
import threading
import time

from pipeline import blocks as blocks_module
from pipeline import files
from pipeline.blocks import blocks_of_shard, spans_of
from pipeline.fill import FillEvents, fill_blocks
from pipeline.gguf.header import TensorInfo, encode_padded_header
from pipeline.gguf.part import ShardPart
from pipeline.model.targets.tensor import TargetTensor
from pipeline.plan import PlannedShard, PlannedTensor, Transform
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.types import TYPES
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.reader import SourceReader
from pipeline.source.spec import Codec, MatrixRef
from tasks.job import Job
from tasks.request import JobParameters
from tests.pipeline.tiny_shards import header_bytes

CHILDREN = multiprocessing.get_context("forkserver")
"""Processes that start in milliseconds and share nothing with the tests."""
CHILDREN.set_forkserver_preload(["tests.pipeline.filling"])

SEAMS = (
    "_open",
    "_preadv",
    "_pwrite",
    "_write",
    "_fdatasync",
    "_fsync",
    "_replace",
    "_truncate",
    "_fallocate",
)

MIXED = """
allow = ["larger_than_fp4", "below_bf16"]

[roles]
routed = "Q3_K"
engram = "Q4_K"
attention = "Q6_K"
embedding = "Q4_K"
shared = "Q3_K"

[sub_roles]
routed_up = "Q4_K"
routed_down = "Q6_K"
hyper_connection = "F32"
router = "F32"
"""


def job_of(source, out, recipe="native", layout=""):
    return Job(JobParameters(str(source), str(recipe), str(out), layout))


def fill_shard(part, shard, source, quantizer, *, n_threads, **options):
    """Fill a whole shard and read it back, as `tasks.shard.WriteShard` does."""
    quantizer.prepare({tensor.type for tensor in shard.tensors if tensor.is_encoded})
    blocks = blocks_of_shard(shard)
    fill_blocks(part, blocks, source, quantizer, n_threads=n_threads, **options)
    return part.read_back(spans_of(shard), n_threads=n_threads)


def fill(job, no, *, n_threads=2, events=None, source=None):
    """Make shard ``no`` of ``job``; gives its record."""
    shard, spec = job.shards[no], job.shard_specs[no]
    path = job.store.path(spec)
    with (
        source or SourceReader(job.checkpoint) as reader,
        ShardPart(path, header=shard.header, nbytes=shard.nbytes, spec=spec) as part,
    ):
        options = {"importance": job.weighing.importance, "events": events}
        digests = fill_shard(part, shard, reader, job.quantizer, n_threads=n_threads, **options)
        record = job.store.save(spec, part.part, digests)
        part.publish()
    return record


def sha256_of(path):
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def shard_path(job, no):
    return job.store.path(job.shard_specs[no])


def part_path(job, no):
    return shard_path(job, no).with_name("shard.gguf.part")


def journal_path(job, no):
    return shard_path(job, no).with_name("shard.gguf.journal")


def one_life(source, out, no, *, block_weights, log=None, pause=0.0, death=None):
    """Fill a shard in this process.

    ``log`` gets a line per block begun, ``pause`` is slept after every tile; ``death`` is an
    `Nth` that ends the process.
    """
    blocks_module.BLOCK_WEIGHTS = block_weights
    job = job_of(source, out)
    job.quantizer, job.shard_specs  # noqa: B018 - opened before calls are counted
    if death:
        death.install()
    fill(job, no, events=_told(log, pause))


def _told(log, pause):
    if log is None:
        return FillEvents(advanced=lambda _: time.sleep(pause))
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return FillEvents(
        advanced=lambda _: time.sleep(pause),
        started=lambda _slot, block: os.write(fd, f"{block}\n".encode()) and None,
    )


def fill_huge_table(folder, *, n_rows, n_threads):
    """Fill a shard with a table of ``n_rows`` x 256 zeros that lie in a hole; gives bytes read."""
    matrix = MatrixRef(Codec.FP8, "table.weight", "table.scale", n_rows, 256, (1, 32))
    _write_hollow(folder, matrix)
    target = TargetTensor("blk.1.engram_embd.weight", 1, (n_rows, 256), None, (matrix,))
    info = TensorInfo(target.name, (256, n_rows), TYPES["TQ1_0"].type_id, 0)
    header = encode_padded_header((), (info,), page=4096)
    planned = PlannedTensor(target, TYPES["TQ1_0"], Transform.ENCODE, 0, len(header))
    shard = PlannedShard(0, "engram", "huge.gguf", header, (planned,))
    with (
        SourceReader(open_checkpoint(folder)) as source,
        ShardPart(folder / "huge.gguf", header=header, nbytes=shard.nbytes, spec="0") as part,
    ):
        fill_shard(part, shard, source, GgmlQuantizer(), n_threads=n_threads)
        part.publish()
    return source.nbytes_read


def _write_hollow(folder, matrix):
    n_codes = matrix.n_rows * matrix.n_cols
    n_scales = n_codes // 32
    shapes = {"weight": (matrix.n_rows, 256), "scale": (matrix.n_rows, 8)}
    spans = {"weight": (0, n_codes), "scale": (n_codes, n_codes + n_scales)}
    dtypes = {"weight": "F8_E4M3", "scale": "F8_E8M0"}
    header = header_bytes(
        {
            f"table.{part}": {
                "dtype": dtypes[part],
                "shape": shapes[part],
                "data_offsets": spans[part],
            }
            for part in shapes
        }
    )
    path = folder / "model.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + n_codes + n_scales)
    (folder / "config.json").write_text('{"model_type": "hollow"}')


def write_often(path, content):
    for _ in range(30):
        files.write_whole(path, content)


def status_nbytes(field):
    """A field of this process's own /proc status, in bytes."""
    with open("/proc/self/status") as opened:  # noqa: PTH123
        line = next(line for line in opened if line.startswith(field))
    return int(line.split()[1]) << 10


class PeakAnonymous:
    """The most anonymous memory of this process while the context is open."""

    def __enter__(self):
        self.nbytes = self.before = status_nbytes("RssAnon")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _sample(self):
        while not self._ended.wait(0.002):
            self.nbytes = max(self.nbytes, status_nbytes("RssAnon"))


class Nth:
    """Makes the n-th call (from 1 on, counted over all seams given) do something else."""

    def __init__(self, seams, n, act):
        self.seams, self.n, self.act, self.count = seams, n, act, 0

    def install(self, monkeypatch=None):
        for name in self.seams:
            call = self._wrapped(getattr(files, name))
            if monkeypatch is None:
                setattr(files, name, call)
            else:
                monkeypatch.setattr(files, name, call)
        return self

    @property
    def happened(self):
        return self.count >= self.n

    def _wrapped(self, call):
        def wrapped(*arguments, **options):
            self.count += 1
            if self.count == self.n:
                return self.act(call, *arguments, **options)
            return call(*arguments, **options)

        return wrapped


def refusing(code):
    """An act: the call fails with ``code``."""

    def act(call, *arguments, **options):
        raise OSError(code, os.strerror(code))

    return act


def dying(call, *arguments, **options):
    """An act: the process ends before the call, as by SIGKILL."""
    os._exit(9)
