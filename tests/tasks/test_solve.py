"""SolveBudget: from a recipe with a budget to one that runs, within its bytes."""

import json
import os
import re
from dataclasses import replace

import pytest

from pipeline.digest import sha256
from pipeline.errors import OutputError, PlanError, Problems, RecipeError, SourceError
from pipeline.recipe.schema import load_recipe
from tasks.budget_answer import FIRST_LINE, moved
from tasks.job import Job
from tasks.request import JobParameters
from tasks.solve import SolveBudget
from tests.pipeline.importance.writing import write_imatrix
from tests.tasks.commands import files_of, luigi

LIMIT = 16_300_000
ASKED = f"""
description = "Fits."
allow = ["larger_than_fp4"]

[roles]
routed = "Q3_K"
engram = "Q8_0"
attention = "Q8_0"
embedding = "BF16"
shared = "Q8_0"

[sub_roles]
engram_gate = "F32"
hyper_connection = "F32"
compressor = "BF16"

[output]
layout = "fork"

[budget]
file_nbytes = {LIMIT}
candidates = ["Q4_K", "Q8_0"]

[budget.types]
routed = ["Q2_K", "Q3_K", "MXFP4"]
attention = []
engram_table = []
"""


@pytest.fixture
def ask(small_miniature, tmp_path):
    """A task for a recipe, whose output is where the second value says."""

    def asking(content=ASKED, **more):
        recipe = tmp_path / "fit.toml"
        recipe.write_text(content)
        task = SolveBudget(
            source=str(small_miniature),
            recipe=str(recipe),
            out=str(tmp_path / "out"),
            name="mini",
            **{"rows": 4, "threads": 2, **more},
        )
        return task, tmp_path / "out/mini-fit-fork"

    return asking


def solve(task):
    # luigi hands out one object per set of parameters, and these remember their recipe.
    vars(task).pop("asked", None)
    task.show()


def planned_nbytes(task, recipe):
    parameters = JobParameters(str(task.source), str(recipe), str(task.out), name="mini")
    return Job(parameters).nbytes


