"""Steps of two nodes as a training drives them, for the suites of `cluster` that compare them with something else, block by block; and one of these
comparisons, for `--suite cost`: a step that Dask drives, and a step of the same two nodes that a bare loop drives.

One cluster, one team of nodes, as a training opens them. A block is some steps, two in flight: either called by the client as the trainer does, or by
a loop in each node's own process, which knows neither client nor scheduler. Blocks alternate in pairs, and the order in a pair alternates, too: both
sides have the same processes, memory, connections and cores, and the machine's own ups and downs fall on both. What is compared is the median over
pairs of the difference, with an interval by the bootstrap (Efron, 1979).

What Dask does while nobody calls it (heartbeats, ticks of its event loops) goes on beside a bare block, too, and so cannot be in the difference. It
is measured with nothing under way, in processor time, and told apart.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, Final

IDLE_SECONDS: Final = 10.0


@dataclass
class Block:
    """Some steps.

    Attributes:
        seconds: of a step.
        processor_seconds: of a step, of all processes.
    """

    seconds: float
    processor_seconds: float


@dataclass
class Driven:
    """What was measured.

    Attributes:
        through, bare: blocks, by pair.
        idle: processor seconds per second of all processes with nothing under way.
    """

    through: list[Block]
    bare: list[Block]
    idle: float

    @property
    def extra(self) -> list[float]:
        """Seconds that a step takes longer through Dask, by pair."""
        return [a.seconds - b.seconds for a, b in zip(self.through, self.bare, strict=True)]

    @property
    def extra_processor(self) -> list[float]:
        """Processor seconds that a step takes more through Dask, by pair."""
        return [a.processor_seconds - b.processor_seconds for a, b in zip(self.through, self.bare, strict=True)]


def interval(values: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """Between which values the median lies with 95 %: percentiles of the medians of samples drawn with replacement."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[round(0.025 * (draws - 1))], medians[round(0.975 * (draws - 1))]


@contextmanager
def opened_team(flags: Sequence[str], folder: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Two nodes as a training opens them: Dask's client, the `ClusterEngine`, and the places in the data.

    Args:
        flags: of `nntask train`.
    """
    from nntask.config import resolve
    from nntask.data import BatchStream, open_dataset
    from nntask.planning import capture
    from wrappers.cli.options import request
    from wrappers.dask import Connection, DaskCluster

    asked = request([*flags, "--dask", "local:2", "--run-dir", str(folder / "driven"), "--steps", "1"], {})
    run = resolve(asked.settings, asked.config)
    cluster, dataset = run.cluster, open_dataset(run.data)
    assert cluster is not None  # --dask
    stream = BatchStream(dataset.examples(run.model.seed), run.step.batch, seed=run.model.seed, select=dataset.select_sequences, rows=())
    run.directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        connection = Connection(cluster, _tell)
        stack.callback(connection.close)
        _, engine = stack.enter_context(DaskCluster(connection, cluster).open(run, capture(run, 1), dataset, _tell))
        yield connection.client, engine, stream


def driven(flags: Sequence[str], folder: Path, pairs: int, block: int) -> Driven:
    """Measure pairs of blocks.

    Args:
        flags: of `nntask train`.
        block: steps whose time counts in a block; two more surround them.
    """
    with opened_team(flags, folder) as team:
        sides = Sides(*team, block)
        for side in (sides.through, sides.bare) * 2:  # compiles, warms caches
            side()
        found = Driven([], [], 0.0)
        for pair in range(pairs):
            order = [(sides.through, found.through), (sides.bare, found.bare)]
            for side, blocks in order if pair % 2 else order[::-1]:
                blocks.append(side())
            if pair % 20 == 19 or pair == pairs - 1:
                low, high = interval(found.extra)
                text = f"median difference {1e3 * median(found.extra):+.2f} ms, 95 %: {1e3 * low:+.2f} to {1e3 * high:+.2f}"
                _tell(f"pair {pair + 1}/{pairs}  through {found.through[-1].seconds:.4f} s, bare {found.bare[-1].seconds:.4f} s; {text}")
        found.idle = sides.idle(min(IDLE_SECONDS, float(pairs)))
    return found


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def two_in_flight(numbers: Sequence[int], start: Callable[[int], Any], finish: Callable[[Any], Any]) -> list[float]:
    """Steps as the trainer drives them, each begun before the one before it has ended; when each has ended, in seconds of `perf_counter`."""
    ends, flying = [], start(numbers[0])
    for number in numbers[1:]:
        started = start(number)
        finish(flying)
        ends.append(perf_counter())
        flying = started
    finish(flying)
    return [*ends, perf_counter()]


def seconds_of(ends: Sequence[float]) -> float:
    """Seconds of a step between the first end and the last but one: behind that, no step is begun beside."""
    return (ends[-2] - ends[0]) / (len(ends) - 2)


class Sides:
    """The same nodes, driven in two ways.

    Args:
        client: of the cluster.
        engine: a `ClusterEngine`.
        stream: of places in the data.
        block: steps whose time counts.
    """

    def __init__(self, client: Any, engine: Any, stream: Any, block: int) -> None:
        import psutil

        self.client, self.engine, self.stream, self.block = client, engine, stream, block
        self.asked, self.own = 0, 0  # steps that nodes were asked for, which they count, and steps that they drove themselves
        me = psutil.Process()
        self.processes = [me, *me.children(recursive=True)]  # the scheduler is a thread of this one

    def through(self) -> Block:
        """A block as the trainer drives it."""
        begin, numbers = self.processor_seconds(), range(self.asked + 1, self.asked + self.block + 3)
        self.asked = numbers[-1]
        ends = two_in_flight(numbers, lambda number: self.engine.start(number, 1e-3, self.stream.next()), lambda started: started.result())
        return self._block(seconds_of(ends), begin)

    def bare(self) -> Block:
        """A block that the nodes drive themselves."""
        begin, first = self.processor_seconds(), self.own + 1
        self.own += self.block + 2
        laps = self.client.run(_loop(), first, self.block + 2)
        return self._block(max(laps.values()), begin)

    def _block(self, seconds: float, begin: float) -> Block:
        return Block(seconds, (self.processor_seconds() - begin) / (self.block + 2))

    def idle(self, seconds: float) -> float:
        """Processor seconds per second with nothing under way."""
        begin, start = self.processor_seconds(), perf_counter()
        sleep(seconds)
        return (self.processor_seconds() - begin) / (perf_counter() - start)

    def processor_seconds(self) -> float:
        """Of all processes so far."""
        times = [process.cpu_times() for process in self.processes]
        return sum(float(each.user + each.system) for each in times)


def _loop() -> Any:
    """What each worker runs on its node's thread for starts; a function inside a function travels as code."""

    async def drive(first: int, count: int, dask_worker: Any) -> float:
        import asyncio
        from time import perf_counter

        (node,) = dask_worker.state.actors.values()

        def loop() -> float:
            ends, flying = [], None
            for number in range(first, first + count):
                started = node._engine.start(number, 1e-3, node._stream.next())
                if flying is not None:
                    flying.shard_outcome()
                    ends.append(perf_counter())
                flying = started
            assert flying is not None
            flying.shard_outcome()
            return (ends[-1] - ends[0]) / (len(ends) - 1)

        return await asyncio.get_running_loop().run_in_executor(node._starts, loop)

    return drive
