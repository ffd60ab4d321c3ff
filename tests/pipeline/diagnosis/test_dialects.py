"""Other projects' forms of a V4.1 file: each named, with what can be done."""

from pathlib import Path

import pytest

from pipeline.diagnosis.diagnose import Verdict, examine
from pipeline.diagnosis.finding import Finding, Severity
from pipeline.diagnosis.opened import Opened
from pipeline.errors import FormatError
from pipeline.gguf.keys import ValueType, array, text, u32
from pipeline.model import dialects
from pipeline.model.dialects import dialect_of
from pipeline.model.layout import Layout
from pipeline.quant.types import TYPES
from pipeline.report.diagnosis_page import diagnosis_page
from pipeline.requant.complete import completed
from tests.gguf_forms import extra, tensor, v4_target, with_keys, with_tensors
from tests.pipeline.diagnosis.models import (
    P,
    commands_of,
    examined,
    released_lookups,
    sound_model,
    texts,
)

TABLES = ("blk.1.engram_embd.weight", "blk.3.engram_embd.weight")


@pytest.fixture(scope="module")
def fork():
    return sound_model(Layout.FORK)


def without_engram_keys(model, *entries):
    dropped = [key for key in model.files[0].key_values if key.startswith(f"{P}engram.")]
    return with_keys(model, *entries, without=dropped)


def byte_tables(width):
    def change(model):
        tables = [tensor(model, n, type=TYPES["I8"], ne=(width, 100)) for n in TABLES]
        return with_tensors(model, *tables)

    return change


def table_named(name):
    return lambda m: with_tensors(m, *(extra(f"blk.{n}.{name}") for n in (1, 3)), without=TABLES)


FOREIGN = {
    "ds4": (byte_tables(264), dialects.DS4),
    "ds4 norms": (lambda m: with_tensors(m, extra("blk.1.engram_q_norm.weight")), dialects.DS4),
    "ds4 encoding": (lambda m: with_keys(m, text(f"{P}engram.encoding", "x")), dialects.DS4),
    "ds4 config": (lambda m: with_keys(m, text(f"{P}config", "{}")), dialects.DS4_CONFIG),
    "jigsaw": (byte_tables(256), dialects.JIGSAW),
    "mx": (table_named("engram_embed.weight"), dialects.MX),
    "tarruda": (
        lambda m: with_tensors(m, extra("blk.1.engram_embd_scale.weight")),
        dialects.TARRUDA,
    ),
    "both": (
        lambda m: with_tensors(m, extra("per_layer_token_embd.weight")),
        dialects.BOTH_TABLES,
    ),
    "no table": (lambda m: with_tensors(m, without=TABLES), dialects.NO_TABLE),
}

RELATED = {
    "sidecar": (without_engram_keys, dialects.SIDECAR),
    "hellok": (
        lambda m: without_engram_keys(
            m, array(f"{P}engram.head_bucket_sizes", ValueType.UINT64, [3])
        ),
        dialects.HELLOKS,
    ),
    "kmbandy": (
        lambda m: without_engram_keys(m, u32(f"{P}engram.vocab_size", 16_000_000)),
        dialects.KMBANDY,
    ),
}


@pytest.mark.parametrize(("change", "dialect"), FOREIGN.values(), ids=FOREIGN)
def test_a_dialect_of_other_tensors_is_refused_by_name(fork, change, dialect):
    model = change(fork)
    assert dialect_of(model) is dialect
    found = examined(model)
    assert found.verdict is Verdict.FAULTY
    assert any(dialect.name in what for what in texts(found))
    assert any(dialect.makers in fact.value for fact in found.facts)
    assert any("--source CHECKPOINT" in command for command in commands_of(found))


@pytest.mark.parametrize(("change", "dialect"), RELATED.values(), ids=RELATED)
def test_a_dialect_of_other_keys_is_mended_by_keys(change, dialect):
    model = change(sound_model(Layout.FORK, released_lookups()))
    assert dialect_of(model) is dialect
    found = examined(model)
    assert found.verdict is Verdict.FAULTY
    assert any(dialect.name in what for what in texts(found))
    assert any("--recipe as-is" in command for command in commands_of(found))


def test_our_own_forms_are_no_dialects(fork):
    assert dialect_of(fork) is None
    assert dialect_of(sound_model(Layout.MAINLINE)) is None
    assert dialect_of(v4_target()) is None
    broken = without_engram_keys(fork, array(f"{P}engram.layer_ids", ValueType.INT32, [1, 3]))
    assert dialect_of(broken) is None


def test_another_architecture_is_no_model_of_ours(fork):
    found = examined(
        with_keys(
            with_tensors(v4_target(), without=["output_hc_fn.weight"]),
            text("general.architecture", "llama"),
        )
    )
    assert found.verdict is Verdict.NO_MODEL
    assert "architecture llama" in found.facts[0].value


def test_a_dialect_stands_before_what_its_types_look_like(fork):
    cut = Finding(Severity.STOPS, "the file is cut short")
    found = examine(Path("model.gguf"), Opened(byte_tables(264)(fork), (cut,), is_readable=False))
    assert [finding.what[:3] for finding in found.findings] == ["ds4", "the"]


@pytest.mark.parametrize("change", [change for change, _ in FOREIGN.values()], ids=FOREIGN)
def test_no_sentence_about_a_dialect_ends_twice(fork, change):
    model = change(fork)
    assert ".." not in diagnosis_page(examined(model))
    with pytest.raises(FormatError) as told:
        completed(model)
    assert ".." not in str(told.value)


def test_the_reason_is_told_where_writing_anew_is_refused(fork):
    """No file of this size says by its tables alone how long n-grams are."""
    found = examined(without_engram_keys(fork))
    mend = next(f.mend for f in found.findings if "9 of 9 engram keys" in f.what)
    with pytest.raises(FormatError) as told:
        completed(without_engram_keys(fork))
    assert told.value.what in mend.what
    assert not any("as-is" in command for command in commands_of(found))
