"""What a command of `first_card` has: cards, a folder, trainings of `nntask train` in this process. In a rehearsal the card is that of
`tests/support/strict_cuda`, models are tiny, and figures of speed mean nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench
import common

Check = tuple[str, Callable[[], Any]]
WHOLE: Final = "--seq-tile=-1 --embd-tile=-1 --inner-tile=-1 --head-tile=-1 --vocab-tile=-1 --ngpu=1"


class Work(bench.Work):
    """Trainings in this process, whose cards may be emulated."""

    def run(self, argv: Sequence[str]) -> tuple[int, str]:
        """Run `nntask`; its exit code and what it said."""
        from wrappers.cli import main

        said, before = io.StringIO(), Path.cwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = main(list(argv))
        finally:
            os.chdir(before)
        return code, said.getvalue()


@dataclass
class Here:
    """What a command has: cards, a folder, trainings.

    Attributes:
        rehearse: whether the card is emulated.
    """

    rehearse: bool
    work: Work
    cuda: Any = None
    rehearsed: Any = None
    opened: list[Any] = field(default_factory=list)

    def devices(self, count: int = 1, *, tf32: bool = False) -> list[Any]:
        """Parts of the first card, or all of it."""
        (card,) = self.cards.choose(1)
        parts: list[Any] = self.cards.open([(card, part if count > 1 else None) for part in range(count)], tf32=tf32, dtype="fp32")
        self.opened += parts
        return parts

    def look(self) -> None:
        """Look at what a rehearsal's libraries have refused.

        Raises:
            AssertionError: there is something.
        """
        assert not (self.cuda and self.cuda.found), f"CUDA would refuse: {self.cuda.found[:3]}"

    @property
    def cards(self) -> Any:
        """Where devices come from."""
        from nntask.hardware import cards

        return self.rehearsed or cards

    def is_lost(self) -> bool:
        """Whether the card answers nothing more in this process."""
        try:
            if self.opened:
                self.opened[0]._cuda.setDevice(0)
                self.opened[0]._cuda.deviceSynchronize()
        except (RuntimeError, AttributeError) as error:
            return isinstance(error, RuntimeError)
        return False

    def config(self, size: str) -> Any:
        """A model without dropout."""
        found = bench.gpt2("tiny" if self.rehearse else size)
        return replace(found, vocab_size=60, n_positions=8, n_embd=8, n_layer=1, n_head=2) if self.rehearse else found

    def steps(self, count: int) -> int:
        """Steps of a training."""
        return min(count, 3) if self.rehearse else count

    def sizes(self, batch: int, minibatch: int) -> str:
        """Flags of a batch, and whole tiles."""
        if self.rehearse:
            batch, minibatch = 2, 1
        return f"{WHOLE} --batch={batch} --minibatch={minibatch} --minibatch-tile={minibatch}"


@contextlib.contextmanager
def opened(rehearse: bool) -> Iterator[Here]:
    """A folder, and cards."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        here = Here(rehearse, Work(Path(folder), 0.0))
        if rehearse:
            from support.cuda_emulator import build_folder
            from support.strict_cuda import rehearsed

            here.cuda, here.rehearsed = stack.enter_context(rehearsed(build_folder(common.ROOT / "build" / "emulated"), Path(folder) / "code"))
        yield here


def near(found: Sequence[float], want: Sequence[float], relative: float) -> float:
    """The largest relative difference.

    Raises:
        AssertionError: it is above `relative`.
    """
    away = max(abs(a / b - 1) for a, b in zip(found, want, strict=True))
    assert away <= relative, f"{away:.2e} apart, at most {relative:.0e} is rounding: {list(found)[:6]} and {list(want)[:6]}"
    return away
