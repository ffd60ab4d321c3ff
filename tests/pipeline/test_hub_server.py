"""The test server, asked by the hub's own client as it comes from the registry."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from filecmp import cmpfiles
from pathlib import Path

import pytest
from huggingface_hub import HfApi, close_session, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import BlobLfsInfo, RepoFile, RepoFolder

from tests.hub_server import Fault, HubServer, Status, Truncated

REPO = "owner/model"
SHARD = bytes(range(256)) * 1024
FILES = {
    "config.json": b"hello\n",
    "model-00001-of-00001.safetensors": SHARD,
    "nested folder/b.txt": b"b",
    "nested folder/deep/a.txt": b"",
}
HELLO_GIT_SHA1 = "ce013625030ba8dba906f756967f9e9ca394464a"
EMPTY_GIT_SHA1 = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
LFS_NAME = "model-00001-of-00001.safetensors"
SHARD_SHA256 = hashlib.sha256(SHARD).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "served"
    for name, content in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    close_session()
    with HubServer() as server:
        server.add_commit(REPO, folder, commit="a" * 40)
        yield server
    close_session()


def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


def download(
    hub: HubServer,
    cache: Path,
    name: str,
    *,
    repo: str = REPO,
    revision: str = "main",
    token: str = "",
) -> bytes:
    path = hf_hub_download(
        repo, name, revision=revision, token=token or False, cache_dir=cache, endpoint=hub.url
    )
    return Path(path).read_bytes()


def file_of(entry: RepoFile | RepoFolder) -> RepoFile:
    assert isinstance(entry, RepoFile)
    return entry


def sha256_of(lfs: BlobLfsInfo | None) -> str | None:
    return lfs.sha256 if lfs else None


def asked(hub: HubServer) -> list[tuple[str, str, str, int]]:
    return [(each.method, each.origin, each.file, each.status) for each in hub.requests]


@pytest.mark.parametrize("revision", [None, "main", "a" * 40])
def test_model_info_names_commit_and_files(hub: HubServer, revision: str | None) -> None:
    info = api(hub).model_info(REPO, revision=revision)
    assert (info.id, info.sha, info.gated) == (REPO, "a" * 40, False)
    assert [each.rfilename for each in info.siblings or []] == list(FILES)


def test_model_info_with_sizes_and_digests(hub: HubServer) -> None:
    info = api(hub).model_info(REPO, files_metadata=True)
    found = {each.rfilename: each for each in info.siblings or []}
    assert {name: each.size for name, each in found.items()} == {
        name: len(content) for name, content in FILES.items()
    }
    assert (found["config.json"].blob_id, found["config.json"].lfs) == (HELLO_GIT_SHA1, None)
    assert sha256_of(found[LFS_NAME].lfs) == SHARD_SHA256


@pytest.mark.parametrize(("page_size", "n_pages"), [(1000, 1), (4, 2), (2, 3), (1, 6)])
def test_tree_page_by_page(hub: HubServer, page_size: int, n_pages: int) -> None:
    hub.page_size = page_size
    entries = list(api(hub).list_repo_tree(REPO, recursive=True))
    files = {each.path: each for each in entries if isinstance(each, RepoFile)}
    folders = [each.path for each in entries if isinstance(each, RepoFolder)]
    assert {name: each.size for name, each in files.items()} == {
        name: len(content) for name, content in FILES.items()
    }
    assert folders == ["nested folder", "nested folder/deep"]
    assert files["config.json"].blob_id == HELLO_GIT_SHA1
    assert files["nested folder/deep/a.txt"].blob_id == EMPTY_GIT_SHA1
    assert len(hub.requests) == n_pages


def test_tree_gives_lfs_digest_and_pointer(hub: HubServer) -> None:
    pointer = (
        "version https://git-lfs.github.com/spec/v1\n"
        f"oid sha256:{SHARD_SHA256}\nsize {len(SHARD)}\n"
    ).encode()
    entries = {each.path: each for each in api(hub).list_repo_tree(REPO)}
    file = file_of(entries[LFS_NAME])
    assert file.lfs == {"size": len(SHARD), "sha256": SHARD_SHA256, "pointer_size": len(pointer)}
    assert file.blob_id == hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
    assert file.xet_hash is None


@pytest.mark.parametrize(
    ("path", "recursive", "names"),
    [
        (None, False, ["nested folder", "config.json", LFS_NAME]),
        ("nested folder", False, ["nested folder/deep", "nested folder/b.txt"]),
        ("nested folder/deep", True, ["nested folder/deep/a.txt"]),
    ],
    ids=["root", "folder", "deep"],
)
def test_tree_of_a_folder(
    hub: HubServer, path: str | None, recursive: bool, names: list[str]
) -> None:
    entries = api(hub).list_repo_tree(REPO, path, recursive=recursive)
    assert [each.path for each in entries] == names


def test_expanded_tree_has_commit_and_scan(hub: HubServer) -> None:
    folder, file, _ = api(hub).list_repo_tree(REPO, expand=True)
    assert [each.last_commit and each.last_commit["oid"] for each in (folder, file)] == [
        "a" * 40
    ] * 2
    security = file_of(file).security
    assert security is not None
    assert security.safe


@pytest.mark.parametrize("expand", [False, True])
def test_paths_info_drops_what_is_not_there(hub: HubServer, expand: bool) -> None:
    paths = ["config.json", "absent", "nested folder", LFS_NAME]
    found = api(hub).get_paths_info(REPO, paths, expand=expand)
    assert [each.path for each in found] == ["config.json", "nested folder", LFS_NAME]
    assert sha256_of(file_of(found[2]).lfs) == SHARD_SHA256
    assert (found[0].last_commit is not None) is expand


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("has_resolve_cache", [False, True], ids=["direct", "redirected"])
def test_download_gives_the_content(
    hub: HubServer, tmp_path: Path, name: str, has_resolve_cache: bool
) -> None:
    hub.has_resolve_cache = has_resolve_cache
    assert download(hub, tmp_path, name) == FILES[name]


def test_lfs_file_comes_from_the_other_origin_without_the_token(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.token = "right"
    assert download(hub, tmp_path, LFS_NAME, token="right") == SHARD
    assert asked(hub) == [("HEAD", "hub", LFS_NAME, 302), ("GET", "cdn", LFS_NAME, 200)]
    assert [each.is_authorized for each in hub.requests] == [True, False]
    assert hub.requests[1].nbytes == len(SHARD)


def test_a_moved_branch_is_another_commit(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes(b"other\n")
    second = hub.add_commit(REPO, other)
    assert api(hub).model_info(REPO).sha == second
    assert download(hub, tmp_path, "config.json") == b"other\n"
    assert download(hub, tmp_path, "config.json", revision="a" * 40) == b"hello\n"
    hub.move_branch(REPO, "main", "a" * 40)
    assert download(hub, tmp_path, "config.json") == b"hello\n"
    (branch,) = api(hub).list_repo_refs(REPO).branches
    assert (branch.name, branch.target_commit) == ("main", "a" * 40)


SNAPSHOT = "import sys, huggingface_hub as h; print(h.snapshot_download(sys.argv[1]))"


def test_snapshot_by_environment_alone(small_miniature: Path, tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.add_commit(REPO, small_miniature)
        done = subprocess.run(
            [sys.executable, "-c", SNAPSHOT, REPO],
            env=hub.client_environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        sent = sum(each.nbytes for each in hub.requests if each.origin == "cdn")
    paths = [path for path in small_miniature.rglob("*") if path.is_file()]
    names = [path.relative_to(small_miniature).as_posix() for path in paths]
    fetched = Path(done.stdout.strip())
    assert fetched.is_relative_to(tmp_path)
    assert cmpfiles(small_miniature, fetched, names, shallow=False) == (names, [], [])
    assert sent == sum(p.stat().st_size for p in small_miniature.glob("*.safetensors"))


REFUSALS: list[tuple[dict[str, str], type[HfHubHTTPError], int, str]] = [
    ({"token": ""}, HfHubHTTPError, 401, "Invalid username or password"),
    ({"token": "wrong"}, HfHubHTTPError, 401, "Invalid credentials in Authorization header"),
    ({"token": "old"}, HfHubHTTPError, 401, "is expired"),
    ({"revision": "v2"}, RevisionNotFoundError, 404, "Invalid rev id: v2"),
    ({"name": "absent"}, RemoteEntryNotFoundError, 404, "Entry Not Found"),
    ({"repo": "owner/absent"}, RepositoryNotFoundError, 404, "Repository Not Found"),
]


@pytest.mark.parametrize(
    ("options", "error", "status", "words"),
    REFUSALS,
    ids=["no token", "wrong token", "expired token", "revision", "file", "repository"],
)
def test_refusals_are_the_client_s_own_errors(
    hub: HubServer,
    tmp_path: Path,
    options: dict[str, str],
    error: type[HfHubHTTPError],
    status: int,
    words: str,
) -> None:
    hub.token = "right"
    hub.expired_tokens.add("old")
    asked_for = {"name": "config.json", "token": "right", **options}
    with pytest.raises(error, match=words) as caught:
        download(hub, tmp_path, **asked_for)
    assert type(caught.value) is error
    assert caught.value.response.status_code == hub.requests[-1].status == status


@pytest.mark.parametrize(("token", "status"), [("", 401), ("right", 403)])
def test_gated_files_are_refused(hub: HubServer, tmp_path: Path, token: str, status: int) -> None:
    hub.gated = True
    with pytest.raises(GatedRepoError, match="Access to model owner/model is restricted"):
        download(hub, tmp_path, "config.json", token=token)
    assert hub.requests[-1].status == status


def test_a_gated_repository_can_be_listed(hub: HubServer) -> None:
    hub.gated = True
    assert api(hub).model_info(REPO).gated == "manual"
    assert len(list(api(hub).list_repo_tree(REPO))) == 3
    with pytest.raises(GatedRepoError, match="Please log in"):
        api(hub).auth_check(REPO)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda api: api.model_info("owner/absent"), RepositoryNotFoundError),
        (lambda api: api.model_info(REPO, revision="v2"), RevisionNotFoundError),
        (lambda api: list(api.list_repo_tree(REPO, revision="v2")), RevisionNotFoundError),
        (lambda api: list(api.list_repo_tree(REPO, "absent")), RemoteEntryNotFoundError),
        (lambda api: api.get_paths_info(REPO, ["a"], revision="v2"), RevisionNotFoundError),
    ],
    ids=["model", "revision", "tree revision", "tree folder", "paths-info revision"],
)
def test_listings_of_what_is_not_there(
    hub: HubServer, call: Callable[[HfApi], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        call(api(hub))


def test_the_client_resumes_a_truncated_download(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    n_chunk = 10 << 20  # the client keeps whole chunks of this size only
    with (folder / "big.bin").open("wb") as big:
        big.truncate(n_chunk + 5000)
    hub.add_commit(REPO, folder)
    hub.fault(Fault(Truncated(after=n_chunk + 1000), "big.bin", origin="cdn"))
    assert download(hub, tmp_path, "big.bin") == bytes(n_chunk + 5000)
    first, second = (each for each in hub.requests if each.origin == "cdn")
    assert (first.faults, first.range, first.nbytes) == (("Truncated",), None, n_chunk + 1000)
    assert (second.status, second.range) == (206, f"bytes={n_chunk}-")
    assert second.nbytes == 5000


def test_the_client_waits_as_long_as_it_is_told(hub: HubServer) -> None:
    hub.fault(Fault(Status(429, retry_after=0), "api/tree"))
    assert len(list(api(hub).list_repo_tree(REPO))) == 3
    first, second = hub.requests
    assert (first.status, second.status) == (429, 200)
    assert second.at - first.at >= 1
