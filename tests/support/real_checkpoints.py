"""The command as a process with its peak memory, streams of ids, torch's side of training, and the figures that tests of real checkpoints keep."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "tests" / "data" / "story.txt").read_text(encoding="utf-8")
"""A text of several scripts, of which the tests' figures are."""


_MEASURED = """
import atexit, pathlib, re, runpy, sys
path = pathlib.Path(sys.argv.pop(1))
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: path.write_text(str(int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024)))
runpy.run_module("nntask", run_name="__main__", alter_sys=True)
"""
"""``python -m nntask``, which writes its peak resident memory to a file at the end. (What the kernel tells of a child counts the parent as well.)"""


@dataclass(frozen=True)
class Figure:
    """A comparison.

    Args:
        checkpoint: name of the model.
        compared: what was computed.
        beside: what it was compared with.
        difference: how far apart they were.
        memory: peak resident bytes of nntask's process, 0 where it was not one of its own.
        seconds: of nntask's process, 0 where it was not one of its own.
        test: the test.
    """

    checkpoint: str
    compared: str
    beside: str
    difference: str
    memory: int
    seconds: float
    test: str


@dataclass
class Figures:
    """All comparisons of a session."""

    rows: list[Figure] = field(default_factory=list)


@dataclass(frozen=True)
class Ran:
    """A command that ended well.

    Args:
        output: its standard output.
        seconds: how long it ran.
        memory: its peak resident memory in bytes.
    """

    output: str
    seconds: float
    memory: int


def command(*argv: Any, cwd: Path | None = None) -> Ran:
    """``python -m nntask`` as a process of its own.

    Raises:
        AssertionError: it failed; the message is what it printed.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    started = time.monotonic()
    with tempfile.NamedTemporaryFile() as peak:
        line = [sys.executable, "-c", _MEASURED, peak.name, *map(str, argv)]
        done = subprocess.run(line, capture_output=True, encoding="utf-8", env=env, cwd=cwd, check=False)
        memory = int(peak.read() or 0)
    assert done.returncode == 0, done.stdout + done.stderr
    return Ran(done.stdout, time.monotonic() - started, memory)


def stream(folder: Path, ids: Sequence[int]) -> Path:
    """Ids as the token file that ``--dataset train.bin`` reads; returns the folder."""
    np.array(ids, np.uint16).tofile(folder / "train.bin")
    return folder


def sequences(folder: Path, length: int) -> torch.Tensor:
    """The sequences of a stream with their last targets, (sequences, `length` + 1)."""
    ids = np.fromfile(folder / "train.bin", np.uint16).astype(np.int64)
    starts = range(0, len(ids) - length, length)
    return torch.from_numpy(np.stack([ids[start : start + length + 1] for start in starts]))


_SMILES = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
"""Tokens of chemical reactions, as rxnfp's own tokenizer cuts them."""


def reaction_tokenizer(vocabulary: Path) -> Any:
    """The tokenizer of rxnfp's models, as one of transformers."""
    ids = {line: number for number, line in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_SMILES), "isolated")
    ends = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def classifier_losses(model: Any, tokenizer: Any, rows: Sequence[tuple[str, int]], length: int, steps: int, lr: float) -> list[float]:
    """Losses of AdamW with nntask's defaults on all rows every time; `model`, a classifier in evaluation mode, learns."""
    given = tokenizer([text for text, _ in rows], padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    labels = torch.tensor([label for _, label in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    found = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(**given).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def torch_losses(model: Any, ids: torch.Tensor, steps: int, lr: float) -> list[float]:
    """Losses of AdamW with nntask's defaults, on the same batch every time; `model` learns."""
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    found = []
    for _ in range(steps):
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def their_logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Logits of a text by a module of torch, (tokens, vocabulary)."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].numpy()


def perplexity_of(logits: np.ndarray, ids: Sequence[int]) -> float:
    """Of the tokens behind the first one."""
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(logits[:-1]).double(), torch.tensor(list(ids[1:])))
    return float(loss.exp())


def our_logits(path: Path, ids: Sequence[int]) -> np.ndarray:
    """Logits of a text by nntask, from Python, (tokens, vocabulary)."""
    from nntask import ModelTiling, no_grad
    from nntask.inference import ModelSource
    from scheduler import Runtime

    with Runtime(cpu_workers=2, ram=4 << 30) as runtime:
        model = ModelSource.open(path).build(runtime, ModelTiling(), "fp32")
        model.eval()
        tokens, _ = model.input_tensors(1, len(ids))
        tokens.write(np.array([ids], np.int32))
        with no_grad():
            return np.array(model.logits(tokens).read()[0], np.float32)
