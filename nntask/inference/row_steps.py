"""The steps of a running batch: how many rows they have, the cache that they share, and the tasks of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tiles import TOKEN_ROWS, TileTensor

from ..errors import UsageError
from ..models.language import LanguageModel
from ..nn.autograd import no_grad
from ..nn.kv_cache import Past
from ..nn.kv_pages import KVPages, RowInputs
from .generator import check_writes

if TYPE_CHECKING:
    from scheduler import TaskRuntime

    from ..models.interface import ModelConfig

PROMPT_ROWS: Final = 64
"""Tokens of a prompt that a step takes."""
_MOST_PAGES: Final = 64
_SHORTEST_PAGE: Final = 16


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How large a batch may become.

    Args:
        slots: texts side by side.
        context: most tokens that the model looks at.
        page: positions of a page, a divisor or a multiple of `PROMPT_ROWS`.
        num_pages: of all texts together.
    """

    slots: int
    context: int
    page: int
    num_pages: int

    @classmethod
    def of(cls, slots: int, context: int, num_pages: int | None = None) -> BatchShape:
        """With pages of a length that follows from the context, as many as all slots may come to need unless given."""
        page = _SHORTEST_PAGE
        while page * _MOST_PAGES < context:
            page *= 2
        return cls(slots, context, page, slots * -(-context // page) if num_pages is None else num_pages)

    @property
    def most(self) -> int:
        """Most pages of a text."""
        return -(-self.context // self.page)

    @property
    def longest(self) -> int:
        """Most positions of a text: those of the context, or of all pages."""
        return min(self.context, self.num_pages * self.page)


def check_joins(config: ModelConfig) -> None:
    """Check that texts of a model of `config` can run side by side in pages.

    Raises:
        UsageError: they cannot.
    """
    check_writes(config)
    if config.description.encoder is not None:
        raise UsageError(f"a {config.model_type} reads prompts with an encoder, and texts that join are of models without one; use nntask generate")


def token_rows(slots: int, *, has_gpus: bool) -> tuple[int, ...]:
    """Rows of the steps that take a token of each text, ascending: the smallest that holds all texts is run, and of more texts than the largest holds
    several."""
    if has_gpus:
        return (slots,)
    most = min(slots, TOKEN_ROWS)
    return (*(1 << power for power in range((most - 1).bit_length())), most)


def pages_for(model: LanguageModel, runtime: TaskRuntime, shape: BatchShape) -> KVPages:
    """The cache of a batch."""
    sizes: Mapping[str, int] = {"num_pages": shape.num_pages, "length": shape.page, "most": shape.most, "longest": shape.longest}
    return KVPages(model.config, model.given_tiling, runtime, **sizes, dtype=model.lm_head.dtype)


def emit_rows(model: LanguageModel, past: Past, inputs: RowInputs, *, scores: bool) -> TileTensor | None:
    """Emit a step over rows: the scores (R, 1, V) of what follows each, or None."""
    with no_grad():
        if scores:
            return model.continued_logits(inputs.tokens, past).data
        model.trunk(inputs.tokens, None, past)
        return None
