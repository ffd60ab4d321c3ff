"""The page and the pictures of a choice of experts."""

from __future__ import annotations

import struct
from dataclasses import replace

import matplotlib
import numpy as np
import pytest

from pipeline.experts.choice import Choice
from pipeline.experts.criterion import Criterion, scores
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList
from pipeline.experts.keep_json import keep_digest
from pipeline.experts.merge import merge
from pipeline.experts.origin import Origin
from pipeline.experts.routing import Routing
from pipeline.experts.saliency import Sum
from pipeline.experts.select import select
from pipeline.experts.stability import STEADY, HalvesReport, compare_criteria, compare_halves
from pipeline.report.pruned_card import pruned_card
from pipeline.report.saliency_chart import curves_png, multiples
from pipeline.report.saliency_facts import SelectionFacts, selection_facts
from pipeline.report.saliency_overlap import overlap_png
from pipeline.report.saliency_page import keep_markdown, selection_markdown
from pipeline.report.saliency_table import criteria_table, keep_table, layer_table
from pipeline.report.saliency_words import CRITERIA, LABELS, place_words
from pipeline.report.tables import Table
from tests.pipeline.experts.tables import ROUTING, hand_table, random_table, table

HAND = Routing(1, 4, 2, 1.5)
N_KEPT = 8


def facts_of(source, n_kept=N_KEPT, routing=ROUTING, criterion=Criterion.REAP, **words):
    halves = words.pop("halves", None)
    return selection_facts(source, select(source, criterion, n_kept, routing, **words), halves)


@pytest.fixture(scope="module")
def facts() -> SelectionFacts:
    return facts_of(random_table(5))


def test_the_hand_example_layer_by_layer() -> None:
    (layer,) = facts_of(hand_table(), 2, HAND).layers
    assert (layer.n_tokens, layer.n_never, layer.halves) == (3, 1, None)
    assert layer.least_kept == pytest.approx(3.3701, abs=1e-4)
    assert layer.best_pruned == pytest.approx(1.8263, abs=1e-4)
    assert layer.gap == pytest.approx(1 - 1.8263 / 3.3701, abs=1e-4)
    row = [3.3701, 11.25, 1.8263, 0]
    assert layer.spread == pytest.approx(np.std(row) / np.mean(row), abs=1e-4)


def test_what_a_table_says_is_what_the_scores_say(facts: SelectionFacts) -> None:
    values = scores(random_table(5), Criterion.REAP)
    shown = layer_table(facts)
    for layer, ids in enumerate(facts.keep.layers):
        kept = set(ids)
        least = min(values[layer, e] for e in kept)
        best = max(values[layer, e] for e in range(12) if e not in kept)
        assert least >= best
        assert float(str(shown.values("least kept score")[layer])) == pytest.approx(least, rel=1e-3)
        assert float(str(shown.values("best pruned score")[layer])) == pytest.approx(best, rel=1e-3)
        assert shown.values("gap")[layer] == pytest.approx((least - best) / least)


def test_a_forced_expert_shows_as_a_negative_gap_and_by_its_place() -> None:
    source = random_table(5, n_tokens=400)
    order = np.argsort(-scores(source, Criterion.REAP)[1], kind="stable")
    facts = facts_of(source, forced={1: [int(order[8])]})
    assert facts.lifted == ((), (8,), ())
    gap = facts.layers[1].gap
    assert gap is not None
    assert gap < 0


def test_where_nothing_is_pruned_there_is_no_gap() -> None:
    facts = facts_of(random_table(5), 12)
    assert [(layer.best_pruned, layer.gap) for layer in facts.layers] == [(None, None)] * 3
    assert facts.lifted == ((), (), ())
    assert curves_png(facts, "t").startswith(b"\x89PNG")


def test_halves_are_told_layer_by_layer_and_in_a_sentence() -> None:
    halves = compare_halves((random_table(5), random_table(6)), Criterion.REAP, N_KEPT)
    facts = facts_of(random_table(5), halves=halves)
    assert [layer.halves for layer in facts.layers] == halves.shares.tolist()
    assert float(halves.shares.mean()) < STEADY
    assert "measure on more text" in facts.notes[-1]
    steady = HalvesReport(Criterion.REAP, N_KEPT, np.ones(3))
    assert "100.0 %: as steady" in facts_of(random_table(5), halves=steady).notes[-1]


def test_a_table_that_knows_less_says_less() -> None:
    source = random_table(5)
    poor = table({Sum.COUNTS: source.sums[Sum.COUNTS]}, honesty=Honesty.PROXY)
    facts = facts_of(poor, criterion=Criterion.FREQUENCY)
    assert [layer.n_tokens for layer in facts.layers] == [None] * 3
    page = selection_markdown(facts, "a model", {"Scores": "keep.png"})
    assert "Other criteria" not in page
    assert LABELS[Honesty.PROXY] in page


