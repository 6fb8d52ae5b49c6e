"""Child side of `ConfinedProcess`: reads requests as lines of JSON and answers each with a line.

A service is a module with two names. `IMPORTED` lists the modules that it imports lazily; they are imported before files become inaccessible.
`SERVICE` is a class: its argument is the content of the opening request, its attribute `facts` is the answer to that request, and calling an instance
with the content of a later request returns the answer, a JSON value.
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
    """Answer requests until standard input ends."""
    module = importlib.import_module(sys.argv[1])
    for name in module.IMPORTED:
        with contextlib.suppress(ImportError):  # the service says which package is missing
            importlib.import_module(name)
    with open("/proc/self/statm", encoding="ascii") as statm:  # opened now, since no file can be opened after `_confine`
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
    """Write the line that answers a request.

    Args:
        line: the request, as JSON [seconds, nbytes, content].
        work: function from the content to the answer.
        taken: memory of the process before the request, in bytes of address space.
    """
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
    except BaseException as error:  # compilers and filters raise any error, and a Rust panic is not an Exception
        answer = json.dumps(["failed", type(error).__name__])
    print(answer, flush=True)


def _confine() -> None:
    """Deny this process files, new threads and stderr, to which native code may write."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # when memory is short, the kernel ends this process first
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    _limit(resource.RLIMIT_CORE, 0)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):  # open descriptors keep working
        resource.setrlimit(kind, (0, 0))


def _limit(kind: int, soft: int) -> None:
    """Set a soft resource limit of this process, capped by its hard limit."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _taken(statm: TextIO) -> int:
    """Return the size of this process's address space in bytes; `statm` is its open /proc/self/statm."""
    statm.seek(0)
    return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
