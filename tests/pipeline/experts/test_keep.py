"""Rules of keep lists, cuts after cuts, the JSON form and its digest."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import OutputError, PlanError, Problems, SourceError
from pipeline.experts.choice import Choice
from pipeline.experts.criterion import Criterion, scores
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList, check_fits, compose
from pipeline.experts.keep_json import keep_digest, keep_spec, read_keep_json, write_keep
from pipeline.experts.origin import Origin
from pipeline.experts.routing import Routing, routing_of
from pipeline.experts.select import best, select
from tests.pipeline.experts.tables import ROUTING, random_table, write_json
from tests.pipeline.released_plans import released_config

CHOICE = Choice(
    kind="test",
    honesty=Honesty.TRUE_GATE,
    criterion=Criterion.REAP,
    n_experts=8,
    n_kept=3,
    origins=(Origin("0" * 64, "sums ü.pt"),),
    tokens=100,
    forced=((0, 7),),
    protected=((1, 2), (1, 5)),
)


def keep(*layers, n_experts=8, top_k=2, choices=(CHOICE,)) -> KeepList:
    return KeepList(n_experts, top_k, tuple(map(tuple, layers)), tuple(choices))


GOOD = keep((0, 3, 7), (1, 2, 5))

BROKEN = {
    "twice": ([(0, 3, 3), (1, 2, 5)], "layer 0 keeps an expert twice; found 3"),
    "beyond": ([(0, 3, 7), (1, 2, 8)], "layer 1 keeps .* does not have; expected 0 to 7; found 8"),
    "negative": ([(-1, 3, 7), (1, 2, 5)], "layer 0 keeps .* does not have; .*found -1"),
    "too few": ([(3,), (4,)], "layer 0 keeps fewer experts than a token uses; expected at least 2"),
    "uneven": ([(0, 1, 2), (1, 2, 5), (0, 1)], "layer 2 keeps another number.*expected 3; found 2"),
    "descending": ([(3, 0, 7), (1, 2, 5)], "layer 0 keeps are not in ascending order"),
    "nothing": ([], "is empty"),
}


@pytest.mark.parametrize(("layers", "message"), BROKEN.values(), ids=BROKEN)
def test_each_broken_rule_names_layer_and_ids(layers, message):
    with pytest.raises((PlanError, Problems), match=message):
        keep(*layers)


def test_all_broken_layers_are_told_at_once():
    with pytest.raises(Problems, match="2 problems") as caught:
        keep((0, 0, 1), (5, 6, 9))
    assert "layer 0 keeps an expert twice" in str(caught.value)
    assert "layer 1 keeps an expert that the model does not have" in str(caught.value)


def test_a_list_without_a_history_is_refused():
    with pytest.raises(PlanError, match="how it was chosen"):
        keep((0, 1), choices=())


MISFITS = {
    "missing layer": (Routing(3, 8, 2), "no layer 2; expected 3 layers; found 2"),
    "beyond the model": (Routing(1, 8, 2), "layer 1 is not in its trunk"),
    "other experts": (Routing(2, 9, 2), "number of experts in a layer; expected 9; found 8"),
    "other top-k": (Routing(2, 8, 3), "experts used by a token; expected 3; found 2"),
}


@pytest.mark.parametrize(("routing", "message"), MISFITS.values(), ids=MISFITS)
def test_a_list_of_another_model_is_refused(routing, message):
    check_fits(GOOD, Routing(2, 8, 2))
    with pytest.raises(PlanError, match=message):
        check_fits(GOOD, routing)


def test_the_released_model_has_the_routing_of_its_config():
    config = released_config()
    assert routing_of(config) == Routing(40, 384, 6, 1.5)
    assert routing_of(replace(config, norm_weights=False)).gate_sum is None
    with pytest.raises(PlanError, match=r"look them up by token id.*found 3 layers"):
        routing_of(replace(config, n_hash_layers=3))


@settings(max_examples=40)
@given(seed=st.integers(0, 99), n_first=st.integers(3, 12), data=st.data())
def test_a_cut_after_a_cut_is_the_direct_cut(seed, n_first, data):
    n_second = data.draw(st.integers(2, n_first))
    table = random_table(seed)
    first = select(table, Criterion.REAP, n_first, ROUTING).keep
    left = np.take_along_axis(scores(table, Criterion.REAP), np.array(first.layers), 1)
    second = KeepList(n_first, ROUTING.top_k, best(left, n_second), first.choices)
    direct = select(table, Criterion.REAP, n_second, ROUTING).keep
    assert compose(first, second).layers == direct.layers


def test_composing_keeps_both_histories_and_the_weakest_label():
    listed = replace(CHOICE, honesty=Honesty.LIST_ONLY, criterion=None, n_experts=3, n_kept=2)
    second = keep((0, 2), (1, 2), n_experts=3, choices=(listed,))
    both = compose(GOOD, second)
    assert both.layers == ((0, 7), (2, 5))
    assert (both.n_experts, both.n_kept) == (8, 2)
    assert both.choices == (CHOICE, listed)
    assert both.honesty is Honesty.LIST_ONLY


def test_a_second_cut_must_be_of_what_the_first_leaves():
    with pytest.raises(PlanError, match="number of experts in a layer; expected 3; found 8"):
        compose(GOOD, GOOD)
    with pytest.raises(PlanError, match="no layer 1"):
        compose(GOOD, keep((0, 1), n_experts=3))


def test_a_written_list_reads_back(tmp_path):
    path = tmp_path / "a folder/keep.json"
    write_keep(path, GOOD)
    assert read_keep_json(path) == GOOD
    first = path.read_bytes()
    write_keep(path, read_keep_json(path))
    assert path.read_bytes() == first
    with pytest.raises(OutputError):
        write_keep(path / "below", GOOD)


def test_the_digest_is_of_the_list_and_its_history_but_not_of_file_names():
    renamed = replace(CHOICE, origins=(Origin("0" * 64, "another name"),))
    assert keep_digest(keep(*GOOD.layers, choices=(renamed,))) == keep_digest(GOOD)
    others = [
        keep((0, 3, 6), (1, 2, 5)),
        keep(*GOOD.layers, n_experts=9),
        keep(*GOOD.layers, top_k=3),
        keep(*GOOD.layers, choices=(CHOICE, CHOICE)),
        *(
            keep(*GOOD.layers, choices=(replace(CHOICE, **change),))
            for change in (
                {"honesty": Honesty.PROXY},
                {"criterion": Criterion.EAN_SUM},
                {"kind": "other"},
                {"tokens": None},
                {"forced": ()},
                {"protected": ()},
                {"origins": (Origin("1" * 64, "sums ü.pt"),)},
            )
        ),
    ]
    digests = {keep_digest(other) for other in [GOOD, *others]}
    assert len(digests) == 1 + len(others)


def test_the_digest_stays_what_it_was():
    """Files are named by it: a change of the form must be a change of its version."""
    assert keep_digest(GOOD) == ("166e4c397e867f846f7ce8dc0cbedb869c9cc26236d316cead0471fc3923ff6a")


def changes(**entries):
    return keep_spec(GOOD) | entries


def with_choice(**entries):
    return changes(choices=[keep_spec(GOOD)["choices"][0] | entries])


DAMAGED = {
    "another format": (changes(format="expert-keep/2"), "another format; .*expected expert-keep/1"),
    "no format": ({"layers": {}}, "another format"),
    "no layers": ({"format": "expert-keep/1"}, "not of the form"),
    "a hole": (changes(layers={"0": [0, 3, 7], "2": [1, 2, 5]}), "without a gap"),
    "no ids": (changes(layers={"0": [0, 3, True], "1": [1, 2, 5]}), "True is not a whole number"),
    "fraction": (changes(layers={"0": [0, 3, 7.0], "1": [1, 2, 5]}), "7.0 is not a whole number"),
    "text": (changes(layers={"0": "037", "1": [1, 2, 5]}), "is not a list"),
    "unknown criterion": (with_choice(criterion="reap_l2"), "reap_l2"),
    "unknown label": (with_choice(honesty="true"), "not of the form"),
    "label of the wrong kind": (with_choice(honesty=["true-gate"]), "is not text"),
    "no choices": (changes(choices=[]), "is empty"),
    "a triple": (with_choice(forced=[[1, 2, 3]]), "not of the form"),
    "prettier label": (changes(honesty="recovered"), "contradicts itself in honesty"),
    "other count": (changes(keep_experts=4), "contradicts itself in keep_experts"),
    "twice": (changes(layers={"0": [0, 3, 3], "1": [1, 2, 5]}), "layer 0 keeps an expert twice"),
}


@pytest.mark.parametrize(("entries", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_list_is_refused_with_its_file(tmp_path, entries, message):
    path = write_json(tmp_path / "keep.json", entries)
    with pytest.raises((SourceError, PlanError), match=message) as caught:
        read_keep_json(path)
    assert caught.value.file == str(path)


def test_the_written_form_is_plain_json_that_others_can_read(tmp_path):
    write_keep(tmp_path / "keep.json", GOOD)
    entries = json.loads((tmp_path / "keep.json").read_bytes())
    assert entries["layers"] == {"0": [0, 3, 7], "1": [1, 2, 5]}
    assert (entries["source_experts"], entries["keep_experts"]) == (8, 3)
    assert (entries["honesty"], entries["choices"][0]["criterion"]) == ("true-gate", "reap")
