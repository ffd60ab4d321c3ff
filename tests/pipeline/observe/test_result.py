"""The saliency file of an observation: the whole, its halves, and how it was measured."""

import json

import numpy as np
import pytest

from pipeline.errors import SourceError
from pipeline.experts.accumulate import LayerSums
from pipeline.experts.criterion import Criterion
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.canonical import (
    read_canonical_halves,
    read_provenance,
    saliency_bytes,
    write_saliency,
)
from pipeline.experts.importers.open import read_halves, read_saliency
from pipeline.experts.merge import merge
from pipeline.experts.routing import routing_of
from pipeline.experts.saliency import Sum
from pipeline.experts.select import select
from pipeline.experts.stability import compare_halves
from pipeline.observe.result import write_result
from pipeline.observe.sequences import Sequences
from tests.pipeline.experts.tables import assert_same, random_table
from tests.pipeline.observe.conftest import LENGTHS


def layers_of(sums):
    """Sums ``[2, 4, n_layers, n_experts]`` as a run gives them."""
    return [
        tuple(LayerSums(dict(zip(Sum, sums[half, :, layer], strict=True))) for half in range(2))
        for layer in range(sums.shape[2])
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "observed.safetensors"


@pytest.fixture
def written(path, tokens, wanted):
    sequences = Sequences(tuple(tokens), 5)
    return write_result(path, layers_of(wanted.sums), sequences, "a text", {"spec": "x"})


def test_the_file_holds_the_sums_of_both_halves(written, path, wanted, model, tokens):
    table = read_saliency(path)
    assert_same(table, written)
    for n, name in enumerate(Sum):
        np.testing.assert_array_equal(table.sums[name], wanted.sums[:, n].sum(0))
    assert (table.honesty, table.kind) == (Honesty.TRUE_GATE, "observed")
    assert (table.tokens, table.top_k) == ((sum(LENGTHS),) * 6, model.config.n_experts_used)
    assert table.origins[0].sha256 == Sequences(tuple(tokens), 1).sha256
    assert read_provenance(path) == {"spec": "x"}


def test_gates_add_up_to_the_scale(written, model):
    """Normalised over the chosen experts, then scaled: what true gates are."""
    sums = written.sums[Sum.GATES].sum(axis=1)
    assert sums == pytest.approx(model.config.weights_scale * sum(LENGTHS))


def test_halves_are_those_of_even_and_odd_sequences(written, path, wanted):
    halves = read_halves(path)
    for half, table in enumerate(halves):
        for n, name in enumerate(Sum):
            np.testing.assert_array_equal(table.sums[name], wanted.sums[half, n])
        assert table.tokens == (sum(LENGTHS[half::2]),) * 6
        assert table.top_k == 2
    report = compare_halves(halves, Criterion.REAP, 3)
    assert 0 < report.shares.mean() <= 1


def test_a_keep_list_can_be_chosen_by_it(written, path, model):
    selection = select(read_saliency(path), Criterion.REAP, 3, routing_of(model.config))
    assert selection.keep.honesty is Honesty.TRUE_GATE
    means = written.sums[Sum.WEIGHTED_NORMS] / np.maximum(written.sums[Sum.COUNTS], 1)
    assert selection.keep.layers[2] == tuple(sorted(np.argsort(-means[2], kind="stable")[:3]))


def test_one_text_does_not_count_twice(written):
    with pytest.raises(SourceError, match="same tokens would count twice"):
        merge([written, written])


def test_a_single_sequence_has_no_halves(path, tokens, wanted):
    alone = np.stack([wanted.sums[0], np.zeros_like(wanted.sums[0])])
    sequences = Sequences((np.concatenate(tokens[0::2]),), 1)
    write_result(path, layers_of(alone), sequences, "a text", {})
    assert read_saliency(path).tokens == (sum(LENGTHS[0::2]),) * 6
    with pytest.raises(SourceError, match="keeps no two halves"):
        read_halves(path)


def test_what_is_added_changes_no_table_and_no_older_file(path):
    table, half = random_table(1), random_table(2)
    other = random_table(3)
    whole = merge([half, other])
    plain = saliency_bytes(table)
    write_saliency(path, table, provenance={"spec": "y", "n": 3})
    assert_same(read_saliency(path), table)
    assert read_provenance(path) == {"spec": "y", "n": 3}
    write_saliency(path, table)
    assert path.read_bytes() == plain
    assert read_provenance(path) == {}
    write_saliency(path, whole, halves=(half, other))
    assert_same(read_saliency(path), whole)
    for found, wanted in zip(read_canonical_halves(path), (half, other), strict=True):
        for name, values in wanted.sums.items():
            np.testing.assert_array_equal(found.sums[name], values)
        assert found.tokens == wanted.tokens


def edited(path, **entries):
    whole = path.read_bytes()
    n = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + n])
    header["__metadata__"] |= entries
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + n :])


@pytest.mark.parametrize("tokens", ["[", "[1]", "[[1],[2],[3]]x", "[[1],[2]]", "[null]"])
def test_damaged_halves_are_told(tokens, path):
    half, other = random_table(2), random_table(3)
    write_saliency(path, merge([half, other]), halves=(half, other))
    edited(path, halves_tokens=tokens)
    assert read_saliency(path)
    with pytest.raises(SourceError) as caught:
        read_halves(path)
    assert caught.value.file == str(path)


def test_halves_of_another_whole_are_told(path):
    half, other = random_table(2), random_table(3)
    write_saliency(path, half, halves=(half, other))
    with pytest.raises(SourceError, match="do not add up"):
        read_halves(path)


def test_a_file_of_another_form_keeps_no_halves(path):
    path.write_text("0,1\n")
    with pytest.raises(SourceError, match="keeps no two halves"):
        read_halves(path)
