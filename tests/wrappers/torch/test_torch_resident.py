"""The budget of a session is real: resident memory beside it and the imports is small, and the weights are in memory once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadline import DEADLINE

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
WIDTH, LAYERS = 1536, 16
WEIGHTS = LAYERS * WIDTH * WIDTH * 4
"""Bytes of the weights: a quarter of what training takes with AdamW."""
BESIDE = 64 << 20
"""Bar: resident bytes beside imports and budget, in the first session of a process. They are records of tasks, compiled loops, and working memory of
kernels."""

_JOB = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from wrappers.torch import Session

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))

def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")

class Net(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    def forward(self, x):
        return self.layers(x).square().mean()

def train(width, layers, **terms):
    with Session(Net(width, layers), lr=1e-3, minibatches=2, workers=2, **terms) as session:
        made = resident("VmHWM")
        forget_peak()
        losses = [session.step(x=torch.ones(8, width)) for _ in range(3)]
        return made, resident("VmHWM"), losses, session.runtime.stats()

torch.set_num_threads(1)
width, layers, ram, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.optim.AdamW([torch.zeros(1)])  # imports more of PyTorch
before = resident("VmRSS")
forget_peak()
made, trained, losses, stats = train(width, layers, ram=f"{ram}B", disk=folder)
print(json.dumps({"made": made - before, "trained": trained - before, "losses": losses, "peak": stats["peak_bytes"]}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is Linux's")
def test_resident_memory_is_the_budget_and_little_more(tmp_path: Path) -> None:
    """In a quarter of what training takes, over a disk: while the session takes the weights over, and while it trains."""
    command = [sys.executable, "-c", _JOB, str(WIDTH), str(LAYERS), str(WEIGHTS), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["losses"][2] < found["losses"][0]
    assert found["peak"]["disk"] > 3 * WEIGHTS  # else everything would fit
    assert found["made"] <= WEIGHTS + BESIDE
    assert found["trained"] <= WEIGHTS + BESIDE
    if not torch.backends.cuda.is_built():  # else a session gives back more pages of PyTorch's imports than it takes
        assert found["trained"] >= WEIGHTS // 2  # what was measured is the session
