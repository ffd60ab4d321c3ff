"""Addresses of repositories: what is one, what is a path, what is neither."""

import pytest

from pipeline.errors import SourceError
from pipeline.source.hub.address import HubAddress, is_address, parse_address

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("owner/name", HubAddress("owner/name", "main")),
        ("owner/name@v1.0", HubAddress("owner/name", "v1.0")),
        ("owner/name@refs/pr/3", HubAddress("owner/name", "refs/pr/3")),
        (f"Own-er/Na.me_1@{COMMIT}", HubAddress("Own-er/Na.me_1", COMMIT)),
    ],
)
def test_an_address_in_parts(text, address):
    assert parse_address(text) == address
    assert is_address(text)
    assert parse_address(str(address)) == address
    assert address.is_commit == (COMMIT in text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "/owner/name",
        "./owner/name",
        "owner/name/more",
        "owner/name@",
        "owner/name@a b",
        "owner/name@a..b",
        "owner/name@../x",
        "owner/na me",
        "owner/name.git",
        "https://example.org/owner/name",
        "owner/\0name",
        "ö/name",
        "a" * 5000,
    ],
)
def test_what_is_no_address_is_named(text):
    assert not is_address(text)
    with pytest.raises(SourceError, match="owner/name or owner/name@revision") as caught:
        parse_address(text)
    assert len(str(caught.value)) < 600


def test_a_folder_that_exists_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_address("owner/name")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_address("owner/name")
