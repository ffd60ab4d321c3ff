"""What an observation is said to take, at the released size and held against a run."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from pipeline.errors import ConfigError, OutputError, PlanError, Problems
from pipeline.model.config import read_config
from pipeline.model.expected.tensors import expected_tensors
from pipeline.observe import needs
from pipeline.observe.chunk import chunks_of
from pipeline.observe.measure import Speed, measure
from pipeline.observe.observable import require_observable
from pipeline.observe.plan import BASE_NBYTES, Keeping, Room, plan_observation
from pipeline.report.observe_table import duration, observation_tables
from tests.conftest import SMALL
from tests.pipeline.observe.observing import ROOMY, arithmetic_of, write_tight
from tests.pipeline.released_plans import released_config

N_TOKENS = 262_144
TEXT = (2048,) * (N_TOKENS // 2048)
GB = 10**9
FLOAT32 = arithmetic_of("float32")


@pytest.fixture(scope="module")
def released():
    config = released_config("v4.1-flash")
    return config, {spec.name: spec for spec in expected_tensors(config)}


def planned(released, room, keeping=Keeping.DISK, arithmetic=FLOAT32, lengths=TEXT):
    return plan_observation(*released, lengths, arithmetic, keeping, room)


def test_the_released_model_over_the_usual_text(released):
    """Against figures by hand: 33 GFLOP a token, 289 GB of experts, 82 kB of streams a token."""
    plan = planned(released, Room(64 * GB, None, 100 * GB))
    assert plan.flops / N_TOKENS == pytest.approx(33e9, rel=0.06)
    assert len(plan.chunks) == 1
    assert plan.read_nbytes == pytest.approx(288_777_830_400 + 13e9, rel=0.01)
    streams = N_TOKENS * 4 * 5120 * 4
    assert 2 * streams < plan.disk_nbytes < 2.2 * streams
    assert sum(use.nbytes for use in plan.uses) < 17 * GB


def test_less_memory_means_more_passes(released):
    whole = planned(released, Room(64 * GB, None, 100 * GB))
    parts = planned(released, Room(8 * GB, None, 100 * GB))
    assert len(parts.chunks) == 3
    assert sum(use.nbytes for use in parts.uses) <= 8 * GB
    more = parts.read_nbytes - whole.read_nbytes
    assert more == (len(parts.chunks) - 1) * 288_777_830_400
    assert [n for chunk in parts.chunks for n in chunk] == list(range(len(TEXT)))


def test_a_state_in_memory_lies_on_the_device_where_it_fits(released):
    cuda = replace(FLOAT32, device=torch.device("cuda"), scratch_nbytes=2 << 30)
    large = planned(released, Room(64 * GB, 140 * GB, 0), Keeping.MEMORY, cuda)
    small = planned(released, Room(64 * GB, 23 * GB, 0), Keeping.MEMORY, cuda)
    assert (large.state_on_device, small.state_on_device) == (True, False)
    for plan, room in ((large, 140 * GB), (small, 23 * GB)):
        assert sum(use.nbytes for use in plan.uses if use.on_device) <= room
        assert sum(use.nbytes for use in plan.uses if not use.on_device) <= 64 * GB


REFUSED = {
    "disk": (Room(64 * GB, None, 40 * GB), Keeping.DISK, "too little disk.*--state memory"),
    "memory": (Room(3 * GB, None, 100 * GB), Keeping.DISK, "too little memory.*--sequence"),
    "memory with state": (Room(20 * GB, None, 0), Keeping.MEMORY, "memory.*--state disk"),
}


@pytest.mark.parametrize(("room", "keeping", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(room, keeping, message, released):
    with pytest.raises(OutputError, match=message):
        planned(released, room, keeping)


def test_a_device_that_is_too_small_is_refused(released):
    cuda = replace(FLOAT32, device=torch.device("cuda"))
    with pytest.raises(OutputError, match="too little memory of the device"):
        planned(released, Room(64 * GB, 2 * GB, 100 * GB), arithmetic=cuda)
    with pytest.raises(OutputError, match="too little memory;"):
        planned(released, Room(1 * GB, 80 * GB, 100 * GB), arithmetic=cuda)


@pytest.mark.parametrize(
    ("lengths", "most", "chunks"),
    [
        ((3, 3, 3), 100, [range(3)]),
        ((3, 3, 3), 6, [range(2), range(2, 3)]),
        ((3, 9, 3), 4, [range(1), range(1, 2), range(2, 3)]),
        ((1,), 0, [range(1)]),
    ],
)
def test_chunks_are_whole_sequences(lengths, most, chunks):
    assert chunks_of(lengths, most) == chunks


def test_flops_are_those_of_a_count_by_hand(model):
    config, lengths = model.config, (40, 7)
    sizes = needs.Sizes.of(config, model.specs)
    total = 0
    for layer, ratio in enumerate(config.layer_ratios):
        names = [n for n in model.specs if n.startswith(f"layers.{layer}.")]
        dense = [n for n in names if ".experts." not in n and ".embed." not in n]
        weights = sum(math.prod(model.specs[n].shape) for n in dense if not n.endswith(".scale"))
        weights += config.n_experts_used * 3 * config.hidden * config.expert_ff
        for n in lengths:
            rows = n // ratio if ratio else 0
            read = min(8, n) + min(4, rows)
            indexed = config.index_heads * config.index_dim * rows
            total += 2 * n * (weights + 2 * config.n_heads * config.head_dim * read)
            total += 2 * n * indexed if layer in config.index_sources else 0
    assert needs.flops(config, sizes, lengths) == total


def test_the_tables_say_it(model, tokens):
    text = model.text(tokens)
    lengths = text.sequences.lengths
    plan = plan_observation(model.config, model.specs, lengths, FLOAT32, Keeping.DISK, ROOMY)
    with model.loader(FLOAT32) as loader:
        speed = measure(loader, model.config, FLOAT32, plan.n_ahead)
    assert speed.flops > 1e7
    assert 0 < speed.expert_seconds < 1
    tables = observation_tables(plan, text.sequences, 10**6, speed, ROOMY, model.config)
    work, memory, disk = tables
    assert work.values("figure")[2] == f"{sum(lengths):,}"
    assert "fewer than the 1,000,000 tokens" in work.notes[0]
    assert memory.values("bytes")[-1] == sum(use.nbytes for use in plan.uses)
    assert disk.values("bytes") == (plan.read_nbytes, plan.disk_nbytes, ROOMY.disk)
    slow = Speed(plan.flops / 100, 0)
    assert slow.seconds(plan, model.config) == 100


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3 s"), (59.6, "1 min"), (600, "10 min"), (7500, "2 h 05 min")]
)
def test_times_are_written_for_people(seconds, text):
    assert duration(seconds) == text


def test_v4_is_refused_with_the_reason(small_v4_miniature):
    said = json.loads((small_v4_miniature / "config.json").read_bytes())
    with pytest.raises(PlanError, match="first layers look them up by token id"):
        require_observable(read_config(said), said)
    with pytest.raises(ConfigError, match=r"this model's family; expected v4\.1"):
        require_observable(replace(read_config(said), n_hash_layers=0), said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"n_kv_heads": 2}, "num_key_value_heads"),
        ({"kv_sources": (3,)}, "layer 2 reads compressed rows that no layer makes"),
        ({"kv_sources": (2,)}, "layer 3 reads compressed rows"),
        ({"index_sources": (3,)}, "layer 2 reads compressed rows"),
    ],
)
def test_another_forward_pass_is_refused(changes, message, model):
    with pytest.raises((ConfigError, Problems), match=message):
        require_observable(replace(model.config, **changes), model.checkpoint.config)


def test_a_temperature_of_the_router_is_refused(model):
    said = dict(model.checkpoint.config)
    require_observable(model.config, said)
    said["text_config"] = said["text_config"] | {"gate_temp": 2}
    with pytest.raises(ConfigError, match="gate_temp"):
        require_observable(model.config, said)


LARGER = """
import json, sys
from pathlib import Path
import torch
from pipeline.observe.plan import Keeping, Room, plan_observation
from tests.pipeline.filling import PeakAnonymous
from tests.pipeline.observe import observing
from tests.pipeline.observe.observing import Model, arithmetic_of, some_tokens

