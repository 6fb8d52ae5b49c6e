"""``--auto-tile``, by search and from a table: what is searched, what is kept, what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median

import pytest
from support.deadline import DEADLINE

from nntask.training import autotune
from wrappers.cli import main

ROOT = Path(__file__).parents[3]
SMALL = {"vocab_size": 1031, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=4 --lr=1e-3 --ncpu=2 --sample-tokens=0"
TRAIN = ["train", *FLAGS.split()]
SIZES = ("minibatch_tile", "seq_tile", "embd_tile", "inner_tile", "head_tile", "vocab_tile")
TRIED = re.compile(r"auto-tile: (minibatch \d+, .*): (does not fit|([\d.e-]+) s a step \(from 2 of 3 layers\))")


@pytest.fixture
def here(folder, text):
    """A directory of its own with a small config and some text."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    return folder


def sizes_of(config: Path) -> dict[str, int]:
    """Tile sizes in a run's config.toml."""
    cut = tomllib.loads(config.read_text())["tiling"]
    return {name: cut[name] for name in SIZES}


def words(sizes: dict[str, int]) -> str:
    """As the search prints them."""
    return ", ".join(f"{name.removesuffix('_tile')} {size}" for name, size in sizes.items())


def losses(run: Path) -> list[float]:
    """Of every step, all digits."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_fastest_of_what_was_tried_is_kept(here, capsys):
    """The search prints seconds of several tilings and takes the fastest; --resume and --config repeat its sizes and do not search."""
    assert main([*TRAIN, "--steps=2", "--run-dir=run", "--auto-tile=measured"]) == 0
    out = capsys.readouterr().out
    tried: dict[str, list[float]] = {}
    for match in TRIED.finditer(out):
        tried.setdefault(match[1], []).append(float(match[3]))
    assert len(tried) >= 5
    finals = {each: median(found) for each, found in tried.items() if len(found) == 3}
    assert len(finals) == 3
    chosen = sizes_of(here / "run" / "config.toml")
    assert words(chosen) == min(finals, key=lambda each: finals[each])
    assert f"the fastest of {len(tried)} tilings is {words(chosen)}" in out
    assert main(["train", "--config=run/config.toml", "--steps=4", "--run-dir=again", "--auto-tile=measured"]) == 0
    assert "has nothing to search: every tile size is given" in capsys.readouterr().out
    assert main(["train", "--resume=run", "--steps=4", "--auto-tile=measured"]) == 0
    assert not TRIED.search(capsys.readouterr().out)
    assert sizes_of(here / "run" / "config.toml") == sizes_of(here / "again" / "config.toml") == chosen
    assert losses(here / "run") == losses(here / "again")


@pytest.mark.long
def test_given_sizes_are_kept(here, capsys):
    """Only sizes without a flag are searched."""
    assert main([*TRAIN, "--steps=1", "--run-dir=run", "--auto-tile=measured", "--seq-tile=17", "--vocab-tile=-1"]) == 0
    tried = [match[1] for match in TRIED.finditer(capsys.readouterr().out)]
    assert len(tried) >= 2
    assert all("seq 17," in each and each.endswith("vocab 1031") for each in tried)
    assert sizes_of(here / "run" / "config.toml")["seq_tile"] == 17


@pytest.mark.long
def test_a_table_of_ones_own(here, capsys, monkeypatch):
    """The search enters its tiling into the file; later runs of that shape take it from there, by flag or variable, and others do not."""
    assert main([*TRAIN, "--steps=1", "--run-dir=run", "--auto-tile=measured@tables/my.toml", "--inner-tile=40"]) == 0
    assert "auto-tile: entered into tables/my.toml" in capsys.readouterr().out
    chosen = sizes_of(here / "run" / "config.toml")
    assert chosen["inner_tile"] == 40
    assert main([*TRAIN, "--steps=1", "--run-dir=second", "--auto-tile=table@tables/my.toml"]) == 0
    monkeypatch.setenv("NNTASK_TILE_TABLE", "tables/my.toml")
    assert main([*TRAIN, "--steps=1", "--run-dir=third", "--head-tile=1"]) == 0
    assert main([*TRAIN, "--steps=1", "--run-dir=other", "--batch=2"]) == 0
    assert not TRIED.search(capsys.readouterr().out)
    assert sizes_of(here / "second" / "config.toml") == chosen
    assert sizes_of(here / "third" / "config.toml") == {**chosen, "head_tile": 1}
    assert sizes_of(here / "other" / "config.toml")["inner_tile"] == 128
    assert main([*TRAIN, "--steps=1", "--auto-tile=measured", "--dry-run"]) == 0
    assert "entered" not in capsys.readouterr().out


@pytest.mark.long
def test_the_search_keeps_to_the_budget(here, capsys):
    """Where the table's tiles do not fit --ram, smaller ones that do are found; where none fits, the run is refused as always."""
    given = ["--minibatch-tile=1", "--seq-tile=32", "--embd-tile=-1", "--inner-tile=64", "--head-tile=-1"]
    budget = ["--steps=1", "--run-dir=run", "--disk=tier", "--ram=250KB", *given]
    assert main([*TRAIN, *budget]) == 3
    assert "--vocab-tile" in capsys.readouterr().err
    assert main([*TRAIN, *budget, "--auto-tile=measured"]) == 0
    out = capsys.readouterr().out
    assert "vocab 516: does not fit" in out
    assert "vocab 258: " in out
    assert sizes_of(here / "run" / "config.toml")["vocab_tile"] < 516
    assert main([*TRAIN, *budget[:1], *budget[2:], "--ram=50KB", "--auto-tile=measured"]) == 3
    assert re.search(r"auto-tile: none of \d+ tilings fits", capsys.readouterr().out)


