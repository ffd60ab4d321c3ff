"""Keep lists read back from checkpoints that were pruned."""

import numpy as np
import pytest

from pipeline.errors import Problems, QuantmillError, SourceError
from pipeline.experts.honesty import Honesty
from pipeline.experts.recover import SAMPLE_NBYTES, recover_keep
from pipeline.experts.routing import Routing
from pipeline.files import read_bytes
from pipeline.source.checkpoint import open_checkpoint
from tests.pipeline.tiny_shards import write_checkpoint

ROUTING = Routing(n_layers=3, n_experts=8, top_k=2)
KEPT = ((0, 2, 3, 7), (1, 2, 5, 6), (0, 1, 4, 5))
HIDDEN, FF = 6, 4


def base_tensors():
    random = np.random.default_rng(0)
    tensors = {"embed.weight": ("BF16", random.integers(0, 2**14, (5, HIDDEN)))}
    for layer in range(ROUTING.n_layers):
        gate = f"layers.{layer}.ffn.gate."
        tensors[f"{gate}weight"] = ("BF16", random.integers(0, 2**14, (8, HIDDEN)))
        for bias in ("bias", "bias_vl"):
            tensors[gate + bias] = ("F32", random.standard_normal(8))
        for expert in range(8):
            for part, shape in (("w1", (FF, HIDDEN)), ("w2", (HIDDEN, FF)), ("w3", (FF, HIDDEN))):
                name = f"layers.{layer}.ffn.experts.{expert}.{part}."
                tensors[f"{name}weight"] = ("I8", random.integers(0, 256, shape))
                tensors[f"{name}scale"] = ("F8_E8M0", random.integers(0, 255, (shape[0], 1)))
    return tensors


def prune(tensors, kept=KEPT):
    """What published tools leave: rows and experts of the kept ids, renumbered."""
    pruned = {}
    for name, (dtype, values) in tensors.items():
        words = name.split(".")
        if words[0] != "layers":
            pruned[name] = (dtype, values)
            continue
        ids = list(kept[int(words[1])])
        if words[3] == "gate":
            pruned[name] = (dtype, values[ids])
        elif int(words[4]) in ids:
            words[4] = str(ids.index(int(words[4])))
            pruned[".".join(words)] = (dtype, values)
    return pruned


def recover(tmp_path, base, pruned, routing=ROUTING, **words):
    folders = [
        write_checkpoint(tmp_path / name, {"model.safetensors": tensors})
        for name, tensors in (("base", base), ("pruned", pruned))
    ]
    return recover_keep(*map(open_checkpoint, folders), routing, **words)


def test_the_list_is_recovered_from_the_routers_rows(tmp_path):
    keep = recover(tmp_path, base_tensors(), prune(base_tensors()))
    assert keep.layers == KEPT
    assert (keep.n_experts, keep.top_k, keep.honesty) == (8, 2, Honesty.RECOVERED)
    (choice,) = keep.choices
    assert (choice.criterion, choice.tokens) == (None, None)
    assert [origin.name for origin in choice.origins] == ["routers of base", "routers of pruned"]


def test_a_model_without_image_biases_is_recovered_too(tmp_path):
    base = {name: t for name, t in base_tensors().items() if not name.endswith("bias_vl")}
    assert recover(tmp_path, base, prune(base)).layers == KEPT


def test_the_order_of_the_pruned_experts_does_not_matter(tmp_path):
    pruned = prune(base_tensors(), tuple(ids[::-1] for ids in KEPT))
    assert recover(tmp_path, base_tensors(), pruned).layers == KEPT


def test_only_routers_and_one_expert_a_layer_are_read(tmp_path):
    base = base_tensors()
    read = []

    def counted(path, offset, nbytes):
        read.append(nbytes)
        return read_bytes(path, offset, nbytes)

    recover(tmp_path, base, prune(base), read=counted)
    routers = 3 * (8 + 4) * (HIDDEN * 2 + 8)
    experts = 3 * 2 * (3 * HIDDEN * FF + 2 * FF + HIDDEN)
    assert sum(read) == routers + experts
    assert max(read) < SAMPLE_NBYTES


def copied(tensors, name, source, target):
    dtype, values = tensors[name]
    values = values.copy()
    values[target] = values[source]
    tensors[name] = (dtype, values)


def with_twin_rows(*, biases=(), experts=False):
    """A base whose experts 2 and 4 of layer 0 have the same row, as told more than that."""
    base = base_tensors()
    for name in ("weight", *biases):
        copied(base, f"layers.0.ffn.gate.{name}", 2, 4)
    if experts:
        for part in ("w1", "w2", "w3"):
            for half in ("weight", "scale"):
                name = f"layers.0.ffn.experts.{{}}.{part}.{half}"
                base[name.format(4)] = base[name.format(2)]
    return base


