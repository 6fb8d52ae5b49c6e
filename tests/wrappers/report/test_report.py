"""The report of a run: every figure against a run whose numbers are known, the page whole, small and by itself, bad input in one sentence."""

from __future__ import annotations

import gzip
import html
import json
import re
import sys
from pathlib import Path

import pytest
from support.known_run import ABOUT, MACHINE, MS, PLAN, line, write_cluster_run, write_run, write_trace

import wrappers.report.page
from nntask.errors import DataError, UsageError
from wrappers.cli import main
from wrappers.report import figures
from wrappers.report.page import MOST_BYTES, page
from wrappers.report.records import NodeRecord, RunRecord, read_run


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    """The known run."""
    return read_run(write_run(tmp_path / "run"))


def text_of(document: str) -> str:
    """What a page says, without code and marks."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", document, flags=re.DOTALL))).split())


def row(document: str, first: str) -> list[str]:
    """Cells of the table row that begins so."""
    found = next(cells for cells in re.findall(r"<tr>(.*?)</tr>", document) if cells.startswith(f"<td>{html.escape(first)}</td>"))
    return [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", found)]


def test_curves_and_memory(run: RunRecord) -> None:
    """Values by step; memory over seconds of training, with its peak and its budget."""
    assert figures.curve(run.lines, "loss") == [(1, 7.0), (2, 6.0), (3, 5.0), (4, 4.0)]
    found = figures.memories(run.nodes[0])
    assert found["ram"].points == [(1.0, 1 << 28), (2.0, 2 << 28), (3.0, 3 << 28), (4.0, 4 << 28)]
    assert (found["ram"].peak, found["ram"].budget, found["disk"].budget) == (1 << 30, 1 << 30, 8 << 30)


def test_links_and_shares(run: RunRecord) -> None:
    """Bytes of each link in all, a step and a second; shares of each worker add up to one."""
    out, back = figures.links(run.nodes[0]).values()
    assert (out.total, out.per_step, out.per_second) == (8e9, 2e9, 2e9)
    assert (back.total, back.per_step, [y for _, y in back.points]) == (2e9, 5e8, [1e9, 0.0, 1e9, 0.0])
    shares = figures.shares(run.nodes[0])
    assert shares["cpu:0"].busy == pytest.approx(0.8)
    assert shares["cpu:0"].stalled == pytest.approx(0.1)
    assert shares["cpu:1"].idle == pytest.approx(0.5)
    assert all(share.busy + share.stalled + share.idle == pytest.approx(1) for share in shares.values())


def test_what_is_kept_moved_or_made_again(tmp_path: Path) -> None:
    """Rows of plan.json beside what steps measured; a run that wrote none, or that fits, has no table; a broken file is one sentence."""
    folder = write_run(tmp_path / "run")
    document = page(read_run(folder))
    text = text_of(document)
    assert "Recomputed instead of kept: norm (chosen; forecast 0.9 s a step, without any 1.5 s)." in text
    assert "Measured: 6 tasks a step, 0.13 s a step in kernels, 10.0% of the time in kernels." in text
    assert "Forecast per step: 2 GB moved and 0.9 s; measured: 2.5 GB and 1 s." in text
    assert row(document, "norm") == ["norm", "2", "4 MiB", "75%", "25%", "", "0.25", "0.75"]
    assert row(document, "<a>") == ["<a>", "", "1 MiB", "", "", "100%", "0.5", ""]
    (folder / "plan.json").write_text(json.dumps({**PLAN, "recompute": "none", "values": [], "forecast_bytes": {}}))
    assert "Recomputed instead of kept: none: everything fits." in text_of(page(read_run(folder)))
    (folder / "plan.json").write_text(json.dumps({**PLAN, "values": [{"name": "norm"}]}))
    with pytest.raises(DataError, match=r"plan\.json has figures that nntask did not write; remove it, or restore it"):
        read_run(folder)
    (folder / "plan.json").unlink()
    (folder / "metrics.jsonl").write_text(json.dumps({key: value for key, value in line(1).items() if not key.startswith("recompute")}) + "\n")
    assert read_run(folder).nodes[0].planned == {}
    assert "ecomputed instead of kept" not in text_of(page(read_run(folder)))


def test_codelets_and_bounds(run: RunRecord) -> None:
    """Seconds from the bars of whole steps, rates from the recorded operations, a worker's share of the peak, the time over the largest bound."""
    matmul, adam = figures.codelets(run.nodes)
    assert (matmul.name, matmul.tasks, matmul.seconds, adam.seconds) == ("matmul", 2, pytest.approx(0.06), pytest.approx(0.01))
    assert matmul.share == pytest.approx(6 / 7)
    assert matmul.flops_per_second == pytest.approx(3e9 / 0.06)
    assert matmul.of_peak == pytest.approx(50e9 / 100e9)  # of one of two workers
    assert (adam.flops_per_second, adam.of_peak, adam.bytes_per_second) == (None, None, pytest.approx(2e9))
    found = figures.achieved(run.nodes[0].trace)
    assert found is not None
    assert (found.seconds, found.over_bound) == (0.05, pytest.approx(1.25))


