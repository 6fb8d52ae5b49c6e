"""Every fenced shell block of the README and of docs runs as printed, in order, in a directory like a fresh clone.

A block that cannot has a marker on the line before its fence: ``<!-- ci: network -->``, ``<!-- ci: gpu -->`` or ``<!-- ci: minutes -->``. Those that
take minutes run with `make test-all`, the others with `make test-pages`, which CI runs as well. What the commands are given (a model
directory, notes, WikiText and GPT-2's tokenizer where they would be once fetched) is small and made here; the Hub is never asked.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import save_file

from nntask.data.tokenizer import train_bpe
from nntask.models import gpt2
from nntask.models.gpt2 import GPT2, GPT2Config
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"(?:^<!-- ci: (?P<marker>.*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL: Final = ("sh", "bash")
OTHERS: Final = ("python", "text", "toml", "json", "mermaid")
MARKERS: Final = ("network", "gpu", "minutes")
LONGEST: Final = {None: 180, "minutes": 280}
"""Seconds a block may take."""


def blocks(page: Path, markers: tuple[str | None, ...]) -> list[re.Match[str]]:
    """The page's shell blocks with one of the markers, in order."""
    return [fence for fence in FENCE.finditer(page.read_text()) if fence["language"] in SHELL and fence["marker"] in markers]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with the examples and benchmarks, what the commands read, and `nntask` and `python` on its path."""
    here = tmp_path
    (here / "examples").symlink_to(ROOT / "examples")
    (here / "benchmarks").symlink_to(ROOT / "benchmarks")
    (here / "bin").mkdir()
    for name, command in (("nntask", f'"{sys.executable}" -m nntask'), ("python", f'"{sys.executable}"')):
        (here / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (here / "bin" / name).chmod(0o755)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(300)]
    rows = [" ".join(rng.choices(words, k=40)) + "\n" for _ in range(1500)]
    (here / "notes.txt").write_text("".join(rows))
    (here / "prompts.txt").write_text("".join(rows[:2]))
    tokenizer = train_bpe(rows[:200], 400)
    for place in ("gpt2-dir", "cache/tokenizers/gpt2", "cache/hub"):
        (here / place).mkdir(parents=True)
    tokenizer.save(here / "cache" / "tokenizers" / "gpt2")
    for split, part in (("train", rows), ("validation", rows[:100])):
        (here / "cache" / "hub" / f"wiki.{split}.raw").write_text("".join(part))
    _write_model(here / "gpt2-dir")
    tokenizer.save(here / "gpt2-dir")
    return here


def _write_model(place: Path) -> None:
    """A small GPT-2 of random weights as Hugging Face writes it."""
    import json

    config = GPT2Config(vocab_size=400, n_positions=256, n_embd=32, n_layer=2, n_head=2)
    model = GPT2(config, ModelTiling(), InlineRuntime())
    weights = gpt2.NAMES.to_hf({name: tensor.read() for name, tensor in model.tensors().items()}, config)
    save_file({name: np.ascontiguousarray(weight) for name, weight in weights.items()}, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps({"model_type": "gpt2", **config.to_dict()}))


def run_blocks(page: Path, markers: tuple[str | None, ...], clone: Path) -> None:
    """Run the page's blocks with one of the markers as printed, in order; every command of each must end with exit code 0."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("NNTASK_", "STARPU_"))}
    variables |= {
        "PATH": f"{clone / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "NNTASK_CACHE": str(clone / "cache"),
    }
    for block in blocks(page, markers):
        done = subprocess.run(
            ["bash", "-e", "-x", "-c", block["body"]],
            cwd=clone,
            env=variables,
            capture_output=True,
            text=True,
            timeout=LONGEST[block["marker"]],
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def with_commands(*markers: str | None) -> list[Any]:
    """The pages that have blocks with one of the markers, by their names."""
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page, markers)]


@pytest.mark.pages
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", with_commands(None))
def test_commands_run_as_printed(page: Path, clone: Path) -> None:
    """All blocks without a marker."""
    run_blocks(page, (None,), clone)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", with_commands("minutes"))
def test_commands_of_minutes_run_as_printed(page: Path, clone: Path) -> None:
    """Those that take minutes as well, among the others."""
    run_blocks(page, (None, "minutes"), clone)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_escapes(page: Path) -> None:
    """Each fence says what it is, each marker is one of the three, and none marks a block that is no command."""
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(fences)
    assert {fence["language"] for fence in fences} <= {*SHELL, *OTHERS}
    assert {fence["marker"] for fence in fences if fence["language"] in SHELL} <= {None, *MARKERS}
    assert not any(fence["marker"] for fence in fences if fence["language"] not in SHELL)
    assert text.count("<!-- ci:") == sum(fence["marker"] is not None for fence in fences)


def test_the_readme_has_commands() -> None:
    """There is something to run, and most of it is run by default."""
    assert len(blocks(PAGES[0], (None,))) > len(blocks(PAGES[0], MARKERS)) / 2 > 0
