"""Trials of tilings, and the file that keeps what they find."""

from dataclasses import replace

import pytest
from support.counted_calls import count_calls

from nntask.config.resolution import resolve
from nntask.config.settings import ModelSettings, ResourceSettings, TilingSettings, TrainSettings
from nntask.errors import DataError
from nntask.models.gpt2 import GPT2Config
from nntask.planning.memory_fit import capture
from nntask.tiling.model_tiling import Limits, ModelTiling, cut
from nntask.tiling.tile_table import add_row, read_table, shape_of
from nntask.training.autotune import _doubled, _halved, _kernel_seconds, measure
from scheduler.api.recording import Recorder

CONFIG = GPT2Config(vocab_size=300, n_positions=32, n_embd=24, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
ASKED = TrainSettings(model=ModelSettings(model="gpt2"), tiling=TilingSettings(batch=6, minibatch=2), resources=ResourceSettings(ncpu=2))
ROW = ModelTiling(1, 16, 24, 96, 2, 150)


def plan_of(config, batch):
    """The step of a model over a batch in minibatches of 2."""
    return capture(resolve(replace(ASKED, tiling=replace(ASKED.tiling, batch=batch)), config)).plan


def test_a_step_lasts_as_long_as_its_kinds_of_tasks():
    """With the same seconds for tasks of the same kind, the whole step's kernels follow exactly from those of fewer layers and minibatches."""
    whole, trial = plan_of(replace(CONFIG, n_layer=5), 6), plan_of(CONFIG, 4)

    def seconds(plan):
        sizes = [0 if task.name == "sum_scalars" else sum(handle.spec.nbytes for handle, _ in task.accesses) for task in plan.tasks]
        return [1e-3 * (len(task.name) + size) for task, size in zip(plan.tasks, sizes, strict=True)]  # it sums one scalar per parameter

    assert _kernel_seconds(whole, trial, seconds(trial)) == pytest.approx(sum(seconds(whole)), rel=1e-9)
    assert len(whole.tasks) > 2 * len(trial.tasks)


@pytest.mark.parametrize(("layers", "left_out"), [(2, ""), (4, " (from 2 of 4 layers)")])
def test_a_trial_says_what_it_left_out(layers, left_out):
    """Models of more than two layers run with two."""
    config = replace(CONFIG, n_layer=layers)
    seconds, words = measure(resolve(ASKED, config), cut(config, 2, 32, Limits(32, 64, 256)))
    assert 0 < seconds < 60
    assert words == left_out


def test_a_trial_of_the_whole_step_captures_it_once():
    """The check of its memory is what runs; a trial with fewer layers or minibatches is another step."""
    tiling = cut(CONFIG, 2, 32, Limits(32, 64, 256))
    for batch, num_captures in ((4, 1), (6, 2)):
        run = resolve(replace(ASKED, tiling=replace(ASKED.tiling, batch=batch)), CONFIG)
        assert count_calls(lambda run=run: measure(run, tiling), Recorder.finish) == [num_captures]


def test_neighbours_halve_and_double_one_limit():
    """Down to the smallest and up to the largest, the others untouched."""
    limits = Limits(300, 100, 4096)
    assert list(_halved(limits, "tokens")) == [Limits(150, 100, 4096), Limits(75, 100, 4096), Limits(64, 100, 4096)]
    larger = list(_doubled(limits, "vocab"))
    assert larger[:2] == [Limits(300, 100, 8192), Limits(300, 100, 16384)]
    assert larger[-1].vocab == 1 << 20


def test_rows_are_replaced_by_shape(tmp_path):
    """A file has one row for a shape, the latest; others stay."""
    path = tmp_path / "new" / "table.toml"
    one, other = shape_of(CONFIG, 2, 32), shape_of(CONFIG, 4, 32)
    add_row(path, one, ModelTiling(2, 32, 24, 96, 2, 300))
    add_row(path, other, ModelTiling(4, 32, 24, 96, 2, 300))
    add_row(path, one, ROW)
    assert read_table(path) == {one: ROW, other: ModelTiling(4, 32, 24, 96, 2, 300)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("seq_tile = 16", "seq_tile = 0"), "row 1: seq_tile must be a whole number of at least 1, got 0"),
        (("seq_tile = 16", 'seq_tile = "16"'), "row 1: seq_tile must be a whole number of at least 1, got '16'"),
        (("minibatch_tile = 1", "minibatch_tile = 3"), "row 1: minibatch_tile must divide minibatch = 2, got 3"),
        (("seq_tile = 16\n", ""), "row 1 must have the keys"),
        (("[[tiling]]", "[tiling]"), r"must hold \[\[tiling\]\] rows"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, change, words):
    """With the row and what is wrong with it."""
    path = tmp_path / "table.toml"
    add_row(path, shape_of(CONFIG, 2, 32), ROW)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(DataError, match=words):
        read_table(path)
