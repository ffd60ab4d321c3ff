"""Every command that is printed for a broken file, run as printed: what it leaves is sound."""

import contextlib
import io
import shlex
import shutil
import sys
from dataclasses import replace

import pytest
from gguf.scripts import gguf_set_metadata

from pipeline.diagnosis.diagnose import Verdict, diagnose
from pipeline.gguf.keys import ValueType, array, i32, u16, u32
from pipeline.gguf.model_file import SPLIT_COUNT, SPLIT_TENSORS_COUNT, shard_name
from pipeline.gguf.reader import read_gguf
from pipeline.model.layout import Layout
from tasks import recipe_command
from tests.gguf_builder import file_bytes
from tests.pipeline.diagnosis.models import FIVE, LATER, P, with_alignment_key
from tests.promises.whole_job import run_job

pytestmark = pytest.mark.slow

CANDIDATES = ("candidate", "kv_source_layer", "index_source_layer", "indexer.source_layers")


@pytest.fixture(scope="module")
def sound(small_miniature, tmp_path_factory):
    """The first shard of each layout's set, as this project makes it."""
    out = tmp_path_factory.mktemp("sound")
    for layout in Layout:
        assert run_job(small_miniature, out, "native", layout=layout.value).ok
    return {
        layout: next((out / f"mini-native-{layout}").glob("*-00001-of-0000[2-9].gguf"))
        for layout in Layout
    }


def broken(first, folder, change):
    """The set again; ``change`` takes and gives keys (by name) and tensors of its first shard."""
    folder.mkdir()
    for path in first.parent.glob(f"{shard_name(first).stem}-0*.gguf"):
        shutil.copy(path, folder)
    file = read_gguf(first)
    data = first.read_bytes()
    contents = {t.name: data[t.offset : t.offset + t.nbytes] for t in file.tensors.values()}
    contents["blk.0.foo.weight"] = bytes(128)
    keys, tensors = change(
        dict(file.key_values), [(t.name, t.ne, t.type.name) for t in file.tensors.values()]
    )
    path = folder / first.name
    path.write_bytes(file_bytes([*keys.values()], tensors, contents))
    return path


def keyed(*entries, without=()):
    def change(keys, tensors):
        kept = {k: e for k, e in keys.items() if not any(part in k for part in without)}
        return {**kept, **{entry.key: entry for entry in entries}}, tensors

    return change


def valued(name, value_of):
    """The key ``name`` with another value."""

    def change(keys, tensors):
        entry = keys[P + name]
        return {**keys, entry.key: replace(entry, value=value_of(entry.value))}, tensors

    return change


def typed(name, kind, element=None):
    def change(keys, tensors):
        entry = keys[P + name]
        return {**keys, entry.key: replace(entry, type=kind, element=element)}, tensors

    return change


def prefixed(keys, tensors):
    moved = [replace(e, key=e.key.replace(P, "deepseek4.1.")) for e in keys.values()]
    return {entry.key: entry for entry in moved}, tensors


def lacking(part, *, is_counted):
    def change(keys, tensors):
        kept = [one for one in tensors if part not in one[0]]
        said = keys[SPLIT_TENSORS_COUNT].value
        n_tensors = said - (len(tensors) - len(kept)) * is_counted
        return {**keys, SPLIT_TENSORS_COUNT: i32(SPLIT_TENSORS_COUNT, n_tensors)}, kept

    return change


def with_foreign(keys, tensors):
    return keys, [*tensors, ("blk.0.foo.weight", (32,), "F32")]


