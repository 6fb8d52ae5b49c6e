"""Mistakes that a session of PyTorch refuses: what each one is, a program that makes it, and words of the sentence that it meets.

A test tries them all, and the page of the site about PyTorch models shows the sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from nntask import NntaskError
from wrappers.torch import Session
from wrappers.torch.capture.objectives import loss_of, objective_of, scalar
from wrappers.torch.session.arguments import PlannedPasses
from wrappers.torch.session.hosting import check_gpus
from wrappers.torch.steps.captures import Captures
from wrappers.torch.steps.dry import PassTerms


class Mean(torch.nn.Module):
    """Has nothing wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.layer(x).mean()


class Vector(Mean):
    """Has a result that is no loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As x."""
        return self.layer(x)


class Counts(Mean):
    """Decides by a value that each minibatch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        self.count += 1
        if self.count > 3:
            x = -x
        return self.layer(x).mean()


class Draws(Mean):
    """Draws numbers by an operation that takes no generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return (self.layer(x) * torch.randint_like(x, torch.tensor(4))).mean()


class Addresses(Mean):
    """Reads the address of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        y = self.layer(x)
        return y.mean() if y.data_ptr() else y.sum()


class Retains(Mean):
    """Keeps the gradient of an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        y = self.layer(x)
        y.retain_grad()
        return y.mean()