torch.set_num_threads(1)
(source, root), keeping, spared = map(Path, sys.argv[1:3]), Keeping(sys.argv[3]), int(sys.argv[4])
model = Model(source)
tokens = some_tokens(model, (900, 1500, 1100, 1300))
arithmetic = arithmetic_of("float32", scratch_nbytes=100_000_000)
lengths = [len(one) for one in tokens]

def planned(host):
    room = Room(host, None, 10**11)
    return plan_observation(model.config, model.specs, lengths, arithmetic, keeping, room)

room = sum(use.nbytes for use in planned(10**11).uses) - spared
plan = planned(room)
observing.logits_of = lambda *_: []
folder = root if keeping is Keeping.DISK else None
with PeakAnonymous() as peak:
    observing.observed(model, tokens, arithmetic, folder=folder, room=Room(room, None, 10**11))
told = {"told": sum(use.nbytes for use in plan.uses), "chunks": len(plan.chunks)}
print(json.dumps(told | {"before": peak.before, "peak": peak.nbytes}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A model whose parts are all large enough to show beside what torch itself takes."""
    wide = {"hidden": 1024, "expert_ff": 1024, "n_experts": 16}
    size = replace(SMALL, n_heads=8, head_dim=512, o_groups=2, o_lora=512, **wide)
    return write_tight(tmp_path_factory.mktemp("larger checkpoint"), size, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keeping", "spared"), [(Keeping.DISK, 0), (Keeping.MEMORY, 20_000_000)], ids=str
)
def test_memory_stays_within_what_was_told(keeping, spared, larger, tmp_path):
    words = [sys.executable, "-c", LARGER, larger, tmp_path, keeping, spared]
    words = list(map(str, words))
    result = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    measured = json.loads(result.stderr.splitlines()[-1])
    assert measured["chunks"] == 1 + bool(spared)
    assert measured["before"] <= BASE_NBYTES
    told, taken = measured["told"] - BASE_NBYTES, measured["peak"] - measured["before"]
    assert 0.5 * told < taken <= told
