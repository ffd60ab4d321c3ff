"""Files of other tools, generated with their keys and read back as the numbers that went in."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from pipeline.errors import SourceError
from pipeline.experts.criterion import Criterion, scores
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.canonical import saliency_bytes, write_saliency
from pipeline.experts.importers.npz import read_halves
from pipeline.experts.importers.open import read_saliency
from pipeline.experts.merge import merge
from pipeline.experts.origin import Origin, origin_of
from pipeline.experts.saliency import Sum
from tests.pipeline.experts.tables import (
    assert_same,
    observer_layers,
    profile_layers,
    random_table,
    write_json,
)

SOURCE = random_table(7)
"""What the files of these tests hold."""

COUNTS, GATES, NORMS, WEIGHTED = (SOURCE.sums[name] for name in Sum)
MEANS = WEIGHTED / COUNTS.clip(min=1)


@pytest.fixture
def path(tmp_path):
    """A name that says nothing about the form: content decides."""
    return tmp_path / "Saliency größe"


def said(table):
    return table.kind, table.honesty, table.tokens, table.top_k


def test_the_published_observers_file_is_read(path):
    torch.save(observer_layers(SOURCE), path)
    table = read_saliency(path)
    expected = replace(
        SOURCE,
        kind="reap-observer",
        honesty=Honesty.SOFTMAX_GATE,
        origins=(origin_of(path),),
    )
    assert_same(table, expected)
    assert table.origins[0].name == path.name


def test_layers_of_an_observer_are_placed_by_number_not_by_order(path):
    layers = observer_layers(SOURCE)
    torch.save({n: layers[n] for n in (2, 0, 1)}, path)
    np.testing.assert_array_equal(read_saliency(path).sums[Sum.COUNTS], COUNTS)


def broken_layers(layer, **entries):
    layers = observer_layers(SOURCE)
    layers[layer] |= entries
    return {n: {k: v for k, v in entry.items() if v is not None} for n, entry in layers.items()}


BROKEN_OBSERVERS = {
    "no first layer": ({n: observer_layers(SOURCE)[n] for n in (1, 2)}, "nothing about layer 0"),
    "a hole": ({n: observer_layers(SOURCE)[n] for n in (0, 2)}, "nothing about layer 1"),
    "negative layer": ({-1: observer_layers(SOURCE)[0]}, "nothing about layer 0"),
    "no sums": (broken_layers(1, ean_sum=None), "layer 1 lacks ean_sum"),
    "no tokens": (broken_layers(1, total_tokens=None), "total_tokens of layer 1"),
    "fewer experts": (broken_layers(2, ean_sum=torch.ones(11)), "ean_sum of layer 2 is not one"),
    "a matrix": (broken_layers(0, ean_sum=torch.ones(12, 2)), "ean_sum of layer 0 is not one"),
    "other tokens": (broken_layers(1, total_tokens=torch.tensor(41)), "no multiple of total_tok"),
    "other means": (broken_layers(1, reap=torch.ones(12)), "reap of layer 1, expert .* the mean"),
    "complex": (broken_layers(1, ean_sum=torch.ones(12) * 1j), "ean_sum of layer 1 is not a pl"),
    "sparse": (broken_layers(1, ean_sum=torch.ones(12).to_sparse()), "ean_sum of layer 1 is not"),
    "meta": (broken_layers(1, ean_sum=torch.ones(12, device="meta")), "ean_sum of layer 1 is no"),
    "NaN": (broken_layers(1, ean_sum=torch.full((12,), np.nan)), "norms of layer 1, expert 0"),
    "a list": (broken_layers(1, ean_sum=[1.0] * 12), "ean_sum of layer 1 is not a plain tensor"),
    "layers are tensors": ({0: torch.ones(3)}, "layer 0 is not a table of sums"),
    "a claim of 10^12": (
        broken_layers(0, ean_sum=torch.zeros(1).as_strided((10**6, 10**6), (0, 0))),
        "ean_sum of layer 0 is too large",
    ),
    "names": ({"model.layers.0": torch.ones(3)}, "of no known observer"),
    "empty": ({}, "of no known observer"),
    "a list alone": ([1, 2], "holds no dictionary"),
    "a tensor alone": (torch.ones(3), "holds no dictionary"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN_OBSERVERS.values(), ids=BROKEN_OBSERVERS)
def test_each_fault_of_an_observer_is_told(path, content, message):
    torch.save(content, path)
    with pytest.raises(SourceError, match=message) as caught:
        read_saliency(path)
    assert caught.value.file == str(path)


def test_a_parameter_and_other_widths_of_numbers_are_read(path):
    layers = observer_layers(SOURCE)
    layers[0]["ean_sum"] = torch.nn.Parameter(layers[0]["ean_sum"])
    layers[1]["expert_frequency"] = layers[1]["expert_frequency"].to(torch.int16)
    layers[2]["total_tokens"] = 40
    torch.save(layers, path)
    np.testing.assert_array_equal(read_saliency(path).sums[Sum.NORMS], NORMS)


PAIRED = {
    "sal": torch.tensor(WEIGHTED),
    "cnt": torch.tensor(COUNTS),
    "n_layers": 3,
    "n_experts": 12,
    "tokens_seen": 40,
    "collector": "moe-forward",
}
IMAGES = random_table(8, n_tokens=5)
PAIRED_IMAGES = PAIRED | {
    "sal_img": torch.tensor(IMAGES.sums[Sum.WEIGHTED_NORMS]),
    "cnt_img": torch.tensor(IMAGES.sums[Sum.COUNTS]),
    "tokens_seen": 45,
}


def test_sums_and_counts_of_text_are_true_reap(path):
    torch.save(PAIRED, path)
    table = read_saliency(path)
    assert said(table) == ("paired-sums-text", Honesty.TRUE_GATE, (40,) * 3, 2)
    np.testing.assert_array_equal(scores(table, Criterion.REAP), MEANS)
    assert set(table.sums) == {Sum.COUNTS, Sum.WEIGHTED_NORMS}
    assert_same(read_saliency(path, text_only=True), table)


def test_images_are_added_or_left_out(path):
    torch.save(PAIRED_IMAGES, path)
    both, text = read_saliency(path), read_saliency(path, text_only=True)
    np.testing.assert_array_equal(
        both.sums[Sum.WEIGHTED_NORMS], WEIGHTED + IMAGES.sums[Sum.WEIGHTED_NORMS]
    )
    assert said(both) == ("paired-sums", Honesty.TRUE_GATE, (45,) * 3, 2)
    np.testing.assert_array_equal(text.sums[Sum.COUNTS], COUNTS)
    assert said(text) == ("paired-sums-text", Honesty.TRUE_GATE, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 4}, r"sal is not a matrix .*expected \(4, 12\); found \(3, 12\)"),
        ({"n_experts": 13}, r"sal is not a matrix .*expected \(3, 13\)"),
        ({"n_experts": -1}, "n_experts is not a count"),
        ({"sal": torch.ones(3)}, "sal is not a matrix"),
        ({"cnt": torch.ones(3, 4)}, "cnt is not a matrix"),
        ({"sal_img": torch.ones(3, 4)}, "sal_img is not a matrix"),
        ({"cnt": torch.tensor(COUNTS) + 0.5}, "counts of layer 0, expert 0"),
    ],
)
def test_paired_sums_that_do_not_fit_are_refused(path, changes, message):
    torch.save(PAIRED_IMAGES | changes, path)
    with pytest.raises(SourceError, match=message):
        read_saliency(path)


def test_a_profile_is_read_to_the_digits_it_was_printed_with(path):
    write_json(path, profile_layers(SOURCE))
    table = read_saliency(path)
    assert said(table) == ("expert-profile", Honesty.UNNORMALISED_GATE, (40,) * 3, 2)
    np.testing.assert_array_equal(table.sums[Sum.COUNTS], COUNTS)
    for name in Sum:
        np.testing.assert_allclose(table.sums[name], SOURCE.sums[name], rtol=1e-5)


def profile(layer="1", **entries):
    layers = profile_layers(SOURCE)
    layers[layer] = layers[layer] | entries
    return layers


BROKEN_PROFILES = {
    "a hole": ({n: v for n, v in profile().items() if n != "1"}, "nothing about layer 1"),
    "experts skipped": (profile("0", activation_counts=[1] * 12), "do not add up.*--n-experts"),
    "text": (profile(reap=["1"] * 12), "reap of layer 1 is not a list of numbers"),
    "flags": (profile(activation_counts=[True] * 12), "activation_counts of layer 1 is not"),
    "too few": (profile(reap=[1] * 11), "reap of layer 1 is not one number for each expert"),
    "negative tokens": (profile(total_tokens=-1), "total_tokens of layer 1 is not a count"),
    "named layer": (profile() | {"last": profile()["2"]}, "a layer is not named by its number"),
    "padded layer": (profile() | {"03": profile()["2"]}, "a layer is not named by its number"),
}


@pytest.mark.parametrize(("entries", "message"), BROKEN_PROFILES.values(), ids=BROKEN_PROFILES)
def test_each_fault_of_a_profile_is_told(path, entries, message):
    write_json(path, entries)
    with pytest.raises(SourceError, match=message) as caught:
        read_saliency(path)
    assert caught.value.file == str(path)


def test_a_profile_without_norms_still_ranks_by_what_it_has(path):
    layers = profile_layers(SOURCE)
    for layer in layers.values():
        del layer["ean_mean"]
    write_json(path, layers)
    assert set(read_saliency(path).sums) == {Sum.COUNTS, Sum.GATES, Sum.WEIGHTED_NORMS}


HALVES = [random_table(seed, n_tokens=20) for seed in (11, 12)]
BOTH = merge([replace(half, origins=(Origin(str(n), ""),)) for n, half in enumerate(HALVES)])


def halves_of(name):
    return np.stack([half.sums[name] for half in HALVES])


def save_npz(path, **arrays):
    with path.open("wb") as file:
        np.savez(file, **arrays)


ROUTING_WEIGHTS = {
    "saliency": BOTH.sums[Sum.GATES],
    "robust_saliency": BOTH.sums[Sum.GATES],
    "counts": BOTH.sums[Sum.COUNTS].astype(np.int64),
    "saliency_halves": halves_of(Sum.GATES),
    "counts_halves": halves_of(Sum.COUNTS).astype(np.int64),
    "tokens": np.array(40),
    "method": np.array("normalized_routing_weight"),
}
TOTALS, N_BOTH = BOTH.sums[Sum.WEIGHTED_NORMS], BOTH.sums[Sum.COUNTS]
CALIBRATION = {
    "saliency": TOTALS / N_BOTH.clip(min=1),
    "total": TOTALS,
    "counts": N_BOTH,
    "saliency_halves": halves_of(Sum.WEIGHTED_NORMS) / halves_of(Sum.COUNTS).clip(min=1),
    "counts_halves": halves_of(Sum.COUNTS),
    "tokens": np.array(40),
    "moe_layers": np.arange(3),
}


def test_router_weights_alone_are_a_proxy(path):
    save_npz(path, **ROUTING_WEIGHTS)
    table = read_saliency(path)
    assert said(table) == ("routing-weights", Honesty.PROXY, (40,) * 3, 2)
    np.testing.assert_array_equal(table.sums[Sum.GATES], BOTH.sums[Sum.GATES])
    with pytest.raises(SourceError, match="criterion reap needs sums"):
        scores(table, Criterion.REAP)


def test_a_calibration_with_outputs_is_true_reap(path):
    save_npz(path, **CALIBRATION)
    table = read_saliency(path)
    assert said(table) == ("reap-calibrate", Honesty.TRUE_GATE, (40,) * 3, 2)
    np.testing.assert_array_equal(table.sums[Sum.WEIGHTED_NORMS], TOTALS)


@pytest.mark.parametrize(
    ("arrays", "name"),
    [(ROUTING_WEIGHTS, Sum.GATES), (CALIBRATION, Sum.WEIGHTED_NORMS)],
    ids=["sums", "means"],
)
def test_halves_become_tables_of_their_own_and_add_up_to_the_whole(path, arrays, name):
    save_npz(path, **arrays)
    halves = read_halves(path)
    for half, expected in zip(halves, HALVES, strict=True):
        np.testing.assert_allclose(half.sums[name], expected.sums[name], rtol=1e-14)
        np.testing.assert_array_equal(half.sums[Sum.COUNTS], expected.sums[Sum.COUNTS])
    assert [half.origins[0].name for half in halves] == [f"{path.name} half {n}" for n in (1, 2)]


def but(arrays, **changes):
    changed = arrays | changes
    return {name: array for name, array in changed.items() if array is not None}


BROKEN_NPZ = {
    "sum or mean": (but(ROUTING_WEIGHTS, method=None), "sums or means"),
    "another method": (but(ROUTING_WEIGHTS, method=np.array("l2")), "sums or means.*method l2"),
    "totals by another method": (but(CALIBRATION, method=np.array("l2")), "sums or means"),
    "no counts": (but(CALIBRATION, counts=None), "no array counts of 2 dimensions"),
    "text": (but(CALIBRATION, counts=np.full((3, 12), "x")), "no array counts of 2 dim"),
    "a stack": (but(CALIBRATION, total=np.ones((2, 3, 12))), "no array total of 2 dimensions"),
    "other mean": (but(CALIBRATION, saliency=TOTALS), "not the mean of total over counts"),
    "other shape": (but(CALIBRATION, counts=N_BOTH[:2]), "not the mean of total over counts"),
    "half a token": (but(CALIBRATION, tokens=np.array(1.5)), "tokens is not a count"),
    "objects": (but(CALIBRATION, total=np.array([[{}]], object)), "npz file cannot be read"),
}


@pytest.mark.parametrize(("arrays", "message"), BROKEN_NPZ.values(), ids=BROKEN_NPZ)
def test_each_fault_of_an_npz_is_told(path, arrays, message):
    save_npz(path, **arrays)
    with pytest.raises(SourceError, match=message) as caught:
        read_saliency(path)
    assert caught.value.file == str(path)


def test_halves_must_be_two(path):
    save_npz(path, **but(CALIBRATION, saliency_halves=np.ones((3, 3, 12))))
    with pytest.raises(SourceError, match="not two tables"):
        read_halves(path)
    save_npz(path, **but(CALIBRATION, saliency_halves=None))
    with pytest.raises(SourceError, match="no array saliency_halves"):
        read_halves(path)


PARTIAL = replace(SOURCE, sums={Sum.COUNTS: COUNTS}, tokens=None, top_k=None, origins=())


@pytest.mark.parametrize("table", [SOURCE, BOTH, PARTIAL], ids=["full", "merged", "counts only"])
def test_our_own_file_reads_back_and_has_one_form(path, table):
    write_saliency(path, table)
    assert_same(read_saliency(path), table)
    assert path.read_bytes() == saliency_bytes(read_saliency(path))
    backwards = replace(table, sums=dict(reversed(table.sums.items())))
    assert saliency_bytes(backwards) == path.read_bytes()
    arrays = load_file(path)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        str(name): values.tolist() for name, values in table.sums.items()
    }


def edited(**entries):
    whole = saliency_bytes(PARTIAL)
    n = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + n])
    header["__metadata__"] |= entries
    kept = {key: value for key, value in header["__metadata__"].items() if value is not None}
    text = json.dumps(header | {"__metadata__": kept}).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + n :]


def flipped():
    whole = bytearray(saliency_bytes(PARTIAL))
    whole[-8:] = np.float64(3).tobytes()
    return bytes(whole)


BROKEN_OWN = {
    "sums changed": (flipped(), "not those that the file was written with"),
    "cut": (saliency_bytes(PARTIAL)[:-8], "is cut"),
    "another version": (edited(format="expert-saliency/2"), "holds no saliency"),
    "another file": (edited(format=None), "holds no saliency"),
    "unknown label": (edited(honesty="honest"), "not of the form"),
    "no label": (edited(honesty=None), "not of the form"),
    "no JSON": (edited(tokens="["), "not of the form"),
    "no numbers": (edited(tokens='"ab"'), "not of the form"),
    "no origins": (edited(origins="[1]"), "not of the form"),
    "tokens of one layer": (edited(tokens="[1]"), "not given for each layer"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN_OWN.values(), ids=BROKEN_OWN)
def test_each_fault_of_our_own_file_is_told(path, content, message):
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        read_saliency(path)
    assert caught.value.file == str(path)


def test_only_files_that_tell_images_apart_can_leave_them_out(path):
    write_saliency(path, SOURCE)
    with pytest.raises(SourceError, match="does not tell text from images"):
        read_saliency(path, text_only=True)
