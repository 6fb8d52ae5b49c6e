"""A run that a callback of `on_task` stops can be saved: its state is that after whole steps, bit by bit, and training goes on from there."""

from pathlib import Path

import numpy as np
import pytest

from nntask import GPT2, AdamW, GPT2Config, ModelTiling
from nntask.io.safetensors_file import load_tensors, save_tensors
from scheduler import FinishedTask, RunStopped, Runtime

CONFIG = GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=1, n_head=2)


class Training:
    """A small model, its optimizer and their recorded step."""

    def __init__(self, runtime: Runtime) -> None:
        self.model = GPT2(CONFIG, ModelTiling(embd_tile=4), runtime)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.tokens, self.targets = self.model.input_tensors(batch=2)
        with runtime.record() as self.step:
            self.loss = self.model(self.tokens, self.targets)
            self.loss.backward()
            self.optimizer.step()
        self.state = {**self.model.tensors(), **{f"optimizer {name}": tensor for name, tensor in self.optimizer.tensors().items()}}

    def run(self, first: int, last: int) -> list[float]:
        """Losses of steps `first` to `last`, two in flight."""
        tickets = []
        for number in range(first, last + 1):
            ids = np.random.default_rng(number).integers(0, 31, (2, 9))
            self.tokens.write(ids[:, :-1])
            self.targets.write(ids[:, 1:])
            self.optimizer.prepare(number)
            tickets.append(float(self.step.replay().read(self.loss)[0]))
        return tickets


@pytest.mark.parametrize("devices", [0, 2])
def test_a_stopped_run_is_saved_and_continued(tmp_path: Path, devices: int) -> None:
    """Stopped in the middle of step 4 by one task of hundreds: the step is done, and nothing of it is missing."""

    def stop(task: FinishedTask) -> None:
        if task.replay == 3 and task.name == "attention":
            raise LookupError("that is enough")

    with Runtime(2 if not devices else 0, sim_gpus=devices, ram=1 << 26) as runtime:
        whole = Training(runtime).run(1, 8)
    with Runtime(2 if not devices else 0, sim_gpus=devices, ram=1 << 26) as runtime:
        training = Training(runtime)
        runtime.on_task(stop)
        with pytest.raises(RunStopped, match="LookupError: that is enough"):
            training.run(1, 8)
        save_tensors(tmp_path / "state.safetensors", training.state, finite=True)
    with Runtime(1, ram=1 << 26) as runtime:
        training = Training(runtime)
        runtime.wait()
        load_tensors(tmp_path / "state.safetensors", training.state)
        assert training.run(5, 8) == whole[4:]
