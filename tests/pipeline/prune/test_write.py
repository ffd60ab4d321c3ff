"""Files of a cut checkpoint as they are written, and the check of the whole."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import replace

import pytest

from pipeline import files
from pipeline.errors import OutputError, Problems, SourceError, VerifyError
from pipeline.model.config import read_config
from pipeline.prune import write as write_module
from pipeline.prune.check import check_pruned
from pipeline.prune.config_json import config_bytes, cut_config, index_bytes
from pipeline.prune.plan import plan_pruned
from pipeline.prune.records import Records, file_spec
from pipeline.prune.write import missing_nbytes, part_of, write_file
from pipeline.source.checkpoint import open_checkpoint
from tests.pipeline.prune.pruning import expected, keep_of, planned, stored

KEEP = keep_of(3)


def write_all(source, plan, folder):
    for file in plan.files:
        write_file(file, source, folder / file.name, told=lambda _: None)


def finish(source, plan, folder):
    """What makes the files a checkpoint."""
    entries = cut_config(source.config, read_config(source.config), plan.keep)
    (folder / "config.json").write_bytes(config_bytes(entries))
    (folder / "model.safetensors.index.json").write_bytes(index_bytes(plan))
    return entries


@pytest.fixture(scope="module")
def made(small_miniature, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    source, plan = planned(small_miniature, KEEP)
    write_all(source, plan, folder)
    return source, plan, folder, finish(source, plan, folder)


def test_what_is_left_is_left_byte_for_byte(small_miniature, made):
    assert stored(made[2]) == expected(stored(small_miniature), KEEP)


def test_files_are_as_long_as_planned_and_hashed_rightly(made, small_miniature, tmp_path):
    source, plan, folder, _ = made
    assert {file.name: (folder / file.name).stat().st_size for file in plan.files} == {
        file.name: file.nbytes for file in plan.files
    }
    told = []
    for file in (plan.files[0], plan.files[2]):
        digest = write_file(file, source, tmp_path / file.name, told=told.append)
        assert digest == hashlib.sha256((tmp_path / file.name).read_bytes()).hexdigest()
    assert sum(told) == plan.files[0].nbytes + plan.files[2].nbytes


def test_what_does_not_change_takes_no_space(small_miniature, made):
    _, plan, folder, _ = made
    for file in plan.files:
        shared = (folder / file.name).samefile(small_miniature / file.name)
        assert shared is not file.is_changed


def test_a_link_to_a_link_is_followed(small_miniature, tmp_path):
    """As the folders of a hub's own cache are made."""
    (tmp_path / "source").mkdir()
    for path in small_miniature.iterdir():
        (tmp_path / "source" / path.name).symlink_to(path)
    source, plan = planned(tmp_path / "source", KEEP)
    write_file(plan.files[0], source, tmp_path / "out" / "a", told=lambda _: None)
    assert not (tmp_path / "out" / "a").is_symlink()
    assert (tmp_path / "out" / "a").samefile(small_miniature / plan.files[0].name)


def test_memory_does_not_grow_with_the_file(made, tmp_path, monkeypatch):
    source, plan, folder, _ = made
    monkeypatch.setattr(write_module, "_STEP_NBYTES", 1000)
    largest = []
    real = files.write_exact

    def watched(fd, content, offset, path):
        largest.append(len(content))
        real(fd, content, offset, path)

    monkeypatch.setattr(files, "write_exact", watched)
    file = plan.files[3]
    write_file(file, source, tmp_path / "x", told=lambda _: None)
    assert max(largest[1:]) == 1000
    assert (tmp_path / "x").read_bytes() == (folder / file.name).read_bytes()


