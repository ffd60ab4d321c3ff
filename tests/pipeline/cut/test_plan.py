"""What a cut changes, what it leaves alone, and what cannot be cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.budget import budget_of, plan_items
from pipeline.cut.earlier import told_keep
from pipeline.cut.file_plan import plan_of_file
from pipeline.cut.plan import carried_plan, cut_plan
from pipeline.errors import FormatError, PlanError, Problems
from pipeline.experts.keep import compose
from pipeline.experts.keep_json import keep_digest
from pipeline.experts.keys import keep_keys
from pipeline.gguf.header import FILLER_KEY
from pipeline.gguf.keys import KeyValue, ValueType, array, text, u32
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.model.layout import Layout
from pipeline.model.roles import Role
from pipeline.model.targets.trunk import target_tensors
from pipeline.plan import Plan, make_plan
from tests.gguf_builder import (
    draft_plan,
    full_config,
    small_keys,
    small_plan,
    small_v4_config,
    write_hollow,
)
from tests.gguf_forms import extra, tensor, with_keys, with_tensors
from tests.pipeline.cut.models import CONFIG, N_EXPERTS, PER_EXPERT, keep_of, plan_of
from tests.pipeline.released_plans import released_plan

P = "deepseek41."


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> GgufModel:
    return read_model(write_hollow(plan_of(Layout.FORK), tmp_path_factory.mktemp("fork")))


def cut(model: GgufModel, keep=None) -> Plan:
    return cut_plan(plan_of_file(model), keep or keep_of(5), name="cut")


@pytest.mark.parametrize("layout", Layout, ids=str)
def test_only_tensors_with_an_entry_per_expert_lose_entries(tmp_path, layout):
    whole = plan_of_file(read_model(write_hollow(plan_of(layout), tmp_path)))
    made = cut_plan(whole, keep_of(5), name="cut")
    assert [t.name for t in made.tensors] == [t.name for t in whole.tensors]
    for before, after in zip(whole.tensors, made.tensors, strict=True):
        assert (before.type, before.shard) == (after.type, after.shard)
        if before.name in PER_EXPERT:
            assert after.target.shape == (5, *before.target.shape[1:])
            assert after.nbytes * N_EXPERTS == before.nbytes * 5
        else:
            assert after.target == before.target
    assert made.config == replace(whole.config, n_experts=5)


def test_files_stay_one_by_one_and_unchanged_ones_are_the_same(model):
    whole, made = plan_of_file(model), cut(model)
    assert len(made.shards) == len(whole.shards) == 6
    for before, after in zip(whole.shards, made.shards, strict=True):
        assert after.file_name == before.file_name.replace("small-", "cut-")
        assert (after.no, after.kind) == (before.no, before.kind)
        is_same = after.kind == "engram"
        assert after == replace(before, file_name=after.file_name) or not is_same
        assert (after.existing is before.existing) is is_same
        assert after.nbytes == before.nbytes or not is_same


def test_metadata_differ_in_the_count_and_in_what_is_told_of_the_cut(model):
    keep, made = keep_of(5), cut(model)
    before = {key: entry for key, entry in model.key_values.items() if key != FILLER_KEY}
    split = [entry for key, entry in before.items() if key.startswith("split.")]
    expected = [
        u32(entry.key, 5) if entry.key == f"{P}expert_count" else entry
        for entry in before.values()
        if entry not in split
    ]
    assert list(made.key_values) == [*expected, *keep_keys(keep)]


def test_nothing_changes_where_no_expert_goes(model):
    whole = plan_of_file(model)
    assert cut(model, keep_of(N_EXPERTS)) == carried_plan(whole, name="cut")
    assert all(shard.existing for shard in cut(model, keep_of(N_EXPERTS)).shards)


def test_a_second_cut_tells_the_first_models_experts(model, tmp_path):
    first, second = keep_of(5), keep_of(3, n_experts=5)
    once = read_model(write_hollow(cut(model, first), tmp_path / "once"))
    twice = cut(once, second)
    direct = cut(model, compose(first, second))
    count = {entry.key: entry.value for entry in twice.key_values}
    straight = {entry.key: entry.value for entry in direct.key_values}
    differing = {key for key in straight if count[key] != straight[key]}
    assert count.keys() == straight.keys()
    # How a list came about before is known by its digest only.
    assert differing == {"quantmill.experts.keep_sha256"}
    assert count["quantmill.experts.source_count"] == N_EXPERTS
    told = told_keep(plan_of_file(once), second)
    assert told.layers == compose(first, second).layers
    assert [choice.criterion for choice in told.choices] == ["reap", "reap"]
    assert count["quantmill.experts.keep_sha256"] == keep_digest(told)


DAMAGED = {
    "ids of fewer layers": array("quantmill.experts.kept", ValueType.INT32, [0, 1, 2]),
    "ids that are none": array("quantmill.experts.kept", ValueType.STRING, ["a"] * 30),
    "no count": text("quantmill.experts.source_count", "many"),
    "unlike lists": array("quantmill.experts.honesty", ValueType.STRING, ["proxy", "proxy"]),
    "an unknown label": array("quantmill.experts.honesty", ValueType.STRING, ["best"]),
    "no list": text("quantmill.experts.criterion", "reap"),
}


@pytest.mark.parametrize("entry", DAMAGED.values(), ids=DAMAGED)
def test_damaged_words_of_an_earlier_cut_are_not_built_on(model, tmp_path, entry):
    once = read_model(write_hollow(cut(model), tmp_path))
    with pytest.raises(FormatError, match=r"quantmill\.experts\.\* are damaged"):
        cut(with_keys(once, entry), keep_of(3, n_experts=5))


def misfit(**changes):
    return lambda model: (model, keep_of(5, **changes))


def keyed(*entries: KeyValue):
    return lambda model: (with_keys(model, *entries), keep_of(4))


def added(name, ne, type_name="F32"):
    return lambda model: (with_tensors(model, extra(name, ne, type_name)), keep_of(5))


def changed(name, **changes):
    return lambda model: (with_tensors(model, tensor(model, name, **changes)), keep_of(5))


REFUSED = {
    "a list with fewer layers": (misfit(n_layers=5), PlanError, "has no layer 5"),
    "a list with more layers": (misfit(n_layers=7), PlanError, "goes beyond the model: layer 6"),
    "a list for more experts": (
        misfit(n_experts=8),
        PlanError,
        "another number of experts in a layer; expected 7; found 8",
    ),
    "a list for another top-k": (
        misfit(top_k=3),
        PlanError,
        "another number of experts used by a token; expected 2; found 3",
    ),
    "groups that do not divide": (
        keyed(u32(f"{P}expert_group_count", 3)),
        PlanError,
        "unlike numbers of experts in its 3 groups",
    ),
    "a table of experts by token": (
        added("blk.0.ffn_gate_tid2eid.weight", (6, 48), "I32"),
        PlanError,
        "look them up by token id.*tensor blk.0.ffn_gate_tid2eid.weight",
    ),
    "an unknown tensor with as many entries": (
        added("blk.0.exp_probs_x.bias", (N_EXPERTS,)),
        FormatError,
        "not known whether they are the experts'; tensor blk.0.exp_probs_x.bias",
    ),
    "a router of another size": (
        changed("blk.2.ffn_gate_inp.weight", ne=(64, 8)),
        FormatError,
        "entry of its own for each expert; tensor blk.2.ffn_gate_inp.weight; expected 7",
    ),
    "a bias in blocks": (
        added("blk.0.ffn_up_exps.bias", (N_EXPERTS,), "Q8_0"),
        FormatError,
        "entry of its own for each expert; tensor blk.0.ffn_up_exps.bias",
    ),
}


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(model, make, kind, message):
    changed, keep = make(model)
    with pytest.raises(kind, match=message):
        cut(changed, keep)


def test_several_misfits_are_told_together(model):
    with pytest.raises(Problems, match="2 problems"):
        cut(model, keep_of(5, n_experts=8, top_k=3))


def test_a_hash_routed_model_and_a_draft_are_refused(tmp_path):
    v4 = read_model(write_hollow(small_plan(Layout.MAINLINE, small_v4_config()), tmp_path / "v4"))
    with pytest.raises(PlanError, match="look them up by token id"):
        cut(v4, keep_of(3, n_experts=4))
    draft = read_model(write_hollow(draft_plan(CONFIG), tmp_path / "draft"))
    with pytest.raises(PlanError, match="Name the target"):
        cut(draft, keep_of(2, n_experts=3, n_layers=3))


def test_what_else_may_have_an_entry_per_expert_is_cut_too(model):
    names = {
        "blk.1.ffn_gate_up_exps.weight": (64, 64, N_EXPERTS),
        "blk.1.ffn_up_exps.scale": (N_EXPERTS,),
        "blk.1.ffn_down_exps.input_scale": (N_EXPERTS,),
        "blk.1.ffn_gate_exps.bias": (32, N_EXPERTS),
    }
    more = with_tensors(model, *(extra(name, ne) for name, ne in names.items()))
    single = extra("blk.2.ffn_up_exps.scale", (1,))
    shapes = {t.name: t.target.shape for t in cut(with_tensors(more, single)).tensors}
    for name, ne in names.items():
        assert shapes[name] == (5, *ne[::-1][1:])
    assert shapes[single.name] == (1,)


@pytest.mark.parametrize("layout", Layout, ids=str)
def test_tensors_that_are_as_long_by_chance_stay(tmp_path, layout):
    """The gates of the engram have a column per residual stream: here as many as experts."""
    plan = small_plan(layout)
    assert plan.config.n_experts == plan.config.hc_mult == 4
    made = cut(read_model(write_hollow(plan, tmp_path)), keep_of(3, n_experts=4))
    before = {t.name: t.target.shape for t in plan.tensors}
    assert {t.name for t in made.tensors if t.target.shape != before[t.name]} == PER_EXPERT


def test_equal_groups_may_be_cut_equally(model):
    grouped = with_keys(model, u32(f"{P}expert_group_count", 7))
    assert cut(grouped, keep_of(N_EXPERTS)).config.n_experts == N_EXPERTS
    with pytest.raises(PlanError, match="in its 7 groups"):
        cut(grouped)


@pytest.mark.parametrize(
    "layout", [Layout.FORK, pytest.param(Layout.MAINLINE, marks=pytest.mark.slow)], ids=str
)
def test_the_published_q3_model_at_full_size(tmp_path, layout):
    published, config = released_plan("published-q3_k_m", layout), full_config()
    plan = make_plan(
        name="full",
        form=published.form,
        config=config,
        targets=target_tensors(config, layout),
        types={t.name: t.type for t in published.tensors},
        key_values=small_keys(config, layout),
        shard_nbytes=published.shard_nbytes,
    )
    whole = plan_of_file(read_model(write_hollow(plan, tmp_path)))
    before = budget_of("", plan_items(whole))
    assert before.line(Role.ROUTED).nbytes == 258_767_585_280
    for n_kept, routed in ((256, 172_511_723_520), (320, 215_639_654_400)):
        keep = keep_of(n_kept, n_experts=384, n_layers=40, top_k=6)
        made = cut_plan(whole, keep, name="full")
        after = budget_of("", plan_items(made))
        assert after.line(Role.ROUTED).nbytes == routed
        assert routed * 384 == 258_767_585_280 * n_kept
        # A token reads as many experts as before; the router has fewer rows.
        read = (before.line(Role.ROUTED).per_token, after.line(Role.ROUTED).per_token)
        assert read == (4_043_243_520, 4_043_243_520)
        assert before.per_token - after.per_token == 40 * (384 - n_kept) * (5120 * 2 + 4)
        for shard in made.shards:
            assert (shard.existing is not None) is (shard.kind == "engram")
