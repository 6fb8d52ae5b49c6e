"""Train a GPT-2 with NNTile's command line, and print NNTile's lines.

python examples/gpt2_custom_training.py --config-path=examples/gpt2_default_config.json --batch=4 --minibatch=1 --lr=3e-4 --nepochs=1 --nforward=10

NNTile's flags are translated to those of ``nntask train``, which may be typed, too. Timed loops, printed sums and files written at the end, which
``nntask train`` does not have, are made here with nntask's Python interface.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from wrappers.cli import guarded, run_train

if TYPE_CHECKING:
    from nntask.config import RunConfig
    from nntask.training import Session

DTYPES = ("fp32", "fp16", "bf16")


def parser() -> argparse.ArgumentParser:
    """Return the parser of NNTile's flags that ``nntask train`` has under another name or not at all."""
    flags = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="All other flags: nntask train --help"
    )
    add, switch = flags.add_argument, argparse.BooleanOptionalAction
    for name in ("nforward", "nforward-warmup", "nbackward", "nbackward-warmup"):
        add(f"--{name}", type=_count, default=0, help="number of passes over a minibatch of random tokens, timed or before the timed ones")
    add("--nepochs", type=_count, default=0, help="number of passes over the data")
    add("--nepochs-warmup", type=_count, default=0, help="number of passes before these that train but are not timed")
    add("--loss-reduction", choices=("mean", "sum"), default="mean", help="print the mean loss of the tokens of a step, or their sum")
    add("--start-lr", type=float, help="learning rate of step 1 (default: 0 with --full-lr-iter)")
    add("--full-lr-iter", type=int, help="step at which the learning rate reaches --lr")
    add("--optimizer", default="fusedadamw", help="sgd, adam, adamw, or fusedadamw, which is the same")
    add("--restrict", choices=("none", "cpu", "cuda"), default="none", help="use no GPU, or require one")
    add("--flashattention", action=switch, default=True, help="compute attention without storing the scores")
    add("--redux", action=switch, default=False, help="sum gradients in parallel, as --lanes 4 of nntask")
    add("--fp32-fast-tf32", action=switch, default=False, help="compute products in TF32 on GPUs, as --dtype tf32 of nntask")
    for name in ("checkpoint", "optimizer"):
        add(f"--load-{name}", metavar="FILE", help=f"safetensors file to start from ({name})")
        add(f"--save-{name}", metavar="FILE", help=f"safetensors file to write at the end ({name})")
        add(f"--save-{name}-dtype", choices=DTYPES, default="fp32", help="element type of that file")
    return flags


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {number}")
    return number


def translated(args: argparse.Namespace, rest: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command line of ``nntask train``.

    Args:
        args: NNTile's flags.
        rest: other words, which follow and so win over the translation.
        environ: environment variables, where a number of GPUs is as good as ``--restrict=cuda``.
    """
    words = [f"--optimizer={args.optimizer.replace('fusedadamw', 'adamw')}"]
    if args.full_lr_iter is not None:
        words += [f"--warmup-steps={args.full_lr_iter}", f"--warmup-start-lr={args.start_lr or 0.0}"]
    if args.nepochs + args.nepochs_warmup:
        words.append(f"--nepochs={args.nepochs + args.nepochs_warmup}")
    if args.restrict == "cpu":
        words.append("--ngpu=0")
    if args.restrict == "cuda" and (environ.get("NNTASK_NGPU") or environ.get("STARPU_NCUDA") or "0") == "0":
        words.append("--ngpu=-1")
    words += ["--attention=stored"] * (not args.flashattention) + ["--lanes=4"] * args.redux + ["--dtype=tf32"] * args.fp32_fast_tf32
    return [*words, *rest]


@dataclass(slots=True)
class Training:
    """NNTile's habits around a training of nntask.

    Args:
        args: NNTile's flags.
        trains: whether training was asked for; timed loops alone train nothing.

    Attributes:
        directory: directory of the run, once it is known.
    """

    args: argparse.Namespace
    trains: bool
    directory: Path | None = None

    @property
    def num_passes(self) -> int:
        """Number of passes of the timed loops, warm-up included."""
        return int(self.args.nforward + self.args.nforward_warmup + self.args.nbackward + self.args.nbackward_warmup)

    @property
    def outputs(self) -> dict[str, tuple[str, str]]:
        """Content of a checkpoint -> (file to write, element type)."""
        both = {"weights": "checkpoint", "optimizer": "optimizer"}
        files = {content: (getattr(self.args, f"save_{name}"), getattr(self.args, f"save_{name}_dtype")) for content, name in both.items()}
        return {content: (path, dtype) for content, (path, dtype) in files.items() if path}

    def changed(self, run: RunConfig) -> RunConfig:
        """Return the run with the settings that no flag of nntask has.

        Raises:
            UsageError: a file cannot be written, or flags contradict each other.
        """
        from nntask import UsageError
        from nntask.export import check_state_file

        weights, optimizer = self.args.load_checkpoint, self.args.load_optimizer
        if run.cluster is not None and (self.num_passes or self.outputs):
            raise UsageError("timed loops and saved files are of one machine; drop --dask, or train with nntask train")
        if (weights or optimizer) and (run.start.is_continued or run.start.frozen_base is not None):
            raise UsageError(f"{weights or optimizer} and --resume or --train both say where to begin; drop one of them, or use --init-from")
        for path, _ in self.outputs.values():
            check_state_file(Path(path), force=True)
            if not run.saving.at_end:
                raise UsageError(f"{path} is written from the last checkpoint, and --save-every 0 writes none; drop --save-every")
        length = replace(run.length, warmup_epochs=self.args.nepochs_warmup)
        if not self.trains and not run.start.is_continued:
            length = replace(length, steps=0, epochs=0)
        start = replace(run.start, weights=Path(weights) if weights else run.start.weights, optimizer=Path(optimizer) if optimizer else None)
        self.directory = run.directory
        return replace(run, length=length, start=start, sums_loss=self.args.loss_reduction == "sum")

    def before(self, session: Session) -> None:
        """Run the timed loops before the first step and print their lines; a signal ends them."""
        from nntask.data import random_batch

        self.directory = session.run.directory
        run, args, engine = session.run, self.args, session.engine
        if not self.num_passes:
            return
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

    def save(self) -> None:
        """Write the files that were asked for, from the last checkpoint."""
        from nntask.checkpoints import find_checkpoint
        from nntask.export import export_state

        for content, (path, dtype) in self.outputs.items():
            assert self.directory is not None  # the run has ended
            export_state(find_checkpoint(self.directory), Path(path), content=content, dtype=dtype, force=True)  # type: ignore[arg-type]


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
    args, rest = parser().parse_known_args([word.replace("_", "-") if word.startswith("--") and "=" not in word else word for word in argv])

    def train() -> int:
        from nntask import UsageError

        sets_steps = any(word.partition("=")[0] == "--steps" for word in rest)
        training = Training(args, trains=bool(sets_steps or args.nepochs + args.nepochs_warmup))
        training.trains |= not training.num_passes
        try:
            code = run_train(translated(args, rest, os.environ), changed=training.changed, before=training.before)
        except UsageError as error:
            raise UsageError(str(error).replace("--ngpu -1", "--restrict=cuda")) from error
        if code == 0 and "--dry-run" not in rest:
            training.save()
        return code

    return guarded(train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
