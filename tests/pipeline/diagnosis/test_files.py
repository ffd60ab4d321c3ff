"""Files that are damaged, renamed, incomplete, or no GGUF at all."""

import json
import shlex
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from pipeline.diagnosis.diagnose import Verdict, diagnose
from pipeline.diagnosis.finding import Severity
from pipeline.errors import SourceError
from pipeline.gguf.header import TensorInfo, encode_header, padded
from pipeline.gguf.keys import ValueType, array, text, u32
from pipeline.gguf.model_file import SPLIT_TENSORS_COUNT
from pipeline.gguf.reader import read_header
from pipeline.model.layout import Layout
from pipeline.quant.types import TYPES
from tests.gguf_builder import draft_plan, small_config, small_keys, write_plan
from tests.pipeline.diagnosis.models import commands_of, sound_plan, texts, written


def header_rewritten(path, change):
    """The file again with ``change`` made to its tensor infos; its data stays."""
    header = read_header(path)
    data = path.read_bytes()[header.data_offset :]
    infos = [change(info) for info in header.infos]
    path.write_bytes(encode_header(list(header.key_values.values()), infos) + data)


def run(found):
    for command in commands_of(found):
        words = shlex.split(command)
        if words[0] in ("mv", "truncate"):
            subprocess.run(words, check=True)


def test_the_three_ways_to_name_a_model_agree(tmp_path):
    first = written(tmp_path / "one" / "model.gguf", n_files=3)
    second = first.with_name(first.name.replace("00001-of", "00002-of"))
    shown = [
        [f.what for f in diagnose(path).findings] for path in (first, second, tmp_path / "one")
    ]
    assert shown[0] == shown[1] == shown[2]
    assert diagnose(second).verdict is Verdict.SOUND


def test_a_truncated_file_says_how_much_is_there(tmp_path):
    path = written(tmp_path / "model.gguf")
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - 5000)
    found = diagnose(path)
    assert found.verdict is Verdict.FAULTY
    assert f"cut short: {whole - 5000:,} of " in texts(found)[0]
    assert found.roles, "what it is can be told all the same"
    assert not any("as-is" in command for command in commands_of(found))


def test_bytes_behind_the_last_tensor_can_be_taken_off(tmp_path):
    path = written(tmp_path / "model.gguf")
    with path.open("ab") as file:
        file.write(bytes(1000))
    found = diagnose(path)
    assert found.verdict is Verdict.SOUND
    assert any("bytes follow the last tensor" in what for what in texts(found))
    run(found)
    assert not any("bytes follow" in what for what in texts(diagnose(path)))


def test_a_cut_header_is_a_fault(tmp_path):
    path = written(tmp_path / "model.gguf")
    with path.open("r+b") as file:
        file.truncate(2000)
    found = diagnose(path)
    assert found.verdict is Verdict.FAULTY
    assert "the file ends inside" in texts(found)[0]


def test_mxfp8_under_a_shared_id_is_named(tmp_path):
    name = "blk.1.engram_embd.weight"
    keys = small_keys(sound_plan(Layout.FORK).config, Layout.FORK)
    nbytes, kind = 100 * 8 * 33, TYPES["F8_E4M3"]
    infos = [
        TensorInfo(name, (256, 100), kind.type_id, 0),
        TensorInfo("output_norm.weight", (64,), 0, padded(nbytes)),
    ]
    path = tmp_path / "unsloth.gguf"
    path.write_bytes(encode_header(list(keys), infos) + bytes(padded(nbytes) + 256))
    found = diagnose(path)
    assert found.verdict is Verdict.FAULTY
    named = next(f for f in found.findings if "MXFP8" in f.what)
    assert name.split(".", 2)[2] in named.where[1]
    assert "--source CHECKPOINT" in named.mend.commands[0]
    assert next(row for row in found.roles if row.title == "engram").nbytes == nbytes