def test_codelets_are_those_of_whole_steps(tmp_path: Path) -> None:
    """A step that was traced in part counts for nothing; without a whole one there is nothing to say."""
    folder = write_run(tmp_path / "run")
    write_trace(folder / "trace.json.gz", {**ABOUT, "steps": [4]})
    assert figures.codelets(read_run(folder).nodes)[0].seconds == pytest.approx(0.06)
    write_trace(folder / "trace.json.gz", {"unix_ns": 0})
    assert figures.codelets(read_run(folder).nodes) == []
    assert "No step was traced completely" in text_of(page(read_run(folder)))


def test_gantt(run: RunRecord) -> None:
    """Every task and copy of the chosen steps, from the first one's start; a part is drawn where there is too much, and the page says which."""
    found = figures.gantt(run.nodes)
    assert found is not None
    assert (found.tracks, found.steps, found.begins) == (["cpu:0", "cpu:1", "ram->disk"], (3, 4), [0, 50 * MS])
    assert (found.num_found, found.coverage) == (8, 1.0)
    assert {(bar.track, bar.name, bar.start // MS, bar.end // MS) for bar in found.bars if bar.step == 4} == {
        ("cpu:0", "matmul", 50, 90),
        ("cpu:1", "matmul", 50, 70),
        ("cpu:0", "adam", 90, 100),
    }
    assert [(bar.track, bar.nbytes, bar.start // MS) for bar in found.bars if bar.nbytes] == [("ram->disk", 10**6, 10), ("ram->disk", 10**6, 60)]
    assert found.memory == {"ram": [(20 * MS, 3 << 20), (70 * MS, 4 << 20)], "disk": [(20 * MS, 3 << 21), (70 * MS, 4 << 21)]}
    one = figures.gantt(run.nodes, most=3)
    assert one is not None
    assert (one.steps, one.num_found, len(one.bars)) == ((3, 3), 4, 3)
    assert one.coverage == pytest.approx(70 / 75)
    assert figures.gantt(run.nodes, (4, 9)).steps == (4, 4)  # type: ignore[union-attr]
    assert figures.gantt(run.nodes, (7, 9)) is None


def test_thinning_keeps_means_and_maxima() -> None:
    """Equally many neighbours a point; no fewer points than needed."""
    points = [(float(x), float(x % 10)) for x in range(2500)]
    assert figures.thinned(points[:1000]) == points[:1000]
    mean, largest = figures.thinned(points), figures.thinned(points, "max")
    assert len(mean) == len(largest) == 834
    assert mean[0] == (1.0, 1.0)
    assert largest[3] == (10.0, 9.0)


def test_the_page_shows_these_figures_and_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables and sentences with the known numbers, a plot for each figure, no address of anything outside the file."""
    write_run(tmp_path / "a <run>")
    assert main(["report", str(tmp_path / "a <run>")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/a <run>/report.html\n"
    document = (tmp_path / "a <run>" / "report.html").read_text()
    assert len(document) < MOST_BYTES
    assert row(document, "matmul") == ["matmul", "2", "60.00", "85.7%", "50.0", "50%", "0.1"]
    assert row(document, "adam") == ["adam", "1", "10.00", "14.3%", "", "", "2.0"]
    assert row(document, "ram") == ["ram", "1 GiB", "1 GiB", "100.0%"]
    assert row(document, "ram->disk") == ["ram->disk", "8.000", "2.0000", "2.0000"]
    assert row(document, "cpu:0") == ["cpu:0", "80.0%", "10.0%", "10.0%"]
    text = text_of(document)
    assert "nntask report: a <run>" in text
    for words in ("7.0000 → 4.0000", "A traced step took 50.0 ms, 1.25 x its largest bound", "200.0 GF/s", "Means over 2 traced"):
        assert words in text
    titles = ("loss", "gradient norm", "learning rate", "throughput", "ram: at most 1 GiB of 1 GiB", "bytes over each link")
    for title in (*titles, "tasks by worker and copies by link, steps 3 to 4"):
        assert f'"text":"{title}' in document
    assert document.count("data-root-id") == 12
    outside = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL))
    assert outside == ["data:,"]


def test_one_machine_that_went_on_is_reported_itself(tmp_path: Path) -> None:
    """What nodes have left behind ends before the run does."""
    folder = write_cluster_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(line(9)) + "\n")
    found = read_run(folder)
    assert [node.name for node in found.nodes] == [""]
    assert found.nodes[0].lines[-1]["step"] == 9


def test_a_cluster_has_one_page(tmp_path: Path) -> None:
    """Workers, memories and links of every node by its name; codelets of all nodes together; bounds of each."""
    found = read_run(write_cluster_run(tmp_path / "run"))
    assert [node.name for node in found.nodes] == ["left", "right"]
    drawn = figures.gantt(found.nodes)
    assert drawn is not None
    assert drawn.tracks == ["left cpu:0", "left cpu:1", "right cpu:0", "right cpu:1", "left ram->disk", "right ram->disk"]
    assert figures.codelets(found.nodes)[0].seconds == pytest.approx(0.12)
    assert figures.codelets(found.nodes)[0].of_peak == pytest.approx(0.5)
    document = page(found)
    assert row(document, "right cpu:1") == ["right cpu:1", "50.0%", "0.0%", "50.0%"]
    assert row(document, "left disk->ram")[1] == "2.000"
    assert "workers on 2 nodes" in text_of(document)
    assert "right: a traced step took 50.0 ms" in text_of(document)
    assert text_of(document).count("On left, right, recomputed instead of kept: norm") == 1
    (tmp_path / "run" / "nodes" / "right" / "plan.json").write_text(json.dumps({**PLAN, "recompute": "none", "values": [], "forecast_bytes": {}}))
    text = text_of(page(read_run(tmp_path / "run")))
    assert "On left, recomputed instead of kept: norm" in text
    assert "On right, recomputed instead of kept: none: everything fits." in text
    with pytest.raises(UsageError, match=r"is of one machine and .* has 2 nodes"):
        read_run(tmp_path / "run", tmp_path / "run" / "nodes" / "left" / "trace.json.gz")


@pytest.mark.long
def test_a_large_run_is_thinned_out_and_says_so(tmp_path: Path) -> None:
    """6,000 steps on three nodes and 24,000 bars: below 5 MB, with what was left out."""
    run = read_run(write_run(tmp_path / "run"))
    write_trace(tmp_path / "many.json.gz", repeats=4_000)
    trace = read_run(tmp_path / "run", tmp_path / "many.json.gz").nodes[0].trace
    lines = [line(step) for step in range(1, 6_001)]
    nodes = [NodeRecord(f"node-{at}", lines, MACHINE, trace if at == 0 else None) for at in range(3)]
    document = page(RunRecord(run.path, lines, {}, nodes))
    assert len(document.encode()) < MOST_BYTES
    text = text_of(document)
    assert "6,000 steps; each point is the mean of 6 of them." in text
    assert "6,000 steps; each point is the maximum of 6 of them." in text
    assert "The 10,000 longest of 12,001 tasks and copies are drawn" in text
    assert "Steps 3 to 4 were traced; --steps A:B draws others." in text


def test_many_memories_and_links_are_told_and_the_largest_drawn(run: RunRecord) -> None:
    """Tables have all of them; the page says how many are drawn."""
    one = {
        **line(1),
        "moved_bytes": {f"a{at}->b": at << 20 for at in range(1, 21)},
        "resident_peak_bytes": {f"m{at}": at << 20 for at in range(1, 31)},
    }
    document = page(RunRecord(run.path, [one], {}, [NodeRecord("", [one], {"budget_bytes": {f"m{at}": 1 << 30 for at in range(1, 31)}})]))
    assert "The 14 busiest of 20 links are drawn." in text_of(document)
    assert "The 24 fullest of 30 memories are drawn." in text_of(document)
    assert row(document, "a3->b")[1] == "0.003"
    assert row(document, "m3") == ["m3", "3 MiB", "1 GiB", "0.3%"]
    assert '"text":"m30: at most' in document
    assert '"text":"m3: at most' not in document


def test_a_page_that_would_be_too_large_is_thinned_out_more(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the limit asks for: here a little above what Bokeh alone takes."""
    lines = [line(step) for step in range(1, 1001)]
    large = RunRecord(run.path, lines, {}, [NodeRecord("", lines)])
    document = page(large)
    assert "each point is" not in text_of(document)
    monkeypatch.setattr(wrappers.report.page, "MOST_BYTES", len(document.encode()) - 10_000)
    assert "1,000 steps; each point is the maximum of 4 of them." in text_of(page(large))


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path: Path) -> None:
    """The command that goes on for a few traced steps; a run that was killed has no summary, and its last line may be cut short."""
    folder = write_run(tmp_path / "run")
    for name in ("trace.json.gz", "summary.json", "machine.json"):
        (folder / name).unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 3.')
    text = text_of(page(read_run(folder)))
    assert f"nntask train --resume {folder} --steps 8 --trace-steps 6:7" in text
    assert "after step 4: it has no summary.json" in text
    assert "budgets are not recorded" in text


def test_lines_with_nothing_but_steps_make_a_page(tmp_path: Path) -> None:
    """Figures that a node does not have are left out, values that are no numbers too."""
    odd = '{"step": 2, "loss": null, "moved_bytes": 3, "seconds": "x", "busy_seconds": {"cpu:0": null}}'
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + odd + "\n")
    text = text_of(page(read_run(tmp_path)))
    assert "The time of workers is not recorded" in text
    assert "No bytes moved" in text


def broken(folder: Path, name: str, content: bytes) -> None:
    """Put a broken file into a run."""
    (folder / name).write_bytes(content)


WHOLE = gzip.compress(json.dumps({"otherData": {"nntask": {"format": 1, **ABOUT}}, "traceEvents": []}).encode())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", b"", "metrics.jsonl holds no step yet; wait for the first one"),
        ("metrics.jsonl", b'{"step": 1, "lo', "metrics.jsonl holds no step yet"),
        ("summary.json", b'{"steps": 4', "summary.json is not whole JSON"),
        ("machine.json", b"[1]", "machine.json must be a JSON object, got [1]"),
        ("trace.json.gz", WHOLE[:-20], "trace.json.gz is not whole; trace some steps anew, as in nntask train --trace-steps 10:11"),
        ("trace.json.gz", b'{"traceEvents": [', "trace.json.gz is not whole"),
        ("trace.json.gz", b'{"traceEvents": []}', "trace.json.gz is no trace of this version of nntask: it does not name its format, 1"),
        ("trace.json.gz", b'{"otherData": {"nntask": {"format": 7}}, "traceEvents": []}', "must have format 1, got 7, which another version"),
        ("trace.json.gz", b'{"otherData": {"nntask": {"format": 1}}, "traceEvents": []}', "has events that nntask did not write"),
    ],
)
def test_broken_files_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, words: str) -> None:
    """Exit code 4, the file, what is wrong; no page."""
    folder = write_run(tmp_path / "run")
    broken(folder, name, content)
    assert main(["report", str(folder)]) == 4
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_wrong_words_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory, a directory that is no run, steps that were not traced, a page that cannot be written, Bokeh missing."""
    folder = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text("{}")
    for argv, code, words in (
        ([str(tmp_path / "none")], 4, f"there is no directory {tmp_path}/none; give the directory of a run"),
        ([str(tmp_path / "x.json")], 4, f"{tmp_path}/x.json is a file, and nntask report draws the run in a directory; give the directory of a run"),
        (
            [str(folder / "metrics.jsonl")],
            4,
            f"metrics.jsonl is a file, and nntask report draws the run in a directory; give that of its run, {folder}\n",
        ),
        ([str(tmp_path / "empty")], 4, "empty has no metrics.jsonl; give the directory of a run"),
        ([str(folder), "--steps=1:2"], 2, "--steps must name steps that were traced, got 1:2, and steps 3 to 4 were"),
        ([str(folder), "--steps=4"], 2, "--steps must be A:B with 1 <= A <= B, got '4'"),
        ([str(folder), "--steps=all"], 2, "--steps must be A:B with 1 <= A <= B, got 'all'"),
        ([str(folder), f"--trace={tmp_path}/none"], 4, "cannot be read: No such file or directory; name another one with --trace"),
        ([str(folder), f"--output={tmp_path}/none/a.html"], 2, f"there is no directory {tmp_path}/none; make it, or choose another place"),
        ([str(folder), f"--output={tmp_path}"], 2, f"--output {tmp_path} is a directory; give a file"),
        ([str(folder), "--output=/proc/a.html"], 2, "/proc is not a writable directory; choose another place"),
    ):
        assert main(["report", *argv]) == code, argv
        assert words in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith(("bokeh", "wrappers.report.p", "wrappers.report.sections"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert main(["report", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "nntask: report needs the bokeh package" in err
    assert "pip install -e '.[dashboard]'" in err


@pytest.mark.parametrize("line", ['trace = "{}"', 'trace_steps = "3:4@{}"', 'trace = ""\ntrace_steps = "all@{}"'])
def test_a_trace_elsewhere_is_found_by_the_configuration(line: str, tmp_path: Path) -> None:
    """The file of --trace-steps stands in config.toml, as of old with a key of its own; --trace of the report is stronger."""
    folder = write_run(tmp_path / "run")
    (folder / "trace.json.gz").unlink()
    assert read_run(folder).nodes[0].trace is None
    write_trace(tmp_path / "t.json")
    (folder / "config.toml").write_text(f"[observe]\n{line.format(tmp_path / 't.json')}\n")
    trace = read_run(folder).nodes[0].trace
    assert trace is not None
    assert trace.path == tmp_path / "t.json"
    (folder / "config.toml").write_text("observe = 3")
    assert read_run(folder).nodes[0].trace is None
    with pytest.raises(DataError, match="cannot be read"):
        read_run(folder, tmp_path / "none.json")
