"""What a diagnosis says of a model's keys and tensors: sound ones pass, each fault is named."""

import pytest

from pipeline.diagnosis.diagnose import Verdict
from pipeline.diagnosis.finding import Severity
from pipeline.gguf.keys import ValueType, array, text, u32
from pipeline.model.layout import Layout
from pipeline.model.metadata.required import UNION_KEYS
from pipeline.quant.types import TYPES
from tests.gguf_forms import extra, tensor, v4_draft, v4_target, v41_draft, with_keys, with_tensors
from tests.pipeline.diagnosis.models import (
    FIVE,
    LATER,
    P,
    aligned,
    commands_of,
    examined,
    retyped,
    sound_model,
    texts,
)

AS_IS = "RunRecipe --recipe as-is --source model.gguf --layout fork"


@pytest.fixture(scope="module")
def fork():
    return sound_model(Layout.FORK)


@pytest.fixture(scope="module")
def mainline():
    return sound_model(Layout.MAINLINE)


@pytest.mark.parametrize("layout", Layout, ids=str)
def test_nothing_is_wrong_with_a_sound_target(layout):
    found = examined(sound_model(layout))
    assert found.verdict is Verdict.SOUND
    assert [finding.severity for finding in found.findings] == [Severity.NOTE], texts(found)
    assert "no draft" in texts(found)[0]
    assert "RunRecipe --recipe draft --source CHECKPOINT" in commands_of(found)[0]
    assert found.repair is None


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (v4_target, "V4-Flash, target"),
        (v4_draft, "V4-Flash, draft"),
        (v41_draft, "V4.1-Flash, dra"),
    ],
)
def test_other_forms_are_named(model, what):
    found = examined(model())
    assert found.verdict is Verdict.SOUND, texts(found)
    assert what in next(fact.value for fact in found.facts if fact.label == "what")


def test_published_file_without_the_union_keys_is_sound(fork):
    assert examined(with_keys(fork, without=UNION_KEYS)).verdict is Verdict.SOUND


def five_of_nine(model):
    return with_keys(model, without=[*FIVE, *LATER])


def v4_prefix(model):
    moved = [f"{P}block_count", f"{P}engram.primes", f"{P}expert_count"]
    entries = model.files[0].key_values
    renamed = [_renamed(entries[key], key.replace(P, "deepseek4.")) for key in moved]
    return with_keys(model, *renamed, without=moved)


def no_prefix(model):
    entry = model.files[0].key_values[f"{P}engram.pad_id"]
    return with_keys(model, _renamed(entry, "engram.pad_id"), without=[entry.key])


def _renamed(entry, key):
    return type(entry)(key, entry.type, entry.value, entry.element)


def other_offsets(model):
    sizes = model.files[0].key_values[f"{P}engram.primes"].value
    running = [sum(sizes[:n]) for n in range(len(sizes))]
    offsets = array(f"{P}engram.offsets", ValueType.UINT64, running)
    return with_keys(model, offsets, without=[f"{P}engram.head_offsets"])


def short_array(model):
    return with_keys(model, array(f"{P}swiglu_clamp_exp", ValueType.FLOAT32, [10.0] * 5))


def cut_in_one_layer(model):
    name = "blk.2.ffn_up_exps.weight"
    ne = model.tensors[name][1].ne
    return with_tensors(model, tensor(model, name, ne=(*ne[:2], ne[2] - 1)))


BROKEN = {
    "five of nine": (
        five_of_nine,
        Severity.STOPS,
        "5 of 9 engram keys are missing: deepseek41.engram.pad_id, ",
        AS_IS,
    ),
    "v4 prefix": (v4_prefix, Severity.STOPS, "3 keys under a wrong prefix", AS_IS),
    "no prefix": (no_prefix, Severity.STOPS, "1 key under a wrong prefix", AS_IS),
    "v4 architecture": (
        lambda m: with_keys(m, text("general.architecture", "deepseek4")),
        Severity.STOPS,
        "general.architecture is deepseek4",
        AS_IS,
    ),
    "offsets": (
        other_offsets,
        Severity.WRONG,
        "bucket offsets, per table",
        AS_IS,
    ),
    "quantized mix": (retyped(".hc_ffn_fn.", "Q8_0"), Severity.LOSES, "6 tensors of the hyper", ""),
    "bf16 mix": (retyped(".hc_attn_fn.", "BF16"), Severity.LOSES, "stored as BF16", ""),
    "router": (retyped(".ffn_gate_inp.", "Q4_0"), Severity.LOSES, "router matrices", ""),
    "q and k": (retyped(".engram_q.", "Q8_0"), Severity.LOSES, "engram q/k vectors", ""),
    "norms": (retyped("attn_norm.", "Q8_0"), Severity.STOPS, "instead of F32", ""),
    "half norms": (retyped("attn_norm.", "F16"), Severity.STOPS, "instead of F32", AS_IS),
    "waste": (retyped("ffn_down_exps.", "Q5_K"), Severity.WASTES, "6 stacks in Q5_K", ""),
    "extra": (
        lambda m: with_tensors(m, extra("output_hc_fn.weight")),
        Severity.STOPS,
        "1 tensor too many",
        AS_IS,
    ),
    "missing": (
        lambda m: with_tensors(m, without=["blk.2.indexer.k_norm.weight"]),
        Severity.STOPS,
        "1 tensor missing",
        "--recipe alike.toml",
    ),
    "mtp inside": (
        lambda m: with_tensors(m, extra("blk.6.attn_norm.weight", (64,))),
        Severity.STOPS,
        "A DSpark stage is no layer",
        AS_IS,
    ),
    "short array": (
        short_array,
        Severity.STOPS,
        "another length than the model",
        "--recipe alike.toml",
    ),
    "silent default": (
        lambda m: with_keys(m, without=[f"{P}rope.scaling.factor"]),
        Severity.WRONG,
        "without a word",
        "--recipe alike.toml",
    ),
    "other layout's keys": (
        lambda m: with_keys(m, u32(f"{P}ple.ngram_size", 4)),
        Severity.WRONG,
        "must not be there",
        AS_IS,
    ),
    "key type": (
        lambda m: with_keys(m, array(f"{P}engram.primes", ValueType.INT64, [1])),
        Severity.STOPS,
        "has a type that loaders refuse",
        AS_IS,
    ),
    "alignment": (lambda m: aligned(m, 4096), Severity.NOTE, "4,096 instead of 32", AS_IS),
    "one layer cut": (cut_in_one_layer, Severity.STOPS, "3 in 1 tensor", "CutExperts"),
    "key not cut": (
        lambda m: with_keys(m, u32(f"{P}expert_count", 8)),
        Severity.STOPS,
        "expert_count says 8",
        "The cut did not reach the key",
    ),
}


