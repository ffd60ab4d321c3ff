"""Fetches the pinned engines once, into the virtual environment."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

PINS = tomllib.loads(Path(__file__).with_name("versions.toml").read_text())
ENGINES = Path(sys.prefix) / "engines"

_TIMEOUT_S = 600


class Unavailable(Exception):
    """An engine cannot be had on this machine now; the message says what to do."""


def node() -> str:
    """The Node that runs the WebAssembly build.

    Raises:
        Unavailable: There is none on PATH, or it is too old.
    """
    least = PINS["mainline"]["node"]
    found = shutil.which("node")
    if not found:
        raise Unavailable(
            f"`node` is not on PATH: mainline llama.cpp runs on Node {least} or newer."
        )
    version = _run([found, "--version"]).strip()
    major = re.match(r"v(\d+)\.", version)
    if not major or int(major[1]) < least:
        raise Unavailable(f"Node {least} or newer is needed; {found} is {version}.")
    return found


def mainline_packages() -> Path:
    """The folder of mainline's npm packages, fetched if it is not there.

    Raises:
        Unavailable: npm is missing or could not fetch them, or they hold other bytes than pinned.
    """
    pin = PINS["mainline"]
    folder = _npm_packages("mainline")
    if hashlib.sha256((folder / pin["wasm"]).read_bytes()).hexdigest() != pin["wasm_sha256"]:
        raise Unavailable(f"{folder} is not the pinned build: remove it and run the tests again.")
    return folder


def quantizing_libraries() -> Path:
    """The folder of llama.cpp's shared libraries, fetched if it is not there.

    Raises:
        Unavailable: npm is missing or could not fetch them, as on other kinds of machine.
    """
    return _npm_packages("quantizing") / PINS["quantizing"]["libraries"]


def native_package() -> Path:
    """The folder that the native engine's package is imported from, fetched if it is not there.

    Raises:
        Unavailable: pip could not fetch it.
    """
    return _python_packages("native", PINS["native"]["build"])


def transformers_packages() -> Path:
    """The same for transformers and what it needs beyond this environment.

    Raises:
        Unavailable: pip could not fetch them.
    """
    return _python_packages("transformers", PINS["transformers"]["pip"]["transformers"])


def _npm_packages(pin: str) -> Path:
    npm = shutil.which("npm")

    def fetch(folder: Path) -> None:
        if not npm:
            raise Unavailable(
                f"`npm` is not on PATH: it comes with Node {PINS['mainline']['node']}."
            )
        wanted = [f"{package}@{version}" for package, version in PINS[pin]["npm"].items()]
        quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save"]
        _run([npm, "install", "--prefix", str(folder), *quiet, *wanted])

    return _installed(f"{pin}-{PINS[pin]['build']}", fetch)


def _python_packages(pin: str, version: str) -> Path:
    def fetch(folder: Path) -> None:
        wanted = [f"{package}=={version}" for package, version in PINS[pin]["pip"].items()]
        quiet = ["--quiet", "--no-deps", "--only-binary=:all:"]
        pip = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(folder)]
        _run([*pip, *wanted])

    return _installed(f"{pin}-{version}", fetch)


def _installed(name: str, fetch: Callable[[Path], None]) -> Path:
    """``ENGINES / name``, filled aside and renamed, so that two test runs may do it at once."""
    final = ENGINES / name
    if final.is_dir():
        return final
    ENGINES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=ENGINES) as folder:
        aside = Path(folder) / name
        aside.mkdir()
        fetch(aside)
        with contextlib.suppress(OSError):  # another run was faster
            aside.rename(final)
    return final


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(command)} failed:\n{error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command)} failed: {error}") from error
    return done.stdout
