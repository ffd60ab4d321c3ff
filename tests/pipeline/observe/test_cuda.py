"""The same on a GPU, where there is one."""

import pytest
import torch

from tests.pipeline.observe.observing import arithmetic_of, assert_logits, assert_sums, observed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CHUNKS = (range(1), range(1, 3), range(3, 5))


@pytest.mark.parametrize("changes", [{}, {"chunks": CHUNKS, "block": 16}], ids=str)
def test_double_precision(changes, model, tokens, wanted):
    found = observed(model, tokens, arithmetic_of("float64", "cuda"), **changes)
    assert_sums(found, wanted, 1e-10)
    assert_logits(found, wanted, 1e-10)


def test_single_precision(model, tokens, wanted, tmp_path):
    found = observed(model, tokens, arithmetic_of("float32", "cuda"), folder=tmp_path)
    assert_sums(found, wanted, 1e-4)
    assert_logits(found, wanted, 1e-4)
