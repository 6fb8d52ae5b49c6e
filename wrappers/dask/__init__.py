"""Dask: training on its clusters (`cluster`, `node`), its graphs on our workers and memory (`get`, `runtime`), its arrays as tile tensors and back.

Everything is imported when it is first asked for, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .graphs.scheduler import GraphRuntime, get, runtime
    from .graphs.tensors import from_array, to_array

_HOMES: Final = {
    "GraphRuntime": ".graphs.scheduler",
    "from_array": ".graphs.tensors",
    "get": ".graphs.scheduler",
    "runtime": ".graphs.scheduler",
    "to_array": ".graphs.tensors",
}
"""Where each public name lives."""

__all__ = ["GraphRuntime", "from_array", "get", "runtime", "to_array"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
