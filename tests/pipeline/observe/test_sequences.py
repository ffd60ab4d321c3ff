"""How a text becomes sequences, and which files hold text."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline.digest import sha256
from pipeline.errors import SourceError
from pipeline.miniature.vocabulary import small_vocabulary
from pipeline.observe.calibration import documents_of, encoded
from pipeline.observe.sequences import packed

BOS = 0


def texts(sequences):
    return [one.tolist() for one in sequences.tokens]


def test_documents_are_cut_and_never_mixed():
    read = packed([[5] * 7, [6, 6], [], [7]], bos=BOS, longest=4, most=100)
    assert texts(read) == [[0, 5, 5, 5], [0, 5, 5, 5], [0, 5], [0, 6, 6], [0, 7]]
    assert (read.n_documents, read.n_tokens, read.lengths) == (3, 15, (4, 4, 2, 3, 2))


def test_the_first_token_is_not_doubled():
    assert texts(packed([[0, 5, 5], [0]], bos=BOS, longest=4, most=9)) == [[0, 5, 5]]


@pytest.mark.parametrize(
    ("most", "lengths"), [(1, ()), (2, (2,)), (5, (4,)), (6, (4, 2)), (9, (4, 4)), (10, (4, 4, 2))]
)
def test_the_last_sequence_is_cut_short(most, lengths):
    read = packed([[5] * 7, [6] * 2, [7]], bos=BOS, longest=4, most=most)
    assert read.lengths == lengths


@given(
    documents=st.lists(st.lists(st.integers(1, 9), max_size=30), max_size=6),
    longest=st.integers(2, 9),
    most=st.integers(2, 60),
)
def test_nothing_is_lost_or_reordered(documents, longest, most):
    read = packed(documents, bos=BOS, longest=longest, most=most)
    assert read.n_tokens <= most
    assert all(2 <= n <= longest for n in read.lengths)
    assert all(one[0] == BOS for one in read.tokens)
    flat = [token for one in read.tokens for token in one[1:].tolist()]
    wanted = [token for document in documents for token in document]
    assert flat == wanted[: len(flat)]
    assert len(flat) == len(wanted) or read.n_tokens >= most - 1


def test_the_digest_tells_where_sequences_end():
    digests = {
        packed(documents, bos=BOS, longest=9, most=99).sha256
        for documents in ([[5, 6]], [[5], [6]], [[6, 5]], [[5, 6], [7]])
    }
    assert len(digests) == 4
    one = packed([[5, 6]], bos=BOS, longest=9, most=99)
    assert one.sha256 == sha256(np.array([3, 0, 5, 6], "<u4").tobytes())


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.md").write_text("third")
    (tmp_path / "a.jsonl").write_text('{"text": "first", "more": 1}\n\n{"text": "second"}\r\n')
    (tmp_path / "c.txt").write_text("vierte: ä")
    for other in (".hidden.txt", "notes.html", "weights.safetensors"):
        (tmp_path / other).write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "a.txt").write_text("no")
    assert list(documents_of(tmp_path)) == ["first", "second", "third", "vierte: ä"]
    assert list(documents_of(tmp_path / "c.txt")) == ["vierte: ä"]


BROKEN = {
    "nothing": (None, None, "no calibration text here"),
    "another form": ("a.html", b"x", "unknown form"),
    "bytes": ("a.txt", b"abc\xff", "not UTF-8.*offset 3.*0xFF"),
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not valid JSON"),
    "no text": ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', "line 2 holds no document"),
    "a number": ("a.jsonl", b'{"text": 3}', "line 1 holds no document"),
    "a list": ("a.jsonl", b"[]", "line 1 is not a JSON object"),
}


@pytest.mark.parametrize(("name", "content", "message"), BROKEN.values(), ids=BROKEN)
def test_each_fault_of_a_text_is_told(name, content, message, tmp_path):
    path = tmp_path / "empty" if name is None else tmp_path / name
    if name:
        path.write_bytes(content)
    else:
        path.mkdir()
    with pytest.raises(SourceError, match=message) as caught:
        list(documents_of(path))
    assert caught.value.file == str(path)


@pytest.fixture(scope="module")
def vocabulary():
    return small_vocabulary(1280, "v4.1-flash")


def test_tokens_are_the_checkpoints_own(vocabulary):
    text = "<｜User｜>bada Bido, 123!<｜Assistant｜>"
    (ids,) = encoded([text], vocabulary.tokenizer)
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer.decode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    added = json.loads(vocabulary.tokenizer)["added_tokens"]
    named = {entry["content"]: entry["id"] for entry in added}
    assert (ids[0], ids[-1]) == (named["<｜User｜>"], named["<｜Assistant｜>"])


def test_images_are_refused(vocabulary):
    image = vocabulary.ids["image"]
    documents = ["text", "an <｜deepseek_image｜> inside"]
    with pytest.raises(SourceError, match=r"document 2 .* token of an image"):
        list(encoded(documents, vocabulary.tokenizer, refused=image))
    assert len(list(encoded(documents, vocabulary.tokenizer))) == 2
