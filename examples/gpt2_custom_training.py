"""Train a GPT-2 with NNTile's command line, and print NNTile's lines.

python examples/gpt2_custom_training.py --config-path=examples/gpt2_default_config.json --batch=4 --minibatch=1 --lr=3e-4 --nepochs=1 --nforward=10

NNTile's flags are translated to those of ``nntask train``, which may be typed, too, unless they contradict each other. Timed loops, printed sums and
files written at the end, which ``nntask train`` does not have, are made here with nntask's Python interface.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from nntask import UsageError
from scheduler.drivers import NoGpu
from wrappers.cli import guarded, run_train
from wrappers.cli.options import table_of, typed_text, unknown

if TYPE_CHECKING:
    from nntask.config import RunConfig
    from nntask.training import Session

DTYPES = ("fp32", "fp16", "bf16")


class Parser(argparse.ArgumentParser):
    """Parser whose mistakes are errors of nntask."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of a wrong flag."""
        raise UsageError(f"{message.removeprefix('argument ')}; see --help")


def parser() -> Parser:
    """Return the parser of NNTile's flags that ``nntask train`` has under another name or not at all."""
    flags = Parser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="All other flags: nntask train --help"
    )
    add, switch = flags.add_argument, argparse.BooleanOptionalAction
    for name in ("nforward", "nforward-warmup", "nbackward", "nbackward-warmup"):
        add(f"--{name}", type=_count, default=0, help="number of passes over a minibatch of random tokens, timed or before the timed ones")
    add("--nepochs", type=_count, default=0, help="number of passes over the data")
    add("--nepochs-warmup", type=_count, default=0, help="number of passes before these that train but are not timed")
    add("--loss-reduction", choices=("mean", "sum"), default="mean", help="print the mean loss of the tokens of a step, or their sum")
    add("--start-lr", type=float, help="learning rate of step 1 (default: 0 with --full-lr-iter)")
    add("--full-lr-iter", type=_count, help="step at which the learning rate reaches --lr; 1 for no warm-up (default: nntask's warm-up)")
    add("--optimizer", help="sgd, adam, adamw, or fusedadamw, which is the same (default: adamw)")
    add("--restrict", choices=("none", "cpu", "cuda"), default="none", help="use no GPU, or require one")
    add("--flashattention", action=switch, help="compute attention without storing the scores (default)")
    add("--redux", action=switch, default=False, help="sum gradients in parallel, as --lanes 4 of nntask")
    add("--fp32-fast-tf32", action=switch, default=False, help="compute products in TF32 on GPUs, as --dtype tf32 of nntask")
    for name in ("checkpoint", "optimizer"):
        add(f"--load-{name}", metavar="FILE", help=f"safetensors file to start from ({name})")
        add(f"--save-{name}", metavar="FILE", help=f"safetensors file to write at the end ({name})")
        add(f"--save-{name}-dtype", choices=DTYPES, default="fp32", help="element type of that file")
    return flags


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, got {text}")
    return number


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return NNTile's flags and the other words of a command line; underscores in names of flags become dashes.

    Raises:
        UsageError: a value is wrong, or flags contradict each other.
    """
    words = [word.partition("=") if word.startswith("--") else (word, "", "") for word in argv]
    args, rest = parser().parse_known_args([(name.replace("_", "-") if name.startswith("--") else name) + "".join(end) for name, *end in words])
    check_names(rest)
    check_warm_up(args, rest)
    check_devices(args, rest)
    lanes, dtype, attention = (typed_text(rest, name) for name in ("lanes", "dtype", "attention"))
    if args.redux and lanes not in (None, "4"):
        raise UsageError(f"--redux means --lanes 4, got --lanes {lanes}; drop --redux")
    if args.fp32_fast_tf32 and dtype not in (None, "auto", "fp32", "tf32"):
        raise UsageError(f"--fp32-fast-tf32 means --dtype tf32, got --dtype {dtype}; drop one of them")
    if args.flashattention is False and attention not in (None, "stored"):
        raise UsageError(f"--no-flashattention means --attention stored, got --attention {attention}; drop one of them")
    if args.flashattention and attention == "stored":
        raise UsageError("--flashattention stores no scores, and --attention stored does; drop one of them")
    return args, rest


def check_names(rest: Sequence[str]) -> None:
    """Check that the flags among other words are flags of ``nntask train``.

    Raises:
        UsageError: one is not; the message suggests the most similar flags of NNTile and of nntask.
    """
    from nntask.config import TrainSettings

    theirs = {*table_of(TrainSettings), "config", "help-all"}
    ours = {option.removeprefix("--") for action in parser()._actions for option in action.option_strings}
    for word in rest:
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and word != "--" and not {name, name.removeprefix("no-")} & theirs:
            raise unknown(name, text if equals else typed_text(rest, name), sorted(theirs | ours), f"--{name}", "--help", kind="flag ")


def check_warm_up(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Check the flags of the warm-up.

    Raises:
        UsageError: one is wrong, or there are two warm-ups.
    """
    full, start = args.full_lr_iter, args.start_lr
    if full is not None and full < 1:
        raise UsageError(f"--full-lr-iter must be at least 1, got {full}; the nearest legal value is 1")
    if start is not None and not 0 <= start < float("inf"):
        raise UsageError(f"--start-lr must be a finite number of at least 0, got {start:g}; for example 0")
    if start and full is None:
        raise UsageError(f"--start-lr {start:g} is where the warm-up of --full-lr-iter begins; add --full-lr-iter, or drop --start-lr")
    for name, nothing in (("warmup-steps", "0"), ("warmup-start-lr", None)):
        value = typed_text(rest, name)
        if full is not None and value not in (None, nothing):
            raise UsageError(f"--full-lr-iter {full} and --{name} {value} are both warm-ups; drop one of them")


