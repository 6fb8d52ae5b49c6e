"""Steps in flight: the outcome of each is read once, before later steps overwrite it in the runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from nntask.engine import Outcome
from nntask.optim import norm_of
from scheduler import Ticket

from ..steps.emission import value_of
from ..steps.state import ModuleState
from .hosting import Host
from .python_state import Leaving, bring_into_python
from .recording import RecordedStep

OnFailure = Callable[[Exception, Ticket, int, Collection[str]], Exception]
"""Function of an error, the ticket of the failed step, its number and the names that it updates, which returns the error to raise."""


class StartedStep:
    """A step in flight.

    Args:
        recorded: the step.
        leavings: tensors that its passes will leave in Python.
        ticket: ticket of its replay.
        number: number of the step, from 1.
        host, state: runtime and tensors of the session.
        on_failure: function that is called once if a task fails.
    """

    def __init__(
        self, recorded: RecordedStep, leavings: Sequence[Leaving], ticket: Ticket, number: int, host: Host, state: ModuleState, on_failure: OnFailure
    ) -> None:
        self._recorded, self._leavings, self._ticket, self._number = recorded, leavings, ticket, number
        self._host, self._state, self._on_failure = host, state, on_failure
        self._outcome: Outcome | Exception | None = None

    @property
    def loss_dtype(self) -> torch.dtype:
        """Element type of the loss."""
        dtype: torch.dtype = self._recorded.outputs[0].dtype
        return dtype

    @property
    def succeeded(self) -> bool:
        """Whether the step has ended without an error."""
        return isinstance(self._outcome, Outcome)

    def result(self) -> Outcome:
        """Wait until the step is over, and return its outcome; it can be called several times, at any later time.

        Raises:
            NntaskError: a task failed, or a memory was too small.
        """
        self.wait()
        assert self._outcome is not None  # wait() has set it
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def wait(self) -> None:
        """Wait until the step is over, and keep its outcome, which later steps overwrite in the runtime."""
        if self._outcome is None:
            try:
                self._outcome = self._read()
            except Exception as error:
                failed = self._ticket.failure is not None
                self._outcome = self._on_failure(error, self._ticket, self._number, self._recorded.updated) if failed else error

    def _read(self) -> Outcome:
        recorded = self._recorded
        with self._host.user_errors():
            self._ticket.wait()
            bring_into_python(self._leavings, recorded.kept, self._ticket, self._state)
            losses = [float(value_of(outputs, kept, self._ticket).reshape(())) for outputs, kept in zip(recorded.outputs, recorded.kept, strict=True)]
            assert recorded.squares is not None  # a training step has an update
            return Outcome(sum(losses) / recorded.divisor, norm_of(self._ticket.read(recorded.squares)))
