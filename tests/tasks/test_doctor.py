"""The doctor notices packages that would be run in place of ours."""

import os
import subprocess
import sys

import pytest

from tasks.doctor.installation import PACKAGES, ROOT, claimed, missing_libraries, shadowed


def run_doctor(path):
    environment = {**os.environ, "PYTHONPATH": os.fspath(path)}
    command = [sys.executable, "-P", str(ROOT / "tasks" / "doctor" / "installation.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=path)


def test_this_installation_is_healthy():
    assert shadowed() == []
    assert claimed() == []
    assert missing_libraries() == []


@pytest.mark.parametrize(
    "name", [PACKAGES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PACKAGES[1:])]
)
def test_a_package_earlier_on_the_path_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    result = run_doctor(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"the package {name} is another project's: {tmp_path / name}" in result.stdout


def test_a_distribution_that_claims_our_names_is_named(tmp_path):
    info = tmp_path / "otherwheel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: otherwheel\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("recipes\n")
    (info / "RECORD").write_text("recipes/__init__.py,,\n")
    result = run_doctor(tmp_path)
    assert result.returncode == 1
    assert "the distribution otherwheel also installs a package recipes" in result.stdout
