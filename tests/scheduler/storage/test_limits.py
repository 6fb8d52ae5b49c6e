"""Limits that cgroups of both versions set to memory and cores, read from directories like those of the system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler import usable_cores
from scheduler.storage.limits import memory_limit

MIB = 1 << 20
ROOT = Path(__file__).parents[3]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The list of the cgroups of a process in a pod, in both versions."""
    file = tmp_path / "own"
    file.write_text("9:name=systemd:/\n4:memory:/pods/one\n3:cpu,cpuacct:/pods/one\n1:cpuset:/\n0::/pods/one\n")
    return file


def groups(root: Path, files: dict[str, str]) -> Path:
    """Write the files of cgroups, and return their directory."""
    for name, text in files.items():
        (root / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "groups" / name).write_text(f"{text}\n")
    return root / "groups"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pods/one/memory.max": str(500 * MIB)}, 500),
        ({"pods/one/memory.max": "max", "pods/memory.max": str(400 * MIB), "memory.max": "max"}, 400),
        ({"pods/one/memory.max": str(500 * MIB), "pods/one/memory.high": str(300 * MIB)}, 300),
        ({"memory.high": str(200 * MIB)}, 200),
        ({"memory/pods/one/memory.limit_in_bytes": str(600 * MIB), "memory/memory.limit_in_bytes": str(1 << 62)}, 600),
        ({"memory/memory.limit_in_bytes": str(100 * MIB)}, 100),
        ({"pods/two/memory.max": "1", "memory/memory.max": "1", "cpu/memory.limit_in_bytes": "1", "pods/one/memory.max": str(500 * MIB)}, 500),
    ],
)
def test_memory_of_a_cgroup(tmp_path: Path, own: Path, files: dict[str, str], expected: int) -> None:
    """The lowest limit of the group and its parents counts, those that only slow a process down as well; no other group's does."""
    assert memory_limit(groups(tmp_path, files), own) == expected * MIB


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"pods/one/cpu.max": "100000 100000"}, 1),
        ({"pods/one/cpu.max": "20000 100000"}, 1),
        ({"pods/one/cpu.max": "max 100000", "pods/cpu.max": "100001 100000"}, 2),
        ({"cpu/pods/one/cpu.cfs_quota_us": "50000", "cpu/pods/one/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/pods/one/cpu.cfs_quota_us": "-1", "cpu/pods/one/cpu.cfs_period_us": "100000"}, 1 << 20),
        ({"pods/one/cpu.max": "0 0"}, 1 << 20),
        ({"pods/one/cpu.max": ""}, 1 << 20),
        ({}, 1 << 20),
    ],
)
@pytest.mark.parametrize("num_cores", [1, 2, 8])
def test_cores_of_a_cgroup(tmp_path: Path, own: Path, files: dict[str, str], share: int, num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of processor time is that many cores, rounded up, and never more than the process may run on, whatever machine runs the test."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cores)), raising=False)
    assert usable_cores(tmp_path / "none", own) == num_cores
    assert usable_cores(groups(tmp_path, files), own) == min(share, num_cores)


def test_a_system_without_cgroups(tmp_path: Path) -> None:
    """Limits are those of the machine."""
    assert memory_limit(tmp_path, tmp_path / "none") >= memory_limit()
    assert usable_cores(tmp_path, tmp_path / "none") >= usable_cores() >= 1


def test_one_function_counts_cores() -> None:
    """Benchmarks and packages use it, since any other count misses the quota of a container."""
    files = [path for folder in ("scheduler", "tiles", "nntask", "wrappers", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    counting = [str(path.relative_to(ROOT)) for path in files if "len(os.sched_getaffinity" in path.read_text()]
    assert counting == ["scheduler/storage/limits.py"]
