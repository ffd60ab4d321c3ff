"""Targets with their drafts: drafting changes how fast tokens come, never which."""

import numpy as np
import pytest

from pipeline.gguf.model_file import read_shards
from tests.engines.edited import Content, Edited
from tests.engines.engine import Refused

pytestmark = pytest.mark.engine

N = 20
STEADY_CHANNEL = 7


def test_a_draft_changes_no_token(mainline, small_mainline):
    """Also: the package's own server gives what our way into its functions gives."""
    with mainline.load(small_mainline.shards, draft=small_mainline.draft) as drafted:
        tokens = drafted.tokenize("Drafts come five at a time.")
        made = drafted.generate(tokens, N)
    with mainline.load(small_mainline.shards) as alone:
        assert made.tokens == alone.generate(tokens, N).tokens
    assert made.n_drafted >= N
    assert made.n_accepted < made.n_drafted  # the weights are random


def test_a_draft_that_must_be_right_is_taken(mainline, small_mainline, tmp_path):
    """One channel of the embeddings outweighs all others, and the head reads one token from it."""
    model = Edited.read(small_mainline.shards)
    with mainline.load_vocabulary(small_mainline.shards) as session:
        (always,) = session.tokenize("a")
    target = _steady(model, always).write(tmp_path / "steady.gguf")
    with mainline.load([target], draft=small_mainline.draft) as session:
        made = session.generate([always], N)
    assert made.tokens == (always,) * N
    assert made.n_accepted == made.n_drafted > N // 2


def _steady(model, token):
    embedding, head = model.tensors["token_embd.weight"], model.tensors["output.weight"]
    inputs, outputs = _matrix(embedding), _matrix(head)
    inputs[:, STEADY_CHANNEL] = 1e4
    outputs[:, STEADY_CHANNEL] = 0
    outputs[token, STEADY_CHANNEL] = 1e3
    return model.tensor("token_embd.weight", _bf16(inputs)).tensor("output.weight", _bf16(outputs))


def _matrix(content):
    assert content.type_name == "BF16"
    bits = np.frombuffer(content.data, "<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(content.ne[::-1]).copy()


def _bf16(matrix):
    return Content(
        matrix.shape[::-1], "BF16", (matrix.view(np.uint32) >> 16).astype("<u2").tobytes()
    )


def test_a_draft_is_no_model_of_its_own(mainline, small_mainline):
    with pytest.raises(Refused, match="ctx_other"):
        mainline.load([small_mainline.draft])


def test_a_draft_without_its_mark_is_refused(mainline, small_mainline, tmp_path):
    draft = Edited.read([small_mainline.draft]).without_key("dflash.hyper_connection.single_pass")
    with pytest.raises(Refused, match=r"tensor 'output_hc_fn.weight' not found"):
        mainline.load(small_mainline.shards, draft=draft.write(tmp_path / "draft.gguf"))


def test_a_draft_with_the_tensors_of_the_other_generation_is_refused(
    mainline, small_mainline, tmp_path
):
    draft = Edited.read([small_mainline.draft])
    extra = Content((4,), "F32", bytes(16))
    path = draft.tensor("output_hc_base.weight", extra).write(tmp_path / "draft.gguf")
    with pytest.raises(Refused, match="wrong number of tensors; expected 79, got 78"):
        mainline.load(small_mainline.shards, draft=path)
    assert len(read_shards([small_mainline.draft]).tensors) == 78
