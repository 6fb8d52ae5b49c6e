"""The modules of benchmarks/bounds, which are scripts and no package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "bounds"))

import bound
import byte_bound
import evict
import jobs
import schedules
import time_bound
from access_trace import AccessTrace, trace_of

__all__ = ["AccessTrace", "bound", "byte_bound", "evict", "jobs", "schedules", "time_bound", "trace_of"]