FORK, MAINLINE = Layout.FORK, Layout.MAINLINE
CASES = {
    "signed pad": (MAINLINE, typed("engram.pad_token_id", ValueType.INT32)),
    "signed primes": (FORK, typed("engram.primes", ValueType.ARRAY, ValueType.INT64)),
    "fork's keys in mainline": (
        MAINLINE,
        keyed(
            u32(f"{P}engram.pad_id", 1), array(f"{P}engram.multipliers", ValueType.UINT64, [1, 2])
        ),
    ),
    "mainline's key in fork": (FORK, keyed(u32(f"{P}ple.ngram_size", 4))),
    "five keys": (FORK, keyed(without=FIVE)),
    "five keys and candidates": (FORK, keyed(without=(*FIVE, *LATER, *CANDIDATES))),
    "prefix": (FORK, prefixed),
    "tensor": (FORK, lacking("indexer.k_norm", is_counted=True)),
    "tensor and count": (FORK, lacking("indexer.k_norm", is_counted=False)),
    "count": (MAINLINE, lacking("exp_probs_b_vl", is_counted=False)),
    "extra": (FORK, with_foreign),
    "offsets": (MAINLINE, valued("ple.head_offsets", lambda v: v[: len(v) // 2] * 2)),
    "pad": (FORK, valued("engram.pad_id", lambda _: 9_999_999)),
    "raw pad": (MAINLINE, valued("engram.pad_token_id", lambda _: 9_999_999)),
    "map": (FORK, valued("engram.token_map", lambda v: v[:-1])),
    "multipliers": (MAINLINE, valued("ple.layer_multipliers", lambda v: v[::-1])),
    "primes": (FORK, valued("engram.primes", lambda v: (v[0] + 2, *v[1:]))),
    "split count": (FORK, keyed(u16(SPLIT_COUNT, 7))),
    "alignment key": (FORK, keyed()),
}
TWICE = ("extra",)
"""What takes two steps: the number, then the tensor."""


class Reader:
    """Somebody who types what the page says, in a folder, and has the checkpoint."""

    def __init__(self, folder, checkpoint, monkeypatch):
        self._checkpoint = str(checkpoint)
        self._patch = monkeypatch
        monkeypatch.chdir(folder)
        self._folder = folder
        self._round = 0

    def mend(self, path):
        """Follow what is printed for the faults of ``path``; where the mended model is."""
        self._round += 1
        found = diagnose(path)
        assert found.verdict is Verdict.FAULTY
        mends = [f.mend for f in found.findings if f.severity.is_fault]
        assert all(mends)
        commands = {command for mend in mends for command in mend.commands}
        assert len(commands) == 1, commands
        if found.alike:
            (self._folder / "alike.toml").write_text(found.alike)
        for step in commands.pop().split(" && "):
            path = self._type(shlex.split(step)) or path
        return path

    def _type(self, words):
        match words:
            case ["scripts/recipe", *rest, ">", target]:
                with contextlib.redirect_stdout(io.StringIO()) as told:
                    assert recipe_command.main(rest) == 0
                (self._folder / target).write_text(told.getvalue())
            case ["scripts/run", "RunRecipe", *rest]:
                given = dict(zip((word[2:] for word in rest[::2]), rest[1::2], strict=True))
                assert given["recipe"] not in ("native", "RECIPE")
                source = given.pop("source").replace("CHECKPOINT", self._checkpoint)
                out = self._folder / f"out{self._round}"
                outcome = run_job(source, out, **given)
                assert outcome.ok, outcome.text
                return next(out.glob("mini-*"))
            case [".venv/bin/gguf-set-metadata", *rest]:
                self._patch.setattr(sys, "argv", ["gguf-set-metadata", *rest])
                gguf_set_metadata.main()
        return None


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_mends(name, sound, small_miniature, tmp_path, monkeypatch):
    layout, change = CASES[name]
    path = broken(sound[layout], tmp_path / "broken", change)
    if name == "alignment key":
        with_alignment_key(path)
    reader = Reader(tmp_path, small_miniature, monkeypatch)
    for _ in range(2 if name in TWICE else 1):
        path = reader.mend(path)
    found = diagnose(path)
    assert found.verdict is Verdict.SOUND, [finding.what for finding in found.findings]
