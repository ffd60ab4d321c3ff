"""Targets with their drafts: drafting changes how fast tokens come, never which."""

import pytest

from pipeline.gguf.model_file import read_shards
from tests.engines.edited import Content, Edited
from tests.engines.engine import Refused
from tests.engines.steady import steady

pytestmark = pytest.mark.engine

N = 20


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
    target = steady(model, always).write(tmp_path / "steady.gguf")
    with mainline.load([target], draft=small_mainline.draft) as session:
        made = session.generate([always], N)
    assert made.tokens == (always,) * N
    assert made.n_accepted == made.n_drafted > N // 2


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
