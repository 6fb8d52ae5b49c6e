"""Chains of calls compiled to one function each by PyTorch's Inductor and the C++ compiler of this machine.

A compiled function reads its inputs and writes its results in memory that the caller gives it; PyTorch allocates the buffers that it needs between
its loops, and their size is known. It uses one thread and releases the GIL, so that workers compute in parallel. Equal chains are compiled once in a
session, and Inductor caches compiled code on disk (TORCHINDUCTOR_CACHE_DIR) for the next one.

Fused loops sum in another order than PyTorch's own kernels: results differ from eager's by rounding, and are the same in every run of one
machine, for any budget and number of workers.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nntask import UsageError

from ..releases import check_inductor
from .calls import Ref

_OPTIONS: Final = {
    **{"cpp.threads": 1, "compile_threads": 1},  # no pool of processes, which would stay alive
    **{"size_asserts": False, "alignment_asserts": False, "cpp_wrapper": False, "fx_graph_cache": True},
}
_CALL: Final = (
    "[](auto... each) {{ struct Unlocked {{ PyThreadState* state = PyEval_SaveThread(); ~Unlocked() {{ PyEval_RestoreThread(state); }} }} unlocked; "
    "kernel(each...); }}({}); Py_RETURN_NONE;"
)
"""C++ code with which Inductor's binding calls a kernel; Inductor's own code keeps the GIL."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled function.

    Attributes:
        run: function of a list of inputs and then of results, which it fills.
        nbytes: total bytes of the buffers that PyTorch allocates for it.
    """

    run: Callable[[list[torch.Tensor]], Any]
    nbytes: int


def check_compiler() -> None:
    """Check that there is a C++ compiler.

    Raises:
        UsageError: no compiler works, or this release of PyTorch lacks parts of Inductor that are used here.
    """
    check_inductor()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UsageError(
            "compiled=True needs a C++ compiler, and none was found",
            "install g++ or clang++, name one by the environment variable CXX, or leave out compiled=True",
        ) from None


def compile_function(function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[Ref], results: Sequence[Ref], name: str) -> Compiled:
    """Compile a function of tensors, made of operations without side effects.

    Args:
        function: function of the inputs that returns the results.
        inputs, results: references, of which types, shapes and strides count.
        name: name of the operations, for messages.

    Raises:
        UsageError: the function cannot be compiled here.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    def into(*tensors: torch.Tensor) -> tuple[()]:
        for value, target in zip(function(*tensors[: len(inputs)]), tensors[len(inputs) :], strict=True):
            target.copy_(value)
        return ()

    try:
        with config.patch(_OPTIONS), torch.no_grad(), FakeTensorMode() as mode, ExitStack() as after:
            after.callback(setattr, CppPythonBindingsCodeCache, "call_entry_function", CppPythonBindingsCodeCache.call_entry_function)
            CppPythonBindingsCodeCache.call_entry_function = _CALL
            tensors = [torch.empty_strided(each.shape, each.strides, dtype=each.dtype) for each in (*inputs, *results)]
            graph = make_fx(into, decomposition_table={**select_decomp_table(), **_DECOMPOSITIONS})(*tensors)
            with torch._guards.tracing(torch._guards.TracingContext(mode)):
                compiled = compile_fx_inner(graph, tensors)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise UsageError(
            f"{name} cannot be compiled ({type(error).__name__}: {reason[0] if reason else ''})", "leave out compiled=True, or fix the compiler"
        ) from error
    return Compiled(compiled, _buffers_of(compiled.source_code))


def _nll_loss_backward(
    gradient: torch.Tensor, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int, count: torch.Tensor
) -> Any:
    """Return the gradient of a loss by a mask instead of a scatter, which needs no extra memory  # (), (N, V), (N,), () -> (N, V)."""
    if scores.dim() != 2 or weight is not None or not reduction or scores.shape[1] >= 1 << 31:
        return NotImplemented
    row = torch.arange(scores.shape[1], dtype=torch.int32)  # (V,)
    column = torch.where(target == ignored, -1, target).to(torch.int32)  # (N,)
    return torch.where(row == column[:, None], -gradient / count if reduction == _MEAN else -gradient, 0)


_MEAN: Final = 1
"""PyTorch's number for the reduction of a loss by its mean; 0 is none and 2 the sum."""
_DECOMPOSITIONS: Final = {torch.ops.aten.nll_loss_backward.default: _nll_loss_backward}
"""Operations that are decomposed in another way than Inductor's."""


def _buffers_of(source: str) -> int:
    """Return the total bytes of the buffers that the code of a compiled function allocates."""
    total = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("empty_strided"):
            shape, dtype = ast.literal_eval(node.args[0]), node.args[2]
            assert isinstance(dtype, ast.Attribute)  # torch.float32
            total += prod(shape) * getattr(torch, dtype.attr).itemsize
    return total
