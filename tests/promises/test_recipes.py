"""P10: the wrong recipe fails before a weight is read and before anything is written."""

import pytest

from pipeline import files
from tests.promises.whole_job import run_job
from tests.tasks.commands import luigi, run_recipe

ROLES = {
    "routed": "MXFP4",
    "engram": "Q8_0",
    "attention": "Q8_0",
    "embedding": "BF16",
    "shared": "Q8_0",
}
TAIL = '[sub_roles]\nengram_gate = "F32"\nhyper_connection = "F32"\n'


def recipe(head="", tail=TAIL, **changes):
    """A recipe that is right but for what is said; a role of None is left out."""
    roles = ROLES | changes
    lines = [f'{role} = "{name}"' for role, name in roles.items() if name is not None]
    return "\n".join([head, "[roles]", *lines, tail])


def override(match, name):
    return f"\n[[override]]\nmatch = '{match}'\ntype = \"{name}\"\n"


# Broken in itself: told before the source is even looked at.
MALFORMED = {
    "no TOML": ("[roles\n", "not valid TOML"),
    "not UTF-8": (b"# \xff\n", "not UTF-8"),
    "empty": ("", r"the table \[roles\] is missing"),
    "role missing": (recipe(shared=None), "roles.shared is missing"),
    "unknown role": (recipe(routde="Q8_0"), "unknown key roles.routde"),
    "unknown key": (recipe('layuot = "fork"'), "unknown key layuot"),
    "unknown sub-role": (recipe(tail='[sub_roles]\ngate = "F32"\n'), "unknown key sub_roles.gate"),
    "unknown type": (recipe(shared="Q9_0"), "roles.shared"),
    "type is a number": (recipe().replace('"BF16"', "16"), "roles.embedding: not text"),
    "unknown allowance": (recipe('allow = ["anything"]'), "allow 1"),
    "pattern that is none": (
        recipe(tail=TAIL + override("blk.(", "F32")),
        "override 1, match: not a regular",
    ),
    "layout": (recipe(tail=TAIL + '[output]\nlayout = "sideways"\n'), "output.layout"),
    "shard size in words": (
        recipe(tail=TAIL + '[output]\nshard_nbytes = "45 GB"\n'),
        "output.shard_nbytes: not a whole number",
    ),
}

# Right in itself, but not for this model: told from headers alone.
UNFIT = {
    "override matches nothing": (
        recipe(tail=TAIL + override("attn_qkv", "F32")),
        "matches no tensor",
    ),
    "override never reached": (
        recipe(tail=TAIL + override("attn", "Q8_0") + override("attn_q_a", "BF16")),
        "is never reached",
    ),
    "needs an importance matrix": (recipe(shared="IQ2_XXS"), "importance matrix"),
    "norms in BF16": (recipe(tail=TAIL + 'norm = "BF16"\n'), "nothing but F32"),
    "router below BF16": (recipe(tail=TAIL + 'router = "Q8_0"\n'), "below_bf16"),
    "FP4 to a larger lossy type": (recipe(routed="Q4_K"), "larger_than_fp4"),
    "type of ik_llama.cpp": (recipe(shared="IQ4_KSS"), "IQ4_KSS"),
}


@pytest.mark.parametrize(("text", "message"), MALFORMED.values(), ids=MALFORMED)
def test_p10_a_malformed_recipe_fails_before_the_source_is_opened(tmp_path, text, message):
    path = tmp_path / "broken.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    outcome = run_job(tmp_path / "no such checkpoint", tmp_path / "out", path)
    check_refused(outcome, tmp_path, message)
    assert "no such checkpoint" not in outcome.text


@pytest.mark.parametrize(("text", "message"), UNFIT.values(), ids=UNFIT)
def test_p10_a_recipe_that_does_not_fit_fails_before_a_weight_is_read(
    small_miniature, tmp_path, monkeypatch, text, message
):
    path, reads = tmp_path / "unfit.toml", []
    path.write_text(text)
    real = files._preadv
    monkeypatch.setattr(files, "_preadv", lambda *args: reads.append(args[2]) or real(*args))
    outcome = run_job(small_miniature, tmp_path / "out", path)
    check_refused(outcome, tmp_path, message)
    assert max(reads, default=0) == 0, "only the beginnings of files are looked at"


def check_refused(outcome, tmp_path, message):
    assert not outcome.ok
    with pytest.raises(Exception, match=message):
        raise outcome.errors[0]
    assert not (tmp_path / "out").exists()


def test_p10_the_recipe_that_the_others_change_is_right(small_miniature, tmp_path):
    (tmp_path / "right.toml").write_text(recipe())
    assert run_job(small_miniature, tmp_path / "out", tmp_path / "right.toml").ok


def test_p10_the_wrong_recipe_fails_on_the_command_line(small_miniature, tmp_path):
    (tmp_path / "bad.toml").write_text(recipe(shared="IQ2_XXS", routed="Q4_K"))
    result = luigi(*run_recipe(small_miniature, "bad.toml"), cwd=tmp_path)
    assert result.returncode == 35
    assert "2 problems" in result.stderr
    assert "importance matrix" in result.stderr
    assert "larger_than_fp4" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