class Grows(Mean):
    """Gives its weight values of another shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        self.layer.weight.data = torch.zeros(2, 4)
        return x.mean() + self.layer.weight.mean()


class Looks(torch.nn.Module):
    """Looks ids up in a table, and picks a column of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(97, 6)

    def forward(self, input_ids: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.table(input_ids).gather(1, column).mean()


def _complex() -> torch.nn.Module:
    module = torch.nn.Linear(4, 1)
    module.weight = torch.nn.Parameter(torch.zeros(1, 4, dtype=torch.complex64))
    return module


def _shared() -> torch.nn.Module:
    module = Vector()
    module.register_buffer("alias", module.layer.weight.detach())
    return module


def _traced() -> Any:
    return torch.jit.trace(torch.nn.Linear(4, 1), torch.ones(2, 4))


def _twice(_: Path) -> None:
    module = Mean()
    with Session(module, ram="16MB"):
        Session(module, ram="16MB")


def _call_emptied(_: Path) -> None:
    module = Mean()
    with Session(module, ram="16MB"):
        module(torch.ones(2, 4))


def _clip_emptied(_: Path) -> None:
    module = Mean()
    with Session(module, ram="16MB"):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def _load_emptied(_: Path) -> None:
    module = Mean()
    values = {name: value.clone() for name, value in module.state_dict().items()}
    with Session(module, ram="16MB"):
        module.load_state_dict(values)


def _with_gradient() -> torch.nn.Module:
    module = Mean()
    module(torch.ones(2, 4)).backward()
    return module


def _hooked() -> torch.nn.Module:
    module = Mean()
    module.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return module


def _frozen() -> torch.nn.Module:
    return Vector().requires_grad_(False)


def _stepped(module: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _change_momentum(folder: Path) -> None:
    module = Mean()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with Session(module, optimizer, ram="16MB") as session:
        optimizer.param_groups[0]["momentum"] = 0.0
        session.step(x=torch.ones(2, 4))


def _state_of_optimizer(_: Path) -> None:
    with Session(Mean(), ram="16MB") as session:
        session.optimizer.state_dict()


def _take_out(_: Path) -> None:
    with Session(Mean(), ram="16MB") as session:
        session.optimizer.param_groups[0]["params"].pop()
        session.step(x=torch.ones(2, 4))


def _hooked_optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _save_twice(folder: Path) -> None:
    with Session(Mean(), ram="16MB") as session:
        session.save(folder / "first")
        session.save(folder / "first")


def _resume_otherwise(folder: Path) -> None:
    with Session(Mean(), ram="16MB", threads=2) as session:
        session.save(folder / "first")
    with Session(Mean(), ram="16MB") as session:
        session.resume(folder / "first")


def _resume_nothing(folder: Path) -> None:
    with Session(Mean(), ram="16MB") as session:
        session.resume(folder / "first")


def _look(ids: int, column: int) -> Callable[[Path], None]:
    def act(_: Path) -> None:
        with Session(Looks(), ram="16MB") as session:
            session.step(input_ids=torch.tensor([3, ids]), column=torch.tensor([[0], [column]]))

    return act


def _array(_: Path) -> None:
    with Session(Mean(), ram="16MB") as session:
        session.step(x=torch.ones(2, 4), mask=np.ones((2, 4)))


def _step(make_module: Callable[[], Any], **terms: Any) -> Callable[[Path], None]:
    """A session over a module, and a step."""

    def act(_: Path) -> None:
        with Session(make_module(), **{"ram": "16MB", **terms}) as session:
            session.step(x=torch.randn(2, 4))

    return act


def _step_of_another_module(_: Path) -> None:
    other = Captures(Mean(), scalar(objective_of(loss_of)), PassTerms({}))
    Session(Mean(), ram="16MB", planned=PlannedPasses(other, None, None))  # type: ignore[arg-type]  # refused before they are looked at


def _with(make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> Callable[[Path], None]:
    """A session over a module and an instance of an optimizer."""

    def act(_: Path) -> None:
        module = Mean()
        Session(module, make_optimizer(module), ram="16MB").close()

    return act


@dataclass(frozen=True)
class Refusal:
    """A mistake.

    Attributes:
        what: it is.
        words: a pattern of the sentence.
        act: makes it; is given a folder of its own.
    """

    what: str
    words: str
    act: Callable[[Path], None]

    def error(self, folder: Path) -> NntaskError:
        """Return the error that the mistake meets.

        Raises:
            AssertionError: it meets none.
        """
        try:
            self.act(folder)
        except NntaskError as error:
            return error
        raise AssertionError(f"{self.what} is not refused")

    def sentence(self, folder: Path) -> str:
        """Return the message of `error`, as `plain`."""
        return plain(str(self.error(folder)), folder)


def plain(text: str, folder: Path) -> str:
    """Return a part of a message with a folder and a file that a user might have."""
    return re.sub(rf"\S*{Path(__file__).name}:\d+", "model.py:12", text).replace(f"{folder}/", "")


REFUSALS: Final = (
    Refusal(
        "a branch on a value that each minibatch changes",
        r"model\.py:\d+ needs the value .*minibatches=1, .*torch\.where",
        _step(Counts, minibatches=2),
    ),
    Refusal("a random operation without a generator", r"aten\.randint_like\.Tensor cannot be given a seed of its own; use dropout", _step(Draws)),
    Refusal("the address of a tensor", r"model\.py:\d+ reads the address of a tensor, .* compute without addresses", _step(Addresses)),
    Refusal("the gradient of an activation", r"model\.py:\d+ keeps the gradient of an activation \(retain_grad\), .*autograd\.grad", _step(Retains)),
    Refusal("values of another shape", r"a tensor of shape \(4, 4\) values of shape \(2, 4\); keep its shape", _step(Grows)),
    Refusal("a loss that is no scalar", r"must be a tensor with one element, got a tensor of shape \(2, 4\); give loss=", _step(Vector)),
    Refusal("a function", r"trains a torch\.nn\.Module of Python, got a builtin_function_or_method", _step(lambda: torch.relu)),
    Refusal("a scripted module", r"trains a torch\.nn\.Module of Python, got a TopLevelTracedModule", _step(_traced)),
    Refusal("a module whose weights a session has", r"layer\.weight has no values, since a session holds them", _twice),
    Refusal("a call of one", r"the weights of the module are in a session", _call_emptied),
    Refusal("another reading of its weights", r"so grad cannot use them: .* overwrite them with session\.load_state_dict\(\)", _clip_emptied),
    Refusal("values loaded into one", r"use load_state_dict\(\) of the session, or load_into\(module\) before", _load_emptied),
    Refusal("a gradient from before", r"layer\.weight has a gradient from before the session, .*zero_grad\(\)", _step(_with_gradient)),
    Refusal("a lazy module", r"weight has no shape yet .* call the module once", _step(lambda: torch.nn.LazyLinear(1))),
    Refusal("nothing to learn", r"no parameter that is learnt; set requires_grad", _step(_frozen)),
    Refusal("sparse gradients", r"has sparse gradients, .* sparse=False", _step(lambda: torch.nn.EmbeddingBag(4, 4, sparse=True))),
    Refusal("complex parameters", r"weight is of type torch\.complex64, and parameters must be real", _step(_complex)),
    Refusal("two tensors of one memory", r"alias and layer\.weight are two tensors of one memory", _step(_shared)),
    Refusal("a hook of a finished gradient", r"layer\.weight has a post-accumulate hook of its gradient", _step(_hooked)),
    Refusal("no values", r"weight has no values \(it is on the meta device\); give weights=DIR", _step(lambda: torch.nn.Linear(4, 4, device="meta"))),
    Refusal("a planned step of another module", r"planned must be a step of this module", _step_of_another_module),
    Refusal("a name of no optimizer", r"optimizer must be one of sgd, adam, adamw.* got 'lion'", _step(Mean, optimizer="lion")),
    Refusal("another optimizer of PyTorch", r"got Adagrad", _with(lambda module: torch.optim.Adagrad(module.parameters()))),
    Refusal("a rate below 0", r"AdamW refuses \{'lr': -1\.0\}: Invalid learning rate", _step(Mean, lr=-1.0)),
    Refusal("an option of an optimizer", r"amsgrad of AdamW must be False, got True", _step(Mean, amsgrad=True)),
    Refusal("an optimizer that has taken steps", r"has taken steps already", _with(_stepped)),
    Refusal("an optimizer of some parameters", r"lacks layer\.bias", _with(lambda module: torch.optim.SGD([module.layer.weight], lr=1.0))),
    Refusal("an optimizer of another module", r"a parameter that the module lacks", _with(lambda _: torch.optim.SGD(Mean().parameters(), lr=1.0))),
    Refusal("a momentum that is turned off", r"whether group 0 has momentum must stay True while the session is open, got False", _change_momentum),
    Refusal("the state of the optimizer", r"state_dict\(\) of the optimizer cannot be called while a session is open", _state_of_optimizer),
    Refusal("a parameter taken out of its group", r"must keep its parameters, .* had \[2\] parameters in the groups, got \[1\]", _take_out),
    Refusal("a hook of the optimizer's steps", r"must have no step hooks, .* got 1", _with(_hooked_optimizer)),
    Refusal("no minibatch", r"minibatches must be an integer of at least 1, got 0", _step(Mean, minibatches=0)),
    Refusal("parts of a minibatch", r"minibatches must be an integer of at least 1, got 2\.5", _step(Mean, minibatches=2.5)),
    Refusal("no thread", r"threads must be from 1 to 1024, got 0", _step(Mean, threads=0)),
    Refusal("fewer workers than none", r"workers must be at least 0, or None for one a core, got -1; use 1", _step(Mean, workers=-1)),
    Refusal("no worker", r"workers must be at least 1 without GPUs, got 0", _step(Mean, workers=0)),
    Refusal("a budget that is none", r"ram must be a size in B, .* got '-1'; for example 2GiB", _step(Mean, ram=-1)),
    Refusal("a batch that cannot be cut", r"a multiple of 3, got \{'x': 2\}", _step(Mean, minibatches=3)),
    Refusal("an argument that is neither tensor nor plain", r"mask of the batch is a ndarray, and arguments must be tensors or plain values", _array),
    Refusal("ids without a row", r"input_ids of the batch must be ids from 0 to 96, got 3 to 120; use the tokenizer", _look(120, 0)),
    Refusal("an operation that fails", r"index 6 is out of bounds .* the step was left out", _look(5, 6)),
    Refusal("a budget below the largest task", r"raise ram=", _step(Mean, ram="4KB")),
    Refusal("real and simulated devices", r"devices are real or simulated, got ngpu=1 and sim_gpu=1", _step(Mean, ngpu=1, sim_gpu=1)),
    Refusal("compiled chains on GPUs", r"compiled chains run on CPUs only, got compiled=True with ngpu=1", _step(Mean, compiled=True, ngpu=1)),
    Refusal(
        "a type that GPUs do not update",
        r"weight is of type torch\.float64, and GPUs update parameters of torch\.float32 and torch\.bfloat16",
        lambda _: check_gpus([object()], Mean().double()),
    ),
    Refusal("a directory that is there", r"exists, and a session is saved to a new directory", _save_twice),
    Refusal("other numerics on resuming", r"threads must be what it was", _resume_otherwise),
    Refusal("a directory without a session", r"holds no whole session", _resume_nothing),
)
