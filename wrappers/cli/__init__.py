"""The `nntask` command.

Each subcommand is a module of its own that is imported only when it is called, so ``--help`` and errors in flags appear at once. An error that nntask
raises on purpose becomes one line on stderr and an exit code; any other exception is a bug and shows its traceback.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Final, TextIO, cast

from .output import Output, complain, open_missing

if TYPE_CHECKING:
    from nntask.training import AroundTraining

    from .commands.train import Changed

__all__ = ["COMMANDS", "exit_code", "guarded", "main", "run_train"]

COMMANDS: Final = {
    "train": "train a language model, or continue a run",
    "generate": "continue prompts with a run, a checkpoint or a model directory",
    "serve": "answer OpenAI's clients over HTTP with a run, a checkpoint or a model directory",
    "perplexity": "score a text with a run, a checkpoint or a model directory",
    "data": "prepare train.bin and val.bin from a dataset",
    "export": "write a run or a checkpoint as a Hugging Face model directory or a GGUF file",
    "quantize": "write a model in few bits, or in another element type, as a GGUF file or a directory",
    "plan": "parameters, bytes and tasks of a training run, without running it",
    "models": "list the families of models and their presets, with parameters and bytes",
    "compare": "run two kinds of workers side by side and name the first task whose results differ",
    "report": "draw a run: steps, memory, links, workers, codelets and bounds, in one HTML file",
    "devices": "what this machine offers",
    "bench": "measure the runtime, the kernels and the links of this machine",
}


_NO_PATH: Final = (errno.ENAMETOOLONG, errno.EACCES)
"""Errors of a test whether a path exists that the path itself causes: it is too long, or lies in a directory without access."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of this process).

    Returns:
        The exit code.
    """
    return guarded(lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def guarded(command: Callable[[], int]) -> int:
    """Run a command with the output and error messages of `nntask`.

    Args:
        command: function that prints, and returns an exit code or raises an error.

    Returns:
        The exit code.
    """
    open_missing()
    if os.path.expanduser("~") == "~":  # a user without a home directory, in which some libraries look for their settings at import
        os.environ["HOME"] = os.devnull
    output = Output(sys.stdout)
    with redirect_stdout(cast(TextIO, output)):
        try:
            return _answer(command, output)
        except KeyboardInterrupt:
            complain("interrupted")
            return 130


def run_train(argv: Sequence[str], *, changed: Changed, around: AroundTraining) -> int:
    """Run ``nntask train`` for a program that changes the run; errors are raised, for `guarded`.

    Args:
        argv: the words after ``nntask train``.
        changed: function from the run that the flags ask for to the run to train; the model must have tiles.
        around: function that returns a context manager for the training of a session on this machine.

    Returns:
        The exit code.
    """
    from .commands.train import run

    _check_working_directory()
    return run(argv, changed=changed, around=around)


def release() -> str:
    """Return the installed version of nntask; "in the source tree" for a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("nntask")
    except metadata.PackageNotFoundError:
        return "in the source tree"


def _answer(command: Callable[[], int], output: Output) -> int:
    """Run a command and print its error, except Ctrl-C; returns the exit code."""
    code = 0
    try:
        try:
            code = command()
        except SystemExit:  # the help has been printed
            output.flush()
            raise
        output.flush()
        return code
    except BrokenPipeError:  # the reader of the output has ended, e.g. `| head`; a training reports this itself
        output.discard()
        return code
    except Exception as error:
        from nntask.io import of_system_limit

        error = of_system_limit(error) or error
        code = exit_code(error)
        if code == 1:
            raise
        complain(f"{str(error.filename)[:200]}: {error.strerror}; name another path" if isinstance(error, OSError) else str(error))
        output.flush_or_discard()
        return code


def _check_working_directory() -> None:
    """Check that there is a working directory, which kernels need when they are compiled.

    Raises:
        UsageError: it was removed, or cannot be used.
    """
    try:
        os.getcwd()
    except OSError as error:
        from nntask import UsageError

        raise UsageError(f"the working directory cannot be used: {error.strerror}", "change to another one") from None


def exit_code(error: Exception) -> int:
    """Return the exit code of a command that ends with an error; 1 for a bug."""
    from nntask import DataError, NntaskError
    from scheduler import DoesNotFit

    if isinstance(error, NntaskError):
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _NO_PATH and error.filename:
        return DataError.exit_code
    return 3 if isinstance(error, DoesNotFit) else 1


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"nntask {release()}")
        return 0
    command = args[0]
    if command not in COMMANDS:
        import difflib

        from nntask import UsageError

        near = difflib.get_close_matches(command, COMMANDS, 1)
        raise UsageError(f"unknown command {command!r}" + (f"; did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"))
    from .options.help import HELP, HELP_ALL

    if not {*HELP, HELP_ALL} & set(args):
        _check_working_directory()
    module = ".bench" if command == "bench" else f".commands.{command}"
    return int(importlib.import_module(module, __name__).run(args[1:]))


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: nntask COMMAND [flags]", "", "Trains transformers as tasks over tiles.", ""]
    lines += [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "nntask COMMAND --help lists the flags of a command."])
