"""A session with the interface of nntask's training loop (`nntask.engine.interface`): a language model of transformers in ``nntask train``.

Data, loop, checkpoints, metrics and exit codes are nntask's; PyTorch computes inside the tasks. A loss is the mean over the predictions in a
minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from nntask.config import LanguageRun
from nntask.data import Batch, Dataset
from nntask.hardware import known_gemm_peak
from nntask.inference import HOW, choose, sample_prompt
from scheduler import Step
from tiles import TileTensor

from ..session.session import Session
from ..session.started import StartedStep
from .collation import Collator


class TorchEngine:
    """A language model, its optimizer and their recorded step.

    Args:
        run: settings of the run, including the minibatches.
        session: session over the model, on the run's runtime.
        collator: maker of the model's arguments from tokens.
    """

    def __init__(self, run: LanguageRun, session: Session, collator: Collator) -> None:
        self._run, self._session, self._collator = run, session, collator

    @property
    def num_trained(self) -> int:
        """Number of trainable weights."""
        return sum(parameter.numel() for parameter in self._session.module.parameters() if parameter.requires_grad)

    @property
    def num_tasks(self) -> int:
        """Number of tasks in one optimizer step."""
        return self.step.num_tasks

    @property
    def step(self) -> Step:
        """The recorded optimizer step."""
        example = self._collator.example(self._run.step.minibatch, self._run.model.seq_len)
        return self._session.training_step([example] * self._run.step.num_minibatches)

    def start(self, step: int, lr: float, batch: Batch) -> StartedStep:
        """Begin optimizer step `step` (from 1) on a whole batch; return immediately while fewer than two are in flight."""
        size = self._run.step.minibatch
        rows = [batch.tokens[first : first + size] for first in range(0, len(batch.tokens), size)]
        self._session.num_steps = step - 1  # random numbers depend on it
        for group in self._session.optimizer.param_groups:
            group["lr"] = lr
        return self._session.start_minibatches([self._collator.training(tokens, step, number) for number, tokens in enumerate(rows)])

    def evaluate(self, batch: Batch) -> float:
        """Return the mean loss of the predictions in a batch times the number of its targets, without changing anything."""
        mean = self._session.evaluate(**self._collator.validation(batch.tokens, batch.targets))
        return mean * float((batch.targets >= 0).sum())

    def model_tensors(self) -> Mapping[str, TileTensor]:
        """Return parameters and buffers by the names in the module's `state_dict`."""
        return self._session.model_tensors()

    def optimizer_tensors(self) -> Mapping[str, TileTensor]:
        """Return the state of the optimizer by name."""
        return self._session.optimizer_tensors()

    def peak_flops(self) -> float:
        """Return the flop/s of matrix products on the CPU workers, in the element type of the model."""
        return known_gemm_peak(max(len(self._session.runtime.stats()["busy_seconds"]), 1), self._run.model.dtype)

    def reset_optimizer(self) -> None:
        """Reset the optimizer, keeping the current weights."""
        self._session.reset_optimizer()

    def sample(self, dataset: Dataset, length: int, stopped: Callable[[], bool]) -> str:
        """Return text, or ids without a tokenizer, from a model that predicts the next token.

        Each token costs a forward pass over a whole sequence, since a session caches no keys and values.

        Args:
            length: number of tokens of a sequence, the largest length of the text.
            stopped: function that returns whether to stop, called before each token.
        """
        run, tokenizer = self._run, dataset.tokenizer
        prompt, num_before = sample_prompt(run, tokenizer, length)
        ids, how = list(prompt), replace(HOW, seed=run.model.seed)
        ends = tokenizer.special.eos if tokenizer else ()
        row = np.zeros((1, length), np.int64)  # tokens after a position do not change its scores
        row[0, : len(ids)] = ids
        for number in range(min(run.settings.run.sample_tokens, length - len(ids))):
            if stopped():
                break
            scores = self._session.predict(input_ids=torch.from_numpy(row.copy()), **self._collator.fixed)["logits"][0, len(ids) - 1]
            token = choose(scores.float().numpy()[: tokenizer.vocab_size if tokenizer else None], how, how.draw(0, number))
            if token in ends:
                break
            row[0, len(ids)] = token
            ids.append(token)
        return tokenizer.decode(ids[num_before:]) if tokenizer else " ".join(map(str, ids[num_before:]))
