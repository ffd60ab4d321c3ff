"""Several recipes filled from the same source rows."""

from contextlib import ExitStack

import pytest

from pipeline.blocks import blocks_of_shard, spans_of
from pipeline.errors import OutputError
from pipeline.fill import Wanted, fill_together, grouped
from pipeline.gguf.part import ShardPart
from pipeline.quant.libraries import Libraries
from pipeline.source.reader import SourceReader
from tests.pipeline.filling import MIXED, fill, job_of

FIRST_EXPERTS = 3


class Counting(Libraries):
    """Counts the rows that are quantized."""

    n_rows = 0

    def quantize(self, ggml_type, rows, out, importance):
        Counting.n_rows += len(rows)
        super().quantize(ggml_type, rows, out, importance)


@pytest.fixture
def jobs(small_miniature, tmp_path):
    """Two recipes that share the types of gate and up, and one that repacks."""
    mixed, other = tmp_path / "mixed.toml", tmp_path / "other.toml"
    mixed.write_text(MIXED)
    other.write_text(MIXED.replace('routed_down = "Q6_K"', 'routed_down = "Q2_K"'))
    return [
        job_of(small_miniature, tmp_path / "out", recipe) for recipe in (mixed, other, "native")
    ]


def parts_of(jobs, stack, no):
    return [
        (
            job,
            stack.enter_context(
                ShardPart(
                    job.store.path(job.shard_specs[no]),
                    header=job.shards[no].header,
                    nbytes=job.shards[no].nbytes,
                    spec=job.shard_specs[no],
                )
            ),
        )
        for job in jobs
    ]


def wanted_of(parts, no):
    return [Wanted(part, block) for job, part in parts for block in blocks_of_shard(job.shards[no])]


@pytest.mark.parametrize("no", [0, FIRST_EXPERTS])
def test_the_bytes_are_those_of_one_by_one(jobs, small_miniature, tmp_path, no):
    alone = [
        fill(job_of(small_miniature, tmp_path / str(i), job.parameters.recipe), no).file_sha256
        for i, job in enumerate(jobs)
    ]
    with SourceReader(jobs[0].checkpoint) as source, ExitStack() as stack:
        parts = parts_of(jobs, stack, no)
        quantizer = Libraries()
        quantizer.prepare({t.type for j in jobs for t in j.shards[no].tensors if t.is_encoded})
        fill_together(grouped(wanted_of(parts, no)), source, quantizer, n_threads=2)
        together = [
            part.read_back(spans_of(job.shards[no]), n_threads=1).file_sha256 for job, part in parts
        ]
    assert together == alone
    assert len(set(together)) == len(jobs)


def test_rows_are_decoded_once_and_equal_types_quantized_once(jobs, small_miniature, tmp_path):
    first, second, _ = jobs
    n_stack = first.shards[FIRST_EXPERTS].tensors[0].target.n_rows
    n_layers = first.config.n_layers
    down = n_layers * first.shards[FIRST_EXPERTS].tensors[-1].target.n_rows
    with SourceReader(first.checkpoint) as source, ExitStack() as stack:
        parts = parts_of([first, second], stack, FIRST_EXPERTS)
        Counting.n_rows, quantizer = 0, Counting()
        wanted = wanted_of(parts, FIRST_EXPERTS)
        fill_together(grouped(wanted), source, quantizer, n_threads=2)
        n_read = source.nbytes_read
    total = sum(t.target.n_rows for t in first.shards[FIRST_EXPERTS].tensors)
    assert Counting.n_rows == total + down
    assert n_stack < total
    alone = SourceReader(first.checkpoint)
    fill(
        job_of(small_miniature, tmp_path / "alone", first.parameters.recipe),
        FIRST_EXPERTS,
        source=alone,
    )
    assert n_read == alone.nbytes_read


def test_a_part_that_is_whole_already_is_left_alone(jobs, monkeypatch):
    pair = jobs[:2]
    with SourceReader(pair[0].checkpoint) as source, ExitStack() as stack:
        parts = parts_of(pair, stack, FIRST_EXPERTS)
        quantizer = Counting()
        whole = [w for w in wanted_of(parts, FIRST_EXPERTS) if w.part is parts[0][1]]
        fill_together(grouped(whole), source, quantizer, n_threads=1)
        parts[0][1].settle()
        monkeypatch.setattr(parts[0][1], "write", refuse)
        fill_together(grouped(wanted_of(parts, FIRST_EXPERTS)), source, quantizer, n_threads=1)
        for job, part in parts[1:]:
            part.read_back(spans_of(job.shards[FIRST_EXPERTS]), n_threads=1)


def refuse(*_):
    raise OutputError("a finished part is written to")
