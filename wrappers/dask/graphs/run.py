"""One graph during its execution: its ready tasks, and the threads that run them.

A task is *light* if no input of it lies in blocks, no task of its kind has had a large result, and the store is within its budget; a light task runs
at once. Any other task is submitted to the store, and runs when its data is in memory. At most one such task per worker is submitted, with a disk
two, so that the data of one is fetched while the other runs.

Rules. All work except running a task happens under the store's lock. The first failure ends the run: no further task begins, and results of running
tasks are dropped.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dask._task_spec import GraphNode
from dask.utils import key_split

from scheduler.machine import PAGE, rounded, sleep_until

from .blocks import FAR, MemoryBlock, MemoryRequest
from .evaluate import evaluate
from .observe import Observers
from .plan import GraphPlan, Key, prefix_of
from .store import Store
from .values import SMALL, Held, hold, holds, is_of, is_partial_view, weigh

RESULTS = -1
"""Number of the pseudo-task that brings the requested values into memory."""

Job = tuple[int, MemoryRequest | None]
"""A task's number, and the admitted request for its memory; None for a light task."""


class GraphRun:
    """A graph during its execution.

    Args:
        store: the memory of results.
        plan: the tasks.
        workers: number of threads that call `work`.
        observers: Dask's callbacks.
        first: order of task 0 among the tasks of all runs of the store.
        depth: number of runs of the store whose tasks wait for this run.

    Attributes:
        error: the first failure.
        failed: node and values of the task that raised the failure.
    """

    def __init__(self, store: Store, plan: GraphPlan, workers: int, observers: Observers, first: int, *, depth: int = 0) -> None:
        self.store = store
        self.depth = depth
        self._num_working = workers
        self.plan = plan
        self.error: BaseException | None = None
        self.failed: tuple[GraphNode, Mapping[Key, Any]] | None = None
        self._observers = observers
        self.first = first
        self._workers = workers
        self._limit = 2 * workers if store.spills else workers
        self._wake = threading.Condition(store.lock)
        self._finished = threading.Event()
        self._fetched = threading.Event()
        self._fetching: MemoryRequest | None = None
        self._is_fetching = False
        self._cache: dict[Key, Any] = dict(plan.data)
        self._waiting = [len(reads) for reads in plan.reads]
        self._ready = [number for number, count in enumerate(self._waiting) if not count]
        self._left = [len(readers) + plan.is_wanted(number) for number, readers in enumerate(plan.readers)]
        self._weights = [0] * len(plan.nodes)
        self._done = bytearray(len(plan.nodes))
        self._admitted: list[tuple[int, MemoryRequest]] = []
        self._largest: dict[str, int] = {}
        self._prefixes: dict[Any, str] = {}
        self._num_left = len(plan.nodes)
        self._num_submitted = 0
        self._num_held = 0
        self._num_idle = 0
        self._ended = not plan.nodes
        self._closed = False
        if self._ended:
            self._finished.set()

    def work(self) -> None:
        """Run tasks until none is left; the body of a worker thread."""
        try:
            with self._wake:
                self.store.depths[threading.get_ident()] = self.depth + 1
                job = self._take()
            while job is not None:
                number, request = job
                value, weight = self._call(number, request)
                with self._wake:
                    self._complete(number, request, value, weight)
                    value = None
                    job = self._take()
        except BaseException as error:  # an error of a task or a callback, for the program
            with self._wake:
                self._fail(error)
                request = job[1] if job is not None else None
                if request is not None and request.is_admitted and self.store.failure is None:
                    self.store.advance(self.store.ledger.finish, request)
        finally:
            with self._wake:
                self._num_working -= 1
                self.store.depths.pop(threading.get_ident(), None)
                self.store.look_for_deadlock()

    def wait(self) -> None:
        """Sleep until the run has ended; Ctrl-C interrupts the sleep."""
        sleep_until(self._finished)

    def stop(self, error: BaseException) -> None:
        """End the run with an error: no further task begins."""
        with self._wake:
            self._fail(error)

    def _call(self, number: int, request: MemoryRequest | None) -> tuple[Any, int]:
        """Run a task; returns its value and the value's approximate bytes."""
        node = self.plan.nodes[number]
        values: Mapping[Key, Any] = self._cache
        if request is not None:
            values = {key: cached.get() if type(cached := self._cache[key]) is Held else cached for key in node.dependencies}
        if self._observers:
            self._observers.begin(self.plan.keys[number])
        try:
            value = evaluate(node, values)
        except BaseException:
            self.failed = self.failed or (node, values)
            raise
        if self._observers:
            self._observers.end(self.plan.keys[number], value)
        return value, weigh(value)

    def _take(self) -> Job | None:
        """Return the next job of the calling worker, which sleeps while there is none; None at the end of the run."""
        while not self._ended:
            if self._admitted:
                return heapq.heappop(self._admitted)
            while self._ready:
                number = self._ready[0]
                if self._is_light(number):
                    heapq.heappop(self._ready)
                    return number, None
                if self._num_submitted >= self._limit:
                    break
                heapq.heappop(self._ready)
                self._submit(number, self._scratch_nbytes(number))
                if self._admitted:
                    return heapq.heappop(self._admitted)
            if not self._ended:
                self._num_idle += 1
                self.store.look_for_deadlock()
                if not self._ended and not self._admitted:  # it may have admitted a request of this run
                    self._wake.wait()
                self._num_idle -= 1
        return None

    @property
    def is_open(self) -> bool:
        """Whether a caller still waits for the run."""
        return not self._ended or self._is_fetching

    @property
    def num_busy(self) -> int:
        """Number of threads that run a task or could take one."""
        if self._admitted or (self._ready and not self._ended and (self._num_submitted < self._limit or self._is_light(self._ready[0]))):
            return self._num_working
        return self._num_working - self._num_idle

    def _is_light(self, number: int) -> bool:
        if self._num_held:
            cache, keys = self._cache, self.plan.keys
            for source in self.plan.reads[number]:
                if type(cache[keys[source]]) is Held:
                    return False
        return not (self._largest and self._scratch_nbytes(number) >= SMALL) and not self.store.ledger.is_full

    def _prefix(self, number: int) -> str:
        name = prefix_of(self.plan.keys[number])
        found = self._prefixes.get(name)
        if found is None:
            found = self._prefixes[name] = key_split(name)
        return found

    def _scratch_nbytes(self, number: int) -> int:
        """Return the bytes of the largest result so far of this kind of task."""
        return self._largest.get(self._prefix(number), 0) if self._largest else 0

    def _submit(self, number: int, result_nbytes: int) -> None:
        plan, blocks = self.plan, dict[MemoryBlock, None]()
        for source in plan.reads[number] if self._num_held else ():
            entry = self._cache[plan.keys[source]]
            if type(entry) is Held:
                blocks.update(dict.fromkeys(entry.blocks))
        self._num_submitted += 1
        self.store.advance(
            self.store.ledger.request, MemoryRequest(self, number, self.first + number, list(blocks), rounded(result_nbytes), PAGE, self.depth)
        )

    def _next_use(self, block: MemoryBlock) -> int:
        """Return the order of the next task that will read the block; `FAR` if there is none."""
        uses, done = block.uses, self._done
        while uses and done[uses[0]]:
            heapq.heappop(uses)
        return self.first + uses[0] if uses else FAR

    def admitted(self, request: MemoryRequest) -> None:
        """Take a task whose data is in memory."""
        if request.number == RESULTS and not self._closed:
            self._fetching, self._is_fetching = request, False
            self._fetched.set()
        elif self._ended:
            self.store.advance(self.store.ledger.finish, request)
        else:
            heapq.heappush(self._admitted, (request.number, request))
            if self._num_idle:
                self._wake.notify()

    def refused(self, request: MemoryRequest, error: BaseException | None) -> None:
        """Note that a task will never run: its data is lost, the disk has failed, or, without an error, it does not fit."""
        nbytes = sum(block.nbytes for block in request.blocks)
        if request.number == RESULTS:
            self._give_up_results(error or self.store.too_large(None, nbytes))
        elif not self._ended:
            self._num_submitted -= 1
            self._fail(error or self.store.too_large(self.plan.keys[request.number], nbytes))

    def _give_up_results(self, error: BaseException) -> None:
        self.error, self._is_fetching = self.error or error, False
        self._fetched.set()

    def broken(self, error: BaseException) -> None:
        """End the run because the store can run no more tasks."""
        self._give_up_results(error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._finished.set()
        self._wake.notify_all()
        admitted, self._admitted = self._admitted, []
        if self.store.failure is None:
            self.store.advance(self.store.ledger.withdraw, self)
            for _, request in admitted:
                self.store.advance(self.store.ledger.finish, request)

    def _complete(self, number: int, request: MemoryRequest | None, value: Any, weight: int) -> None:
        """Keep a task's value, drop values that no task reads any more, and release its readers."""
        if request is not None:
            self._num_submitted -= 1
        if self._ended:
            if request is not None:
                self.store.advance(self.store.ledger.finish, request)
            return
        plan, cache = self.plan, self._cache
        key = plan.keys[number]
        self._done[number] = 1
        if weight >= SMALL:
            value = hold(value, lambda owner, nbytes, is_array: self._find(number, owner, nbytes, is_array))
        cache[key] = value
        for name in plan.names.get(number, ()):
            cache[name] = value
        if type(value) is Held:
            self._adopt(number, value)
        elif weight < SMALL:
            self._weights[number] = weight
            self.store.count_small(weight)
        if request is not None:
            for block in request.blocks:
                block.next_use = self._next_use(block)
            self.store.advance(self.store.ledger.finish, request)
        if not self._left[number]:
            self._drop(number)
        left = self._left
        for source in plan.reads[number]:
            left[source] -= 1
            if not left[source]:
                self._drop(source)
        self._release_readers(number)

    def _release_readers(self, number: int) -> None:
        """Count a finished task off its readers, some of which become ready."""
        waiting, num_ready = self._waiting, 0
        for reader in self.plan.readers[number]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(self._ready, reader)
                num_ready += 1
        self._num_left -= 1
        if not self._num_left:
            self._end()
        elif self._num_idle and self._ready:
            self._wake.notify(max(num_ready, 1))

    def _adopt(self, number: int, held: Held) -> None:
        """Count the new blocks of a result."""
        name, nbytes = self._prefix(number), 0
        self._num_held += 1
        for block in held.blocks:
            for reader in self.plan.readers[number]:
                heapq.heappush(block.uses, reader)
            if not block.is_counted:
                nbytes += block.nbytes
                block.next_use = self._next_use(block)
                self.store.adopt(block)
            elif not is_partial_view(held.value, block):  # it may be an input that the task has changed in place
                self.store.ledger.change(block)
        if nbytes > self._largest.get(name, 0):
            self._largest[name] = nbytes

    def _find(self, number: int, owner: Any, nbytes: int, is_array: bool) -> MemoryBlock | None:
        """Return the block of an owner; None for memory that the graph itself or another run holds."""
        block = self.store.blocks.get(id(owner))
        if block is None:
            node, data = self.plan.nodes[number], self.plan.data
            if holds(node, owner) or any(is_of(data[key], owner) for key in node.dependencies if key in data):
                return None
            return self.store.new_block(self, owner, nbytes, is_array)
        return block if block.client is self else None

    def _drop(self, number: int) -> None:
        """Drop a task's value after its last reader."""
        value = self._cache.pop(self.plan.keys[number])
        for name in self.plan.names.get(number, ()):
            del self._cache[name]
        if type(value) is Held:
            self._num_held -= 1
            for block in value.blocks:
                block.holders.remove(value)
                if not block.holders:
                    self.store.release(block)
        elif self._weights[number]:
            self.store.count_small(-self._weights[number])
            self._weights[number] = 0

    def results(self, hand_over: Callable[[MemoryBlock], None] | None) -> dict[Key, Any]:
        """Return the requested values by key, in host memory; this ends the run.

        Args:
            hand_over: callback that continues to count each block of these values; None to stop counting them.

        Raises:
            DoesNotFit: the values together do not fit the budget.
        """
        held = [value for key in self.plan.wanted if type(value := self._cache.get(key)) is Held]
        blocks = list(dict.fromkeys(block for each in held for block in each.blocks))
        if blocks and self.store.spills:
            with self._wake:
                self._is_fetching = True
                self.store.advance(
                    self.store.ledger.request, MemoryRequest(self, RESULTS, self.first + len(self.plan.nodes), blocks, 0, 0, self.depth)
                )
                self.store.look_for_deadlock()
            sleep_until(self._fetched)
            if self.error is not None:
                raise self.error
        with self._wake:
            values = {key: self._cache[key] for key in self.plan.wanted if key in self._cache}
            values = {key: value.get() if type(value) is Held else value for key, value in values.items()}
            for block in blocks if hand_over is not None else ():
                hand_over(block)  # type: ignore[misc]
            self._return_results()
        return values

    def _return_results(self) -> None:
        """End the pseudo-task that holds the requested values in memory."""
        request, self._fetching = self._fetching, None
        if request is not None and self.store.failure is None:
            self.store.advance(self.store.ledger.finish, request)

    def close(self) -> None:
        """Drop all values."""
        with self._wake:
            self._closed = True
            self._return_results()
            if not self._ended:
                self._end()
            if self.store.failure is None:
                for number in range(len(self.plan.nodes)):
                    if self.plan.keys[number] in self._cache and self._done[number]:
                        self._drop(number)
            self._cache = {}
            self.store.clients.discard(self)
