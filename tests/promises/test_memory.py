"""P14: memory is bounded by tiles and threads, whatever a tensor holds."""

import json
import subprocess
import sys

import pytest

from pipeline.fill import MEMORY_BASE_NBYTES, MEMORY_THREAD_NBYTES

N_THREADS = 2
ENGRAM_BASE = 120_000

BIG_TABLES = """
import json, sys
from dataclasses import replace
from pathlib import Path
from pipeline.miniature.blueprint import write_blueprint
from pipeline.miniature.checkpoint import miniature_blueprint
from tests.conftest import SMALL
from tests.pipeline.filling import PeakAnonymous
from tests.promises.whole_job import run_job

folder, n_threads = Path(sys.argv[1]), int(sys.argv[2])
size = replace(SMALL, engram_base=int(sys.argv[3]))
blueprint = miniature_blueprint(size, 0)
write_blueprint(folder / "source", blueprint, lambda fd, path, shard: None, disk_nbytes=0)
with PeakAnonymous() as peak:
    outcome = run_job(folder / "source", folder / "out", threads=n_threads)
assert outcome.ok, outcome.text
largest = max(p.stat().st_size for p in folder.glob("out/*/*.gguf"))
measured = {"before": peak.before, "peak": peak.nbytes, "largest": largest}
print(json.dumps(measured), file=sys.stderr)
"""


@pytest.mark.slow
def test_p14_memory_stays_bounded(tmp_path):
    """The whole job over tables of holes, each of which would be 740 MB as float32."""
    words = [sys.executable, "-c", BIG_TABLES, str(tmp_path), str(N_THREADS), str(ENGRAM_BASE)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    measured = json.loads(result.stderr.splitlines()[-1])
    allowed = MEMORY_BASE_NBYTES + N_THREADS * MEMORY_THREAD_NBYTES
    as_float = measured["largest"] / 2 / 34 * 32 * 4
    assert as_float > allowed  # a whole table in memory would show
    assert measured["peak"] <= allowed
    assert measured["peak"] - measured["before"] < 200_000_000
