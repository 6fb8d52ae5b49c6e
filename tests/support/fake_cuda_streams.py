"""Streams, events and graphs of `FakeCuda`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from support.fake_cuda_calls import (
    BAD_HANDLE,
    NOT_READY,
    CudaCalls,
    CUDARuntimeError,
    EventOfWork,
    PieceOfWork,
    QueueOfWork,
    RecordedWork,
    StartableWork,
)
from support.hazards import Access, Clock

_INVALIDATED, _ISOLATION, _CAPTURED_EVENT, _WRONG_THREAD = 901, 905, 907, 908
_BLOCKING, _NO_TIMING = 1, 2
_OF_THREAD, _RELAXED = 1, 2


class CudaStreams(CudaCalls):
    """Streams, events and graphs.

    Attributes:
        num_graphs: number of graphs started.
    """

    eventBlockingSync, eventDisableTiming = _BLOCKING, _NO_TIMING
    streamCaptureModeThreadLocal, streamCaptureModeRelaxed = _OF_THREAD, _RELAXED

    def __init__(self, num_devices: int, memory: int, seed: int) -> None:
        super().__init__(num_devices, memory, seed)
        self.num_graphs = 0

    def memory_at(self, address: int, nbytes: int, what: str) -> int | None:
        """Return the device that owns an address; None for memory of the host.

        Raises:
            CUDARuntimeError: the range reaches beyond its reservation.
        """
        for begin, (device, size) in tuple(self.reserved.items()):
            if begin < address + nbytes and address < begin + size:
                if address < begin or address + nbytes > begin + size:
                    raise self.refuse(f"{what} reaches beyond the {size:,} bytes that were reserved")
                return device
        return None

    def streamCreateWithFlags(self, flags: int) -> int:
        """Create a stream of the current device."""
        device = self.getDevice()
        self._look(device)
        if flags != 1:
            self.refuse("this stream and the legacy stream wait for each other; use cudaStreamNonBlocking")
        return self._keep(QueueOfWork(device, self.devices[device].stream()))

    def streamDestroy(self, stream: int) -> None:
        """Destroy a stream; work that is on it is still executed."""
        self._handles.pop(self._number("a stream", stream), None)

    def queue(self, stream: int) -> QueueOfWork:
        """Return a stream by its handle."""
        queue: QueueOfWork = self._of(QueueOfWork, stream, "a stream")
        return queue

    def submit(self, stream: int, name: str, accesses: Sequence[Access], step: Callable[[], object]) -> None:
        """Put work on a stream, or in the graph that is being recorded there."""
        queue: QueueOfWork = self._of(QueueOfWork, stream, "a stream")
        work = PieceOfWork(name, tuple(access for access in accesses if access.nbytes), step)
        if queue.recorded is not None:
            queue.recorded.append(work)
            return
        if self._capturing() is not None:
            raise self.refuse(f"{name} goes to another stream while a graph is being recorded, and would not be in it", _ISOLATION)
        self._put(queue, work)

    def _put(self, queue: QueueOfWork, work: PieceOfWork) -> None:
        with self.lock:
            hazard = self.hazards.add(queue, queue.clock, work.name, work.accesses)
            if hazard:
                raise self.refuse(hazard)
            queue.steps.put(work.step)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        """Make a stream wait for an event."""
        queue: QueueOfWork = self._of(QueueOfWork, stream, "a stream")
        point: EventOfWork = self._of(EventOfWork, event, "an event")
        if (point.captured is None) != (queue.recorded is None):
            raise self.refuse("an event joins work of a graph that is being recorded with work outside", _ISOLATION)
        if point.clock is None:
            return
        with self.lock:
            number = point.asked
            queue.clock.join(point.clock)
            queue.steps.put(lambda: None, lambda: point.done >= number)

    def eventCreateWithFlags(self, flags: int) -> int:
        """Create an event of the current device."""
        if self._number("flags", flags) > 7:
            raise self.refuse(f"flags of an event are 0 to 7, got {flags}")
        self._look(self.getDevice())
        return self._keep(EventOfWork(self.getDevice(), not flags & _NO_TIMING))

    def eventDestroy(self, event: int) -> None:
        """Destroy an event, which may still be on a stream."""
        self._handles.pop(self._number("an event", event), None)

    def eventRecord(self, event: int, stream: int) -> None:
        """Make an event mark the current end of a stream."""
        point, queue = self._of(EventOfWork, event, "an event"), self._of(QueueOfWork, stream, "a stream")
        if point.device != queue.device:
            raise self.refuse(f"an event of device {point.device} is recorded on a stream of device {queue.device}", BAD_HANDLE)
        if queue.recorded is not None:
            point.captured = queue
            return
        with self.lock:
            self.hazards.add(queue, queue.clock, "a record", ())
            point.captured, point.clock, point.asked = None, queue.clock.copy(), point.asked + 1
            number, gpu = point.asked, self.devices[queue.device]

            def pass_by() -> None:
                point.done, point.time = max(point.done, number), gpu.time

            queue.steps.put(pass_by)

    def eventQuery(self, event: int) -> int:
        """Return 0, or 600 (cudaErrorNotReady) if the event has not passed, which stays the thread's last error."""
        point: EventOfWork = self._of(EventOfWork, event, "an event")
        self._unsafe("eventQuery")
        if point.captured is not None:
            raise self.refuse("an event of a graph that is being recorded is queried", _CAPTURED_EVENT)
        if not self.devices[point.device].run_a_little(lambda: point.done >= point.asked):
            self._here.last = NOT_READY
            return NOT_READY
        self._seen(point.clock)
        return 0

    def eventSynchronize(self, event: int) -> None:
        """Wait for an event."""
        point: EventOfWork = self._of(EventOfWork, event, "an event")
        self._unsafe("eventSynchronize")
        number, clock = point.asked, point.clock
        self.devices[point.device].run_until(lambda: point.done >= number)
        self._look(point.device)
        self._seen(clock)

    def eventElapsedTime(self, start: int, end: int) -> float:
        """Return the milliseconds between two events that have passed."""
        first, last = self._of(EventOfWork, start, "an event"), self._of(EventOfWork, end, "an event")
        if not (first.has_timing and last.has_timing and first.asked and last.asked):
            raise self.refuse("time is measured between two events that were recorded and have timing enabled", BAD_HANDLE)
        if first.device != last.device:
            raise self.refuse("time is measured between events of two devices", BAD_HANDLE)
        if first.done < first.asked or last.done < last.asked:
            raise self.refuse("time is measured between events that have not passed", NOT_READY)
        return float(last.time - first.time) * 1e-3

    def streamSynchronize(self, stream: int) -> None:
        """Wait for all work on a stream."""
        queue: QueueOfWork = self._of(QueueOfWork, stream, "a stream")
        self._unsafe("streamSynchronize")
        with self.lock:
            clock = queue.clock.copy()
        self.devices[queue.device].run_until(lambda: not queue.steps.steps)
        self._look(queue.device)
        self._seen(clock)

    def _seen(self, clock: Clock | None) -> None:
        if clock is not None:
            with self.lock:
                self.hazards.host.join(clock)

    def streamBeginCapture(self, stream: int, mode: int = 2) -> None:
        """Start to record the work that is put on a stream."""
        queue: QueueOfWork = self._of(QueueOfWork, stream, "a stream")
        if mode != _OF_THREAD:
            self.refuse("graphs are recorded in the mode of one thread: others reserve, lock and wait meanwhile")
        if queue.recorded is not None or self._capturing() is not None:
            raise self.refuse("a graph is already being recorded")
        queue.recorded, queue.is_invalid, queue.owner = [], False, threading.current_thread()
        self._here.capturing = queue

    def streamEndCapture(self, stream: int) -> int:
        """Return the graph of the work recorded on a stream."""
        queue: QueueOfWork = self._of(QueueOfWork, stream, "a stream")
        if queue.recorded is None:
            raise self.refuse("no graph is recorded on this stream")
        if queue.owner is not threading.current_thread():
            raise self.refuse("the thread that ends a graph has not begun it", _WRONG_THREAD)
        recorded, queue.recorded, self._here.capturing = queue.recorded, None, None
        if queue.is_invalid:
            raise CUDARuntimeError(_INVALIDATED, "the graph was made invalid before")
        return self._keep(RecordedWork(queue.device, recorded))

    def graphInstantiate(self, graph: int) -> int:
        """Create an executable graph."""
        found: RecordedWork = self._of(RecordedWork, graph, "a graph")
        return self._keep(StartableWork(found.device, found.works))

    def graphDestroy(self, graph: int) -> None:
        """Destroy a graph; executable graphs made from it remain."""
        self._of(RecordedWork, graph, "a graph")
        del self._handles[graph]

    def graphExecDestroy(self, graph: int) -> None:
        """Destroy an executable graph; work that runs goes on."""
        self._handles.pop(self._number("a graph", graph), None)

    def graphLaunch(self, graph: int, stream: int) -> None:
        """Put the work of a graph on a stream; the memory that it uses must still be reserved."""
        found: StartableWork = self._of(StartableWork, graph, "an executable graph")
        queue: QueueOfWork = self._of(QueueOfWork, stream, "a stream")
        self.num_graphs += 1
        for work in found.works:
            for access in work.accesses:
                if self.memory_at(access.address, access.nbytes, work.name) is None:
                    raise self.refuse(f"{work.name} of a graph uses memory that was freed")
            self._put(queue, work)
