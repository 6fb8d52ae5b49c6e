"""Checks of the internals of PyTorch that this package uses: all their names exist, and a tiny module trains as in eager PyTorch.

Releases outside the tested range must pass both (`releases`). The names are read from the sources of this package, so no list must be maintained.
Those of Inductor are checked only before chains are compiled, since importing it takes seconds.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn import functional

_HERE: Final = Path(__file__).parent
_INDUCTOR: Final = _HERE / "tasks" / "inductor.py"
_OF_CUDA: Final = "torch._C._cuda"
"""Prefix of names that only a PyTorch with CUDA has."""
_TOLERANCE: Final = 1e-5
"""Largest difference of a loss or a weight between a session and eager PyTorch after one step of the probe."""
RATE: Final = 0.1
"""Learning rate of that step, by plain gradient descent."""

Step = Callable[[torch.nn.Module, torch.Tensor], tuple[float, Mapping[str, torch.Tensor]]]


def find_fault(session: type[Any]) -> str | None:
    """Return why this PyTorch cannot train here: names that it lacks, or a step that differs from eager's; None if it can.

    Args:
        session: class of sessions; passed in because its module imports this one.
    """
    if missing := missing_names(name for file in sorted(_HERE.rglob("*.py")) if file != _INDUCTOR for name in names_in(file.read_text())):
        return f"it lacks {', '.join(missing)}"
    try:
        difference = first_difference(partial(_step_of, session))
    except Exception as error:  # any error of PyTorch's internals
        lines = str(error).splitlines()
        return f"a self-check failed ({type(error).__name__}: {lines[0] if lines else ''})"
    return None if difference is None else f"a self-check differs from eager PyTorch in {difference}"


def find_fault_of_inductor() -> str | None:
    """Return which names this PyTorch lacks for compiled chains, in words; None if it has all."""
    missing = missing_names(names_in(_INDUCTOR.read_text()))
    return f"it lacks {', '.join(missing)}" if missing else None


def names_in(source: str) -> set[str]:
    """Return the names of PyTorch in the source of a module, such as ``torch._C._get_mkldnn_enabled`` and ``torch.ops.aten.mm.default``.

    They are the names imported from PyTorch, and attributes of those, of ``torch`` and of ``aten``.
    """
    tree = ast.parse(source)
    known = {"torch": "torch", "aten": "torch.ops.aten"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level and node.module.partition(".")[0] == "torch":
            known.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    names = set(known.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names if alias.name.startswith("torch."))
        elif isinstance(node, ast.Attribute):
            attributes: list[str] = []
            value: ast.expr = node
            while isinstance(value, ast.Attribute):
                attributes.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in known:
                names.add(".".join([known[value.id], *reversed(attributes)]))
    return names


def missing_names(names: Iterable[str]) -> list[str]:
    """Return the names that this PyTorch lacks, in order, except those that begin with another missing name."""
    has_cuda = torch.backends.cuda.is_built()
    missing: list[str] = []
    for name in sorted(set(names)):
        is_of_this_build = has_cuda or not name.startswith(_OF_CUDA)
        if is_of_this_build and not _exists(name) and not any(name.startswith(f"{other}.") for other in missing):
            missing.append(name)
    return missing


def _exists(name: str) -> bool:
    """Return whether a dotted name of PyTorch exists, as an attribute or as a module to import."""
    value: Any = torch
    path = "torch"
    for attribute in name.split(".")[1:]:
        path = f"{path}.{attribute}"
        try:
            value = getattr(value, attribute)
        except AttributeError:
            if not isinstance(value, ModuleType):
                return False
            try:
                value = importlib.import_module(path)
            except ImportError:
                return False
    return True


class _Probe(torch.nn.Module):  # type: ignore[misc]
    """A model with products, attention, a counter that is changed in place, and a random mask that is kept, so that eager PyTorch can reuse it.

    Args:
        draws: whether the forward pass draws the mask; otherwise it uses the mask in the buffer.
    """

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.project, self.head, self.draws = torch.nn.Linear(8, 24), torch.nn.Linear(8, 1), draws
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(2, 2, 6, 4))  # (B, heads, T, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch  # (B, T, C) -> ()."""
        self.num_calls.add_(1)
        if self.draws:
            self.mask.copy_(functional.dropout(torch.ones_like(self.mask), 0.5))
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()  # (B, heads, T, width) each
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True) * self.mask
        loss: torch.Tensor = self.head(functional.layer_norm(mixed.transpose(1, 2).flatten(2), (8,))).square().mean()
        return loss


def first_difference(step: Step) -> str | None:
    """Train the probe for one step and compare it with eager PyTorch; return the name of the first difference, None without one.

    Args:
        step: function that takes the step, from the probe and a batch, and returns the loss, and parameters and buffers by name.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, x = _Probe(draws=True), torch.randn(2, 6, 8)
    twin = _Probe(draws=False)
    twin.load_state_dict(module.state_dict())
    loss, state = step(module, x)
    if set(state["mask"].unique().tolist()) != {0.0, 2.0}:  # dropout keeps half of the ones, and doubles them
        return "random numbers"
    twin.mask.copy_(state["mask"])
    expected = twin(x)
    expected.backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.sub_(parameter.grad, alpha=RATE)
    return next(_differing({**state, "the loss": torch.tensor(loss)}, {**twin.state_dict(), "the loss": expected.detach()}), None)


def _step_of(session: type[Any], module: torch.nn.Module, x: torch.Tensor) -> tuple[float, Mapping[str, torch.Tensor]]:
    with session(module, "sgd", lr=RATE, ram="64MB", workers=1) as opened:
        return opened.step(x=x), opened.state_dict()


def _differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield the names of tensors that differ by more than rounding, or that only one side has."""
    for name in ("the loss", *expected):
        if name not in found or not torch.allclose(found[name], expected[name], rtol=_TOLERANCE, atol=_TOLERANCE):
            yield name
