"""Steps of a running batch: their numbers of rows, their shared cache, and the tasks of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from scheduler import TaskRuntime
from tiles import TOKEN_ROWS, TileTensor

from ..architecture.family_config import ModelConfig
from ..errors import UsageError
from ..models.language import LanguageModel
from ..nn.autograd import no_grad
from ..nn.kv_cache import Past
from ..nn.kv_pages import KVPages, RowInputs
from .generator import check_writes

PROMPT_ROWS: Final = 64
"""Number of tokens of a prompt that a step reads."""
_MOST_PAGES: Final = 64
_SHORTEST_PAGE: Final = 16


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Limits of a batch.

    Args:
        slots: number of texts that run side by side.
        context: largest number of tokens that the model attends to.
        page: number of positions of a page, a divisor or a multiple of `PROMPT_ROWS`.
        num_pages: number of pages of all texts together.
    """

    slots: int
    context: int
    page: int
    num_pages: int

    @classmethod
    def of(cls, slots: int, context: int, num_pages: int | None = None) -> BatchShape:
        """Return a shape whose page length follows from the context, by default with all pages that `slots` texts may need."""
        page = _SHORTEST_PAGE
        while page * _MOST_PAGES < context:
            page *= 2
        return cls(slots, context, page, slots * -(-context // page) if num_pages is None else num_pages)

    @property
    def most(self) -> int:
        """Largest number of pages of a text."""
        return -(-self.context // self.page)

    @property
    def longest(self) -> int:
        """Largest number of positions of a text: the context, or all pages if they hold fewer."""
        return min(self.context, self.num_pages * self.page)


def check_joins(config: ModelConfig) -> None:
    """Check that texts of a model of `config` can run side by side in pages.

    Raises:
        UsageError: they cannot.
    """
    check_writes(config)
    if config.description.encoder is not None:
        raise UsageError(f"a {config.model_type} has an encoder, and texts that run side by side need a model without one", "use nntask generate")


def token_rows(slots: int, *, has_gpus: bool) -> tuple[int, ...]:
    """Return the numbers of rows of the steps that take a token of each text, in ascending order.

    The smallest step that holds all texts is run. If the largest step holds fewer texts than there are, several steps are run.
    """
    if has_gpus:
        return (slots,)
    most = min(slots, TOKEN_ROWS)
    return (*(1 << power for power in range((most - 1).bit_length())), most)


def pages_for(model: LanguageModel, runtime: TaskRuntime, shape: BatchShape) -> KVPages:
    """Build the cache of a batch."""
    sizes: Mapping[str, int] = {"num_pages": shape.num_pages, "length": shape.page, "most": shape.most, "longest": shape.longest}
    return KVPages(model.config, model.given_tiling, runtime, **sizes, dtype=model.lm_head.dtype)


def emit_rows(model: LanguageModel, past: Past, inputs: RowInputs, *, scores: bool) -> TileTensor | None:
    """Emit a step over rows. Return the scores (R, 1, V) of the next token of each row, or None if `scores` is false."""
    with no_grad():
        if scores:
            return model.continued_logits(inputs.tokens, past).data
        model.trunk(inputs.tokens, None, past)
        return None
