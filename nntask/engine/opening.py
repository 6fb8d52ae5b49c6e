"""The runtime of a run, with the trace and the checks that its settings ask for."""

from __future__ import annotations

from scheduler import Runtime, Trace

from ..config.run_config import LanguageRun
from ..hardware.runtimes import check_finite, open_runtime


def runtime_for(run: LanguageRun, trace: Trace | None = None) -> Runtime:
    """Return the runtime of a run on its machine.

    Args:
        trace: trace to use instead of the one that --trace-steps asks for.

    Raises:
        DoesNotFit, StorageError, UsageError: `open_runtime` raises it.
    """
    observe = run.settings.observe
    if trace is None and (observe.trace or observe.trace_steps):
        trace = Trace(active=run.traced is None)
    runtime = open_runtime(run.machine, dtype=run.model.dtype, lanes=run.step.lanes, trace=trace)
    if run.settings.run.check_finite:
        runtime.on_task(check_finite)
    return runtime
