"""``nntask bench kernels``: figures, table, what counts as moved, mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nntask.config.settings import ModelSettings, TilingSettings, TrainSettings
from wrappers.cli import main
from wrappers.cli.bench.kernels import _summed, captured, kinds_of, moved_bytes

SMALL = ["bench", "kernels", "--model=tiny", "--seq-len=32", "--batch=2", "--repeats=1"]


def _tasks(**model: Any) -> list[Any]:
    return captured(TrainSettings(model=ModelSettings(model="tiny", seq_len=32, **model), tiling=TilingSettings(batch=2))).tasks


def test_figures_cover_the_whole_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Every task of the captured step is counted once, shares add up, and the bounds follow from flops, bytes and the measured peaks."""
    assert main([*SMALL, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    rows = {row["codelet"]: row for row in figures["codelets"]}
    tasks = _tasks()
    assert figures["tasks"] == len(tasks) == sum(row["tasks"] for row in rows.values())
    assert set(rows) == {task.codelet.name for task in tasks}
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert figures["seconds"] == pytest.approx(sum(row["seconds"] for row in rows.values()))
    assert figures["gemm_peak_flops"] > 1e8
    assert figures["copy_bytes_per_second"] > 1e8
    assert rows["adam"]["held_against"] == rows["layer_norm"]["held_against"] == "memory"
    adam = rows["adam"]
    assert adam["fraction_of_peak"] == pytest.approx(adam["bytes_per_second"] / figures["copy_bytes_per_second"])
    assert [row["seconds"] for row in figures["codelets"]] == sorted((row["seconds"] for row in rows.values()), reverse=True)


@pytest.mark.parametrize(("peak", "bandwidth", "bound"), [(1e9, 1e12, "compute"), (1e15, 1e9, "memory")])
def test_a_codelet_is_held_against_what_binds_it(peak: float, bandwidth: float, bound: str) -> None:
    """Flops at the peak, or bytes at the rate of copies, whichever takes longer; at given rates, for measured ones follow the load of the machine."""
    kinds = kinds_of(_tasks())
    for kind in kinds:
        kind.seconds = 1.0
    (matmul,) = (row for row in _summed(kinds, peak, bandwidth)["codelets"] if row["codelet"] == "matmul")
    assert matmul["held_against"] == bound
    rate, most = (matmul["flops_per_second"], peak) if bound == "compute" else (matmul["bytes_per_second"], bandwidth)
    assert matmul["fraction_of_peak"] == pytest.approx(rate / most)


@pytest.mark.parametrize("more", [["--dropout=0.1"], ["--dtype=bf16"]])
def test_the_table_has_a_line_per_codelet(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout and bf16 steps are measured, too; each line says what its codelet is held against."""
    assert main([*SMALL, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 sequences a step" in lines[0]
    assert "sgemm" in lines[0]
    assert all(line.endswith(("of sgemm", "of copies")) for line in lines[2:-1])
    assert any(line.startswith("dropout ") for line in lines) == (more == ["--dropout=0.1"])
    assert lines[-1].startswith("kernels of a step: ")


def test_moved_bytes_count_each_direction_once() -> None:
    """A tile that is read and written counts twice, scratch not at all, a table by the rows that tokens can name."""
    tasks = {task.codelet.name: task for task in reversed(_tasks())}
    sizes = [handle.spec.nbytes for handle, _ in tasks["adam"].accesses]
    assert moved_bytes(tasks["adam"]) == 2 * (sizes[0] + sizes[2] + sizes[3]) + sizes[1] + sizes[4]
    attention = tasks["attention"].accesses
    assert attention[-1][1] == "SCRATCH"
    assert moved_bytes(tasks["attention"]) == sum(handle.spec.nbytes for handle, _ in attention[:-1])
    tokens, table, x = (handle for handle, _ in tasks["embedding"].accesses)
    rows = tokens.spec.nbytes // 4 * table.spec.view.shape[1] * 4
    assert rows < table.spec.nbytes
    assert moved_bytes(tasks["embedding"]) == tokens.spec.nbytes + rows + x.spec.nbytes


def test_kinds_differ_in_shape_mode_or_work() -> None:
    """Tasks of one kind have one codelet, shapes and modes; there are far fewer kinds than tasks."""
    tasks = _tasks()
    kinds = kinds_of(tasks)
    assert sum(kind.count for kind in kinds) == len(tasks) > 3 * len(kinds)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--repeats=0", "--repeats must be at least 1"),
        ("--model=gpt5", "--model must be a preset"),
        ("--batch=0", "--batch must be at least 1"),
        ("--minibatch=3", "--minibatch"),
        ("--dropout=2", "--dropout must be at least 0 and below 1"),
        ("--dtype=int8", "--dtype"),
        ("--seq-len=999", "--seq-len"),
        ("--config-path=nowhere.json", "nowhere.json"),
    ],
)
def test_mistakes(flag: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence names the flag; nothing is measured."""
    assert main([*SMALL, flag]) in (2, 4)
    assert words in capsys.readouterr().err
