"""Tile sizes of a model, and the table they come from."""

import pytest

from nntask.errors import UsageError
from nntask.models.gpt2 import GPT2Config
from nntask.models.registry import PRESETS
from nntask.tiling.model_tiling import ModelTiling, default_tiling, even


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize(("minibatch", "seq_len"), [(1, 256), (1, 2), (2, 200), (8, 256), (7, 33), (3, 1), (12, 64)])
def test_two_workers_are_both_busy_by_default(name, minibatch, seq_len):
    """There are always at least two tiles of tokens of which none is more than twice another, and the minibatch is cut evenly."""
    tiling = default_tiling(PRESETS[name], minibatch, seq_len)
    assert minibatch % tiling.minibatch_tile == 0
    cuts = -(-seq_len // tiling.seq_tile)
    assert cuts * (minibatch // tiling.minibatch_tile) >= 2
    assert tiling == tiling.resolve(PRESETS[name], minibatch, seq_len)


def test_the_table_cuts_gpt2_as_measured():
    """A change of the table changes numerics and speed: it must be meant."""
    assert default_tiling(PRESETS["tiny"], 8, 256) == ModelTiling(2, 256, 256, 1024, 4, 2048)
    assert default_tiling(PRESETS["gpt2"], 4, 1024) == ModelTiling(1, 1024, 768, 3072, 12, 7232)
    assert default_tiling(PRESETS["gpt2"], 1, 1024) == ModelTiling(1, 512, 768, 3072, 12, 7232)
    assert default_tiling(PRESETS["gpt2-medium"], 2, 1024) == ModelTiling(1, 1024, 1024, 4096, 16, 7232)
    assert default_tiling(PRESETS["gpt2"], 16, 1024, device="cuda") == ModelTiling(4, 1024, 768, 3072, 12, 12608)
    assert default_tiling(PRESETS["gpt2-xl"], 16, 1024, device="cuda") == ModelTiling(4, 1024, 1600, 6400, 25, 12608)


def test_whole_and_too_large_sizes_resolve_to_the_dimension():
    """-1 and anything larger than the dimension are the dimension."""
    config = GPT2Config(vocab_size=100, n_positions=64, n_embd=30, n_layer=1, n_head=3, n_inner=50)
    assert ModelTiling(-1, 99, 7, -1, 2, 1000).resolve(config, 4, 32) == ModelTiling(4, 32, 7, 50, 2, 100)


@pytest.mark.parametrize("size", [0, -2])
def test_sizes_below_one_are_refused(size):
    """Except -1."""
    with pytest.raises(UsageError, match="head_tile must be at least 1"):
        ModelTiling(head_tile=size)


@pytest.mark.parametrize(("extent", "limit"), [(1, 5), (10, 3), (50257, 8192), (6400, 4096), (65, 64), (1000, 1)])
def test_even_tiles_stay_below_the_limit(extent, limit):
    """As few tiles as possible, or at most one more for round sizes."""
    size = even(extent, limit)
    assert 1 <= size <= min(limit, extent)
    assert -(-extent // size) <= -(-extent // limit)
