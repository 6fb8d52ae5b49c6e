"""What training on a Dask cluster costs and keeps, on worker processes of this machine: one suite for each claim.

    python benchmarks/dask/cluster.py --suite same      # 20 losses on 1 to 4 nodes, each twice, beside one machine's
    python benchmarks/dask/cluster.py --suite cost      # a step of 2 nodes that Dask drives, and of the same 2 nodes without it
    python benchmarks/dask/cluster.py --suite traffic   # bytes that a node sends a step, beside (n - 1) / n of gradient and parameters
    python benchmarks/dask/cluster.py --suite overlap   # a link on which the exchange alone takes half of a node's computation
    python benchmarks/dask/cluster.py --suite faults    # random kills over a whole run
    python benchmarks/dask/cluster.py --suite scale     # virtual time from what tasks, messages and calls cost: 2 and 4 nodes here, then up to 1,024

Each writes benchmarks/results/dask_SUITE.json; `--output=` writes nothing, `--tiny` is a quick look. Nodes compute on one core each. How `cost`,
`overlap` and `faults` measure is said in `driving`, `alone` and `kills` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Final

HERE: Final = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))
import common  # noqa: E402

DEEP: Final = {"vocab_size": 4096, "n_positions": 256, "n_embd": 256, "n_layer": 12, "n_head": 4}

WARM: Final = 5
"""First steps, which are not timed."""

ROUNDS: Final = {"same": 2, "cost": 120, "traffic": 1, "overlap": 24, "faults": 1, "scale": 3}
"""Of each suite; pairs of blocks where two sides take turns."""

Row = dict[str, Any]


def flags(arguments: argparse.Namespace, *, nodes: int = 4) -> list[str]:
    """The training that is measured: four minibatches in four lanes, or one a node."""
    length, batch = (32, 4) if arguments.tiny else (128, 8)
    size = batch // nodes
    return f"--model tiny --batch {batch} --minibatch {size} --seq-len {length} --lanes {nodes} --ncpu 1 --sample-tokens 0".split()


def train(folder: Path, name: str, steps: int, *more: str) -> list[Row]:
    """Run `nntask train`; returns the lines of metrics.jsonl.

    Raises:
        SystemExit: it failed; its output has been printed.
    """
    argv = [sys.executable, "-m", "nntask", "train", "--run-dir", str(folder / name), "--steps", str(steps), *more]
    done = subprocess.run(argv, cwd=common.ROOT, env={**os.environ, **common.one_thread_blas()}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with code {done.returncode}\n{done.stdout}{done.stderr}")
    return read_rows(folder / name)


def read_rows(run: Path) -> list[Row]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """What must be the same bits."""
    return [(row["loss"], row["grad_norm"]) for row in rows]


def same(arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Runs whose losses equal one machine's."""
    steps = 3 if arguments.tiny else 20
    train(folder, "warm", 1, *flags(arguments))  # a cold cache of compiled loops may be other code
    truth = losses(train(folder, "alone", steps, *flags(arguments)))
    equal, counts = 0, (1, 2) if arguments.tiny else (1, 2, 3, 4)
    for number in range(arguments.rounds):
        for count in counts:
            found = losses(train(folder, f"{count}-{number}", steps, *flags(arguments), "--dask", f"local:{count}"))
            equal += found == truth
            print(f"round {number + 1}/{arguments.rounds}  {count} nodes: {'equal' if found == truth else 'DIFFERENT'}", file=sys.stderr)
    total = arguments.rounds * len(counts)
    what = f"runs of {steps} steps on {counts[0]} to {counts[-1]} nodes whose losses and norms are one machine's, bit by bit"
    return [common.compare(what, "runs", equal, "all", total, better="equal", bar="ratio >= 1")], {"losses": truth}


