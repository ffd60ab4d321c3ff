"""config.json whose keys are missing or contradict each other, and what the draft needs of it."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.model.config import read_config
from tests.pipeline.described import N_LAYERS, N_STAGES, small_config

FAMILIES = ("v4.1", "v4")
STORED = ["embed.weight", *(f"mtp.{stage}.t{n}" for stage in range(3) for n in range(500))]
OF_BOTH = (
    "dspark_target_layer_ids",
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_markov_rank",
)
OF_V41 = (
    "num_nextn_predict_layers",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)
LACKING = [
    *(("v4.1", key, f"text_config.{key}") for key in (*OF_V41, *OF_BOTH)),
    *(("v4", key, key) for key in OF_BOTH),
]


def refusal(config, **options):
    with pytest.raises(ConfigError) as caught:
        read_config(config, **options)
    return caught.value


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_is_read(family):
    model = read_config(small_config(family), file=Path("config.json"), stored=STORED)
    assert (model.family, model.n_layers, model.draft.n_stages) == (family, N_LAYERS, N_STAGES)
    assert model.draft.n_experts == {"v4.1": 4, "v4": 6}[family]


@pytest.mark.parametrize(("family", "key", "path"), LACKING)
def test_a_missing_key_of_a_draft_that_is_there_is_told_with_its_tensors(family, key, path):
    config = small_config(family, **{key: None})
    error = refusal(config, file=Path("model/config.json"), stored=STORED)
    assert error.what == f"config.json lacks {path}, but the checkpoint holds a draft"
    assert error.file == "model/config.json"
    assert error.expected == "keys that describe 3 stages"
    assert error.found == "1,500 tensors mtp.*"
    assert error.next_step


def test_all_missing_keys_of_a_draft_are_told_together():
    config = small_config("v4", dspark_block_size=None, dspark_markov_rank=None)
    assert "dspark_block_size, dspark_markov_rank" in refusal(config, stored=STORED).what


def test_v4s_own_count_of_stages_is_not_asked_for():
    config = small_config("v4", num_nextn_predict_layers=None)
    assert read_config(config, stored=STORED).draft.n_stages == N_STAGES


@pytest.mark.parametrize(("family", "key", "path"), LACKING)
def test_a_missing_key_without_a_draft_is_told_by_itself(family, key, path):
    error = refusal(small_config(family, **{key: None}), stored=["embed.weight"])
    assert error.what == f"config.json lacks the key {path}"
    assert error.file is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_ratios", [0, N_LAYERS, N_LAYERS + 2, N_LAYERS + 4])
def test_every_layer_and_stage_needs_its_ratio(family, n_ratios):
    error = refusal(small_config(family, compress_ratios=[0] * n_ratios))
    assert "compress_ratios must have one entry per layer and draft stage" in error.what
    assert error.expected == "6 (3 layers, 3 stages)"
    assert error.found == n_ratios
    assert error.next_step


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [[0, 2, 1], [1, 1, 2], [0, 1, 3]], ids=str)
def test_target_layers_increase_below_the_number_of_layers(family, layers):
    error = refusal(small_config(family, dspark_target_layer_ids=layers))
    assert "dspark_target_layer_ids must be increasing layer numbers below 3" in error.what
    assert error.found == layers
    assert error.next_step


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_reads_at_least_one_layer(family):
    error = refusal(small_config(family, dspark_target_layer_ids=[]))
    assert "dspark_target_layer_ids names no layer" in error.what
    assert error.next_step


def test_fewer_target_layers_than_stages_are_fewer_stages_of_v4_only():
    assert read_config(small_config("v4.1", dspark_target_layer_ids=[2])).draft.n_stages == 3
    error = refusal(small_config("v4", dspark_target_layer_ids=[1, 2]))
    assert error.expected == "5 (3 layers, 2 stages)"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_experts_per_tok": 7}, "more experts per token than there are"),
        ({"dspark_num_experts_per_tok": 5}, "more experts of the draft per token"),
    ],
    ids=["trunk", "draft"],
)
def test_no_more_experts_are_used_than_there_are(changes, what):
    assert what in refusal(small_config("v4.1", **changes)).what


def test_any_refusal_names_the_file_where_it_is_known():
    config = small_config("v4", hidden_size=None)
    assert refusal(config, file=Path("a/config.json")).file == "a/config.json"
    assert "file a/config.json" in str(refusal(config, file=Path("a/config.json")))
    assert refusal(config).file is None
