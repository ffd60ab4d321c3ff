"""Frequencies out of an importance matrix, and the stand-in for norms."""

import numpy as np
import pytest

from pipeline.errors import FormatError, SourceError
from pipeline.experts.criterion import Criterion, criteria_of, scores
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.imatrix import down_input_squares, with_ean_rms
from pipeline.experts.importers.open import read_saliency
from pipeline.experts.merge import merge
from pipeline.experts.origin import origin_of
from pipeline.experts.saliency import Sum
from pipeline.gguf.keys import text
from tests.gguf_builder import file_bytes
from tests.pipeline.experts.tables import ROUTING, random_table, table

COUNTS = random_table(3).sums[Sum.COUNTS]
N_TOKENS = 40
N_HIDDEN = 6
STACKS = ("down", "up", "gate")
KIND = text("general.type", "imatrix")


def squares(layer):
    return np.random.default_rng(layer).random((ROUTING.n_experts, N_HIDDEN)).astype(np.float32)


def matrices(n_layers=ROUTING.n_layers, stacks=STACKS, routers=True):
    """What llama.cpp's imatrix tool stores of a model's experts and routers: name -> F32 matrix."""
    tensors = {}
    for layer in range(n_layers):
        for stack in stacks:
            name = f"blk.{layer}.ffn_{stack}_exps.weight"
            tensors[f"{name}.in_sum2"] = squares(layer)
            tensors[f"{name}.counts"] = COUNTS[layer].reshape(-1, 1)
        if routers:
            name = f"blk.{layer}.ffn_gate_inp.weight"
            tensors[f"{name}.in_sum2"] = np.ones((1, 5))
            tensors[f"{name}.counts"] = np.array([[N_TOKENS]])
    return tensors


def write(path, tensors, keys=(KIND,)):
    rows = [(name, array.shape[::-1], "F32") for name, array in tensors.items()]
    contents = {name: array.astype("<f4").tobytes() for name, array in tensors.items()}
    path.write_bytes(file_bytes(keys, rows, contents))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "imatrix"


def test_counts_are_the_exact_frequencies(path):
    read = read_saliency(write(path, matrices()))
    np.testing.assert_array_equal(read.sums[Sum.COUNTS], COUNTS)
    assert (read.kind, read.honesty) == ("imatrix", Honesty.PROXY)
    assert (read.tokens, read.top_k) == ((N_TOKENS,) * 3, 2)
    assert read.origins == (origin_of(path),)
    assert criteria_of(read) == (Criterion.FREQUENCY,)
    with pytest.raises(SourceError, match=r"reap needs sums.*ranked by frequency"):
        scores(read, Criterion.REAP)


@pytest.mark.parametrize("stacks", [("down",), ("gate_up", "down"), ("up",)])
def test_one_stack_of_a_layer_is_enough(path, stacks):
    read = read_saliency(write(path, matrices(stacks=stacks)))
    np.testing.assert_array_equal(read.sums[Sum.COUNTS], COUNTS)


def test_without_routers_the_tokens_are_not_known(path):
    read = read_saliency(write(path, matrices(routers=False)))
    assert (read.tokens, read.top_k) == (None, None)


def test_counts_beyond_exact_floats_are_read_but_not_added_up(path):
    tensors = matrices(n_layers=1)
    for name in tensors:
        if name.endswith("counts"):
            tensors[name] = tensors[name] * 1e6 + 1
    read = read_saliency(write(path, tensors))
    assert read.top_k is None


def replaced(changes):
    return matrices() | changes


DOWN, ROUTER = "blk.1.ffn_down_exps.weight.counts", "blk.1.ffn_gate_inp.weight.counts"
BROKEN = {
    "unlike stacks": (
        replaced({DOWN: COUNTS[1].reshape(-1, 1) + 1}),
        "stacks of layer 1 were used by different tokens",
    ),
    "other tokens": (replaced({ROUTER: np.array([[39]])}), "do not add up to the same number"),
    "fraction": (
        {name: array + 0.5 for name, array in matrices(routers=False).items()},
        "counts of layer 0, expert 0 is not a whole number",
    ),
    "a hole": (
        {name: array for name, array in matrices().items() if not name.startswith("blk.1.")},
        "nothing about layer 1",
    ),
    "a draft beside": (
        replaced({"blk.3.ffn_down_exps.weight.counts": np.ones((5, 1))}),
        "counts of experts of layer 3 is not one number for each expert",
    ),
    "no experts": ({"blk.0.attn_q.weight.counts": np.ones((1, 1))}, "nothing about layer 0"),
}


