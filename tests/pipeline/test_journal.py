"""The journal: what a line means, and what is refused."""

import json

import pytest

from pipeline.errors import OutputError
from pipeline.gguf.journal import BlockRecord, head_line, read_journal, record_lines

SPEC, OTHER = "a" * 64, "b" * 64
RECORDS = [BlockRecord(4096 + 64 * i, 64, f"{i:064x}") for i in range(5)]
HEAD = head_line(SPEC)
LINES = record_lines(RECORDS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shard.gguf.journal"


def by_offset(records):
    return {record.offset: record for record in records}


def test_what_was_written_is_read(path):
    path.write_bytes(HEAD + LINES)
    assert read_journal(path, SPEC) == by_offset(RECORDS)


def test_a_missing_or_empty_one_has_no_blocks(path):
    assert read_journal(path, SPEC) == {}
    path.touch()
    assert read_journal(path, SPEC) == {}


def test_it_may_be_torn_at_any_byte(path):
    content = HEAD + LINES
    for n in range(len(content)):
        path.write_bytes(content[:n])
        n_whole = max(0, content[:n].count(b"\n") - 1)
        assert read_journal(path, SPEC) == by_offset(RECORDS[:n_whole])
        # What follows stands on a line of its own.
        with path.open("ab") as opened:
            opened.write(HEAD + record_lines(RECORDS[-1:]))
        assert read_journal(path, SPEC) == by_offset([*RECORDS[:n_whole], RECORDS[-1]])


def test_zeros_that_a_power_cut_left_at_the_end_are_a_torn_line(path):
    path.write_bytes(HEAD + LINES + bytes(500))
    assert read_journal(path, SPEC) == by_offset(RECORDS)
    assert path.read_bytes() == HEAD + LINES


def test_the_later_line_of_a_block_counts_and_every_worker_has_a_head(path):
    again = BlockRecord(RECORDS[0].offset, 128, "f" * 64)
    path.write_bytes(HEAD + LINES + HEAD + record_lines([again]))
    assert read_journal(path, SPEC) == by_offset([*RECORDS, again])


@pytest.mark.parametrize("lines", [b"", HEAD], ids=["its only head", "a later head"])
def test_another_spec_is_refused_with_both_digests(path, lines):
    content = lines + head_line(OTHER) + LINES
    path.write_bytes(content)
    with pytest.raises(OutputError) as caught:
        read_journal(path, SPEC)
    assert SPEC in str(caught.value)
    assert OTHER in str(caught.value)
    assert "Delete the part and its journal" in str(caught.value)
    assert path.read_bytes() == content


def test_another_journal_version_is_refused(path):
    path.write_bytes(json.dumps({"journal": 2, "spec": SPEC}).encode() + b"\n")
    with pytest.raises(OutputError, match="journal version 2"):
        read_journal(path, SPEC)


RECORD = {"offset": 0, "nbytes": 1, "sha256": ""}
GARBAGE = {
    "no head": LINES,
    "binary": bytes(range(11, 256)) + b"\n",
    "head is a list": b"[1]\n",
    "line is no JSON": HEAD + b"blk.0\n" + LINES,
    "line is a number": HEAD + b"7\n",
    "torn in the middle": HEAD + LINES[:30] + b"\n" + LINES,
    "two lines run into one": HEAD + LINES[:30] + HEAD,
    "a field is missing": HEAD + b'{"offset":0,"nbytes":1}\n',
    "offset is text": HEAD + json.dumps(RECORD | {"offset": "0"}).encode() + b"\n",
    "offset is negative": HEAD + json.dumps(RECORD | {"offset": -1}).encode() + b"\n",
    "no bytes": HEAD + json.dumps(RECORD | {"nbytes": 0}).encode() + b"\n",
    "digest is a number": HEAD + json.dumps(RECORD | {"sha256": 5}).encode() + b"\n",
    "nested without end": HEAD + b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_and_left_as_it_is(path, content):
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"the journal is damaged.*Delete it and the part"):
        read_journal(path, SPEC)
    assert path.read_bytes() == content
