"""What starting a command imports: nothing heavy on the way. Seconds are `benchmarks/startup.py`'s business."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LATER = {"asyncio", "bokeh", "dask", "distributed", "pandas", "rich", "torch", "tyro"}
"""What a training run never needs, or only at its end."""
NEVER = {"argparse", "ml_dtypes", "numpy", "psutil", "safetensors", "scheduler", "threadpoolctl", "tiles", "tokenizers"} | LATER
"""What `--help` does not need either."""


def imported(*argv: str, folder: Path) -> set[str]:
    """Top-level names of the modules that a command has imported when it ends."""
    program = "import sys, wrappers.cli as cli; code = cli.main(sys.argv[1:]); print(code, *{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program, *argv],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    code, *names = done.stdout.splitlines()[-1].split()
    assert code == "0"
    return set(names)


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """Not even NumPy, or our own packages below the command line."""
    names = imported("--help", folder=tmp_path)
    assert "wrappers" in names
    assert not NEVER & names


def test_training_imports_only_what_it_uses(tmp_path: Path) -> None:
    """The parser of the help, plots, clusters and the peers of the benchmarks stay away."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    flags = "--model tiny --dataset text --dataset-path text.txt --tokenizer bytes --seq-len 32 --batch 1 --steps 1 --sample-tokens 0 --run-dir run"
    names = imported("train", *flags.split(), folder=tmp_path)
    assert "numpy" in names
    assert not LATER & names


def test_a_checkout_that_is_not_installed_has_a_version() -> None:
    """Without site-packages, where the version of an installed nntask is found; `system_fingerprint` of `nntask serve` is the same words."""
    program = "import wrappers.cli as cli; raise SystemExit(cli.main(['--version']))"
    done = subprocess.run([sys.executable, "-S", "-c", program], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "nntask in the source tree\n", "")
