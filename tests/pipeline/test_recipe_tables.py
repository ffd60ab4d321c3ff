"""The tables of an importance matrix and of a budget."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from pipeline.errors import Problems, QuantmillError
from pipeline.model.layout import Layout
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, parse_recipe
from pipeline.recipe.values import Granularity
from tests.pipeline.released_plans import released_config

ROLES = "[roles]\n" + "".join(
    f'{role} = "BF16"\n' for role in ("engram", "attention", "embedding", "shared")
)
ROLES += 'routed = "MXFP4"\n'


@cache
def targets() -> tuple[TargetTensor, ...]:
    return target_tensors(released_config(), Layout.FORK)


def recipe(lines: str) -> Recipe:
    return parse_recipe((ROLES + lines).encode(), Path("r.toml"))


def what_of(lines: str) -> list[str]:
    with pytest.raises(QuantmillError) as caught:
        recipe(lines)
    error = caught.value
    return [one.what for one in (error.problems if isinstance(error, Problems) else (error,))]


def test_an_importance_matrix_is_optional_and_has_a_prior_of_one_token() -> None:
    table = recipe("").imatrix
    assert (table.file, table.prior, table.threshold, table.required) == (None, 1.0, 10, False)
    table = recipe(
        '[imatrix]\nfile = "m.gguf"\nprior = 0\nthreshold = 0\nrequired = true\n'
    ).imatrix
    assert (table.file, table.prior, table.threshold, table.required) == ("m.gguf", 0, 0, True)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('file = ""', "imatrix.file: empty"),
        ("prior = -1.0", "imatrix.prior: not a sensible number"),
        ("prior = nan", "imatrix.prior: not a sensible number"),
        ("prior = inf", "imatrix.prior: not a sensible number"),
        ('prior = "1"', "imatrix.prior: not a number"),
        ("threshold = -1", "imatrix.threshold: not a sensible number"),
        ("threshold = 1.5", "imatrix.threshold: not a whole number"),
        ("required = 1", "imatrix.required: not true or false"),
        ("requird = true", "unknown key imatrix.requird"),
    ],
)
def test_mistakes_in_the_table_of_the_matrix(line: str, what: str) -> None:
    assert what_of(f"[imatrix]\n{line}\n") == [what]


BUDGET = (
    '[budget]\nfile_nbytes = 292_300_000_000\ngranularity = "layers"\nlayers_per_group = 2\n'
    'candidates = ["q3_k", "IQ2_KS"]\n'
    '[budget.types]\nrouted = []\nrouted_down = ["Q4_K"]\nattention = ["Q8_0"]\n'
    "[budget.weights]\nrouted = 1.5\n"
    "[budget.machine]\nvram_nbytes = 24_000_000_000\nreserve_ram_nbytes = 1\n"
)


def test_a_budget_says_limits_what_is_free_and_what_counts() -> None:
    budget = recipe(BUDGET).budget
    assert budget is not None
    assert (budget.file_nbytes, budget.store_nbytes) == (292_300_000_000, None)
    assert (budget.granularity, budget.layers_per_group) == (Granularity.LAYERS, 2)
    assert budget.candidates == ("Q3_K", "IQ2_KS")
    assert budget.machine is not None
    assert (budget.machine.vram_nbytes, budget.machine.reserve_ram_nbytes) == (24_000_000_000, 1)
    by_name = {t.name: (budget.types.of(t), budget.weights.of(t)) for t in targets()}
    assert by_name["blk.3.ffn_up_exps.weight"] == ((), 1.5)
    assert by_name["blk.3.ffn_down_exps.weight"] == (("Q4_K",), 1.5)
    assert by_name["blk.3.attn_q_a.weight"] == by_name["blk.3.hc_attn_fn.weight"] == (
        ("Q8_0",), None
    )  # fmt: skip
    assert by_name["token_embd.weight"] == (None, None)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("[budget]\n", ["budget: nothing is limited", "budget: nothing is free to choose"]),
        (
            '[budget]\nfile_nbytes = 1\n[budget.types]\nrouted = []\nshared = ["Q2_K"]\n',
            ["budget: nothing says what routed may become"],
        ),
        ("[budget]\nfile_nbytes = 0\n", ["budget.file_nbytes: too small a number"]),
        ('[budget]\ngranularity = "layer"\n', ["budget.granularity: no granularity of a budget"]),
        ('[budget]\ntypes = ["Q2_K"]\n', ["budget.types: not a table"]),
        (
            '[budget.types]\nrouted = ["Q2"]\n',
            ["budget.types.routed 1: no ggml type has this name"],
        ),
        ('[budget.types]\nrouted = "Q2_K"\n', ["budget.types.routed: not a list"]),
        ("[budget.weights]\nrouted = -1\n", ["budget.weights.routed: not a sensible number"]),
        ("[budget.weights]\nroutd = 1\n", ["unknown key budget.weights.routd"]),
        ("[budget.machine]\nvram = 1\n", ["unknown key budget.machine.vram"]),
    ],
)
def test_mistakes_in_a_budget(lines: str, what: list[str]) -> None:
    assert what_of(lines) == what


def test_a_key_of_the_machine_is_told_where_it_belongs() -> None:
    with pytest.raises(QuantmillError, match=r"The key vram_nbytes belongs in \[budget\.machine\]"):
        recipe("[budget]\nvram_nbytes = 1\n")
    with pytest.raises(QuantmillError, match=r"The key match belongs in \[\[override\]\]"):
        recipe("[budget]\nmatch = 'x'\n")


def test_an_unsolved_budget_gives_no_types() -> None:
    made = recipe(BUDGET)
    with pytest.raises(QuantmillError, match=r"budget that is not solved yet.*SolveBudget"):
        resolve_types(made, targets())
    assert resolve_types(made.without_budget(), targets())["token_embd.weight"].name == "BF16"
