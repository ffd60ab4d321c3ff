"""P8 and P9: what comes out is what other readers accept, and of the size that was told before."""

import ctypes
import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from pipeline.quant.error_limits import ERROR_LIMITS
from pipeline.recipe.schema import load_recipe
from recipes import PlanRecipe
from tasks.job import Job
from tasks.plan import plan_text
from tasks.request import JobParameters
from tests.pipeline.filling import MIXED
from tests.pipeline.oracle import Oracle
from tests.promises.whole_job import run_job

RECIPES = Path(__file__).parents[2] / "recipes"
OTHERS = ("v4-", "draft", "reap-", "served-graft", "bpw-2.4-mainline", "as-is")
"""For another model, for no target, and what asks for more than a checkpoint."""
SHIPPED = sorted(p.stem for p in RECIPES.glob("*.toml") if not p.stem.startswith(OTHERS))
LAYOUTS = ("mainline", "fork")
ONE_FAST = ["mainline", pytest.param("fork", marks=pytest.mark.slow)]


class _Parameters(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


def ggml():
    """ggml's own GGUF reader: what llama.cpp opens a file with."""
    folder = Path(importlib.util.find_spec("libggml").submodule_search_locations[0])
    library = ctypes.CDLL(str(folder / "lib64" / "libggml-base.so"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("gguf_init_from_file", pointer, [ctypes.c_char_p, _Parameters]),
        ("gguf_free", None, [pointer]),
        ("gguf_get_n_tensors", number, [pointer]),
        ("gguf_get_tensor_name", ctypes.c_char_p, [pointer, number]),
        ("gguf_get_tensor_type", ctypes.c_int, [pointer, number]),
        ("gguf_get_tensor_offset", ctypes.c_size_t, [pointer, number]),
        ("gguf_get_tensor_size", ctypes.c_size_t, [pointer, number]),
        ("gguf_get_data_offset", ctypes.c_size_t, [pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def read_by_ggml(path):
    """(name, type id, absolute offset, bytes) of every tensor, as ggml itself sees the file."""
    library = ggml()
    opened = library.gguf_init_from_file(str(path).encode(), _Parameters(True, None))
    assert opened, f"ggml refuses {path.name}"
    begin = library.gguf_get_data_offset(opened)
    try:
        return [
            (
                library.gguf_get_tensor_name(opened, n).decode(),
                library.gguf_get_tensor_type(opened, n),
                begin + library.gguf_get_tensor_offset(opened, n),
                library.gguf_get_tensor_size(opened, n),
            )
            for n in range(library.gguf_get_n_tensors(opened))
        ]
    finally:
        library.gguf_free(opened)


@pytest.fixture(scope="module")
def mixed(small_miniature, tmp_path_factory):
    """Both layouts of a recipe with every kind of transform, finished: jobs by layout."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mixed.toml").write_text(MIXED)
    jobs = {}
    for layout in LAYOUTS:
        words = {"recipe": folder / "mixed.toml", "layout": layout}
        outcome = run_job(small_miniature, folder / "out", **words)
        assert outcome.ok, outcome.text
        parameters = (small_miniature, folder / "mixed.toml", folder / "out", layout, "mini")
        jobs[layout] = Job(JobParameters(*map(str, parameters)))
    return jobs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_p08_ggml_itself_opens_every_file_and_sees_what_was_planned(mixed, layout):
    job = mixed[layout]
    for shard in job.shards:
        wanted = [(t.name, t.type.type_id, t.offset, t.nbytes) for t in shard.tensors]
        assert read_by_ggml(job.folder / shard.file_name) == wanted


def test_p08_ggml_refuses_a_file_that_is_cut(mixed, tmp_path):
    """The reader above does look."""
    job = mixed["mainline"]
    content = (job.folder / job.shards[0].file_name).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:3000])
    with pytest.raises(AssertionError, match="ggml refuses"):
        read_by_ggml(tmp_path / "cut.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_p08_every_tensor_is_the_checkpoints_within_the_bound_of_its_type(mixed, layout):
    """Read and dequantized by gguf-py, held against torch's decoding of the checkpoint."""
    job = mixed[layout]
    oracle = Oracle(job.checkpoint)
    n_read = 0
    for shard in job.shards:
        planned = {t.name: t for t in shard.tensors}
        for stored in gguf.GGUFReader(job.folder / shard.file_name).tensors:
            tensor = planned[stored.name]
            wanted = oracle.values(tensor)
            found = dequantize(stored.data, stored.tensor_type).reshape(wanted.shape)
            error = np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) or 1)
            limit = 1e-6 if tensor.type.name in ("F32", "MXFP4") else ERROR_LIMITS[tensor.type.name]
            assert error <= limit, stored.name
            assert stored.tensor_type.name == tensor.type.name
            n_read += 1
    assert n_read == len(job.tensors)


@pytest.mark.parametrize("layout", ONE_FAST)
def test_p08_every_byte_is_that_of_whole_tensor_tools(mixed, layout):
    """Quantized blocks equal those of one ggml call on a tensor that torch decoded whole."""
    assert_bytes_of_whole_tensor_tools(mixed[layout], step=5 if layout == "fork" else 3)


@pytest.mark.parametrize("recipe", ["v4-q3_k", pytest.param("v4-native", marks=pytest.mark.slow)])
def test_p08_every_byte_of_a_v4_file_is_that_of_whole_tensor_tools(
    small_v4_miniature, tmp_path, recipe
):
    assert run_job(small_v4_miniature, tmp_path, recipe).ok
    job = Job(JobParameters(str(small_v4_miniature), recipe, str(tmp_path), "", "mini"))
    assert {"I32", "F32", "BF16", "MXFP4", "Q8_0"} <= {t.type.name for t in planned(job)}
    assert_bytes_of_whole_tensor_tools(job, step=1)


def planned(job):
    return [tensor for shard in job.shards for tensor in shard.tensors]


def assert_bytes_of_whole_tensor_tools(job, *, step):
    oracle = Oracle(job.checkpoint)
    pairs = [(shard, tensor) for shard in job.shards for tensor in shard.tensors]
    for shard, tensor in pairs[::step]:
        with (job.folder / shard.file_name).open("rb") as opened:
            opened.seek(tensor.offset)
            assert opened.read(tensor.nbytes) == oracle.encoded(tensor), tensor.name


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name == "served-lean" else pytest.mark.slow)
        for name in SHIPPED
    ],
)
def test_p09_the_size_told_before_is_the_size_written(small_miniature, tmp_path, recipe):
    """From the printed plan to ``stat``; at full size see tests/pipeline/test_shipped_recipes."""
    words = {"source": str(small_miniature), "recipe": recipe, "out": str(tmp_path / "out")}
    told = plan_text(PlanRecipe(name="mini", **words)).splitlines()
    assert not (tmp_path / "out").exists()
    assert run_job(small_miniature, tmp_path / "out", recipe).ok
    (folder,) = (tmp_path / "out").glob("mini-*")
    made = sorted(folder.glob("*.gguf"))
    assert len(made) == (4 if load_recipe(RECIPES / f"{recipe}.toml").draft.mode == "drop" else 5)
    for path in made:
        (line,) = [line for line in told if line.startswith(path.name)]
        assert f" {path.stat().st_size:,} " in line
    total = sum(path.stat().st_size for path in made)
    assert any("disk: all output files" in line and f" {total:,} " in line for line in told)