def test_what_an_earlier_attempt_left_does_not_show(made, tmp_path):
    source, plan, folder, _ = made
    file, target = plan.files[3], tmp_path / "x"
    part_of(target).write_bytes(b"\xff" * (file.nbytes + 5000))
    write_file(file, source, target, told=lambda _: None)
    assert target.read_bytes() == (folder / file.name).read_bytes()
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_leaves_nothing_under_the_name(made, tmp_path, monkeypatch):
    source, plan, _, _ = made

    def full(fd, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_fallocate", full)
    with pytest.raises(OutputError, match="cannot reserve space"):
        write_file(plan.files[3], source, tmp_path / "x", told=lambda _: None)
    assert not (tmp_path / "x").exists()


def test_a_disk_that_lies_is_found_out(made, tmp_path, monkeypatch):
    source, plan, _, _ = made
    real = files._pwrite

    def lying(fd, content, offset):
        if offset > 1000:
            content = bytes(len(content))
        return real(fd, content, offset)

    monkeypatch.setattr(files, "_pwrite", lying)
    with pytest.raises(VerifyError, match="gives back other bytes"):
        write_file(plan.files[3], source, tmp_path / "x", told=lambda _: None)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("no", [0, 3], ids=["shared", "written"])
def test_a_source_that_changes_meanwhile_is_told(small_miniature, tmp_path, no):
    (tmp_path / "source").mkdir()
    for path in small_miniature.iterdir():
        (tmp_path / "source" / path.name).write_bytes(path.read_bytes())
    source, plan = planned(tmp_path / "source", KEEP)
    os.utime(source.files[plan.files[no].name].path, ns=(1, 1))
    with pytest.raises(SourceError, match="changed after its header was read"):
        write_file(plan.files[no], source, tmp_path / "x", told=lambda _: None)


def test_missing_bytes_count_what_is_reserved(made, tmp_path):
    source, plan, _, _ = made
    shared, written = plan.files[0], plan.files[3]
    assert missing_nbytes(shared, source, tmp_path / "x") == 0
    assert missing_nbytes(written, source, tmp_path / "x") == written.nbytes
    part_of(tmp_path / "x").write_bytes(b"\1" * 65536)
    assert missing_nbytes(written, source, tmp_path / "x") == written.nbytes - 65536


def test_a_right_cut_passes_the_check(made):
    check_pruned(*made[:2], made[3], made[2])


def test_a_checkpoint_cut_by_another_list_fails_the_check(small_miniature, made, tmp_path):
    source, plan, _, entries = made
    other = keep_of(3, seed=1)
    write_all(source, plan_pruned(source, read_config(source.config), other), tmp_path)
    wrong = next(n for n in range(6) if other.layers[n] != KEEP.layers[n])
    with pytest.raises(VerifyError, match=f"layer {wrong} holds other experts"):
        check_pruned(source, plan, entries, tmp_path)


def test_files_that_do_not_agree_with_the_config_fail_the_check(made):
    source, plan, folder, entries = made
    text = {**entries["text_config"], "n_routed_experts": 2}
    with pytest.raises((SourceError, Problems), match="another number of experts"):
        check_pruned(source, plan, {**entries, "text_config": text}, folder)


def test_a_cut_can_be_cut_again(small_miniature, made, tmp_path):
    """Twice is the same as at once."""
    _, _, folder, _ = made
    again = keep_of(2, n_experts=3)
    source, plan = planned(folder, again)
    write_all(source, plan, tmp_path)
    finish(source, plan, tmp_path)
    at_once = tuple(
        tuple(first[e] for e in second)
        for first, second in zip(KEEP.layers, again.layers, strict=True)
    )
    composed = replace(KEEP, layers=at_once)
    assert stored(tmp_path) == expected(stored(small_miniature), composed)


def test_records_tell_what_is_whole(made, tmp_path):
    source, plan, _, _ = made
    file = plan.files[3]
    spec = file_spec(file, KEEP, source)
    records = Records(tmp_path / "state", tmp_path)
    assert records.record(file.name, spec) is None
    digest = write_file(file, source, tmp_path / file.name, told=lambda _: None)
    records.save(file.name, spec, digest)
    assert records.record(file.name, spec).sha256 == digest
    assert records.record(file.name, "another") is None
    os.utime(tmp_path / file.name, ns=(1, 1))
    assert records.record(file.name, spec) is None
    assert records.revive(file.name, spec, {})
    known = records.record(file.name, spec)
    assert known.sha256 == digest
    content = bytearray((tmp_path / file.name).read_bytes())
    content[-1] ^= 1
    (tmp_path / file.name).write_bytes(content)
    assert not records.revive(file.name, spec, {file.name: known})


def test_a_spec_is_of_all_that_the_bytes_depend_on(small_miniature, made):
    source, plan, _, _ = made
    shared, written = plan.files[0], plan.files[3]
    other = keep_of(3, seed=1)
    _, replanned = planned(small_miniature, other)
    assert file_spec(shared, KEEP, source) == file_spec(replanned.files[0], other, source)
    assert file_spec(written, KEEP, source) != file_spec(replanned.files[3], other, source)
    touched = {
        **source.files,
        written.name: replace(source.files[written.name], modified_ns=7),
    }
    late = replace(source, files=touched)
    assert file_spec(written, KEEP, late) != file_spec(written, KEEP, source)


def test_the_result_opens_as_a_checkpoint(made):
    made_again = open_checkpoint(made[2])
    assert read_config(made_again.config).n_experts == 3
