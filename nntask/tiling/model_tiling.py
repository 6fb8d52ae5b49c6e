"""Tile sizes of a model's six dimensions, and the built-in table that provides them by default.

Tile sizes are part of the numerics (they fix the order of sums), so the table depends only on the model and the shape of a minibatch, never on
workers, budgets or measurements. Its limits (tokens, features and vocabulary rows per tile) become sizes in `cut`. ``--auto-tile measured`` searches
the same grid of sizes; `tile_table` keeps its results.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import isqrt, lcm
from typing import TYPE_CHECKING, Final, NamedTuple

from ..errors import UsageError

if TYPE_CHECKING:
    from ..architecture.family_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelTiling:
    """Tile sizes; -1, or a size larger than the dimension, is the whole dimension.

    Args:
        minibatch_tile: sequences per tile.
        seq_tile: tokens per tile.
        embd_tile: features of the residual stream per tile.
        inner_tile: features of the feed-forward layer per tile.
        head_tile: heads of queries per tile, in whole groups of heads that share a head of keys and values, which is in the same tile.
        vocab_tile: rows of the embedding and of the head per tile.

    Raises:
        UsageError: a size is zero or below -1.
    """

    minibatch_tile: int = -1
    seq_tile: int = -1
    embd_tile: int = -1
    inner_tile: int = -1
    head_tile: int = -1
    vocab_tile: int = -1

    def __post_init__(self) -> None:
        for f in fields(self):
            size = getattr(self, f.name)
            if size == 0 or size < -1:
                raise UsageError(
                    f"{f.name} must be at least 1, or -1 for the whole dimension, got {size}", f"the nearest legal value is {1 if size == 0 else -1}"
                )

    def resolve(self, config: ModelConfig, minibatch: int, seq_len: int) -> ModelTiling:
        """Return the same tiling with every size between 1 and its dimension.

        Raises:
            UsageError: a tile of heads of queries would hold only some of the heads that share a head of keys and values.
        """
        whole = (minibatch, seq_len, config.n_embd, config.inner_size, config.n_head, config.vocab_size)
        sizes = (getattr(self, f.name) for f in fields(self))
        tiling = ModelTiling(*(n if size == -1 else min(size, n) for size, n in zip(sizes, whole, strict=True)))
        group = config.n_head // config.n_kv_head
        if tiling.head_tile % group:
            near = max(group, (tiling.head_tile + group // 2) // group * group)
            raise UsageError(
                f"head_tile must be a multiple of {group}, because {group} heads of queries share each of the {config.n_kv_head} heads of keys and "
                f"values, got {tiling.head_tile}",
                f"the nearest legal value is {near}",
            )
        return tiling

    def in_blocks(self, config: ModelConfig, sizes: Iterable[int]) -> ModelTiling:
        """Return the tiling with features and heads rounded up to whole blocks of each size, in dimensions that are divisible by it.

        Args:
            sizes: numbers of features in a block; larger sizes are multiples of smaller ones.
        """

        def rounded(tile: int, extent: int, step: int) -> int:
            return tile if tile == -1 or extent % step else -(-tile // step) * step

        tiling = self
        for size in sorted(sizes):
            heads = lcm(config.head_size, size) // config.head_size
            heads = lcm(heads, config.n_head // config.n_kv_head)  # a tile holds whole groups
            tiling = replace(
                tiling,
                embd_tile=rounded(tiling.embd_tile, config.n_embd, size),
                inner_tile=rounded(tiling.inner_tile, config.inner_size, size),
                head_tile=rounded(tiling.head_tile, config.n_head, heads),
            )
        return tiling


class Limits(NamedTuple):
    """Largest tiles; a tiling is determined by them.

    Args:
        tokens: largest number of tokens per tile.
        features: largest number of features per tile, of the residual stream, the heads and the feed-forward layer.
        vocab: largest number of rows of the embedding per tile.
    """

    tokens: int
    features: int
    vocab: int


_TABLE: Final = {
    "cpu": (
        (512, Limits(tokens=512, features=2048, vocab=4096)),
        (2048, Limits(tokens=1024, features=4096, vocab=8192)),
        (1 << 31, Limits(tokens=1024, features=2048, vocab=4096)),
    ),
    "cuda": ((1 << 31, Limits(tokens=4096, features=8192, vocab=16384)),),
}
"""Device class -> (largest n_embd, limits for models up to that width). Limits for GPUs are not tuned on a card yet: they follow from a launch of
some microseconds and products at hundreds of Tflop/s."""
_FEW_ROWS: Final = 512
_MULTIPLE: Final = 64


def table_limits(config: ModelConfig, minibatch: int, seq_len: int, *, device: str = "cpu") -> Limits:
    """Return the table's limits for `minibatch` sequences of `seq_len` tokens: at least two tiles of tokens if there are at least two tokens.

    Args:
        device: device class, a key of the table.

    Raises:
        UsageError: a count is not positive.
    """
    if minibatch < 1 or seq_len < 1:
        raise UsageError(f"minibatch and sequence length must be at least 1, got {minibatch} and {seq_len}", "the nearest legal value is 1")
    row = next(limits for width, limits in _TABLE[device] if config.n_embd <= width)
    total = minibatch * seq_len
    return Limits(
        tokens=min(row.tokens, -(-total // 2)),
        features=row.features,
        vocab=min(row.vocab, max(_FEW_ROWS, -(-config.vocab_size // 2))),
    )


def default_tiling(config: ModelConfig, minibatch: int, seq_len: int, *, device: str = "cpu") -> ModelTiling:
    """Return the tiling that results from `table_limits`."""
    return cut(config, minibatch, seq_len, table_limits(config, minibatch, seq_len, device=device))


_CACHE_TILE: Final = 512
_GENERATION: Final = Limits(tokens=_CACHE_TILE, features=4096, vocab=8192)


_FEW_WEIGHTS: Final = 4 << 20
"""Number of quantised weights of one attention layer up to which its heads are one tile. One worker reads them in 0.1 to 0.2 ms, as long as the tasks
of a second tile and help by another worker. A token of GPT-2 medium took 16.7 ms instead of 18.6 as q4_0, and 20.1 instead of 21.2 as q8_0."""


def generation_tiling(config: ModelConfig, *, is_quantised: bool = False) -> ModelTiling:
    """Return tiles for generating text, where each step reads every weight once for a few tokens.

    All texts of a batch are in one tile. Every dimension except the residual stream has at least two tiles, so that two workers share the reading.
    Experts, which workers share instead, are the exception: their width has as few tiles as the limit allows, one up to 4,096 features, because a
    part of a matrix would be read from its file in short pieces. Other feed-forward layers of such a model have tiles of that width, so they are
    whole if they are no wider than an expert. Keys and values have tiles of `_CACHE_TILE` positions.

    Args:
        is_quantised: whether matrices are quantised; two workers then gain nothing from sharing the attention of a narrow model.
    """

    def halved(extent: int, limit: int) -> int:
        pieces = 2 * -(-extent // (2 * limit))  # an even number, half for each of two workers
        return even(extent, -(-extent // pieces))

    of_attention = 2 * config.n_embd * (config.n_head + config.n_kv_head) * config.head_size
    heads = halved(config.n_head, max(1, _GENERATION.features // config.head_size))
    has_experts = config.description.stack.num_idle(config.n_embd) > 0
    return ModelTiling(
        seq_tile=_CACHE_TILE,
        embd_tile=even(config.n_embd, _GENERATION.features),
        inner_tile=(even if has_experts else halved)(config.inner_size, _GENERATION.features),
        head_tile=whole_groups(config, config.n_head if is_quantised and of_attention <= _FEW_WEIGHTS else heads),
        vocab_tile=halved(config.vocab_size, _GENERATION.vocab),
    )


def cut(config: ModelConfig, minibatch: int, seq_len: int, limits: Limits) -> ModelTiling:
    """Return the tiling with the fewest tiles within `limits`, of nearly equal size."""
    if seq_len > limits.tokens:
        sequences, seq_tile = 1, even(seq_len, limits.tokens)
    else:
        sequences, seq_tile = max(n for n in divisors(minibatch) if n * seq_len <= limits.tokens), seq_len
    return ModelTiling(
        minibatch_tile=sequences,
        seq_tile=seq_tile,
        embd_tile=even(config.n_embd, limits.features),
        inner_tile=even(config.inner_size, limits.features),
        head_tile=whole_groups(config, limits.features // config.head_size),
        vocab_tile=even(config.vocab_size, limits.vocab),
    )


def whole_groups(config: ModelConfig, limit: int) -> int:
    """Return the number of heads of queries per tile, at most `limit` if a group fits: heads that share a head of keys and values are in one tile."""
    group = config.n_head // config.n_kv_head
    return group * even(config.n_kv_head, max(1, limit // group))


def even(extent: int, limit: int) -> int:
    """Return the tile size that cuts `extent` into the fewest, nearly equal tiles of at most `limit`; large sizes are multiples of 64."""
    if extent <= limit:
        return extent
    size = -(-extent // -(-extent // limit))
    rounded = -(-size // _MULTIPLE) * _MULTIPLE
    return rounded if size >= _MULTIPLE and rounded <= limit else size


def divisors(n: int) -> list[int]:
    """Return the divisors of n, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