@pytest.mark.parametrize(("change", "severity", "words", "mend"), BROKEN.values(), ids=BROKEN)
def test_a_fault_is_named_and_mended(fork, change, severity, words, mend):
    found = examined(change(fork))
    named = [f for f in found.findings if words in f.what]
    assert [f.severity for f in named] == [severity], texts(found)
    assert named[0].mend is not None
    told = " ".join((named[0].mend.what, *named[0].mend.commands))
    assert mend in told
    assert (found.verdict is Verdict.FAULTY) is severity.is_fault


def test_engines_words_are_told(fork):
    found = examined(five_of_nine(fork))
    assert found.findings[0].engine_says == "key not found in model: deepseek41.engram.pad_id"


def test_no_second_finding_for_one_fault(fork):
    """The missing keys are named once, and what follows from them not at all."""
    found = examined(five_of_nine(fork))
    assert len([f for f in found.findings if f.severity.is_fault]) == 1, texts(found)


def test_right_keys_beside_misplaced_ones_are_used(fork):
    found = examined(v4_prefix(fork))
    assert len([f for f in found.findings if f.severity.is_fault]) == 1, texts(found)


def test_waste_counts_the_bytes_that_mxfp4_saves(fork):
    changed = retyped("ffn_down_exps.", "Q8_0")(fork)
    stacks = [t for n, (_, t) in changed.tensors.items() if "ffn_down_exps" in n]
    n_weights = sum(t.ne[0] * t.ne[1] * t.ne[2] for t in stacks)
    grown = with_tensors(
        changed,
        *(tensor(changed, t.name, nbytes=t.ne[0] * t.ne[1] * t.ne[2] // 32 * 34) for t in stacks),
    )
    found = next(f for f in examined(grown).findings if f.severity is Severity.WASTES)
    assert f"take {n_weights // 32 * (34 - 17):,} bytes more" in found.what


def test_waste_in_some_layers_grafts_these_only(fork):
    names = [f"blk.{n}.ffn_down_exps.weight" for n in (0, 1, 4)]
    changed = with_tensors(
        fork, *(tensor(fork, n, type=TYPES["Q8_0"], nbytes=10**6) for n in names)
    )
    repair = examined(changed).repair
    assert repair is not None
    assert 'sub_roles = ["routed_down"]\nlayers = "0-1,4"\ntype = "MXFP4"' in repair.recipe
    assert (
        "--recipe mend.toml --source model.gguf --layout fork --graft original=" in repair.command
    )


def test_ik_types_tell_the_engines(fork, mainline):
    def engines(model):
        return next(f.value for f in examined(model).facts if f.label == "engines")

    change = retyped("ffn_up_exps.", "IQ3_K")
    assert engines(change(fork)) == "ik_llama.cpp since pull request 2455"
    assert engines(change(mainline)).startswith("none")
    assert any("Relayout" in command for command in commands_of(examined(change(mainline))))


def test_a_pruned_file_says_so(fork):
    cut = with_keys(fork, text("reap.method", "REAP"))
    found = examined(retyped(".ffn_gate_inp.", "Q8_0")(cut))
    assert any(fact.label == "pruned" for fact in found.facts)
    told = next(f for f in found.findings if "router" in f.what)
    assert "CutCheckpoint" in told.mend.what


def test_mainline_file_without_a_candidate_layer_runs_wrong(mainline):
    key = f"{P}attention.indexer.candidate_source_layer"
    found = examined(with_keys(mainline, without=[key]))
    assert found.verdict is Verdict.FAULTY
    assert [f.where for f in found.findings if f.severity.is_fault] == [(key,)]


@pytest.mark.parametrize("name", ["ple.layers", "attention.kv_source_layers"])
def test_either_sign_of_small_lists_passes(mainline, name):
    entry = mainline.files[0].key_values[P + name]
    unsigned = array(entry.key, ValueType.UINT32, entry.value)
    assert examined(with_keys(mainline, unsigned)).verdict is Verdict.SOUND


def without_candidates(model):
    names = [k for k in model.files[0].key_values if "candidate" in k]
    return with_keys(five_of_nine(model), without=names)


def test_no_run_is_promised_that_is_refused(fork):
    found = examined(without_candidates(fork))
    mend = next(f.mend for f in found.findings if "5 of 9" in f.what)
    assert "does not say how candidate blocks are selected" in mend.what
    assert "--recipe alike.toml" in mend.commands[0]


@pytest.mark.parametrize("change", [pair[0] for pair in BROKEN.values()], ids=BROKEN)
def test_no_other_recipe_is_offered(fork, change):
    assert not any("--recipe native" in command for command in commands_of(examined(change(fork))))
