"""What must be there of a model, and how a draft that is not whole is told."""

import dataclasses
import re

import pytest

from pipeline.errors import Problems, SourceError
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.presence import DRAFT_ONLY, DRAFT_OPTIONAL, require_tensors, wanted_tensors
from pipeline.source.scope import WHOLE
from pipeline.source.spec import TensorSpec
from tests.pipeline.described import (
    N_DRAFT_EXPERTS,
    N_EXPERTS,
    N_STAGES,
    checkpoint_of,
    small_model,
)

FAMILIES = ("v4.1", "v4")
SCOPES = {"keep": WHOLE, "drop": DRAFT_OPTIONAL, "only": DRAFT_ONLY}
STRICT = {name: scope for name, scope in SCOPES.items() if scope is not DRAFT_OPTIONAL}

every_family = pytest.mark.parametrize("family", FAMILIES)
every_scope = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
every_strict_scope = pytest.mark.parametrize("scope", STRICT.values(), ids=STRICT)


def of_draft(specs):
    return [spec for spec in specs if spec.name.startswith("mtp.")]


def of_stage(specs, stage):
    return [spec for spec in specs if spec.name.startswith(f"mtp.{stage}.")]


def problems_of(specs, family, scope):
    """What is found in a checkpoint that holds ``specs``, as far as ``scope`` looks."""
    seen = [spec for spec in specs if scope.covers(spec.name)]
    try:
        require_tensors(checkpoint_of(seen), small_model(family), scope)
    except Problems as several:
        return list(several.problems)
    except SourceError as one:
        return [one]
    return []


@every_family
@every_scope
def test_a_whole_model_has_what_its_config_asks_for(family, scope):
    model = small_model(family)
    wanted = wanted_tensors(model, scope)
    assert require_tensors(checkpoint_of(wanted), model, scope) == wanted
    draft = of_draft(expected_tensors(model))
    assert list(wanted) == (draft if scope is DRAFT_ONLY else list(expected_tensors(model)))


@every_family
@every_scope
def test_each_absent_stage_is_one_problem_with_its_count(family, scope):
    specs = expected_tensors(small_model(family))
    first, last = of_stage(specs, 0), of_stage(specs, 2)
    (problem,) = problems_of(set(specs) - set(last), family, scope)
    assert "a part of the model that is nowhere" in problem.what
    assert problem.expected == f"{len(last):,} tensors mtp.2.*"
    assert (problem.file, problem.found) == ("model", "none")
    assert problem.next_step
    problems = problems_of(set(specs) - set(last) - set(first), family, scope)
    assert [p.expected for p in problems] == [
        f"{len(stage):,} tensors mtp.{n}.*" for n, stage in ((0, first), (2, last))
    ]


@every_family
@every_scope
def test_a_tensor_of_the_draft_that_is_missing_is_named(family, scope):
    specs = expected_tensors(small_model(family))
    (problem,) = problems_of([s for s in specs if s.name != "mtp.2.norm.weight"], family, scope)
    assert problem.tensor == "mtp.2.norm.weight"


@every_family
@every_strict_scope
def test_no_draft_at_all_is_one_problem(family, scope):
    specs = expected_tensors(small_model(family))
    draft = of_draft(specs)
    (problem,) = problems_of(set(specs) - set(draft), family, scope)
    assert problem.what == "the checkpoint holds no draft, but config.json describes one"
    assert problem.file == "model/config.json"
    assert problem.expected == f"{len(draft):,} tensors mtp.0.* to mtp.{N_STAGES - 1}.*"
    assert "--supplement" in problem.next_step
    assert ('mode = "drop"' in problem.next_step) == (scope is WHOLE)


@every_family
def test_a_draft_that_is_left_out_may_be_absent(family):
    model = small_model(family)
    specs = expected_tensors(model)
    trunk = tuple(spec for spec in specs if not spec.name.startswith("mtp."))
    # An index may still count the draft in its total.
    checkpoint = checkpoint_of(trunk, total_size=sum(spec.nbytes for spec in specs))
    assert require_tensors(checkpoint, model, DRAFT_OPTIONAL) == trunk


def test_without_its_draft_the_rest_is_checked_all_the_same():
    specs = expected_tensors(small_model("v4.1"))
    trunk = [spec for spec in specs if not spec.name.startswith("mtp.")]
    lacking = [spec for spec in trunk if spec.name != "embed.weight"]
    (problem,) = problems_of(lacking, "v4.1", DRAFT_OPTIONAL)
    assert problem.tensor == "embed.weight"
    assert len(problems_of(lacking, "v4.1", WHOLE)) == 2


@every_scope
def test_a_draft_that_is_there_but_not_in_the_index_is_no_absent_one(scope):
    model = small_model("v4.1")
    checkpoint = checkpoint_of(wanted_tensors(model, scope))
    listed = {n: f for n, f in checkpoint.weight_map.items() if not n.startswith("mtp.")}
    with pytest.raises(Problems) as caught:
        require_tensors(dataclasses.replace(checkpoint, weight_map=listed), model, scope)
    assert len(caught.value.problems) == N_STAGES
    assert all("the index does not name" in p.what for p in caught.value.problems)


