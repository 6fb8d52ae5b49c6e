"""Texts that continue prompts, token by token, by a model whose keys and values are cached.

The prompts' tokens but the last pass through the model once, in pieces of a tile of the cache, and leave keys and values behind. Then all texts of
the batch go on together, one token a step: the step is recorded, and recorded anew only when a text enters another tile of the cache, since then
the tasks are others. Texts of unequal length need no padding: every token knows its own position.

The context is the most tokens a model looks at. A longer prompt is refused, and a text ends when its context is full: sliding the window would give
every cached key another position, and so compute everything again for each token.

Frequencies that depend on the length of a text (LongRoPE's) are those of the longest text that may come: the longest prompt and all new tokens.

Where a model has an encoder, that reads the prompts, once; texts are what the decoder says then, and begin with the token before every output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tiles import TileTensor

from ..errors import UsageError
from ..models.language import LanguageModel
from ..nn.autograd import no_grad
from ..nn.kv_cache import KVCache
from .beams import BeamSearch, Hypothesis, Rows, search
from .encoded import attended, padded
from .penalties import NO_PENALTIES, Penalties
from .sampling import Sampling, choose

if TYPE_CHECKING:
    from scheduler import Runtime, Step

    from ..models.interface import ModelConfig

Scores = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class _DecodingStep:
    """A recorded step of one token per text, for the tiles that the tokens lie in; another one where texts go on from others."""

    step: Step
    output: TileTensor


def check_writes(config: ModelConfig) -> None:
    """Check that a model of `config` writes texts.

    Raises:
        UsageError: it predicts something else.
    """
    if config.objective not in ("causal", "seq2seq"):
        what = "predicts masked tokens" if config.objective == "masked" else "predicts a class"
        raise UsageError(f"a {config.model_type} that {what} writes no texts; use a model that predicts the next token")


class Generator:
    """Continues prompts with a model, or answers those that its encoder reads.

    Args:
        context: most tokens that the model looks at, at most its longest sequence; of prompt and text each where there is an encoder.
        use_cache: False computes every token from the whole text again, for comparison.
    """

    def __init__(self, model: LanguageModel, runtime: Runtime, context: int, *, use_cache: bool = True) -> None:
        self.model, self.runtime, self.context, self.use_cache = model, runtime, context, use_cache

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Check that prompts can be continued.

        Raises:
            UsageError: there are none, or one is empty, longer than the context, or has ids that the model does not know; or the model writes none.
        """
        check_writes(self.model.config)
        if not prompts:
            raise UsageError("texts begin with a prompt each, and there are none; give at least one")
        for number, prompt in enumerate(prompts, 1):
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            if not prompt:
                raise UsageError(f"{which} has no tokens, and a text begins with at least one; give it some")
            if len(prompt) > self.context:
                raise UsageError(f"{which} has {len(prompt)} tokens, more than the model's context of {self.context}; shorten it")
            if bad := [each for each in prompt if not 0 <= each < self.model.config.vocab_size]:
                raise UsageError(f"{which} has the id {bad[0]}, and the model knows 0 to {self.model.config.vocab_size - 1}; use its own tokenizer")

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        how: Sampling,
        *,
        vocab_size: int | None = None,
        stop: Collection[int] = (),
        first: int = 0,
        penalties: Penalties = NO_PENALTIES,
    ) -> Iterator[list[int | None]]:
        """Yield the next token of every text, and None for texts that have ended; until all have.

        A text ends after `count` tokens, before a token of `stop`, and when its context is full.

        Args:
            prompts: at least one id each.
            vocab_size: ids that may come; the model's scores beyond them are ignored.
            first: number of the first text, which decides its draws.

        Raises:
            UsageError: see `check`.
            Diverged: the model's scores are not finite.
        """
        self.check(prompts)
        texts = self.begins(prompts)
        goes_on = [True] * len(texts)
        scores = self._scorer(prompts, texts, count)
        for number in range(count):
            found = scores()
            tokens: list[int | None] = []
            for row, text in enumerate(texts):
                token = choose(found[row, :vocab_size], how, how.draw(first + row, number), text, penalties) if goes_on[row] else None
                if token is not None and token not in stop:
                    text.append(token)
                    goes_on[row] = len(text) <= self.context
                    tokens.append(token)
                else:
                    goes_on[row] = False
                    tokens.append(None)
            if all(token is None for token in tokens):
                return
            yield tokens
            if not any(goes_on):
                return

    def beams(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        how: BeamSearch,
        *,
        vocab_size: int | None = None,
        stop: Collection[int] = (),
        penalties: Penalties = NO_PENALTIES,
    ) -> list[list[Hypothesis]]:
        """Search for the most probable texts: for each prompt its hypotheses, at most `how.num_beams` and at least one, the best first.

        A text ends after `count` tokens, with a token of `stop`, and when its context is full. Arguments as of `stream`.

        Raises:
            UsageError: see `check`.
            Diverged: the model's scores are not finite.
        """
        self.check(prompts)
        begins = self.begins(prompts)
        limits = [min(count, self.context + 1 - len(begin)) for begin in begins]
        length = self._cache_length(begins, count)

        def scorer(texts: list[list[int]]) -> Callable[[Rows], Scores]:
            if not self.use_cache:
                return lambda rows: self._scores_again(prompts, texts, length)
            cache = self.model.cache(len(prompts), length)
            self._fill(cache, begins)
            if how.num_beams > 1:
                of_prompts, cache = cache, self.model.cache(len(prompts), length, how.num_beams)
                cache.take(of_prompts)
            self._attend_across(cache, prompts, how.num_beams)
            return _Steps(self.model, self.runtime, cache, texts).scores

        return search(begins, limits, how, scorer, vocab_size=vocab_size, stop=stop, penalties=penalties)

    def begins(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Ids that texts begin with: the prompts, or where an encoder reads those the one before every output."""
        start = self.model.start
        return [list(prompt) if start is None else [start] for prompt in prompts]

    def _scorer(self, prompts: Sequence[Sequence[int]], texts: list[list[int]], count: int) -> Callable[[], Scores]:
        """A function that scores what follows each text as it is when called  # -> (B, V)."""
        length = self._cache_length(texts, count)
        if not self.use_cache:
            return lambda: self._scores_again(prompts, texts, length)
        cache = self.model.cache(len(texts), length)
        self._fill(cache, texts)
        self._attend_across(cache, prompts, 1)
        return _Steps(self.model, self.runtime, cache, texts).scores

    def _cache_length(self, texts: Sequence[Sequence[int]], count: int) -> int:
        """Positions of a cache for `count` new tokens of each text."""
        return min(self.context, max(map(len, texts)) + count - 1)

    def _attend_across(self, cache: KVCache, prompts: Sequence[Sequence[int]], num_beams: int) -> None:
        """Let a cache's passes see the prompts, where an encoder reads them."""
        if self.model.start is not None:
            cache.attend_across(attended(self.model, prompts, num_beams))

    def _fill(self, cache: KVCache, texts: Sequence[Sequence[int]]) -> None:
        """Put keys and values of all tokens but the last of each text into the cache, tile by tile; behind shorter texts lies padding that is
        never read."""
        longest = max(map(len, texts)) - 1
        for start in range(0, longest, cache.tile):
            end = min(start + cache.tile, longest)
            tokens, positions = cache.inputs(end - start)
            ids = np.zeros(tokens.shape, np.int32)
            for row, text in enumerate(texts):
                piece = text[start:end]
                ids[row, : len(piece)] = piece
            tokens.write(ids)
            positions.write(np.broadcast_to(np.arange(start, end, dtype=np.int32), ids.shape))
            cache.grow(end)
            cache.leave(min(start, *(len(text) - 1 for text in texts)))
            with no_grad():
                self.model.trunk(tokens, None, cache.past(positions, range(start // cache.tile, start // cache.tile + 1)))

    def _scores_again(self, prompts: Sequence[Sequence[int]], texts: list[list[int]], longest: int) -> Scores:
        """Scores from the whole texts  # -> (B, V); of one that ended with its context full, without its last token. Prompts have equally many.

        Args:
            longest: positions that a cache would have. Padding up to that number if longer texts turn at frequencies of their own.
        """
        model, texts = self.model, [text[: self.context] for text in texts]
        model.eval()
        length = max(map(len, texts))
        if any(rotary.is_long(longest) for rotary in model.config.description.stack.rotaries):
            length = longest
        if model.start is None:
            given, key = {"tokens": model.input_tensors(len(texts), length)[0]}, "tokens"
        else:
            each_has = len(texts) // len(prompts)
            given, key = padded(model, [prompt for prompt in prompts for _ in range(each_has)], length), "decoder_tokens"
        last = model.position_tensor(len(texts))
        ids = np.zeros((len(texts), length), np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        given[key].write(ids)
        last.write(np.array([len(text) - 1 for text in texts], np.int32))
        with no_grad():
            return model.next_logits(positions=last, **given).read()[:, 0]


class _Steps:
    """Scores of a batch of texts whose tokens but the last are in a cache; each step adds the last ones."""

    def __init__(self, model: LanguageModel, runtime: Runtime, cache: KVCache, texts: list[list[int]]) -> None:
        self._model, self._runtime, self._cache, self._texts = model, runtime, cache, texts
        self._tokens, self._positions = cache.inputs(1)
        self._sources, self._itself = cache.sources(), np.arange(len(texts), dtype=np.int32)
        self._shared = min(map(len, texts)) - 1
        self._written = range(0)
        self._recorded: dict[bool, _DecodingStep] = {}

    def scores(self, rows: Rows | None = None) -> Scores:
        """Scores of what follows each text  # -> (B, V). A text that has ended is where it was.

        Args:
            rows: (B,), the text that each text was before its last token, of those with equal prompts; None for itself.
        """
        positions = [len(text) - 1 for text in self._texts]
        last = self._cache.last_position
        at = np.minimum(np.array(positions, np.int32), last)[:, None]
        self._tokens.write(np.array([[text[-1]] for text in self._texts], np.int32))
        self._positions.write(at)
        moved = None if rows is None or np.array_equal(rows, self._itself) else rows
        if moved is not None:
            self._sources.write(moved)
        recorded = self._step(range(int(at.min()) // self._cache.tile, int(at.max()) // self._cache.tile + 1), moved is not None)
        scores: Scores = recorded.step.replay().read(recorded.output)[:, 0]
        return scores

    def _step(self, written: range, forks: bool) -> _DecodingStep:
        """The recorded step for tokens in these tiles of the cache."""
        if self._written != written:
            self._recorded.clear()
            self._written = written
        if forks not in self._recorded:
            self._cache.grow(written.stop * self._cache.tile)
            self._cache.leave(written.start * self._cache.tile)
            sources = self._sources if forks else None
            with no_grad(), self._runtime.record(groups=True) as step:
                output = self._model.continued_logits(self._tokens, self._cache.past(self._positions, written, sources, self._shared)).data
            self._recorded[forks] = _DecodingStep(step, output)
        return self._recorded[forks]
