"""The other side of `ConfinedProcess`: reads requests as lines of JSON and answers each with a line.

A service is a module with `IMPORTED`, the modules that it imports only when it needs them, and a class `SERVICE`: its argument is the content of the
opening request, `facts` is the answer to that, and calling it with the content of a request returns the answer, a JSON value.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, Final, TextIO

from nntask.errors import DataError

_LONGEST_ERROR: Final = 1000


def main() -> None:
    """Answer requests until there are no more."""
    module = importlib.import_module(sys.argv[1])
    for name in module.IMPORTED:
        with contextlib.suppress(ImportError):  # the service says which package is missing
            importlib.import_module(name)
    with open("/proc/self/statm", encoding="ascii") as statm:  # no file can be opened later on
        _confine()
        services: list[Any] = []

        def opened(content: Any) -> Any:
            services.append(module.SERVICE(content))
            return services[0].facts

        _answer(sys.stdin.readline(), opened, _taken(statm))
        ready = _taken(statm)
        for line in sys.stdin:
            _answer(line, services[0], ready)


def _answer(line: str, work: Callable[[Any], Any], taken: int) -> None:
    """Write the line that answers a request; `taken` is the memory that the process has without it, in bytes."""
    seconds, nbytes, content = json.loads(line)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)
    _limit(resource.RLIMIT_AS, taken + nbytes)
    try:
        answer = json.dumps(["answer", work(content)])
    except DataError as error:
        answer = json.dumps(["refused", str(error)[:_LONGEST_ERROR]])
    except MemoryError:
        answer = json.dumps(["memory", None])
    except BaseException as error:  # compilers and filters raise any error, and a panic of Rust is no Exception
        answer = json.dumps(["failed", type(error).__name__])
    print(answer, flush=True)


def _confine() -> None:
    """Take from this process what a service does not need: files, threads, and stderr, which code outside Python writes to."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # when memory is short, the kernel ends this process first
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    _limit(resource.RLIMIT_CORE, 0)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):  # open descriptors go on working
        resource.setrlimit(kind, (0, 0))


def _limit(kind: int, soft: int) -> None:
    """Limit what this process may use, at most as far as others have limited it."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _taken(statm: TextIO) -> int:
    """Return the bytes of addresses that this process has."""
    statm.seek(0)
    return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
