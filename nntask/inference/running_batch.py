"""Texts that run side by side and join and leave between tokens (continuous batching: Yu et al., Orca, 2022).

A text has a slot and pages of the cache (`nn.kv_pages`, `page_pool`). Recorded steps do all the work, and none is recorded anew when texts come or
go. Some steps take a token of each of 1, 2, 4, ... texts and score the next one; another takes a piece of one prompt, a row for each token. `step`
runs the latter for the first text with an unread prompt, then the smallest of the former that holds all texts whose prompts are read. So a long
prompt delays no other text, and the cost of a token follows the number of running texts.

The scores of a text depend on its request alone: rows share only products with weights, whose loops give each row the bits that it has alone
(`kernels.cpu.matmul.are_tokens`). A position of a prompt always has the same row of its step, and attention adds pages in the order of the text.
GPUs choose their products by the number of rows, so there a step has a row for every slot, and last bits may depend on the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from scheduler import Runtime, Step
from tiles import TileTensor

from ..errors import Diverged, UsageError
from ..models.language import LanguageModel
from ..nn.kv_pages import RowInputs
from .page_pool import PagePool, digests_of
from .row_steps import PROMPT_ROWS, BatchShape, check_joins, emit_rows, pages_for, token_rows
from .sampling import NO_PENALTIES, OutputPenalties, Penalties, Sampling, check_finite, choose

Scores = npt.NDArray[np.floating[Any]]
Work = Literal["tokens", "prompt", "scored prompt"]

BEST: Final = Sampling(temperature=0)
"""Rule that always chooses the best token."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Request for a text: its beginning, and the rules by which it continues.

    Args:
        prompt: ids that the text begins with, at least one.
        limit: maximum number of new tokens.
        how: rule by which tokens are chosen.
        number: index of the text among those of one request, which decides its draws.
        stop: ids that end the text.
        penalties: penalties for repetition in prompt and output.
        output_penalties: penalties for tokens of the output; None for none.
        num_top: number of best tokens reported with each chosen one; None to report no probabilities at all.
        scores_prompt: whether the prompt's tokens are reported as well; the prompt's beginning is then computed even if another text has it.
    """

    prompt: tuple[int, ...]
    limit: int
    how: Sampling = BEST
    number: int = 0
    stop: frozenset[int] = frozenset()
    penalties: Penalties = NO_PENALTIES
    output_penalties: OutputPenalties | None = None
    num_top: int | None = None
    scores_prompt: bool = False


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a token, and the best tokens at its position with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class NextToken:
    """Result of a step for a text.

    Args:
        token: new token; None if the step chose a token of `stop`.
        end: reason for which the text ends here; None if it continues.
        score: log-probabilities of the token, if they were requested.
    """

    token: int | None
    end: Literal["stop", "length"] | None = None
    score: TokenScore | None = None


@dataclass(eq=False, slots=True)
class RunningText:
    """Text in the batch.

    Attributes:
        tokens: ids of prompt and output.
        prompt_scores: log-probabilities of the prompt's tokens except for the first, if they were requested.
        num_shared: number of tokens of the prompt that were in the cache already.
    """

    request: TextRequest
    slot: int
    tokens: list[int]
    pages: list[int]
    digests: list[bytes]
    num_reserved: int
    num_cached: int
    num_shared: int = 0
    prompt_scores: list[TokenScore] = field(default_factory=list)

    @property
    def num_new(self) -> int:
        """Number of tokens of the output."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_read(self) -> bool:
        """Whether the cache has all of the prompt but its last token."""
        return self.num_cached >= len(self.request.prompt) - 1


