"""Checks of the arguments of a session, made before it takes any value from the module."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from nntask import UsageError

from ..guards.away import is_away
from ..steps.modules import named_tensors, saved_tensors
from ..tasks.inductor import check_compiler
from .arguments import Execution, Learning, Resources


def check_arguments(module: torch.nn.Module, learning: Learning, resources: Resources, execution: Execution) -> None:
    """Check the arguments of a session.

    Raises:
        UsageError: a number is out of range, the module is unsuitable (`check_module`), a comparison or compiled chains are combined with GPUs, or
            there is no compiler; a step that was planned is one of another module.
    """
    seed, minibatches, threads, ngpu, verify = learning.seed, learning.minibatches, resources.threads, resources.ngpu, execution.verify
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"seed must be at least 0 and below 2**63, got {seed}", f"the nearest legal value is {min(max(seed, 0), (1 << 63) - 1)}")
    if not isinstance(verify, int) or verify < 0:
        raise UsageError(f"verify must be an integer of at least 0, got {verify}", "1 compares each step with eager PyTorch, 0 none")
    if not isinstance(threads, int) or not 1 <= threads <= 1024:
        raise UsageError(f"threads must be from 1 to 1024, got {threads}", "1 leaves the cores to minibatches that run in parallel")
    if not isinstance(minibatches, int) or minibatches < 1:
        raise UsageError(f"minibatches must be an integer of at least 1, got {minibatches}", "1 takes a batch as a whole")
    check_module(module, has_weights=execution.weights is not None or execution.planned is not None)
    planned = execution.planned
    if planned is not None and (planned.captures.module is not module or (planned.captures.terms.compiler is None) == execution.compiled):
        raise UsageError("planned must be a step of this module, captured with the same compiled=, got another one", "leave planned out")
    if verify and ngpu != 0:
        raise UsageError(f"verify= compares with PyTorch on CPUs, which draws other random numbers than GPUs, got ngpu={ngpu}", "use ngpu=0")
    if execution.compiled:
        check_compiler()
        if ngpu != 0:
            raise UsageError(f"compiled chains run on CPUs only, got compiled=True with ngpu={ngpu}", "leave one of them out")


def check_module(module: torch.nn.Module, *, has_weights: bool = False) -> None:
    """Check that a session can train a module.

    Args:
        has_weights: whether files have the values of its `state_dict`, so that the module needs none.

    Raises:
        UsageError: it is not a module, or a scripted one; a tensor is on another device, complex or hooked; a session holds or held the values; an
            embedding has sparse gradients.
    """
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise UsageError(f"a session trains a torch.nn.Module of Python, got a {type(module).__name__}", "give the module itself, not scripted")
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise UsageError(f"{name} is scripted, and a session captures modules of Python", "give the module that it was scripted from")
    saved = saved_tensors(module).keys()
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in named_tensors(module):
        _check_tensor(name, value, has_values=not (has_weights and name in saved))
        if not value.is_meta and not is_away(value):
            first_name, first = owners.setdefault(value.untyped_storage().data_ptr(), (name, value))
            if first is not value and (isinstance(value, torch.nn.Parameter) or isinstance(first, torch.nn.Parameter)):
                raise UsageError(
                    f"{name} and {first_name} are two tensors of one memory, and a session would separate them", "use one tensor for both, or a copy"
                )
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse:
            raise UsageError(f"{name or 'the module'} has sparse gradients, and gradients must be dense", "make it with sparse=False")


def _check_tensor(name: str, value: torch.Tensor, *, has_values: bool) -> None:
    """Check that a session can hold a parameter or buffer.

    Args:
        has_values: whether it must have values, because no file has them.

    Raises:
        UsageError: the tensor is unsuitable, for a reason listed at `check_module`.
    """
    if is_lazy(value):
        raise UsageError(f"{name} has no shape yet (it is of a lazy module)", "call the module once, with a batch, before")
    if has_values and value.is_meta:
        raise UsageError(f"{name} has no values (it is on the meta device)", "give weights=DIR, or give the buffer values if no file has them")
    if has_values and is_away(value):
        raise UsageError(
            f"{name} has no values, since a session holds them, or held them when it was closed",
            "bring them back first with load_into(module) of that session, or close() of its trainer, or give weights=DIR of a saved session",
        )
    if value.device.type not in ("cpu", "meta"):
        raise UsageError(f"{name} is on {value.device}, and a module must be in CPU memory", "move it with module.cpu()")
    if not is_away(value) and value.grad is not None:
        raise UsageError(f"{name} has a gradient from before the session, to which eager PyTorch would add", "call module.zero_grad() first")
    if getattr(value, "_post_accumulate_grad_hooks", None):
        raise UsageError(f"{name} has a post-accumulate hook of its gradient, which a session does not call", "use register_hook, or remove it")
    if value.is_complex() and isinstance(value, torch.nn.Parameter):
        raise UsageError(f"{name} is of type {value.dtype}, and parameters must be real", "keep real and imaginary parts apart")
