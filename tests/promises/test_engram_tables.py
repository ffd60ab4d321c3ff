"""P15: the engram check means something: each way to be wrong stops the job or is told."""

import json

import numpy as np
import pytest

from pipeline.gguf.model_file import read_model
from pipeline.model.engram.check import check_gguf_engram
from pipeline.source.checkpoint import INDEX_NAME
from tests.promises.whole_job import NAME, linked_copy, run_job

TABLE = "layers.2.engram.embed"


def one_row_more(text):
    text["engram_num_embeddings"][1] += 1


def one_bucket_less(text):
    text["engram_num_embeddings"][0] -= text["engram_vocab_size"]


def swapped(text):
    text["engram_num_embeddings"].reverse()


def other_primes(text):
    text["engram_vocab_size"] += 30


def other_heads(text):
    text["engram_n_heads"] += 1


def other_layer(text):
    text["engram_layer_ids"][1] += 1


def other_vocabulary(text):
    text["engram_compressed_vocab_size"] -= 1


FAULTS = {
    "a row more": (one_row_more, "2.engram"),
    "a bucket less": (one_bucket_less, "1.engram"),
    "tables swapped": (swapped, "engram"),
    "other primes": (other_primes, "engram"),
    "another number of heads": (other_heads, "engram"),
    "another layer": (other_layer, "engram"),
    "another vocabulary": (other_vocabulary, "compressed"),
}


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_p15_tables_that_do_not_fit_their_buckets_stop_the_job(
    small_miniature, tmp_path, change, message
):
    copy = linked_copy(small_miniature, tmp_path / "copy", but=["config.json"])
    config = json.loads((copy / "config.json").read_text())
    change(config["text_config"])
    (copy / "config.json").write_text(json.dumps(config))
    check_stopped(copy, tmp_path, message)


def check_stopped(copy, tmp_path, message):
    outcome = run_job(copy, tmp_path / "out")
    assert not outcome.ok
    assert message in outcome.text
    assert not (tmp_path / "out").exists()


def test_p15_a_missing_table_stops_the_job(small_miniature, tmp_path):
    copy = linked_copy(small_miniature, tmp_path / "copy", but=[INDEX_NAME])
    index = json.loads((copy / INDEX_NAME).read_text())
    file = index["weight_map"][f"{TABLE}.weight"]
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != file}
    (copy / INDEX_NAME).write_text(json.dumps(index))
    (copy / file).unlink()
    check_stopped(copy, tmp_path, "layers.2.engram")


def test_p15_the_tokenizer_of_another_model_stops_the_job(small_miniature, tmp_path):
    """A token that differs from another only in case has no compressed id of its own."""
    copy = linked_copy(small_miniature, tmp_path / "copy", but=["tokenizer.json"])
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    assert "ga" in vocab
    assert "GA" not in vocab
    vocab["GA"] = vocab.pop("!")
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_stopped(copy, tmp_path, "compressed")


SIZES = "deepseek41.ple.head_vocab_sizes"
OFFSETS = "deepseek41.ple.head_offsets"


def in_another_order(values):
    return [values[1], values[0], *values[2:]]


def no_prime(values):
    return [values[0] + 1, *values[1:]]


def moved_by_one(values):
    return [*values[:-1], values[-1] + 1]


def started_again(values):
    half = len(values) // 2
    return [*values[:half], *values[:half]]


KEY_FAULTS = {
    "buckets in another order": (SIZES, in_another_order),
    "a bucket that is no prime": (SIZES, no_prime),
    "primes started again": (SIZES, started_again),
    "an offset moved": (OFFSETS, moved_by_one),
    "offsets per table": (OFFSETS, started_again),
}


@pytest.mark.parametrize(("key", "change"), KEY_FAULTS.values(), ids=KEY_FAULTS)
def test_p15_a_finished_file_with_other_constants_is_told(undisturbed, tmp_path, key, change):
    folder = linked_copy(undisturbed / NAME, tmp_path / NAME, but=[f"{NAME}-00001-of-00004.gguf"])
    path = folder / f"{NAME}-00001-of-00004.gguf"
    assert check_gguf_engram(read_model(path)).problems == ()
    values = list(read_model(path).key_values[key].value)
    replace_values(path, values, change(values))
    problems = check_gguf_engram(read_model(path)).problems
    assert problems
    assert key in "\n".join(map(str, problems)) or "bucket" in "\n".join(map(str, problems))


def replace_values(path, before, after):
    """Other numbers in the place of a 64-bit array of the header."""
    content = path.read_bytes()
    old, new = (np.array(values, np.uint64).tobytes() for values in (before, after))
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