class RunningBatch:
    """Batch of texts that a model writes side by side.

    Args:
        model: model that continues texts; it is set to evaluation.
        vocab_size: number of ids that may be chosen; None for all.

    Attributes:
        pool: ownership of the pages.
        num_steps: number of steps so far, by kind.
        num_shared: number of tokens of prompts that were in the cache already.

    Raises:
        UsageError: the model cannot generate text, or reads prompts with an encoder.
    """

    def __init__(self, model: LanguageModel, runtime: Runtime, shape: BatchShape, *, vocab_size: int | None = None) -> None:
        check_joins(model.config)
        model.eval()
        self.shape, self.vocab_size = shape, vocab_size
        self.pool = PagePool(shape.num_pages, shape.page)
        self.num_steps: dict[Work, int] = {"tokens": 0, "prompt": 0, "scored prompt": 0}
        self.num_shared = 0
        self._model, self.runtime = model, runtime
        self._pages = pages_for(model, runtime, shape)
        self._inputs: dict[int, RowInputs] = {}
        self._recorded: dict[tuple[Work, int], tuple[Step, TileTensor | None]] = {}
        self._sizes = token_rows(shape.slots, has_gpus=runtime.has_gpus)
        self._slots: list[RunningText | None] = [None] * shape.slots
        self._unread: list[RunningText] = []

    @property
    def texts(self) -> list[RunningText]:
        """Running texts in the order of their slots."""
        return [text for text in self._slots if text is not None]

    def check(self, request: TextRequest) -> None:
        """Check that a text could run if it were alone.

        Raises:
            UsageError: its prompt is empty or has ids that the model does not know, or it may become too long.
        """
        length, size = len(request.prompt), self._model.config.vocab_size
        if not request.prompt or request.limit < 1:
            raise UsageError(f"a text needs at least 1 prompt token and 1 new token, got {length} and {request.limit}", "give it some")
        if bad := [each for each in request.prompt if not 0 <= each < size]:
            raise UsageError(f"the prompt has the id {bad[0]}, and the model knows 0 to {size - 1}", "use its own tokenizer")
        if length + request.limit - 1 > self.shape.longest:
            raise UsageError(
                f"prompt and new tokens must be at most {self.shape.longest + 1} tokens together, got {length} and {request.limit}",
                "shorten one of them",
            )

    def join(self, request: TextRequest) -> RunningText | None:
        """Add a text to the batch from the next step on. Return None if no slot is free, or fewer pages than the text may need.

        A prompt that begins like an earlier one shares its full pages: those of running texts, and those of ended texts until their pages are reused.

        Raises:
            UsageError: the request is refused by `check`.
        """
        self.check(request)
        if None not in self._slots:
            return None
        before = request.prompt[:-1]  # the last one is not read but continued
        digests = digests_of(before, self.shape.page)
        known = [] if request.scores_prompt else self.pool.known(digests)
        count = -(-(len(request.prompt) + request.limit - 1) // self.shape.page) - len(known)
        if not self.pool.begin(known, count):
            return None
        slot, num_known = self._slots.index(None), len(known) * self.shape.page
        text = RunningText(request, slot, list(request.prompt), list(known), digests, count, num_known, num_known)
        self._slots[slot] = text
        self.num_shared += num_known
        if not text.is_read:
            self._unread.append(text)
        return text

    def leave(self, text: RunningText) -> None:
        """Remove a text, whether it has ended or not; its slot is free at once."""
        if self._slots[text.slot] is text:
            self._slots[text.slot] = None
            self.pool.end(text.pages, text.num_reserved)
            if text in self._unread:
                self._unread.remove(text)

    def step(self) -> list[tuple[RunningText, NextToken | Diverged]]:
        """Read a piece of a prompt if one is unread, and extend every text whose prompt is read by a token.

        Texts that end, and texts whose scores are not finite, leave the batch.

        Raises:
            Exception: any exception of the runtime when a task or a memory fails; the batch is unusable afterwards.
        """
        results: list[tuple[RunningText, NextToken | Diverged]] = []
        if self._unread and (error := self._read(text := self._unread[0])) is not None:
            results.append((text, error))
            self.leave(text)
        if texts := [text for text in self.texts if text.is_read]:
            results += [(text, self._continued(text, scores)) for text, scores in zip(texts, self._scores(texts), strict=True)]
        for text, each in results:
            if isinstance(each, Diverged) or each.end is not None:
                self.leave(text)
        return results

    def _read(self, text: RunningText) -> Diverged | None:
        """Read the next piece of a prompt; the row of a position is always the same. Return the error if requested scores are not finite."""
        start, prompt = text.num_cached, text.request.prompt
        end = min((start // PROMPT_ROWS + 1) * PROMPT_ROWS, len(prompt) - 1)
        self._take_pages(text, end)
        rows, positions = np.arange(start, end) % PROMPT_ROWS, np.arange(start, end)
        work: Work = "scored prompt" if text.request.scores_prompt else "prompt"
        scores = self._run(work, PROMPT_ROWS, rows, [prompt[start:end], positions], [text.pages] * len(rows))
        if scores is not None:
            try:
                check_finite(scores[rows, : self.vocab_size].ravel())
            except Diverged as error:
                return error
            text.prompt_scores += [
                _told(scores[row, : self.vocab_size], prompt[position + 1], text.request.num_top or 0)
                for row, position in zip(rows, positions, strict=True)
            ]
        # Only pages of prompts are shared. Pages of the output come from another step, which may have other last bits.
        for index in range(start // self.shape.page, end // self.shape.page):
            self.pool.know(text.pages[index], text.digests[index])
        text.num_cached = end
        if text.is_read:
            self._unread.remove(text)
        return None

    def _scores(self, texts: Sequence[RunningText]) -> Scores:
        """Return scores (len(texts), V) of the next token of each text."""
        for text in texts:
            self._take_pages(text, len(text.tokens))
        pieces = []
        for first in range(0, len(texts), self._sizes[-1]):
            piece = texts[first : first + self._sizes[-1]]
            size = next(size for size in self._sizes if size >= len(piece))
            rows = np.array([text.slot for text in piece]) if size == self.shape.slots else np.arange(len(piece))
            given = [[text.tokens[-1] for text in piece], [len(text.tokens) - 1 for text in piece]]
            scores = self._run("tokens", size, rows, given, [text.pages for text in piece])
            assert scores is not None  # this step has some
            pieces.append(scores[rows])
        return np.concatenate(pieces)

    def _continued(self, text: RunningText, scores: Scores) -> NextToken | Diverged:
        """Choose the next token of a text from its scores (V,)."""
        request, scores = text.request, scores[: self.vocab_size]
        try:
            check_finite(scores)
        except Diverged as error:
            return error
        changed = scores if request.output_penalties is None else request.output_penalties.apply(scores, text.tokens[len(request.prompt) :])
        token = choose(changed, request.how, request.how.draw(request.number, text.num_new), text.tokens, request.penalties)
        text.num_cached = len(text.tokens)
        if token in request.stop:
            return NextToken(None, "stop")
        text.tokens.append(token)
        score = None if request.num_top is None else _told(scores, token, request.num_top)
        return NextToken(token, "length" if text.num_new >= request.limit else None, score)

    def _take_pages(self, text: RunningText, length: int) -> None:
        """Take pages for the first `length` positions of a text."""
        while len(text.pages) * self.shape.page < length:
            text.pages.append(self.pool.take())
            text.num_reserved -= 1

    def record_ahead(self) -> bool:
        """Record the step for the next prompt unless it is recorded; return whether it was not. Call this while nothing runs."""
        if ("prompt", PROMPT_ROWS) in self._recorded or not self._pages.num_grown:
            return False
        self._step("prompt", PROMPT_ROWS)
        return True

    def _step(self, work: Work, num_rows: int) -> tuple[Step, TileTensor | None]:
        """Return a recorded step, and its scores if it has any."""
        if num_rows not in self._inputs:
            self._inputs[num_rows] = self._pages.inputs(num_rows)
        if (work, num_rows) not in self._recorded:
            inputs = self._inputs[num_rows]
            with self.runtime.record(groups=True) as step:
                output = emit_rows(self._model, self._pages.past(inputs), inputs, scores=work != "prompt")
            self._recorded[work, num_rows] = step, output
        return self._recorded[work, num_rows]

    def _run(
        self, work: Work, num_rows: int, rows: npt.NDArray[np.intp], given: Sequence[npt.ArrayLike], pages: Sequence[Sequence[int]]
    ) -> Scores | None:
        """Run a step.

        Args:
            rows: (n,) indices of the rows of the step that are not idle.
            given: tokens and positions of these rows, (n,) each.
            pages: pages of the text of each of these rows.

        Returns:
            Scores (num_rows, V); None if the step has none.
        """
        if self._pages.num_grown * self._pages.pages_per_tile < self.pool.num_highest:
            self._pages.grow(self.pool.num_highest)
            self._recorded.clear()
        (step, output), inputs = self._step(work, num_rows), self._inputs[num_rows]
        tokens, positions = np.zeros((2, num_rows, 1), np.int32)
        tokens[rows, 0], positions[rows, 0] = given
        table = np.full((num_rows, self.shape.most), -1, np.int32)
        for row, text_pages in zip(rows, pages, strict=True):
            table[row, : len(text_pages)] = text_pages
        inputs.tokens.write(tokens)
        inputs.positions.write(positions)
        inputs.table.write(table)
        self.num_steps[work] += 1
        ticket = step.replay()
        if output is None:
            return None
        scores: Scores = ticket.read(output)[:, 0]
        return scores


def _told(scores: Scores, token: int, num_top: int) -> TokenScore:
    """Return the score of a token and of the best ones, from the scores (V,) of all tokens at its position."""
    wide = np.asarray(scores, np.float64)
    logarithms = wide - wide.max()
    logarithms -= np.log(np.exp(logarithms).sum())
    best = np.argsort(-logarithms, kind="stable")[:num_top] if num_top else ()
    known = float(logarithms[token]) if token < len(logarithms) else -np.inf
    return TokenScore(token, known, tuple((int(each), float(logarithms[each])) for each in best))