def test_ctrl_c_ends_the_search(here):
    """A signal while tiles are measured ends the run at once, with its exit code and nothing left behind."""
    code = f"import sys\nfrom wrappers.cli import main\nsys.exit(main({[*TRAIN, '--run-dir=run', '--auto-tile=measured']!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    while not TRIED.match(line := process.stdout.readline()):
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, err
    assert "interrupted while tiles were measured" in out
    assert err == ""
    assert not (here / "run").exists()


def test_a_signal_after_the_last_trial_counts(here, capsys, monkeypatch):
    """A search that ends before it looks at the signal does not lose it."""

    def search(run, say, stopped):
        signal.raise_signal(signal.SIGTERM)
        return run.model.tiling

    monkeypatch.setattr(autotune, "search", search)
    assert main([*TRAIN, "--run-dir=run", "--auto-tile=measured"]) == 143
    assert "interrupted while tiles were measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--auto-tile=measure"], 2, "--auto-tile must be one of table, measured, got 'measure'; did you mean measured?"),
        (["--auto-tile=table@none.toml"], 4, "the tile table none.toml cannot be read"),
        (["--auto-tile=table@small.json"], 4, "the tile table small.json is not a TOML file"),
        (["--auto-tile=table@keys.toml"], 4, "row 1 must have the keys n_embd, n_inner"),
        (["--auto-tile=measured@keys.toml"], 4, "row 1 must have the keys n_embd, n_inner"),
        (["--auto-tile=table@other.toml"], 4, "must hold [[tiling]] rows and nothing else, got x"),
        (["--auto-tile=measured@text"], 4, "the tile table text"),
        (["--auto-tile=measured@small.json/x"], 2, "the tile table small.json/x cannot be written"),
    ],
)
def test_bad_input(here, capsys, argv, code, message):
    """One sentence, before anything is measured."""
    (here / "keys.toml").write_text("[[tiling]]\nn_embd = 3\n")
    (here / "other.toml").write_text("x = 3\n")
    assert main([*TRAIN, "--steps=1", *argv]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert "auto-tile:" not in captured.out


def test_plan_runs_nothing(here, capsys):
    """A plan with sizes to search is refused; with all sizes given there is nothing to search."""
    assert main(["plan", *TRAIN[1:], "--auto-tile=measured"]) == 2
    assert "--auto-tile measured runs steps, and nntask plan runs nothing" in capsys.readouterr().err
    given = [f"--{name.replace('_', '-')}=-1" for name in SIZES]
    assert main(["plan", *TRAIN[1:], "--auto-tile=measured", *given]) == 0