@pytest.mark.parametrize(
    ("type_id", "words", "mend"),
    [
        (338, "repacked", "repacked from"),
        (99, "neither ggml nor ik_llama.cpp has", "released checkpoint"),
    ],
)
def test_unknown_types_are_named(tmp_path, type_id, words, mend):
    path = written(tmp_path / "model.gguf")
    header_rewritten(
        path, lambda i: replace(i, type_id=type_id) if i.name == "token_embd.weight" else i
    )
    found = diagnose(path)
    named = next(f for f in found.findings if words in f.what)
    assert named.severity is Severity.STOPS
    assert named.where[1] == "token_embd.weight"
    assert mend in named.mend.what


def test_bytes_that_do_not_fit_the_type_are_named(tmp_path):
    path = written(tmp_path / "model.gguf")
    header_rewritten(path, lambda i: replace(i, type_id=1) if i.name == "token_embd.weight" else i)
    found = diagnose(path)
    assert any("overlapping the next: F16" in what for what in texts(found))


def test_missing_shards_are_listed(tmp_path):
    first = written(tmp_path / "model.gguf", n_files=4)
    for no in (2, 3):
        first.with_name(f"model-0000{no}-of-00004.gguf").unlink()
    found = diagnose(first)
    assert found.verdict is Verdict.FAULTY
    assert texts(found)[0] == "2 shards of 4 missing"
    assert found.findings[0].where == ("model-00002-of-00004.gguf, model-00003-of-00004.gguf",)
    assert not any("missing tensor" in (f.engine_says or "") for f in found.findings)


def test_renamed_shards_are_given_back_their_names(tmp_path):
    first = written(tmp_path / "model.gguf", n_files=3)
    for no in (1, 2, 3):
        first.with_name(f"model-0000{no}-of-00003.gguf").rename(tmp_path / f"mine.part{no}.gguf")
    found = diagnose(tmp_path / "mine.part2.gguf")
    assert found.verdict is Verdict.FAULTY
    assert texts(found)[0] == "3 shards of 3 not named as loaders want them"
    assert found.roles[0].n_tensors == 18
    run(found)
    assert diagnose(tmp_path / "mine-00001-of-00003.gguf").verdict is Verdict.SOUND


def test_swapped_shards_are_put_right(tmp_path):
    first = written(tmp_path / "model.gguf", n_files=3)
    second, third = (first.with_name(f"model-0000{no}-of-00003.gguf") for no in (2, 3))
    second.rename(tmp_path / "aside")
    third.rename(second)
    (tmp_path / "aside").rename(third)
    found = diagnose(tmp_path)
    assert found.verdict is Verdict.FAULTY
    run(found)
    assert diagnose(tmp_path).verdict is Verdict.SOUND


def test_a_wrong_tensor_count_in_the_first_shard_is_told(tmp_path):
    first = written(tmp_path / "model.gguf", n_files=2)
    header = read_header(first)
    data = first.read_bytes()[header.data_offset :]
    keys = [
        replace(e, value=7) if e.key == SPLIT_TENSORS_COUNT else e
        for e in header.key_values.values()
    ]
    first.write_bytes(encode_header(keys, list(header.infos)) + data)
    found = diagnose(first)
    assert found.verdict is Verdict.FAULTY


STRANGERS = {
    "lfs": (
        "model.gguf",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:",
        "git lfs pull",
    ),
    "safetensors": ("model.safetensors", b'\x10\0\0\0\0\0\0\0{"a":1}', "InspectSource"),
    "renamed safetensors": ("model.gguf", b'\x10\1\0\0\0\0\0\0{"a":1}', "InspectSource"),
    "sidecar": ("model.bin", b"DSE1\1\0\0\0", "the GGUF it lies beside"),
    "page": ("model.gguf", b"<!DOCTYPE html><html>", "Fetch the file again"),
    "empty": ("model.gguf", b"", "Fetch the file again"),
    "unfinished": ("model.gguf", bytes(100), "go on"),
    "part": ("shard.gguf.part", b"GGUF", "go on"),
    "ggjt": ("model.bin", b"tjgg\3\0\0\0", "No engine of today"),
    "zip": ("pytorch_model.bin", b"PK\x03\x04", "safetensors"),
    "basalt": ("model.basalt", b"BSLT", "--recipe RECIPE"),
    "ftw": ("model.ftw", b"FTW1", "--recipe RECIPE"),
    "other": ("model.gguf", b"RIFFxxxx", "ask its maker"),
}