@every_scope
def test_a_draft_that_is_in_the_index_but_not_there_is_no_absent_one(scope):
    model = small_model("v4.1")
    checkpoint = checkpoint_of(wanted_tensors(model, scope))
    files = {
        name: dataclasses.replace(file, tensors={}) if name.startswith("mtp.") else file
        for name, file in checkpoint.files.items()
    }
    with pytest.raises(Problems) as caught:
        require_tensors(dataclasses.replace(checkpoint, files=files), model, scope)
    assert len(caught.value.problems) == N_STAGES
    assert all("that no shard holds" in p.what for p in caught.value.problems)


def with_experts(specs, stage, n_rows, n_experts):
    """A stage whose router has ``n_rows`` rows and that has ``n_experts`` experts."""
    expert = [s for s in specs if s.name.startswith(f"mtp.{stage}.ffn.experts.0.")]
    changed = {spec.name: spec for spec in specs}
    for spec in specs:
        if re.match(rf"mtp\.{stage}\.ffn\.gate\.", spec.name):
            changed[spec.name] = dataclasses.replace(spec, shape=(n_rows, *spec.shape[1:]))
        number = re.match(rf"mtp\.{stage}\.ffn\.experts\.(\d+)", spec.name)
        if number and int(number[1]) >= n_experts:
            del changed[spec.name]
    for number in range(n_experts):
        for spec in expert:
            name = spec.name.replace(".experts.0.", f".experts.{number}.")
            changed.setdefault(name, dataclasses.replace(spec, name=name))
    return list(changed.values())


N_ROUTER = {"v4.1": 3, "v4": 2}


@every_family
@every_scope
@pytest.mark.parametrize("more", [2, -1], ids=["more", "fewer"])
def test_another_number_of_experts_is_one_problem_per_stage(family, scope, more):
    """As when the trunk's experts are counted for the draft's."""
    n_draft = N_DRAFT_EXPERTS[family]
    n_found = n_draft + more
    specs = list(expected_tensors(small_model(family)))
    for stage in (0, 1):
        specs = with_experts(specs, stage, n_found, n_found)
    problems = problems_of(specs, family, scope)
    n_tensors = N_ROUTER[family] + 6 * abs(more)
    assert [p.tensor.split(".")[:2] for p in problems] == [["mtp", "0"], ["mtp", "1"]]
    for problem in problems:
        counted = f"than config.json says ({n_tensors} tensors, the first is named)"
        assert problem.what == f"a block has another number of experts {counted}"
        assert problem.expected == f"{n_draft} experts (config.json)"
        assert problem.found == f"{n_found} experts"
        assert re.search(r"mtp\.\d", problem.file)
        assert "dspark_n_routed_experts" in problem.next_step


@every_scope
def test_the_trunks_router_in_a_stage_is_one_problem(scope):
    n_trunk, n_draft = N_EXPERTS["v4.1"], N_DRAFT_EXPERTS["v4.1"]
    specs = with_experts(expected_tensors(small_model("v4.1")), 1, n_trunk, n_draft)
    (problem,) = problems_of(specs, "v4.1", scope)
    assert "(3 tensors" in problem.what
    assert (problem.found, problem.tensor) == ("6 experts", "mtp.1.ffn.gate.bias")


def test_a_missing_expert_in_the_middle_is_missing_and_no_other_count():
    specs = [s for s in expected_tensors(small_model("v4.1")) if ".experts.1." not in s.name]
    problems = problems_of(specs, "v4.1", DRAFT_ONLY)
    assert len(problems) == N_STAGES
    for problem in problems:
        assert "asks for a tensor that is nowhere in the checkpoint (6 tensors" in problem.what


def test_a_number_left_out_is_no_other_count():
    """The last expert goes by a number far beyond it."""
    specs = [
        dataclasses.replace(
            spec, name=spec.name.replace("mtp.0.ffn.experts.3.", "mtp.0.ffn.experts.9.")
        )
        for spec in expected_tensors(small_model("v4.1"))
    ]
    missing, unexpected = problems_of(specs, "v4.1", DRAFT_ONLY)
    assert "asks for a tensor that is nowhere" in missing.what
    assert "does not imply" in unexpected.what


def test_experts_in_a_missing_shard_are_told_by_the_shard():
    model = small_model("v4.1")
    checkpoint = checkpoint_of(wanted_tensors(model, DRAFT_ONLY))
    moved = [name for name in checkpoint.weight_map if name.startswith("mtp.0.ffn.experts.3.")]
    stage = checkpoint.files["mtp.0.safetensors"]
    kept = {name: tensor for name, tensor in stage.tensors.items() if name not in moved}
    files = {**checkpoint.files, "mtp.0.safetensors": dataclasses.replace(stage, tensors=kept)}
    weight_map = {**checkpoint.weight_map, **dict.fromkeys(moved, "gone.safetensors")}
    lacking = dataclasses.replace(checkpoint, files=files, weight_map=weight_map)
    with pytest.raises(SourceError, match=r"names a shard that is not there \(6 tensors"):
        require_tensors(lacking, model, DRAFT_ONLY)


@every_scope
def test_the_router_bias_of_image_tokens_belongs_to_v41_only(scope):
    bias = "mtp.0.ffn.gate.bias_vl"
    assert bias in {spec.name for spec in wanted_tensors(small_model("v4.1"), scope)}
    specs = [*expected_tensors(small_model("v4")), TensorSpec(bias, "F32", (6,))]
    (problem,) = problems_of(specs, "v4", scope)
    assert problem.what == "the checkpoint holds a tensor that config.json does not imply"
    assert problem.tensor == bias
