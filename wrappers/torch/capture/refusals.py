"""Conversion of errors in a capture to sentences of one line, which name the line of the program."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException

from nntask import NntaskError, UsageError

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_HERE: Final = str(Path(__file__).parents[1]) + os.sep
"""Folder of all rooms of this package, whose frames are left out of messages."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error of a capture into a sentence with the line of the model, and silence PyTorch's log of fake tensors, which would bury it.

    Errors that the program itself raises pass through.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    except NntaskError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        kind = "a value" if isinstance(error, DataDependentOutputException) else "a shape that depends on values"
        raise UsageError(
            f"{_line_of(error)} needs {kind} of a tensor while the step is captured ({error.func}), and here no values are known",
            "compute with tensors there (torch.where, masks), or move it out of the model",
        ) from error
    except UnsupportedOperatorException as error:
        raise UsageError(
            f"{_line_of(error)} calls {error.func}, whose shapes PyTorch cannot work out beforehand", "register a fake for it"
        ) from error
    except NotImplementedError as error:
        if "HigherOrderOperator" not in str(error):
            raise UsageError(f"{_line_of(error)} cannot be captured: {error}", "run this part outside of the model") from error
        raise UsageError(
            f"{_line_of(error)} uses a control flow operator ({str(error).partition(' and mode')[0]})", "write it as a loop of Python"
        ) from error
    except Exception as error:
        if _is_of_program(error):
            raise
        raise UsageError(
            f"{_line_of(error)} cannot be captured: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            "try module(**batch) by eager PyTorch, and if that works, run this part outside of the model",
        ) from error
    finally:
        log.disabled = before


def _is_of_program(error: BaseException) -> bool:
    """Return whether a statement of the program raised an error, not PyTorch, a C function or this package."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return not last.filename.startswith((_TORCH, _HERE)) and (last.line or "").startswith(("raise", "assert"))


def _line_of(error: BaseException) -> str:
    """Return the innermost line outside PyTorch that an error passed through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_TORCH, _HERE))]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "the module"


def line_of_program() -> str:
    """Return the innermost line outside PyTorch and this package that is being executed, as FILE:LINE."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "the module"