def test_the_recipe_runs_and_has_exactly_the_bytes_that_were_told(ask, capsys):
    task, folder = ask()
    solve(task)
    document = json.loads((folder / "frontier.json").read_bytes())
    (limit,) = document["limits"]
    assert limit["nbytes"] == LIMIT
    assert planned_nbytes(task, folder / "fit.toml") == limit["used"] <= LIMIT
    made = load_recipe(folder / "fit.toml")
    assert made.budget is None
    assert made.sub_roles.hyper_connection == "F32"
    assert (folder / "frontier.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert f"{limit['used']:,}" in told
    assert "proved: no choice within the limits" in " ".join(told.split())
    reasons = (folder / "fit.toml").read_text()
    assert reasons.startswith(FIRST_LINE)
    for group in document["groups"]:
        assert re.search(
            rf"^# {group['group']} +{group['type']} +{group['nbytes']:,} ", reasons, re.M
        )


def test_solving_again_measures_nothing_and_writes_the_same(ask, tmp_path):
    task, folder = ask()
    solve(task)
    errors = files_of(tmp_path / "out/.quantmill/errors")
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(errors) > 100
    solve(task)
    assert files_of(tmp_path / "out/.quantmill/errors") == errors
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


def test_what_does_not_fit_is_told_and_nothing_is_measured_or_written(ask, monkeypatch):
    monkeypatch.setattr("tasks.solve.measure", None)
    task, folder = ask(ASKED.replace(str(LIMIT), "1_000_000"))
    with pytest.raises(PlanError, match=r"shared_up stays Q8_0 by roles\.shared"):
        solve(task)
    assert not folder.exists()


def test_the_draft_counts_among_the_files_if_one_is_made(ask):
    task, folder = ask()
    solve(task)
    with_draft = load_recipe(folder / "fit.toml")
    (limit,) = json.loads((folder / "frontier.json").read_bytes())["limits"]
    made = Job(replace(task.asked.parameters, recipe=str(folder / "fit.toml")))
    (draft,) = (plan.nbytes for plan in made.plans if plan.form.is_draft)
    task, folder = ask(f"{ASKED}\n[draft]\nmode = 'drop'\n".replace(str(LIMIT), str(LIMIT - draft)))
    solve(task)
    (less,) = json.loads((folder / "frontier.json").read_bytes())["limits"]
    assert draft > 1_000_000
    assert less["used"] == limit["used"] - draft
    assert load_recipe(folder / "fit.toml").roles == with_draft.roles


def test_no_rows_are_nothing_to_judge_by(ask):
    task, folder = ask(rows=0)
    with pytest.raises(PlanError, match="--rows 1 or more"):
        solve(task)
    assert not folder.exists()


def test_an_answer_is_not_called_as_a_document_of_the_output_is(ask):
    task, folder = ask(f'name = "recipe"\n{ASKED}')
    with pytest.raises(OutputError, match=r"would be recipe\.toml"):
        solve(task)
    assert not folder.exists()


def test_a_recipe_without_a_budget_is_none_to_solve(ask):
    task, _ = ask(ASKED.partition("[budget]")[0])
    with pytest.raises(RecipeError, match="no budget to solve"):
        solve(task)


def test_a_fixed_tensor_cannot_be_as_in_the_source_where_no_type_is(ask):
    task, _ = ask(ASKED.replace('shared = "Q8_0"', 'shared = "source"'))
    with pytest.raises(RecipeError, match=r"roles\.shared asks for the type in the source"):
        solve(task)


def test_types_that_no_engine_of_the_layout_reads_are_not_chosen(ask):
    said = ASKED.replace('"Q2_K", "Q3_K"', '"IQ2_K", "Q3_K"').replace('"fork"', '"mainline"')
    task, folder = ask(said)
    solve(task)
    made = (folder.with_name("mini-fit-mainline") / "fit.toml").read_text()
    assert '"IQ2_K"' not in made
    assert "IQ2_K, which no engine reads in the mainline layout." in made


def test_files_of_others_stay(ask):
    task, folder = ask()
    folder.mkdir(parents=True)
    (folder / "fit.toml").write_text("mine")
    with pytest.raises(OutputError, match="another file"):
        solve(task)
    assert (folder / "fit.toml").read_text() == "mine"


def test_a_fetched_source_must_be_here(ask, monkeypatch):
    task, _ = ask()
    monkeypatch.setattr("tasks.sources.Sources.has", lambda self, name: False)
    with pytest.raises(SourceError, match="not here yet"):
        solve(task)


def test_files_beside_the_recipe_are_found_from_the_new_place(ask, tmp_path):
    task, folder = ask(ASKED + '\n[imatrix]\nfile = "beside.dat"\n')
    (tmp_path / "beside.dat").write_bytes(b"")
    recipe = load_recipe(tmp_path / "fit.toml")
    found = moved(recipe, task.asked.parameters, folder).imatrix.file
    assert os.path.normpath(folder / found) == str(tmp_path / "beside.dat")


def test_an_importance_matrix_makes_its_types_possible(ask, tmp_path):
    said = ASKED.replace('"Q2_K", "Q3_K", "MXFP4"', '"IQ3_XXS"')
    task, folder = ask(said)
    with pytest.raises(Problems, match="IQ3_XXS, which needs an importance matrix"):
        solve(task)
    path = write_imatrix(tmp_path / "text.gguf", task.asked.targets)
    task, folder = ask(said, imatrix=str(path))
    solve(task)
    made = load_recipe(folder / "fit.toml")
    assert made.roles.routed == "IQ3_XXS"
    # Given on the command line, it has to be given there again.
    assert made.imatrix.required
    assert made.imatrix.file is None
    written = (folder / "fit.toml").read_text()
    assert "# Importance matrix: text.gguf\n" in written
    assert f"# sha256 {sha256(path.read_bytes())}\n" in written
    task, folder = ask(f'{said}\n[imatrix]\nfile = "text.gguf"\n')
    solve(task)
    made = load_recipe(folder / "fit.toml")
    assert (folder / made.imatrix.file).resolve() == path.resolve()
    assert "# Importance matrix: text.gguf\n" in (folder / "fit.toml").read_text()


@pytest.mark.slow
def test_the_command_line(small_miniature, tmp_path):
    (tmp_path / "fit.toml").write_text(ASKED)
    words = ("--source", small_miniature, "--recipe", "fit.toml", "--name", "mini", "--rows", 2)
    result = luigi("SolveBudget", *words, "--objective", "absolute", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "(absolute)" in result.stdout
    assert "Highs" not in result.stdout
    assert (tmp_path / "out/mini-fit-fork/fit.toml").exists()