@pytest.mark.parametrize(("name", "content", "words"), STRANGERS.values(), ids=STRANGERS)
def test_what_is_no_gguf_is_named(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    found = diagnose(path)
    assert found.verdict is Verdict.NO_MODEL
    mend = found.findings[0].mend
    assert words in " ".join((mend.what, *mend.commands))


def test_folders_that_hold_no_gguf(tmp_path, small_miniature):
    assert "checkpoint folder" in diagnose(small_miniature).facts[0].value
    assert "without a .gguf" in diagnose(tmp_path).facts[0].value
    config = {"quantization_config": {"quant_method": "exl3"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "EXL3" in diagnose(tmp_path).facts[0].value


def test_nothing_there_is_an_error(tmp_path):
    with pytest.raises(SourceError, match=r"nothing\.gguf"):
        diagnose(tmp_path / "nothing.gguf")


def test_a_folder_of_two_models_asks_which(tmp_path):
    written(tmp_path / "one.gguf")
    written(tmp_path / "other.gguf")
    found = diagnose(tmp_path)
    assert found.verdict is Verdict.NO_MODEL
    assert [c.rsplit("/", 1)[1] for c in commands_of(found)] == ["one.gguf", "other.gguf"]


def test_a_draft_of_any_name_beside_the_target_is_found(tmp_path):
    written(tmp_path / "model.gguf")
    write_plan(draft_plan(small_config(), "DSpark"), tmp_path)
    found = diagnose(tmp_path)
    assert found.verdict is Verdict.SOUND, texts(found)
    draft = next(fact.value for fact in found.facts if fact.label == "draft")
    assert draft.startswith("DSpark")
    assert not any("no draft" in what for what in texts(found))


def test_a_draft_of_another_model_is_told(tmp_path):
    written(tmp_path / "model.gguf")
    config = replace(small_config(), hidden=32)
    write_plan(draft_plan(config, "DSpark"), tmp_path)
    found = diagnose(tmp_path / "model.gguf")
    assert any("draft beside it does not fit" in what for what in texts(found))


def test_an_importance_matrix_is_told_by_what_it_saw(tmp_path):
    counts = np.array([0, 3, 500, 600], "<f4")
    sums = np.ones((4, 64), "<f4")
    keys = [
        text("general.type", "imatrix"),
        array("imatrix.datasets", ValueType.STRING, ["wiki.txt"]),
        u32("imatrix.chunk_count", 12),
        u32("imatrix.chunk_size", 512),
    ]
    name = "blk.0.ffn_up_exps.weight"
    infos = [
        TensorInfo(f"{name}.in_sum2", (64, 4), 0, 0),
        TensorInfo(f"{name}.counts", (1, 4), 0, sums.nbytes),
    ]
    path = tmp_path / "imatrix.gguf"
    path.write_bytes(encode_header(keys, infos) + sums.tobytes() + counts.tobytes() + bytes(16))
    found = diagnose(path)
    assert found.verdict is Verdict.NO_MODEL
    facts = {fact.label: fact.value for fact in found.facts}
    assert "importance matrix" in facts["what"]
    assert (facts["datasets"], facts["chunks"]) == ("wiki.txt", "12")
    assert "1 expert matrix never used by the text, 1 by fewer than 10" in texts(found)[0]
