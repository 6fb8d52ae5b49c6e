"""Registry of every environment variable that nntask reads.

A variable with a flag sets that flag: it overrides a config file, and the command line overrides it. Tables in the documentation are generated from
this registry.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .settings import flag_of

_PREFIX: Final = "NNTASK_"
_LIKENESS: Final = 0.75
"""Smallest similarity, from 0 to 1, of two names after the prefix of which one may be meant instead of the other."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    Args:
        name: name in the shell.
        flag: flag that the variable sets, without leading dashes; empty if there is none.
        help: description of its effect.
    """

    name: str
    flag: str
    help: str


VARIABLES: Final = (
    Variable("STARPU_NCPU", "ncpu", "CPU workers; alias of NNTASK_NCPU for users of StarPU"),
    Variable("NNTASK_NCPU", "ncpu", "CPU workers"),
    Variable("STARPU_NCUDA", "ngpu", "GPUs; alias of NNTASK_NGPU for users of StarPU"),
    Variable("NNTASK_NGPU", "ngpu", "number of GPUs, the first ones that CUDA lists"),
    Variable("NNTASK_SPLIT_GPU", "split-gpu", "number of devices that each GPU is divided into, as P in --ngpu NxP"),
    Variable("NNTASK_SIM_GPU", "sim-gpu", "simulated devices"),
    Variable("NNTASK_RAM", "ram", "byte budget of RAM, e.g. 2GiB"),
    Variable("NNTASK_DISK", "disk", "disk tier below RAM: DIR or DIR:SIZE"),
    Variable("NNTASK_GPU_MEMORY", "gpu-memory", "budget of each GPU or simulated device: bytes, or for GPUs a fraction"),
    Variable("NNTASK_SIM_BANDWIDTH", "sim-bandwidth", "bytes per second of each link of a simulated device, as RATE in --sim-gpu N@RATE"),
    Variable("NNTASK_SCHED", "sched", "scheduling policy"),
    Variable("NNTASK_EVICT", "evict", "eviction policy of a full memory"),
    Variable("NNTASK_ORDER", "order", "order in which a step is executed if memory is short"),
    Variable("NNTASK_TILE_TABLE", "tile-table", "TOML file of tile sizes for single model shapes, as FILE in --auto-tile table@FILE"),
    Variable(
        "NNTASK_CACHE",
        "",
        "directory for tokenizers and tokenised text (default: nntask in XDG_CACHE_HOME or ~/.cache); "
        "performance models and compiled GPU kernels are always in the default directory",
    ),
    Variable("NNTASK_WATCHDOG", "watchdog", "seconds without an ended task after which a report says once which tasks run, which wait, and why"),
    Variable("NNTASK_API_KEY", "", "key that requests to nntask serve must send; --api-key-file names a file with the key instead"),
    Variable("NNTASK_ONEDNN", "", "path of oneDNN 3 (libdnnl.so.3), or off (default: found automatically)"),
)


def flags_from(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return flag -> (text, variable) for flags that the environment sets. A later entry of the table wins; empty variables do not count."""
    return {v.flag: (environ[v.name], v.name) for v in VARIABLES if v.flag and environ.get(v.name)}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each NNTASK_* variable that nothing reads."""
    known = [v.name.removeprefix(_PREFIX) for v in VARIABLES if v.name.startswith(_PREFIX)]
    sentences = []
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in known:
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1, _LIKENESS)
            advice = f"did you mean {_PREFIX}{near[0]}?" if near else "nntask train --help-all lists the variables"
            sentences.append(f"{name} is set but nothing reads it; {advice}")
    return sentences


def variables_listed() -> str:
    """Return the variables that set flags, with their flags, as one line of help."""
    names = ", ".join(f"{v.name} ({flag_of(v.flag.replace('-', '_'))})" for v in VARIABLES if v.flag)
    return f"Environment variables that override a TOML file: {names}. Other flags have none."