def check_devices(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Check --restrict against the devices that are typed.

    Raises:
        UsageError: they contradict each other.
    """
    ngpu, sim_gpu = typed_text(rest, "ngpu"), typed_text(rest, "sim-gpu")
    count = None if ngpu is None else ngpu.partition("x")[0]
    simulated = sim_gpu is not None and sim_gpu.partition("@")[0] != "0"
    if args.restrict == "cuda" and (count == "0" or simulated):
        raise UsageError(f"--restrict=cuda needs a GPU, and {f'--sim-gpu {sim_gpu}' if simulated else f'--ngpu {ngpu}'} uses none; drop one of them")
    if args.restrict == "cpu" and count not in (None, "0"):
        raise UsageError(f"--restrict=cpu uses no GPU, got --ngpu {ngpu}; drop one of them")


def translated(args: argparse.Namespace, rest: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command line of ``nntask train``.

    Args:
        args: NNTile's flags.
        rest: other words, which do not contradict them.
        environ: environment variables, where a number of GPUs is as good as ``--restrict=cuda``.
    """
    words = [f"--optimizer={args.optimizer.replace('fusedadamw', 'adamw')}"] if args.optimizer else []
    if args.full_lr_iter is not None:
        words += [f"--warmup-steps={args.full_lr_iter}", f"--warmup-start-lr={args.start_lr or 0.0}"]
    if args.nepochs + args.nepochs_warmup:
        words.append(f"--nepochs={args.nepochs + args.nepochs_warmup}")
    if args.restrict == "cpu":
        words.append("--ngpu=0")
    if args.restrict == "cuda" and typed_text(rest, "ngpu") is None and (environ.get("NNTASK_NGPU") or environ.get("STARPU_NCUDA") or "0") == "0":
        words.append("--ngpu=-1")
    words += ["--attention=stored"] * (args.flashattention is False) + ["--lanes=4"] * args.redux + ["--dtype=tf32"] * args.fp32_fast_tf32
    return [*rest, *words]


@dataclass(slots=True)
class Training:
    """NNTile's habits around a training of nntask.

    Args:
        args: NNTile's flags.
        trains: whether training was asked for; timed loops alone train nothing.
    """

    args: argparse.Namespace
    trains: bool

    @property
    def num_passes(self) -> int:
        """Number of passes of the timed loops, warm-up included."""
        return int(self.args.nforward + self.args.nforward_warmup + self.args.nbackward + self.args.nbackward_warmup)

    @property
    def outputs(self) -> dict[str, tuple[str, str]]:
        """Name of a flag without --save- -> (file to write, element type)."""
        files = {name: (getattr(self.args, f"save_{name}"), getattr(self.args, f"save_{name}_dtype")) for name in ("checkpoint", "optimizer")}
        return {name: (path, dtype) for name, (path, dtype) in files.items() if path}

    def changed(self, run: RunConfig) -> RunConfig:
        """Return the run with the settings that no flag of nntask has.

        Raises:
            UsageError: a file cannot be written, or flags contradict each other.
        """
        from nntask.export import check_state_file

        weights, optimizer = self.args.load_checkpoint, self.args.load_optimizer
        self._check_adapters(run)
        if self.args.restrict == "cpu" and (count := run.settings.resources.sim_gpu):
            raise UsageError(f"--restrict=cpu leaves the {count} devices of --sim-gpu without work; drop one of them")
        if run.cluster is not None and (self.num_passes or self.outputs):
            raise UsageError("timed loops and saved files are of one machine; drop --dask, or train with nntask train")
        if (weights or optimizer) and (run.start.is_continued or run.start.frozen_base is not None):
            raise UsageError(f"{weights or optimizer} and --resume or --train both say where to begin; drop one of them, or use --init-from")
        paths = [Path(path) for path, _ in self.outputs.values()]
        for path in paths:
            check_state_file(path, force=False, instead="remove it")
        if len({path.resolve() for path in paths}) < len(paths):
            raise UsageError(f"--save-checkpoint and --save-optimizer must name two files, got {paths[0]} for both; name another one")
        length = replace(run.length, warmup_epochs=self.args.nepochs_warmup)
        if not self.trains and not run.start.is_continued:
            length = replace(length, steps=0, epochs=0)
        start = replace(run.start, weights=Path(weights) if weights else run.start.weights, optimizer=Path(optimizer) if optimizer else None)
        run = replace(run, length=length, start=start, sums_loss=self.args.loss_reduction == "sum")
        return replace(run, command=self.command) if self.outputs or run.sums_loss else run

    def _check_adapters(self, run: RunConfig) -> None:
        """Check that a run with adapters neither reads nor writes files of a whole model.

        Raises:
            UsageError: it does.
        """
        if run.model.adapters is None:
            return
        instead = {
            "save_checkpoint": ("writes the weights", "drop it, and write the model with nntask export RUN DIR --merge"),
            "save_optimizer": ("writes the optimizer state", "drop it, since the run's checkpoints have the state of the adapters"),
            "load_optimizer": ("reads the optimizer state", "drop it, and continue with the state of the adapters by --resume"),
        }
        for name, (what, advice) in instead.items():
            if path := getattr(self.args, name):
                flag = f"--{name.replace('_', '-')} {path}"
                raise UsageError(f"{flag} {what} of a whole model, and --train {run.settings.optimizer.train} trains adapters; {advice}")

    @property
    def command(self) -> str:
        """Command that continues the run and does at its end what this one would have done."""
        script = Path(__file__).resolve()
        words = ["python", str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)]
        for name, (path, dtype) in self.outputs.items():
            words += [f"--save-{name}={path}", *([] if dtype == "fp32" else [f"--save-{name}-dtype={dtype}"])]
        return shlex.join([*words, *([] if self.args.loss_reduction == "mean" else [f"--loss-reduction={self.args.loss_reduction}"])])

    @contextmanager
    def around(self, session: Session) -> Iterator[None]:
        """Run the timed loops before the training of a new run, and write the files after the last step, unless a signal came before it."""
        if session.run.start.resumed is None and self.num_passes:
            self._time(session)
        yield
        if not session.interrupts.cut_short:
            self._save(session)

    def _time(self, session: Session) -> None:
        """Run the timed loops and print their lines; a signal ends them."""
        from nntask.data import random_batch

        run, args, engine = session.run, self.args, session.engine
        batch: Any = random_batch(run.data.objective, run.step.minibatch, run.model.config.vocab_size, run.model.seed)
        passes: Any = engine  # an engine on this machine can run passes alone
        stopped = session.interrupts.pending
        forward = seconds_of(lambda: passes.forward(batch), args.nforward_warmup, args.nforward, stopped)
        if forward is not None and args.nforward:
            self._say(session, "forward", forward, args.nforward)
        if forward is None or not args.nbackward + args.nbackward_warmup:
            return
        both = seconds_of(lambda: passes.forward_backward(batch), args.nbackward_warmup, args.nbackward, stopped)
        count = args.nforward or max(args.nbackward, 1)
        alone = forward if args.nforward else seconds_of(lambda: passes.forward(batch), 1, count, stopped)
        if both is not None and alone is not None and args.nbackward:
            self._say(session, "backward", max(both - alone / count * args.nbackward, 1e-9), args.nbackward)

    def _say(self, session: Session, name: str, seconds: float, count: int) -> None:
        """Print NNTile's three lines about `count` passes."""
        minibatch = session.run.step.minibatch
        flops = count * minibatch * getattr(session.counts, name)
        session.printer.say(f"nntask {name} time: {seconds} seconds")
        session.printer.say(f"nntask {name} throughput (tokens/sec):  {count * minibatch * session.run.model.seq_len / seconds}")
        session.printer.say(f"nntask {name} performance: {flops / seconds / 1e12} Tflops/s")

    def _save(self, session: Session) -> None:
        """Write the files that were asked for.

        Raises:
            Diverged: a value is not finite.
            UsageError: a value is too large for the element type.
            StorageError: the disk is full or failed.
        """
        from nntask.io import STORAGE, save_tensors

        for name, (path, dtype) in self.outputs.items():
            tensors = session.engine.model_tensors() if name == "checkpoint" else session.engine.optimizer_tensors()
            save_tensors(path, tensors, dtype=STORAGE[dtype], finite=True)
            session.printer.say(f"saved {path}")


def seconds_of(action: Callable[[], None], warmup: int, count: int, stopped: Callable[[], bool]) -> float | None:
    """Return the wall seconds of `count` calls after `warmup` untimed ones; None if the program was asked to stop."""
    begin = perf_counter()
    for number in range(warmup + count):
        if stopped():
            return None
        if number == warmup:
            begin = perf_counter()
        action()
    return perf_counter() - begin


def main(argv: Sequence[str]) -> int:
    """Run NNTile's command line; returns the exit code."""

    def train() -> int:
        args, rest = parsed(argv)
        training = Training(args, trains=typed_text(rest, "steps") is not None or bool(args.nepochs + args.nepochs_warmup))
        training.trains |= not training.num_passes
        try:
            return run_train(translated(args, rest, os.environ), changed=training.changed, around=training.around)
        except UsageError as error:
            reason = error.__cause__
            if args.restrict == "cuda" and isinstance(reason, NoGpu) and reason.requested is None:
                raise UsageError(f"--restrict=cuda needs a GPU, and {reason.fact}", f"drop --restrict=cuda, or {reason.remedy}") from error
            raise

    return guarded(train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
