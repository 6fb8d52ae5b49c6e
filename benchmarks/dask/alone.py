"""Two nodes' computation without their exchange, for `cluster.py --suite overlap`: what a step would take if bytes travelled in no time.

Two processes compute side by side, as two nodes do on this machine: each its minibatches, forward and backward, and the update of the tiles that it
would own, half of the model. Nothing is sent, nothing received, and no sum waits for a peer's part, so parameters that the other node owns stay as
they are. The numbers are those of no training; the work is a node's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

HERE: Final = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]
import common  # noqa: E402
from driving import seconds_of, two_in_flight  # noqa: E402


class Alone:
    """Two nodes that exchange nothing, ready to compute; a context manager.

    Args:
        flags: of `nntask train`, for the whole step of both nodes.
        block: steps whose time counts in a block; two more surround them.

    Raises:
        SystemExit: one has failed; its output has been printed. Methods, too.
    """

    def __init__(self, flags: Sequence[str], block: int, folder: Path) -> None:
        self._commands = [[sys.executable, str(HERE), str(rank), str(block), *flags, "--run-dir", str(folder / f"alone-{rank}")] for rank in range(2)]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            for command in self._commands:
                environment = {**os.environ, **common.one_thread_blas()}
                process = subprocess.Popen(command, cwd=common.ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                self._processes.append(process)
            for process in self._processes:
                while self._line(process) != "ready":  # what the program says before
                    pass
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def seconds(self) -> float:
        """Seconds of a step of the slower node, over a block."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return max(float(self._line(process)) for process in self._processes)

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a node that computes alone has failed")
        return line.strip()


def _own_part(engine: Any) -> Any:
    """An `Exchange` like the engine's that does a node's own part and leaves out what needs the other."""
    from nntask.optim import DataShard, Emission, Exchange

    class Lonely(DataShard):
        """A shard whose node knows no peers."""

        @property
        def peers(self) -> list[int]:
            return []

    class Own(Emission):
        """Sums and updates of a node's own tiles."""

        def run(self) -> None:
            for bucket in self.buckets:
                self._sum(bucket)
                self._update(bucket, None)
            self.optimizer.grad_norm = None  # it takes both nodes' parts

        def _send(self, *args: Any) -> None:
            pass

        def _receive(self, *args: Any, **kwargs: Any) -> None:
            pass

    class OwnPart(Exchange):
        """Without the other nodes."""

        def emit(self, optimizer: Any) -> None:
            Own(self, optimizer).run()

    shard = engine.exchange.shard
    parameters = [parameter for parameter in engine.model.parameters() if parameter.trainable]
    return OwnPart(parameters, Lonely(shard.rank, shard.lanes, shard.minibatches, shard.num_minibatches), engine.exchange.transport)


def main(rank: int, block: int, flags: list[str]) -> None:
    """One of the two processes: a block for each line that it is sent."""
    from nntask.config import resolve
    from nntask.data import BatchStream, open_dataset
    from nntask.engine import RecordedEngine, runtime_for
    from nntask.hardware import reuse_freed_memory
    from nntask.optim import data_shards
    from scheduler.storage import default_ram_budget
    from wrappers.cli.options import request

    reuse_freed_memory()  # as nodes do
    asked = request(flags, {})
    resources = replace(asked.settings.resources, ram=f"{default_ram_budget() // 2}B")
    run = resolve(replace(asked.settings, resources=resources), asked.config)
    cut = run.step
    shard = data_shards(cut.num_minibatches, cut.lanes, 2)[rank]
    dataset = open_dataset(run.data)
    stream = BatchStream(
        dataset.examples(run.model.seed),
        cut.batch,
        seed=run.model.seed,
        select=dataset.select_sequences,
        rows=[m * cut.minibatch + row for m in shard.minibatches for row in range(cut.minibatch)],
    )
    with runtime_for(run) as runtime:
        nobody: Any = object()
        engine = RecordedEngine(run, runtime, shard=shard, transport=nobody)
        engine.exchange = _own_part(engine)
        print("ready", flush=True)
        number = 0
        for _ in sys.stdin:
            numbers = range(number + 1, number + block + 3)
            number = numbers[-1]
            ends = two_in_flight(numbers, lambda number: engine.start(number, 1e-3, stream.next()), lambda started: started.shard_outcome())
            print(seconds_of(ends), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
