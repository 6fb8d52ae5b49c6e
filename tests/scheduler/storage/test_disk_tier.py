"""The disk tier with real files: data comes back, nothing is left behind, and what fails says so."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scheduler import DoesNotFit, HandleLost, Runtime, TaskError
from scheduler.core.errors import TierFailed
from scheduler.core.memory.extents import PAGE
from scheduler.storage import DiskTier, HostArena

PAGES = 8
COUNT = PAGE // 8


def fill(runtime: Runtime, kit, number: int, **options):  # type: ignore[no-untyped-def]
    """So many handles of one page, each full of its number."""
    return [kit.filled(runtime, at, f"h{at}", COUNT, **options) for at in range(number)]


def test_pages_come_back(tmp_path: Path) -> None:
    """What is written is read, at any page, with direct I/O where there is any; the directory stays empty."""
    tier, arena = DiskTier(tmp_path / "new"), HostArena(4 * PAGE)
    arena.memory[: 2 * PAGE] = bytes(range(256)) * 32
    tier.write(arena, 0, 5 * PAGE, 2 * PAGE)
    tier.read(arena, 2 * PAGE, 5 * PAGE, 2 * PAGE)
    assert arena.memory[2 * PAGE : 4 * PAGE] == arena.memory[: 2 * PAGE]
    tier.discard(5 * PAGE, PAGE)
    assert not list((tmp_path / "new").iterdir())
    assert tier.free_bytes() > 0
    with pytest.raises(OSError, match=r"ends"):
        tier.read(arena, 0, 100 * PAGE, PAGE)
    tier.close()
    tier.close()


def test_a_directory_is_made_but_not_what_it_lies_in(tmp_path: Path) -> None:
    """A mistyped place is refused, named, and leaves nothing behind."""
    with pytest.raises(FileNotFoundError, match=rf"its parent directory {tmp_path}/new/a does not exist"):
        Runtime(1, ram=PAGES * PAGE, disk=tmp_path / "new" / "a" / "b")
    assert not list(tmp_path.iterdir())
    with pytest.raises(PermissionError, match=r"/proc is not a writable directory"):
        DiskTier("/proc/tier")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"it is a file; give a directory"):
        DiskTier(tmp_path / "file")


def test_more_data_than_memory(kit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Ten times the budget, written, changed and read back."""
    with Runtime(2, ram=PAGES * PAGE, disk=tmp_path) as runtime:
        handles = fill(runtime, kit, 10 * PAGES)
        for handle in handles:
            runtime.submit(kit.double, [(handle, "RW")])
        assert [kit.value(runtime, handle) for handle in handles] == [2 * at for at in range(10 * PAGES)]
        stats = runtime.stats()
        assert stats["peak_bytes"]["ram"] <= PAGES * PAGE
        assert stats["moved_bytes"]["ram->disk"] > 0
    assert not list(tmp_path.iterdir())


def test_a_tier_that_is_too_small(kit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Data beyond the last tier is refused, the tier is named, and what is there stays readable."""
    with Runtime(1, ram=4 * PAGE, disk=(tmp_path, 6 * PAGE)) as runtime:
        handles = fill(runtime, kit, 6)
        full = r"node disk is full: program makes 4,096 B of new data that .* budget of 24,576 B 24,576 B are taken; raise the budget"
        with pytest.raises(DoesNotFit, match=full) as refusal:
            kit.filled(runtime, 1, "too much", COUNT)
        assert refusal.value.shortage.node == "disk"
        assert [kit.value(runtime, handle) for handle in handles] == list(range(6))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails(code: int, kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """A full or broken disk is one typed error; the runtime goes on with what fits, and nothing already there is lost."""
    honest = DiskTier.write
    with Runtime(1, ram=4 * PAGE, disk=tmp_path) as runtime:
        handles = fill(runtime, kit, 6)

        def fail(self: DiskTier, *arguments: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(DiskTier, "write", fail)

        def increment_all() -> None:
            for handle in handles:
                with runtime.acquire(handle, "RW") as view:
                    view += 1

        with pytest.raises((TierFailed, HandleLost), match=r"--disk|written"):
            increment_all()
        monkeypatch.setattr(DiskTier, "write", honest)
        readable = 0
        for handle in handles:
            try:
                kit.value(runtime, handle)
                readable += 1
            except (HandleLost, DoesNotFit, TierFailed):
                pass
        assert readable >= 4


def test_a_read_that_fails(kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Bytes that cannot be read back are lost: their readers are cancelled with the reason, an overwrite revives them, others live on."""
    honest = DiskTier.read
    with Runtime(1, ram=4 * PAGE, disk=tmp_path) as runtime:
        handles = fill(runtime, kit, 8)

        def fail(self: DiskTier, *arguments: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(DiskTier, "read", fail)
        lost, reasons = [], []
        for handle in handles:
            try:
                kit.value(runtime, handle)
            except HandleLost as error:
                lost.append(handle)
                reasons.append(str(error))
        assert lost
        assert all("read back" in reason for reason in reasons)
        runtime.submit(kit.double, [(lost[0], "RW")])
        with pytest.raises(TaskError, match=r"read back"):
            runtime.wait()
        monkeypatch.setattr(DiskTier, "read", honest)
        with runtime.acquire(lost[0], "W") as view:
            view.fill(7)
        assert kit.value(runtime, lost[0]) == 7


def test_the_directory_may_vanish_and_be_shared(kit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The file has no name: two runtimes do not meet in a directory, and removing it disturbs nobody."""
    place = tmp_path / "shared"
    with Runtime(1, ram=4 * PAGE, disk=place) as one, Runtime(1, ram=4 * PAGE, disk=place) as two:
        first, second = fill(one, kit, 8), fill(two, kit, 8)
        place.rmdir()
        more = fill(one, kit, 8)
        for runtime, handles in ((one, first), (two, second), (one, more)):
            assert [kit.value(runtime, handle) for handle in handles] == list(range(8))


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    """A file in the way is an OSError before anything starts."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file"):
        Runtime(1, ram=4 * PAGE, disk=tmp_path / "file")


def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 in the middle of evictions: the directory is empty."""
    program = textwrap.dedent(
        """
        import sys
        import numpy as np
        from scheduler import Codelet, Runtime
        view = lambda memory, offset: np.ndarray((512,), np.float64, buffer=memory, offset=offset)
        fill = Codelet("fill", cpu=lambda out, *, value: out.fill(value))
        runtime = Runtime(1, ram=8 << 12, disk=sys.argv[1])
        handles = [runtime.handle(4096, view) for _ in range(64)]
        number = 0
        while True:
            for handle in handles:
                runtime.submit(fill, [(handle, "W")], {"value": number})
            runtime.wait()
            number += 1
            print(number, flush=True)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(3):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not list(tmp_path.iterdir())
