"""Two nodes' computation without their exchange, for `cluster.py --suite overlap`: what a step would take if bytes travelled in no time.

Two processes compute side by side, as two nodes do on this machine: each its minibatches, forward and backward, and the update of the tiles that it
would own, half of the model. Nothing is sent, nothing received, and no sum waits for a peer's part, so parameters that the other node owns stay as
they are. The numbers are those of no training; the work is a node's.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

HERE: Final = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]
import common  # noqa: E402
from driving import two_in_flight  # noqa: E402


def seconds_alone(flags: Sequence[str], steps: int, warm: int, folder: Path) -> float:
    """Seconds of a step of the slower of two nodes that exchange nothing, behind `warm` first steps.

    Args:
        flags: of `nntask train`, for the whole step of both nodes.

    Raises:
        SystemExit: one failed; its output has been printed.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE), str(rank), str(steps), str(warm), *flags, "--run-dir", str(folder / f"alone-{rank}")],
            cwd=common.ROOT,
            env={**os.environ, **common.one_thread_blas()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()).strip() != "ready":
                if not line:
                    raise SystemExit("a node that computes alone has ended before its first step")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("a node that computes alone has failed")
        return max(float(answer.split()[-1]) for answer in answers)
    finally:
        for process in processes:
            process.kill()


def _own_part(engine: Any) -> Any:
    """An `Exchange` like the engine's that does a node's own part and leaves out what needs the other."""
    from nntask.sharding import Exchange, Share, _Emission

    class Lonely(Share):
        """A share whose node knows no peers."""

        @property
        def peers(self) -> list[int]:
            return []

    class Own(_Emission):
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

    share = engine.exchange.share
    parameters = [parameter for parameter in engine.model.parameters() if parameter.trainable]
    return OwnPart(parameters, Lonely(share.rank, share.lanes, share.minibatches, share.num_minibatches), engine.exchange.transport)


def main(rank: int, steps: int, warm: int, flags: list[str]) -> None:
    """One of the two processes; as the trainer, it has two steps in flight."""
    from nntask.data import BatchStream, open_dataset
    from nntask.sharding import shares
    from nntask.trainer.machine import open_runtime
    from nntask.trainer.prepare import prepare
    from nntask.trainer.recorded import RecordedEngine
    from scheduler.storage.limits import default_ram_budget
    from wrappers.cli.layers import request
    from wrappers.dask.allocator import reuse_freed_memory

    reuse_freed_memory()  # as nodes do
    asked = request(flags, {})
    prepared = prepare(asked.settings, asked.config, None)
    cut = prepared.settings.tiling
    share = shares((cut.batch or 1) // cut.minibatch, cut.lanes or 1, 2)[rank]
    settings = replace(prepared.settings, resources=replace(prepared.settings.resources, ram=f"{default_ram_budget() // 2}B"))
    dataset = open_dataset(prepared.data)
    stream = BatchStream(
        dataset.train,
        settings.model.seq_len or prepared.config.n_positions,
        cut.batch or 1,
        seed=settings.data.seed,
        select=dataset.select_sequences,
        rows=[m * cut.minibatch + row for m in share.minibatches for row in range(cut.minibatch)],
    )
    with open_runtime(settings) as runtime:
        nobody: Any = object()
        engine = RecordedEngine(prepared.config, prepared.tiling, runtime, settings, share=share, transport=nobody)
        engine.exchange = _own_part(engine)
        print(f"{engine.num_tasks} tasks\nready", flush=True)
        sys.stdin.readline()
        ends = two_in_flight(range(1, steps + 1), lambda number: engine.start(number, 1e-3, stream.next()), lambda started: started.part())
    laps = [b - a for a, b in itertools.pairwise(ends)]
    print(median(laps[warm:] or laps[-1:]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
