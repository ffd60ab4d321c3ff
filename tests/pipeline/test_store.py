"""Where finished shards lie, what they are called by, and when one counts as whole."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil

import pytest

from pipeline import files
from pipeline.errors import OutputError
from pipeline.gguf.part import ShardDigests
from pipeline.measure import TensorError
from pipeline.model.roles import Role
from pipeline.plan import Transform
from pipeline.store import ShardRecord, ShardStore, shard_spec
from tests.pipeline.filling import MIXED, Nth, job_of, refusing

SPEC = "c" * 64
DIGESTS = ShardDigests("d" * 64, {"blk.0.ffn_gate_exps.weight": "e" * 64})
ERRORS = (TensorError("blk.0.ffn_gate_exps.weight", Role.ROUTED, "Q3_K", 8, 64, 0.25, 12.5, 0.3),)


@pytest.fixture
def store(tmp_path):
    return ShardStore(tmp_path / "store")


@pytest.fixture
def whole(store):
    """A store with one whole shard of 100 bytes."""
    store.save(SPEC, unnamed(store), DIGESTS, ERRORS)
    store.part(SPEC).rename(store.path(SPEC))
    return store


def unnamed(store, nbytes=100):
    """A filled part that has not got its name yet."""
    files.make_folder(store.folder(SPEC))
    store.part(SPEC).write_bytes(bytes(nbytes))
    return store.part(SPEC)


def test_a_record_comes_back_once_the_shard_is_whole(store):
    assert store.record(SPEC) is None
    part = unnamed(store)
    saved = store.save(SPEC, part, DIGESTS, ERRORS)
    assert store.record(SPEC) is None  # recorded, not yet published
    modified = part.stat().st_mtime_ns
    part.rename(store.path(SPEC))
    assert store.record(SPEC) == saved
    assert saved == ShardRecord(SPEC, 100, modified, "d" * 64, DIGESTS.spans, ERRORS)


def test_a_touched_shard_is_whole_again_only_after_hashing(store):
    part = unnamed(store)
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    store.save(SPEC, part, ShardDigests(digest, {}), ERRORS)
    part.rename(store.path(SPEC))
    os.utime(store.path(SPEC), ns=(1, 1))
    assert store.record(SPEC) is None
    assert store.revive(SPEC)
    assert store.record(SPEC).modified_ns == 1
    store.path(SPEC).write_bytes(bytes(99) + b"x")
    assert not store.revive(SPEC)
    assert store.record(SPEC) is None


@pytest.mark.parametrize("nbytes", [0, 99, 101])
def test_a_shard_of_another_length_is_not_whole(whole, nbytes):
    os.truncate(whole.path(SPEC), nbytes)
    assert whole.record(SPEC) is None


BROKEN = {
    "empty": b"",
    "cut": b'{"spec": "',
    "binary": b"\xff\xfe\x00",
    "list": b"[]",
    "a field more": b'{"spec":"","nbytes":100,"modified_ns":1,"file_sha256":"","tensors":{},"x":1}',
    "a field less": b'{"spec":"","nbytes":100}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_damaged_record_is_none(whole, content):
    (whole.folder(SPEC) / "record.json").write_bytes(content)
    assert whole.record(SPEC) is None


def test_a_folder_that_another_spec_shares_is_not_this_ones(whole):
    other = SPEC[:16] + "0" * 48
    assert whole.folder(other) == whole.folder(SPEC)
    assert whole.record(other) is None


def test_notes_of_each_slot_survive_and_are_forgotten(store):
    files.make_folder(store.folder(SPEC))
    assert store.notes(SPEC) == ()
    store.note(SPEC, 2, "blk.2.ffn_up_exps.weight (rows 0-16)")
    store.note(SPEC, 0, "a long one that a short one must not show through")
    store.note(SPEC, 0, "short")
    store.note(SPEC, 1, "ü" * 300)
    first, second, third = store.notes(SPEC)
    assert first == "short"
    assert second.startswith("ü" * 100)
    assert third == "blk.2.ffn_up_exps.weight (rows 0-16)"
    store.tidy(SPEC)
    store.tidy(SPEC)
    assert store.notes(SPEC) == ()


@pytest.mark.parametrize("seam", ["_open", "_pwrite"])
def test_a_note_that_cannot_be_left_is_no_error(store, monkeypatch, seam):
    files.make_folder(store.folder(SPEC))
    fault = Nth([seam], 1, refusing(errno.ENOSPC)).install(monkeypatch)
    store.note(SPEC, 0, "block")
    assert fault.happened
    store.note(SPEC, 0, "the next one")
    assert store.notes(SPEC) == ("the next one",)


def test_a_record_that_cannot_be_written_is_told_and_the_old_one_stays(whole, monkeypatch):
    before = whole.record(SPEC)
    for seam in ("_pwrite", "_fdatasync", "_replace"):
        with monkeypatch.context() as patch:
            Nth([seam], 1, refusing(errno.ENOSPC)).install(patch)
            with pytest.raises(
                OutputError, match=r"No space left.*record\.json|record\.json.*No space"
            ):
                whole.save(SPEC, unnamed(whole, 200), DIGESTS)
        assert whole.record(SPEC) == before


def stamps(job, shard):
    files = job.files_of_shards[job.shards.index(shard)]
    return [job.sources.stamp(file) for file in files]


class TestShardSpec:
    """The same spec where the bytes are the same; another one where they may not be."""

    @pytest.fixture
    def job(self, small_miniature, tmp_path):
        return job_of(small_miniature, tmp_path / "out")

    @staticmethod
    def specs(job, version="1"):
        return [shard_spec(shard, stamps(job, shard), lambda _: version) for shard in job.shards]

    def test_it_depends_on_nothing_but_plan_and_source(self, job, small_miniature, tmp_path):
        other = job_of(small_miniature, tmp_path / "another folder")
        assert self.specs(job) == self.specs(other)
        assert len(set(self.specs(job))) == len(job.shards)
        assert all(len(spec) == 64 for spec in self.specs(job))

    def test_a_changed_type_changes_the_shards_that_hold_it(self, job, tmp_path):
        recipe = tmp_path / "mixed.toml"
        recipe.write_text(MIXED)
        other = job_of(job.parameters.source, tmp_path / "out", recipe)
        *_, draft = self.specs(job)
        assert set(self.specs(job)) & set(self.specs(other)) == {draft}

    def test_layouts_share_expert_shards_and_the_draft(self, job, tmp_path):
        fork = job_of(job.parameters.source, tmp_path / "out", layout="fork")
        assert set(self.specs(job)) & set(self.specs(fork)) == set(self.specs(job)[3:])

    def test_another_quantizer_changes_only_what_it_encodes(self, job):
        pairs = zip(job.shards, self.specs(job), self.specs(job, "2"), strict=True)
        moved = {Transform.COPY, Transform.REPACK, Transform.NARROW}
        for shard, old, new in pairs:
            encodes = any(tensor.transform not in moved for tensor in shard.tensors)
            assert (old != new) == encodes
        assert self.specs(job)[3] == self.specs(job, "2")[3]

    def test_a_changed_source_file_changes_the_shards_made_of_it(self, job, tmp_path):
        copy = tmp_path / "copy"
        shutil.copytree(job.parameters.source, copy, copy_function=shutil.copy2)
        before = self.specs(job_of(copy, tmp_path / "out"))
        assert before == self.specs(job)
        changed = job.checkpoint.weight_map["layers.1.engram.embed.weight"]
        os.utime(copy / changed, ns=(1, 1))
        after = self.specs(job_of(copy, tmp_path / "out"))
        kept = [a == b for a, b in zip(before, after, strict=True)]
        assert kept == [True, False, False, True, True]

    def test_other_matrices_under_the_same_header_change_it(self, job):
        """What a keep list does: as many experts, but others."""
        shard = job.shards[3]
        first, *rest = shard.tensors
        swapped = tuple(reversed(first.target.matrices))
        target = dataclasses.replace(first.target, matrices=swapped)
        tensors = (dataclasses.replace(first, target=target), *rest)
        other = dataclasses.replace(shard, tensors=tensors)
        assert other.header == shard.header
        stamped = stamps(job, shard)
        ours, theirs = (shard_spec(one, stamped, lambda _: "1") for one in (other, shard))
        assert ours != theirs

    def test_importance_is_part_of_it(self, job):
        shard = job.shards[0]
        specs = [
            shard_spec(shard, stamps(job, shard), lambda _: "1", importance=importance)
            for importance in (None, ["a", 1.0], ["a", 2.0])
        ]
        assert len(set(specs)) == 3


def test_a_record_is_plain_json(whole):
    entry = json.loads((whole.folder(SPEC) / "record.json").read_text())
    assert entry == {
        "spec": SPEC,
        "nbytes": 100,
        "modified_ns": whole.path(SPEC).stat().st_mtime_ns,
        "file_sha256": DIGESTS.file_sha256,
        "tensors": DIGESTS.spans,
        "errors": [
            {
                "name": "blk.0.ffn_gate_exps.weight",
                "role": "routed",
                "type_name": "Q3_K",
                "n_rows": 8,
                "n_rows_total": 64,
                "squared_error": 0.25,
                "squared_norm": 12.5,
                "limit": 0.3,
                "weighted_error": 0.0,
                "weighted_norm": 0.0,
                "weighted_without": 0.0,
            }
        ],
    }
