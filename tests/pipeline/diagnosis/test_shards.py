"""Sets of shards: any of them names the model, and what is wrong with one is told as that."""

from dataclasses import replace

import pytest

from pipeline.diagnosis.diagnose import Verdict, diagnose
from pipeline.gguf.header import encode_header
from pipeline.gguf.keys import u16
from pipeline.gguf.model_file import SPLIT_COUNT, SPLIT_TENSORS_COUNT
from pipeline.gguf.reader import read_header
from pipeline.model.layout import Layout
from pipeline.report.diagnosis_page import diagnosis_page
from tasks.doctor.file import main
from tests.gguf_builder import small_keys, write_plan
from tests.pipeline.diagnosis.models import (
    P,
    commands_of,
    sound_plan,
    texts,
    with_alignment_key,
    written,
)


@pytest.fixture(scope="module", params=list(Layout), ids=str)
def ours(request, tmp_path_factory):
    """All shards of a set as this project makes it: later ones leave the counts out."""
    folder = tmp_path_factory.mktemp("ours")
    write_plan(sound_plan(request.param), folder)
    shards = sorted(folder.glob("*.gguf"))
    assert len(shards) > 4
    assert any(SPLIT_COUNT not in read_header(shard).key_values for shard in shards)
    return shards


@pytest.fixture
def fork(tmp_path):
    write_plan(sound_plan(Layout.FORK), tmp_path)
    return sorted(tmp_path.glob("*.gguf"))


def with_keys(path, *entries):
    header = read_header(path)
    keys = {**header.key_values, **{entry.key: entry for entry in entries}}
    data = path.read_bytes()[header.data_offset :]
    path.write_bytes(encode_header([*keys.values()], list(header.infos)) + data)


def test_every_shard_names_the_model(ours):
    for shard in ours:
        found = diagnose(shard)
        assert found.verdict is Verdict.SOUND, (shard.name, texts(found))
        assert len(found.roles) == 5


def test_a_renamed_shard_finds_its_set(fork):
    for no, shard in enumerate(fork):
        shard.rename(shard.with_name(f"mine_{no}.gguf"))
    for no in range(len(fork)):
        found = diagnose(fork[0].with_name(f"mine_{no}.gguf"))
        n = len(fork)
        assert texts(found)[0] == f"{n} shards of {n} not named as loaders want them", no


def test_a_set_without_its_tables_is_no_dialect(fork):
    for shard in fork[1:3]:
        shard.unlink()
    found = diagnose(fork[0])
    assert found.verdict is Verdict.FAULTY
    assert texts(found)[0] == f"2 shards of {len(fork)} missing"
    assert not any("dialect" in fact.label or "dialect" in fact.value for fact in found.facts)


def test_a_missing_table_is_not_told_twice(fork):
    fork[2].unlink()
    faults = [f.what for f in diagnose(fork[0]).findings if f.severity.is_fault]
    assert faults == [f"1 shard of {len(fork)} missing"]


def test_a_wrong_count_of_shards_is_told_as_that(fork):
    with_keys(fork[0], u16(SPLIT_COUNT, 7 + len(fork)))
    for path in (fork[0], fork[1], fork[-1], fork[0].parent):
        found = diagnose(path)
        faults = [f for f in found.findings if f.severity.is_fault]
        n = len(fork)
        assert [f.what for f in faults] == [f"split.count says {7 + n}, the set has {n} shards"]
        assert faults[0].mend.commands[0].endswith(f"{fork[0].name} split.count {n}")


def test_a_stale_count_of_tensors_is_told_as_that(fork):
    said = read_header(fork[0]).key_values[SPLIT_TENSORS_COUNT]
    with_keys(fork[0], replace(said, value=7))
    found = diagnose(fork[0])
    faults = [f for f in found.findings if f.severity.is_fault]
    assert [f.what for f in faults] == [
        f"split.tensors.count says 7, the set holds {said.value} tensors"
    ]
    assert faults[0].mend.commands[0].endswith(f"split.tensors.count {said.value}")


def test_a_folder_of_one_set_with_a_bad_header_is_faulty(fork, capsys):
    fork[0].write_bytes(fork[0].read_bytes()[:2000])
    assert main([str(fork[0].parent)]) == 1
    assert "several models" not in capsys.readouterr().out


def test_a_damaged_later_header_is_told(fork):
    fork[3].write_bytes(fork[3].read_bytes()[:30])
    found = diagnose(fork[0])
    assert "1 shard of" in texts(found)[0]
    assert "damaged" in texts(found)[0]
    assert found.findings[0].where == (fork[3].name,)


def test_an_alignment_that_the_data_do_not_have_is_told_as_that(tmp_path):
    path = written(tmp_path / "model.gguf")
    with_alignment_key(path)
    found = diagnose(path)
    faults = [f.what for f in found.findings if f.severity.is_fault]
    assert faults == ["general.alignment says 4,096 but the data are padded to 32"]
    assert found.alike is not None
    assert "--recipe alike.toml --source CHECKPOINT" in commands_of(found)[0]
    page = diagnosis_page(found)
    assert f"    {found.alike.splitlines()[0]}" in page.splitlines()


def test_sentences_end_once(tmp_path):
    """A file that cannot be read, with something to graft and something to write anew."""
    keys = [
        e
        for e in small_keys(sound_plan(Layout.FORK).config, Layout.FORK)
        if e.key != f"{P}engram.pad_id"
    ]
    path = written(tmp_path / "model.gguf", keys=keys)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    page = diagnosis_page(diagnose(path))
    assert "changes. First mend the files themselves, see above." in " ".join(page.split())
    assert ".." not in page.replace("...", "")