@pytest.mark.parametrize(("tensors", "message"), BROKEN.values(), ids=BROKEN)
def test_each_fault_is_told(path, tensors, message):
    write(path, tensors)
    with pytest.raises(SourceError, match=message) as caught:
        read_saliency(path)
    assert caught.value.file == str(path)


def test_only_f32_of_an_importance_matrix_is_read(path):
    with pytest.raises(SourceError, match=r"no importance matrix.*found model"):
        read_saliency(write(path, matrices(), keys=(text("general.type", "model"),)))
    row = (DOWN.replace("1", "0"), (1, 12), "BF16")
    path.write_bytes(file_bytes((KIND,), [row], {row[0]: bytes(24)}))
    with pytest.raises(SourceError, match="F32 matrices only"):
        read_saliency(path)
    path.write_bytes(write(path, matrices()).read_bytes()[:-64])
    with pytest.raises(FormatError, match="cut short"):
        read_saliency(path)


def test_inputs_of_the_down_matrices_are_read_layer_by_layer(path):
    write(path, matrices())
    for layer in range(3):
        np.testing.assert_array_equal(down_input_squares(path, layer), squares(layer))
    with pytest.raises(SourceError, match="no inputs of layer 3's experts"):
        down_input_squares(path, 3)


def test_the_stand_in_is_the_root_of_the_mean_square_where_coordinates_do_not_mix():
    """One hidden coordinate a token: then the columns of the matrix cannot interfere."""
    random = np.random.default_rng(0)
    n_experts, n_hidden, n_out = 4, N_HIDDEN, 9
    down = random.standard_normal((n_experts, n_out, n_hidden))
    squared, counts, norms = np.zeros((4, n_hidden)), np.zeros(4), [[] for _ in range(4)]
    for token in range(60):
        expert = token % 3  # the last one is never used
        hidden = np.zeros(n_hidden)
        hidden[random.integers(n_hidden)] = random.standard_normal()
        squared[expert] += hidden**2
        counts[expert] += 1
        norms[expert].append(np.linalg.norm(down[expert] @ hidden))
    columns = (down**2).sum(axis=1)
    proxy = with_ean_rms(table({"counts": [counts]}), [squared.astype(np.float32)], [columns])
    expected = [np.sqrt(np.mean(np.square(n))) if n else 0 for n in norms]
    np.testing.assert_allclose(scores(proxy, Criterion.EAN_MEAN)[0], expected, rtol=1e-6)
    means = [np.mean(n) if n else 0 for n in norms]
    assert (scores(proxy, Criterion.EAN_MEAN)[0] >= np.array(means) - 1e-9).all()


def test_the_stand_in_bears_its_name_and_cannot_pass_for_reap(path):
    read = read_saliency(write(path, matrices()))
    columns = [np.ones((ROUTING.n_experts, N_HIDDEN))] * 3
    proxy = with_ean_rms(read, map(squares, range(3)), columns)
    assert (proxy.kind, proxy.honesty) == ("proxy-ean-rms-imatrix", Honesty.PROXY)
    assert (proxy.origins, proxy.tokens, proxy.top_k) == (read.origins, read.tokens, read.top_k)
    assert Criterion.REAP not in criteria_of(proxy)
    merged = merge([proxy, random_table(1)])
    assert merged.honesty is Honesty.PROXY
    assert "proxy-ean-rms-imatrix" in merged.kind


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(12, 6)] * 2, "layer 2 lacks its inputs"),
        ([(12, 6), (12, 5), (12, 6)], "layer 1 do not fit"),
        ([(11, 6)] * 3, "layer 0 do not fit"),
        ([(12, 6)] * 4, "layer 3 do not fit"),
    ],
)
def test_matrices_of_another_model_are_refused(layers, message):
    source = table({"counts": COUNTS})
    sizes = [np.ones((shape[0], 6), np.float32) for shape in layers]
    with pytest.raises(SourceError, match=message):
        with_ean_rms(source, sizes, [np.ones(shape) for shape in layers])
