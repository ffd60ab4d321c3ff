"""Lists of ids in the forms that other tools write."""

import json

import pytest

from pipeline.errors import PlanError, Problems, SourceError
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.canonical import write_saliency
from pipeline.experts.importers.open import read_keep
from pipeline.experts.keep_json import write_keep
from pipeline.experts.origin import origin_of
from pipeline.experts.routing import Routing
from pipeline.experts.select import select
from tests.pipeline.experts.tables import ROUTING, random_table

MODEL = Routing(n_layers=2, n_experts=6, top_k=2)
LAYERS = ((0, 2, 5), (1, 3, 4))

LISTS = {"0": [5, 0, 2], "1": [3, 1, 4]}
CSV = "layer,expert_id,reap,kept\n" + "".join(
    f"{layer},{expert},{0.1 * expert:.3f},{int(expert in LAYERS[layer])}\n"
    for layer in range(2)
    for expert in range(6)
)
FORMS = {
    "by layer": json.dumps(LISTS),
    "under layers": json.dumps({"layers": LISTS, "arch": "deepseek41"}),
    "indented": json.dumps(LISTS, indent=1),
    "a line a layer": "".join(json.dumps({n: ids}) + "\n" for n, ids in LISTS.items()),
    "lines with gaps": '\n{"0": [0, 2, 5]}\r\n\n{"1": [1, 3, 4]}',
    "those that go": json.dumps(
        {"version": 1, "pruned_experts": [[0, 1], [0, 3], [0, 4], [1, 0], [1, 2], [1, 5]]}
    ),
    "CSV with kept": CSV,
    "CSV of kept": "layer_id,expert\n0,0\n0,2\n1,1\n0,5\n1,3\n1,4\n",
    "CSV in words": CSV.replace(",1\n", ",True\n").replace(",0\n", ",False\n"),
    "CSV of Windows": "\ufeff" + CSV.replace("\n", "\r\n"),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "список keep"


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_each_form_gives_the_same_list(path, text):
    path.write_text(text, newline="")
    keep = read_keep(path, MODEL)
    assert keep.layers == LAYERS
    assert (keep.n_experts, keep.top_k, keep.honesty) == (6, 2, Honesty.LIST_ONLY)
    (choice,) = keep.choices
    assert (choice.kind, choice.criterion, choice.n_kept) == ("keep-list", None, 3)
    assert choice.origins == (origin_of(path),)


def test_our_own_list_keeps_its_history(path):
    keep = select(random_table(1), "reap", 5, ROUTING).keep
    write_keep(path, keep)
    assert read_keep(path, ROUTING) == keep
    with pytest.raises(PlanError, match="another number of experts in a layer") as caught:
        read_keep(path, Routing(3, 13, 2))
    assert caught.value.file == str(path)


def test_a_ranking_gives_its_best(path):
    path.write_text('{"0": [5, 0, 2, 1, 4, 3]}\n{"1": [3, 1, 4, 0, 2, 5]}\n')
    assert read_keep(path, MODEL, n_best=3).layers == LAYERS
    assert read_keep(path, MODEL).layers == (tuple(range(6)),) * 2
    path.write_text(json.dumps({"0": list(range(6)), "1": list(range(6))}))
    with pytest.raises(SourceError, match="in order of index, so they rank nothing"):
        read_keep(path, MODEL, n_best=3)


BROKEN = {
    "missing layer": ('{"0": [0, 2, 5]}', "no layer 1"),
    "a hole": ('{"0": [0, 2], "2": [1, 3]}', "says nothing about layer 1"),
    "beyond the model": ('{"0": [0, 2], "1": [1, 3], "2": [1, 3]}', "layer 2 is not in its trunk"),
    "twice": ('{"0": [0, 2, 2], "1": [1, 3, 4]}', "layer 0 keeps an expert twice; .*found 2"),
    "beyond": ('{"0": [0, 2, 6], "1": [1, 3, 4]}', "layer 0 keeps .* does not have.*found 6"),
    "uneven": ('{"0": [0, 2, 5], "1": [1, 3, 4, 5]}', "keeps another number of experts"),
    "too few": ('{"0": [0], "1": [1]}', "layer 0 keeps fewer experts than a token uses"),
    "flag": ('{"0": [0, true], "1": [1, 2]}', "0 does not hold a list of ids"),
    "fraction": ('{"0": [0, 1.5], "1": [1, 2]}', "0 does not hold a list of ids"),
    "negative": ('{"0": [-1, 1], "1": [1, 2]}', "0 does not hold a list of ids"),
    "no lists": ('{"0": 3}', "0 does not hold a list of ids"),
    "named layer": ('{"blk.0": [1, 2]}', "a layer is not a number; .*found blk.0"),
    "padded layer": ('{"0": [1, 2], "00": [3, 4]}', "a layer is not a number; .*found 00"),
    "endless layer": ('{"' + "1" * 5000 + '": [1, 2]}', "a layer is not a number"),
    "empty": ("{}", "holds no lists of experts"),
    "empty layers": ('{"layers": []}', "holds no lists of experts"),
    "key twice": ('{"0": [1, 2], "0": [3, 4]}', "holds the key '0' twice"),
    "layer twice": ('{"0": [1, 2]}\n{"0": [3, 4]}', "layer 0 stands twice; .*found line 2"),
    "bad line": ('{"0": [1, 2]}\n{"1": [3, 4}', "line 2 is not valid JSON"),
    "pruned pair": ('{"pruned_experts": [[0]]}', r"something else than \[layer, expert\]"),
    "pruned number": ('{"pruned_experts": 7}', "pruned_experts does not hold a list"),
    "pruned twice": ('{"pruned_experts": [[0, 1], [0, 1]]}', "layer 0, expert 1 cannot be pruned"),
    "pruned beyond": ('{"pruned_experts": [[2, 1]]}', "layer 2, expert 1 cannot be pruned"),
    "pruned unevenly": ('{"pruned_experts": [[0, 1]]}', "keeps another number of experts"),
    "no layer column": ("expert\n1\n", "no one column for the layer"),
    "two expert columns": ("layer,expert,expert_id\n0,1,1\n", "no one column for the expert"),
    "no number": ("layer,expert\n0,x\n", "line 2: the expert is not a number; .*found x"),
    "short row": ("layer,expert\n0\n", "line 2: the expert is not a number"),
    "unclosed quote": ('layer,expert\n0,"1\n', "the CSV is damaged"),
    "no rows": ("layer,expert\n", "says nothing about layer 0"),
    "all pruned": ("layer,expert,kept\n0,1,0\n1,1,0\n", "fewer experts than a token uses"),
    "unknown kept": ("layer,expert,kept\n0,1,maybe\n", "line 2: kept is neither yes nor no"),
    "another format": ('{"format": "other/1"}', "another format"),
    "not UTF-8": (b"layer,expert\n0,\xff\n", "not UTF-8"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_each_fault_is_told_with_the_file(path, text, message):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((SourceError, PlanError, Problems), match=message) as caught:
        read_keep(path, MODEL)
    assert str(path) in str(caught.value)


def test_saliency_is_no_keep_list(path):
    write_saliency(path, random_table(1))
    with pytest.raises(SourceError, match=r"no keep list.*becomes a keep list by a criterion"):
        read_keep(path, ROUTING)
