"""Every environment variable nntask reads, registered once.

A variable with a flag stands in for that flag: stronger than a config file, weaker than the command line. Tables in the documentation are made
from this one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    Args:
        name: as in the shell.
        flag: the flag it stands in for, without dashes in front; empty when there is none.
        help: what it does.
    """

    name: str
    flag: str
    help: str


VARIABLES: Final = (
    Variable("STARPU_NCPU", "ncpu", "CPU workers; alias of NNTASK_NCPU for users of StarPU"),
    Variable("NNTASK_NCPU", "ncpu", "CPU workers"),
    Variable("STARPU_NCUDA", "ngpu", "GPUs; alias of NNTASK_NGPU for users of StarPU"),
    Variable("NNTASK_NGPU", "ngpu", "GPUs, the first ones that CUDA shows"),
    Variable("NNTASK_SPLIT_GPU", "split-gpu", "parts that each GPU is used as"),
    Variable("NNTASK_SIM_GPU", "sim-gpu", "simulated devices"),
    Variable("NNTASK_RAM", "ram", "byte budget of RAM, e.g. 2GiB"),
    Variable("NNTASK_DISK", "disk", "disk tier below RAM: DIR or DIR:SIZE"),
    Variable("NNTASK_GPU_MEMORY", "gpu-memory", "budget of each GPU or simulated device: bytes, or of GPUs a fraction"),
    Variable("NNTASK_SIM_BANDWIDTH", "sim-bandwidth", "bytes per second of each link of a simulated device"),
    Variable("NNTASK_SCHED", "sched", "scheduling policy"),
    Variable("NNTASK_EVICT", "evict", "what leaves a full memory first"),
    Variable("NNTASK_ORDER", "order", "in which order a step is executed when memory is short"),
    Variable("NNTASK_TILE_TABLE", "tile-table", "TOML file of tilings for single shapes"),
    Variable(
        "NNTASK_CACHE",
        "",
        "directory for tokenizers and tokenised text (default: nntask in XDG_CACHE_HOME or ~/.cache); "
        "performance models and compiled GPU kernels stay in the latter",
    ),
    Variable("NNTASK_API_KEY", "", "key that requests to nntask serve must bring; a file of it is named with --api-key-file"),
    Variable("NNTASK_ONEDNN", "", "file of oneDNN 3 (libdnnl.so.3), or off (default: found by itself)"),
)


def flags_from(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Flags that the environment sets: flag -> (text, variable). A later entry of the table wins; empty variables do not count."""
    return {v.flag: (environ[v.name], v.name) for v in VARIABLES if v.flag and environ.get(v.name)}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each NNTASK_* variable that nothing reads."""
    known = [v.name for v in VARIABLES]
    sentences = []
    for name in sorted(environ):
        if name.startswith("NNTASK_") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            sentences.append(f"{name} is set but nothing reads it" + (f"; did you mean {near[0]}?" if near else ""))
    return sentences


def cache_directory() -> Path:
    """Where derived files may be kept and reused; not created here."""
    if own := os.environ.get("NNTASK_CACHE"):
        return Path(own)
    from scheduler.storage import user_cache

    return user_cache()
