"""The built wheel, installed into an environment of its own and used outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest
from support.deadline import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "--model tiny --dataset text --dataset-path text.txt --tokenizer bytes --seq-len 32 --batch 1 --steps 2 --sample-tokens 0 --ncpu 1"


class Installed:
    """An environment that holds the wheel, and an empty working directory."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.nntask, self.folder = python.with_name("nntask"), folder
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR") or name.endswith("_NUM_THREADS")}
        self.environment = {**kept, "HOME": str(folder), "HF_HUB_OFFLINE": "1"}

    def run(self, *argv: str) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            [self.nntask, *argv], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=DEADLINE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in a new environment; its dependencies are those of this one, so nothing is downloaded."""
    home = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", home], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = home.glob("nntask-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    python = home / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    site = home / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = home / "work"
    work.mkdir()
    (work / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    return Installed(python, work)


def test_it_is_the_wheel_that_runs(installed: Installed) -> None:
    """Every package comes from the new environment, not from the checkout, and brings its marker for type checkers."""
    program = "import nntask, tiles, scheduler, wrappers; print(*(m.__path__[0] for m in (nntask, tiles, scheduler, wrappers)))"
    python = installed.nntask.with_name("python")
    places = subprocess.run(
        [python, "-c", program], cwd=installed.folder, env=installed.environment, capture_output=True, text=True, check=True
    ).stdout
    for place in places.split():
        assert Path(place).is_relative_to(python.parents[1])
        assert (Path(place) / "py.typed").exists()


def test_train_plan_export_and_serve(installed: Installed) -> None:
    """A run is planned, trained, exported as a model directory, and served."""
    flags = TRAIN.split()
    assert json.loads(installed.run("plan", *flags, "--json"))["feasible"]
    assert "step 2/2" in installed.run("train", *flags, "--run-dir", "run")
    installed.run("export", "run", "model")
    server = subprocess.Popen(
        [installed.nntask, "serve", "model", "--port", "0", "--ncpu", "1"],
        cwd=installed.folder,
        env=installed.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = next(line.removeprefix("listening on ").strip() for line in server.stdout if line.startswith("listening on "))
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps({"model": "model", "prompt": "to be", "max_tokens": 4}).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
    finally:
        server.terminate()
        server.communicate(timeout=DEADLINE)
    assert server.returncode == 0
