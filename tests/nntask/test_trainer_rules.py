"""Rules between settings, and what unset values become."""

from dataclasses import dataclass, replace

import pytest

from nntask.errors import UsageError
from nntask.trainer.rules import check_values, resolve
from nntask.trainer.settings import TrainSettings, differences, from_dict
from wrappers.cli.flags import build, scan, table_of

TABLE = table_of(TrainSettings)


@dataclass(frozen=True)
class Shape:
    n_positions: int = 64
    vocab_size: int = 100


def settings(*argv: str) -> TrainSettings:
    """Settings of a command line."""
    return build(TrainSettings(), scan(argv, TABLE)[0], TABLE)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch=6", "--minibatch=4"], "--minibatch must divide --batch = 6, got 4; the nearest legal value is 3"),
        (["--batch=8", "--minibatch=4", "--minibatch-tile=3"], "--minibatch-tile must divide --minibatch = 4, got 3; the nearest legal value is 2"),
        (["--seq-len=65"], "--seq-len must be at most n_positions = 64, got 65; the nearest legal value is 64"),
        (["--seq-tile=128"], "--seq-tile must be at most the sequence length 64, got 128"),
    ],
)
def test_rules_between_values(argv, words):
    """Flag, value, rule and the nearest legal value are in the message."""
    with pytest.raises(UsageError) as error:
        resolve(settings(*argv), Shape())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch=0"], "--batch must be at least 1, got 0"),
        (["--steps=-3"], "--steps must be at least 1, got -3"),
        (["--nepochs=-1"], "--nepochs must be 0 or more"),
        (["--minibatch=0"], "--minibatch must be at least 1, or -1 for the whole, got 0"),
        (["--vocab-tile=-2"], "--vocab-tile must be at least 1, or -1"),
        (["--keep-checkpoints=0"], "--keep-checkpoints must be at least 1"),
        (["--dropout=1"], "--dropout must be at least 0 and below 1, got 1"),
        (["--lr=nan"], "--lr must be at least 0, got nan"),
        (["--lr=-1"], "--lr must be at least 0, got -1"),
        (["--restrict=cuda"], "drop --restrict=cuda"),
        (["--ram=12XB"], "--ram must be a size in B, KiB"),
        (["--model=tiny", "--config-path=x"], "both name a model"),
        (["--redux", "--lanes=2"], "--redux means --lanes 4"),
        (["--full-lr-iter=5", "--warmup-steps=5"], "are both warm-ups"),
        (["--trace=x", "--trace-steps=5:2"], "--trace-steps must be A:B"),
        (["--trace-steps=1:2"], "needs --trace FILE"),
        (["--ncpu=0"], "leaves nobody to compute"),
        (["--momentum=0.9"], "belongs to --optimizer sgd"),
    ],
)
def test_values_on_their_own(argv, words):
    """Counts, ranges and combinations are checked without a model."""
    with pytest.raises(UsageError) as error:
        check_values(settings(*argv))
    assert words in str(error.value)


def test_defaults_of_the_small_model():
    """Without flags: 8 sequences, 1e-3, ten warm-up steps, 200 steps; resolving twice changes nothing."""
    resolved = resolve(TrainSettings(), Shape())
    assert (resolved.tiling.batch, resolved.tiling.minibatch, resolved.model.seq_len) == (8, 8, 64)
    assert (resolved.optimizer.lr, resolved.optimizer.warmup_steps, resolved.run.steps) == (1e-3, 10, 200)
    assert (resolved.model.model, resolved.optimizer.optimizer, resolved.tiling.lanes) == ("tiny", "adamw", 1)
    assert resolve(resolved, Shape()) == resolved


def test_aliases_resolve():
    """--redux is four lanes, --fp32-fast-tf32 is tf32, timing loops alone train nothing."""
    resolved = resolve(settings("--redux", "--fp32-fast-tf32", "--nforward=3", "--full-lr-iter=10"), Shape())
    assert (resolved.tiling.lanes, resolved.model.dtype, resolved.run.steps, resolved.optimizer.warmup_steps) == (4, "tf32", None, 0)


def test_differences_name_locked_flags_only():
    """Resources may differ between a run and its continuation; learning rates and tiles may not."""
    stored = resolve(settings("--lr=1e-3", "--ncpu=2"), Shape())
    now = resolve(settings("--lr=2e-3", "--ncpu=1", "--seq-tile=32"), Shape())
    assert differences(stored, now) == ["--seq-tile (was None, is 32)", "--lr (was 0.001, is 0.002)"]
    assert differences(stored, replace(stored, resources=now.resources)) == []


def test_settings_come_back_from_a_dict():
    """state.json's copy of the settings is read back."""
    from dataclasses import asdict

    stored = resolve(settings("--lr=1e-3"), Shape())
    assert from_dict(asdict(stored)) == stored
