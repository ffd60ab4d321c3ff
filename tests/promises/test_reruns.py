"""P11: changed input makes again what depends on it, and nothing else."""

import os
import shutil

import pytest

from tests.promises.whole_job import NAME, finals, linked_copy, run_job

NATIVE = "recipes/native.toml"


def shards(out):
    """Stored shards by the folder of their spec, with what a rewrite would change."""
    return {
        path.parent.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in out.glob(".quantmill/*/shard.gguf")
    }


@pytest.fixture
def made(undisturbed, tmp_path):
    """A folder of its own in which the native recipe has run."""
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out, copy_function=shutil.copy2)
    return out


@pytest.fixture
def native(pytestconfig):
    return (pytestconfig.rootpath / NATIVE).read_text()


def remade(made, source, recipe="native", **parameters):
    """How many shards a run makes; those that were there are not touched."""
    before = shards(made)
    outcome = run_job(source, made, recipe, **parameters)
    assert outcome.ok, outcome.text
    after = shards(made)
    assert {name: after[name] for name in before} == before
    return len(after) - len(before)


def test_p11_the_same_again_writes_nothing(small_miniature, made, wanted):
    state = {p: p.stat().st_mtime_ns for p in made.rglob("*")}
    assert remade(made, small_miniature) == 0
    assert {p: p.stat().st_mtime_ns for p in made.rglob("*")} == state
    assert finals(made) == wanted


RECIPES = {
    "a comment and another order": (
        lambda text: (
            "# mine\n"
            + text.replace('shared = "Q8_0"\n', "").replace(
                "[roles]\n", '[roles]\nshared = "Q8_0"\n'
            )
        ),
        0,
    ),
    # The first shard says the recipe in its metadata, word by word.
    "a type said another way": (lambda text: text.replace('indexer = "Q8_0"\n', ""), 1),
    "the engram's tables": (
        lambda text: text.replace("[sub_roles]\n", '[sub_roles]\nengram_table = "Q6_K"\n'),
        2,
    ),
    "a dense type": (lambda text: text.replace('shared = "Q8_0"', 'shared = "Q6_K"'), 1),
    "the experts' type": (lambda text: text.replace('"MXFP4"', '"Q3_K"'), 2),
}


@pytest.mark.parametrize(
    ("change", "n_made"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if case[1] == 1 else ())
        for name, case in RECIPES.items()
    ],
)
def test_p11_a_changed_recipe_makes_what_depends_on_it(
    small_miniature, made, native, tmp_path, change, n_made
):
    assert change(native) != native
    (tmp_path / "native.toml").write_text(change(native))
    assert remade(made, small_miniature, tmp_path / "native.toml") == n_made


@pytest.mark.slow
def test_p11_the_other_layout_makes_what_differs(small_miniature, made):
    """Dense shard and two tables; the experts' shard is shared."""
    assert remade(made, small_miniature, layout="fork") == 3


@pytest.mark.slow
def test_p11_another_name_makes_only_the_files_that_say_it(small_miniature, made):
    """The first shard of the target, and the draft."""
    assert remade(made, small_miniature, name="other") == 2


@pytest.mark.parametrize(
    ("file", "n_made"),
    [
        ("model-00001-of-00014.safetensors", 0),  # vision
        ("model-00005-of-00014.safetensors", 2),  # a layer: dense tensors and experts
        ("model-00010-of-00014.safetensors", 1),  # a stage of the draft
        pytest.param("model-00009-of-00014.safetensors", 1, marks=pytest.mark.slow),  # head
        # An engram layer: joined table, projections.
        pytest.param("model-00014-of-00014.safetensors", 2, marks=pytest.mark.slow),
    ],
)
def test_p11_a_changed_source_file_makes_what_reads_it(
    small_miniature, made, tmp_path, file, n_made
):
    copy = linked_copy(small_miniature, tmp_path / small_miniature.name, but=[file])
    os.utime(copy / file)
    assert remade(made, copy) == n_made


def test_p11_a_lost_or_damaged_file_is_made_good(small_miniature, made, wanted):
    victims = sorted(made.glob(".quantmill/*"))
    (victims[0] / "shard.gguf").unlink()
    (victims[1] / "record.json").write_text("{}")
    (made / NAME / "budget.md").unlink()
    (made / NAME / f"{NAME}-00003-of-00004.gguf").unlink()
    (made / NAME / "SHA256SUMS").write_text("")
    kept = {name: state for name, state in shards(made).items() if name == victims[2].name}
    outcome = run_job(small_miniature, made)
    assert outcome.ok, outcome.text
    assert finals(made) == wanted
    assert {name: shards(made)[name] for name in kept} == kept