def traffic(arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Bytes that each node sends a step."""
    from nntask import PRESETS

    steps = 3 if arguments.tiny else 10
    model_bytes = 4 * PRESETS["tiny"].num_parameters
    rows, details = [], {}
    for count in (2,) if arguments.tiny else (2, 3, 4):
        found = train(folder, f"{count}", steps, *flags(arguments), "--dask", f"local:{count}")[1:]
        sent = [
            sum(nbytes for row in found for link, nbytes in row["moved_bytes"].items() if link.startswith(f"{rank}=>")) / len(found)
            for rank in range(count)
        ]
        theory = (count - 1) / count * 2 * model_bytes
        details[f"{count} nodes"] = sent
        worst = max(sent, key=lambda nbytes: abs(nbytes - theory))
        what = f"tiny on {count} nodes: bytes sent per node and step, the node farthest from theory"
        rows.append(common.compare(what, "bytes", worst, "(n - 1) / n of gradient and parameters", theory, better="equal", bar="ratio in 0.9..1.1"))
    return rows, details


def seconds_of(rows: Sequence[Row]) -> float:
    """Median of a step behind the first ones."""
    return median(row["seconds"] for row in rows[WARM:] or rows[-1:])


def resolve(row: Row, low: float, high: float, bar: float) -> None:
    """Judge a row by an interval instead of a point: it is met where all of the interval is."""
    row["met"] = high <= bar
    if low <= bar < high:
        row["verdict"] = "not resolved"


def cost(arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """A step of 2 nodes with Dask and without."""
    from counting import counted_cluster, train_messages
    from driving import driven, interval

    steps = WARM + (2 if arguments.tiny else 30)
    with counted_cluster(2) as (address, count):
        before = count()
        begin = monotonic()
        train(folder, "counted", steps, *flags(arguments), "--dask", address, "--nodes", "2")
        messages = train_messages(count(), before, monotonic() - begin, steps)
    pairs = arguments.rounds
    found = driven(flags(arguments), folder, pairs, 2 if arguments.tiny else 4)
    (low, high), extra = interval(found.extra), median(found.extra)
    bare = median(block.seconds for block in found.bare)
    what = f"tiny on 2 nodes: what Dask adds to a step, median of {pairs} pairs (95 %: {1e3 * low:.2f} to {1e3 * high:.2f})"
    row = common.compare(what, "ms", 1e3 * extra, "a step without it, ms", 1e3 * bare, better="less", bar="ours <= 5")
    resolve(row, 1e3 * low, 1e3 * high, 5)
    per_step = messages["per_node_and_step"]
    rows = [
        row,
        common.compare("messages that the scheduler sees per node and step", "messages", per_step, "bar", 2, better="less", bar="ours <= 2"),
    ]
    low_processor, high_processor = interval(found.extra_processor)
    details = {
        "interval_seconds": [low, high],
        "extra_processor_seconds": median(found.extra_processor),
        "extra_processor_interval_seconds": [low_processor, high_processor],
        "bare_processor_seconds": median(block.processor_seconds for block in found.bare),
        "idle_processor_seconds_per_second": found.idle,
        "idle_processor_seconds_per_step": found.idle * bare,
        "pairs": [[a.seconds, b.seconds, a.processor_seconds, b.processor_seconds] for a, b in zip(found.through, found.bare, strict=True)],
        "messages": messages,
    }
    return rows, details


def overlap(arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Two nodes with a minibatch each, and a link on which the exchange alone takes half of a node's computation, which is forward, backward and the
    update of half of the model.

    What ends last in a backward pass is the gradient of the embedding, and the next step begins with it: a quarter of tiny's bytes, and a tenth of
    those of the model with 12 layers, as of large ones.
    """
    cases = {"tiny": (flags(arguments, nodes=2), 10)}
    if not arguments.tiny:
        file = folder / "deep.json"
        file.write_text(json.dumps(DEEP))
        cases["12 layers"] = f"--config-path {file} --batch 16 --minibatch 8 --seq-len 256 --lanes 2 --ncpu 1 --sample-tokens 0".split(), 4
    rows, details = [], {}
    for name, (own, block) in cases.items():
        row, details[name] = _overlap(arguments, folder / name, name, own, block)
        rows.append(row)
    return rows, details


def _overlap(arguments: argparse.Namespace, folder: Path, name: str, own: list[str], block: int) -> tuple[Row, dict[str, Any]]:
    """Blocks of steps alternate between the two sides, which both stay ready, and so does the order in a pair."""
    from alone import Alone
    from driving import Sides, interval, opened_team

    from wrappers.cli.options import request

    folder.mkdir()
    asked = request([*own, "--run-dir", str(folder / "asked")], {})
    nbytes = 4 * asked.config.num_parameters  # half of the gradient, half of the parameters
    together, computing = [], []
    with Alone(own, block, folder) as alone:
        computes = [alone.seconds() for _ in range(4)][1:]
        link = nbytes / (median(computes) / 2)
        with opened_team([*own, "--transport", f"dask@{int(link)}B"], folder) as team:
            sides = Sides(*team, block)
            sides.through()
            order = [(lambda: sides.through().seconds, together), (alone.seconds, computing)]
            for pair in range(arguments.rounds):
                for seconds, found in order if pair % 2 else order[::-1]:
                    found.append(seconds())
                text = f"compute {computing[-1]:.4f} s, step {together[-1]:.4f} s, link {link / 1e6:.1f} MB/s"
                print(f"pair {pair + 1}/{arguments.rounds}  {text}", file=sys.stderr)
    low, high = interval([step / compute for step, compute in zip(together, computing, strict=True)])
    share = nbytes / link / median(computing)
    what = f"{name} on 2 nodes, exchange alone {share:.0%} of the computation: a step (95 % interval of the median ratio: {low:.2f} to {high:.2f})"
    row = common.compare(what, "s", median(together), "a node's share of it without exchange", median(computing), better="less", bar="ratio <= 1.2")
    resolve(row, low, high, 1.2)
    return row, {"step_seconds": together, "compute_seconds": computing, "link_bytes_per_second": link, "bytes_per_node": nbytes}


def faults(arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Kills at random moments over a run on 3 nodes."""
    from kills import SILENCE, kill_at_random, left_over

    steps, kills = (30, 2) if arguments.tiny else (200, 20)
    own = flags(arguments)
    truth = losses(train(folder, "alone", steps, *own))
    mark = str(folder)
    run = kill_at_random([*own, "--steps", str(steps), "--run-dir", str(folder / "run"), "--save-every", "5"], steps, kills, mark)
    found = losses(read_rows(folder / "run"))
    equal = sum(a == b for a, b in zip(found, truth, strict=False)) if len(found) == len(truth) else 0
    orphans = left_over(mark)
    survived = sum(kill.survived for kill in run.kills)
    slowest = max((SILENCE if kill.seconds is None else kill.seconds for kill in run.kills), default=SILENCE)
    what = f"{kills} random kills over {steps} steps on 3 nodes: noticed, and gone on from the last checkpoint"
    rows = [
        common.compare(what, "kills", survived, "asked for", kills, better="equal", bar="ratio >= 1"),
        common.compare("steps whose loss and norm are an undisturbed run's", "steps", equal, "all", steps, better="equal", bar="ratio >= 1"),
        common.compare("longest time from a kill to the next step", "s", slowest, "bar", 60, better="less", bar="ours <= 60"),
        common.compare("processes afterwards, this one included", "processes", 1 + len(orphans), "this one", 1, better="equal", bar="ours <= 1"),
    ]
    return rows, {"kills": [kill.told() for kill in run.kills], "changes": run.changes}


def scale(arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Predictions beside runs here, and the curve."""
    from scale import Costs, measured_call, measured_link, measured_task, predict

    steps = WARM + (2 if arguments.tiny else 15)
    rows, curve = [], {}
    alone = train(folder, "alone", steps, *flags(arguments))  # before a cluster leaves Dask's settings in this process
    costs = Costs(measured_link(), measured_call(), measured_task(alone[WARM:], folder / "alone"))
    for count in (2,) if arguments.tiny else (2, 4):
        real = median(
            seconds_of(train(folder, f"{count}-{number}", steps, *flags(arguments), "--dask", f"local:{count}")) for number in range(arguments.rounds)
        )
        expected = predict(flags(arguments), count, costs, cores=common.usable_cores())["seconds"]
        what = f"tiny on {count} nodes of this machine: a step as virtual time predicts it"
        rows.append(common.compare(what, "s", expected, "measured", real, better="equal", bar="ratio in 0.85..1.15"))
    for count in (1, 2, 4, 16) if arguments.tiny else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        found = predict(flags(arguments), count, costs, cores=None)
        limit = max(("compute", "message", "byte", "call"), key=lambda name: found[f"{name}_seconds"])
        curve[str(count)] = found | {"limit": limit, "efficiency": curve.get("1", found)["seconds"] / found["seconds"]}
        print(
            f"{count:5d} machines: {found['seconds']:.3f} s a step, {curve[str(count)]['efficiency']:.0%} of one's speed each, limited by {limit}s",
            file=sys.stderr,
        )
    link = {"seconds": costs.link.seconds, "bytes_per_second": costs.link.bandwidth}
    return rows, {"link": link, "call_seconds": costs.call, "task_seconds": costs.task, "curve": curve}


def main() -> None:
    """Run a suite."""
    suites = {"same": same, "cost": cost, "traffic": traffic, "overlap": overlap, "faults": faults, "scale": scale}
    parser = common.parser(__doc__, None)
    parser.add_argument("--suite", choices=[*suites], required=True)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(common.ROOT))
    arguments.rounds = arguments.rounds or (min(4, ROUNDS[arguments.suite]) if arguments.tiny else ROUNDS[arguments.suite])
    machine = common.machine()
    with tempfile.TemporaryDirectory() as folder:
        rows, details = suites[arguments.suite](arguments, Path(folder))
    name = f"dask_{arguments.suite}" if arguments.output is None else arguments.output
    common.finish(
        name,
        machine,
        ("numpy", "dask", "distributed"),
        {"rounds": arguments.rounds, "suite": arguments.suite},
        rows,
        keep=not arguments.tiny,
        details=details,
    )


if __name__ == "__main__":
    main()