@pytest.mark.parametrize(
    ("biases", "experts"),
    [((), True), (("bias",), True), (("bias_vl",), False), (("bias", "bias_vl"), False)],
    ids=["both biases", "the image bias", "the text bias", "experts"],
)
def test_equal_rows_are_told_apart_by_biases_and_then_by_experts(tmp_path, biases, experts):
    base = with_twin_rows(biases=biases, experts=experts)
    assert recover(tmp_path, base, prune(base)).layers == KEPT


def test_experts_alike_in_every_byte_cannot_be_told_apart(tmp_path):
    base = with_twin_rows(biases=("bias", "bias_vl"), experts=True)
    with pytest.raises(SourceError, match=r"layer 0: row 1 .* can be several experts.*found 2, 4"):
        recover(tmp_path, base, prune(base))


def changed(tensors, name, place, value):
    dtype, values = tensors[name]
    values = values.copy()
    values[place] = value
    return tensors | {name: (dtype, values)}


def swapped(tensors, layer, one, other):
    """The experts of two places exchanged, the router left as it is."""
    names = {name: t for name, t in tensors.items() if f"layers.{layer}.ffn.experts.{one}." in name}
    for name in names:
        twin = name.replace(f".experts.{one}.", f".experts.{other}.")
        tensors = tensors | {name: tensors[twin], twin: tensors[name]}
    return tensors


GATE = "layers.1.ffn.gate."
PRUNED = prune(base_tensors())
BROKEN = {
    "a trained row": (
        changed(PRUNED, f"{GATE}weight", (2, 0), 9),
        "layer 1: row 2 of the pruned router is no row of the base's",
    ),
    "another bias": (
        changed(PRUNED, f"{GATE}bias", 3, 9),
        "layer 1: row 3 .* is expert 6's, but its biases are not",
    ),
    "another image bias": (
        changed(PRUNED, f"{GATE}bias_vl", 0, 9),
        "layer 1: row 0 .* is expert 1's, but its biases are not",
    ),
    "experts of another order": (swapped(PRUNED, 1, 1, 2), "layer 1: row 1 .*in that place is an"),
    "changed expert": (
        changed(PRUNED, "layers.2.ffn.experts.2.w2.scale", (0, 0), 255),
        "layer 2: row 2 .*in that place is another",
    ),
    "no image biases": (
        {name: t for name, t in PRUNED.items() if not name.endswith("bias_vl")},
        "layer 0 are stored differently; expected 20 bytes",
    ),
    "F32 routers": (
        PRUNED | {f"{GATE}weight": ("F32", np.ones((4, HIDDEN)))},
        "layer 1 are stored differently",
    ),
    "short bias": (PRUNED | {f"{GATE}bias": ("F32", np.ones(3))}, "bias is not one number for"),
    "no router": ({n: t for n, t in PRUNED.items() if n != f"{GATE}weight"}, "no such tensor"),
    "uneven": (prune(base_tensors(), (*KEPT[:2], (0, 1, 4))), "layer 2 keeps another number"),
}


@pytest.mark.parametrize(("pruned", "message"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_match_is_told(tmp_path, pruned, message):
    with pytest.raises(QuantmillError, match=message):
        recover(tmp_path, base_tensors(), pruned)


def test_one_expert_in_two_places_is_told(tmp_path):
    pruned = prune(base_tensors(), (KEPT[0], (1, 2, 2, 6), KEPT[2]))
    with pytest.raises(SourceError, match=r"layer 1: several rows .* same expert's; .*found 2"):
        recover(tmp_path, base_tensors(), with_experts(pruned))


def with_experts(pruned):
    """Give the second of two equal places its experts, which `prune` stored once."""
    for name in [name for name in pruned if "layers.1.ffn.experts.1." in name]:
        pruned[name.replace(".experts.1.", ".experts.2.")] = pruned[name]
    return pruned


def test_all_layers_that_do_not_match_are_told_at_once(tmp_path):
    pruned = changed(PRUNED, "layers.0.ffn.gate.weight", (1, 1), 9)
    pruned = changed(pruned, "layers.2.ffn.gate.weight", (0, 0), 9)
    with pytest.raises(Problems, match="2 problems") as caught:
        recover(tmp_path, base_tensors(), pruned)
    assert "layer 0: row 1" in str(caught.value)
    assert "layer 2: row 0" in str(caught.value)


def test_a_base_that_was_pruned_already_is_told(tmp_path):
    with pytest.raises(SourceError, match=r"another number of experts; .*expected 8; found 4"):
        recover(tmp_path, PRUNED, PRUNED)


def test_a_model_with_more_layers_than_the_checkpoint_is_told(tmp_path):
    with pytest.raises(SourceError, match=r"no such tensor; .*layers.3.ffn.gate.weight"):
        recover(tmp_path, base_tensors(), PRUNED, Routing(4, 8, 2))