def test_the_page_names_everything_that_a_list_depends_on() -> None:
    one, other = random_table(5), random_table(6, name="b")
    both = merge([one, other])
    page = selection_markdown(facts_of(both, forced={2: [7, 3]}), "a model", {"Scores": "x.png"})
    for word in (
        "# 8 of 12 experts in each of 3 layers",
        "![Scores](x.png)",
        "a model: 3 layers of 12 experts",
        CRITERIA[Criterion.REAP],
        LABELS[Honesty.TRUE_GATE],
        "80 in the layer that saw the fewest",
        "layer 2: 3, 7",
        *(origin.sha256 for origin in both.origins),
    ):
        assert word in page, word


def test_a_list_without_scores_has_a_page_too() -> None:
    choice = Choice("recovered", Honesty.RECOVERED, None, 4, 3, (Origin("f" * 64, "routers"),))
    keep = KeepList(4, 2, ((0, 1, 3),), (choice,))
    page = keep_markdown(keep, "a model", ("Mind this.",))
    assert "- Mind this." in page
    assert "| criterion | not known |" in page
    assert LABELS[Honesty.RECOVERED] in page


def test_two_cuts_are_told_one_after_the_other() -> None:
    first = Choice("a", Honesty.TRUE_GATE, Criterion.REAP, 8, 6, ())
    second = Choice("b", Honesty.PROXY, Criterion.FREQUENCY, 6, 4, ())
    page = keep_markdown(KeepList(8, 2, ((0, 1, 2, 3),), (first, second)), "m", ())
    assert page.index("How it was chosen, cut 1") < page.index("How it was chosen, cut 2")
    assert "| label | proxy" in page


EMPTY = Table("bytes", (), ())


@pytest.mark.parametrize(
    ("honesty", "criterion", "is_reap"),
    [
        (Honesty.TRUE_GATE, Criterion.REAP, True),
        (Honesty.TRUE_GATE, Criterion.EAN_MEAN, False),
        (Honesty.SOFTMAX_GATE, Criterion.REAP, False),
        (Honesty.RECOVERED, None, False),
    ],
)
def test_a_card_calls_reap_only_what_is(honesty, criterion, is_reap) -> None:
    keep = KeepList(4, 2, ((0, 1, 3),), (Choice("t", honesty, criterion, 4, 3, ()),))
    card = pruned_card(keep, "a model", EMPTY, ("inference/",))
    assert ("Not to be called REAP" in card) is not is_reap
    assert "Not taken along: inference/." in card


def test_places_by_layer() -> None:
    assert place_words(((3, 7), (3, 12), (5, 0))) == "layer 3: 7, 12; layer 5: 0"


def test_every_label_and_criterion_has_words() -> None:
    assert set(LABELS) == set(Honesty)
    assert set(CRITERIA) == set(Criterion)


def test_overlap_as_a_table() -> None:
    report = compare_criteria(random_table(5), N_KEPT)
    shown = criteria_table(report, 12)
    assert shown.values("") == tuple(map(str, report.criteria))
    assert shown.values("reap")[0] == 1
    assert "66.7 %" in shown.notes[0]


def test_the_list_is_named_by_its_digest() -> None:
    keep = facts_of(random_table(5)).keep
    assert keep_digest(keep) in keep_table(keep, "m").values("")


def size(png: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from(">II", png, 16)
    return width, height


def test_the_cut_is_at_one_in_every_panel() -> None:
    curves = np.array([[8.0, 4.0, 2.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    assert multiples(curves, 3).tolist() == [[4, 2, 1, 0.5], [1, 0, 0, 0]]


def test_same_choice_same_picture_under_other_settings(facts: SelectionFacts) -> None:
    png = curves_png(facts, "a title")
    assert size(png)[0] == 1200
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "savefig.dpi": 10}):
        assert curves_png(facts, "a title") == png
    assert curves_png(facts_of(random_table(6)), "a title") != png


@pytest.mark.parametrize(("n_layers", "n_rows"), [(1, 1), (9, 2)])
def test_every_eight_layers_get_a_row(n_layers: int, n_rows: int) -> None:
    routing = replace(ROUTING, n_layers=n_layers)
    png = curves_png(facts_of(random_table(5, routing), routing=routing), "t")
    assert size(png)[1] == 122 + 116 * n_rows + 40


def test_same_overlap_same_picture_under_other_settings() -> None:
    report = compare_criteria(random_table(5), N_KEPT)
    png = overlap_png(report, 12, "t", chosen=Criterion.REAP)
    with matplotlib.rc_context({"font.size": 30, "savefig.dpi": 10}):
        assert overlap_png(report, 12, "t", chosen=Criterion.REAP) == png
    assert overlap_png(replace(report, shares=report.shares * 0.9), 12, "t") != png
