"""Texts that continue prompts, token by token, by a model whose keys and values are cached.

All tokens of the prompts but the last pass through the model once, in pieces of a tile of the cache, which stores their keys and values. Then all
texts of the batch advance together, one token a step. The step is recorded, and recorded anew only when a text enters another tile of the cache,
since its tasks change then. Texts of unequal length need no padding: every token knows its own position.

The context is the largest number of tokens that a model attends to. A longer prompt is refused, and a text ends when its context is full: a sliding
window would move every cached key to another position, so each token would recompute all of them. Frequencies that depend on the length of a text
(LongRoPE) are those of the longest possible text: the longest prompt and all new tokens.
An encoder reads the prompts once, and every token of the decoder attends to its output; the texts then begin with the model's start token. Letters:
B prompts, S tokens of the longest prompt, T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler import Runtime, Step
from tiles import TileTensor

from ..architecture.family_config import ModelConfig
from ..errors import UsageError
from ..models.language import LanguageModel
from ..nn.autograd import no_grad
from ..nn.kv_cache import EncoderPast, KVCache, kept, source_documents
from .beams import BeamSearch, Hypothesis, Rows, search
from .sampling import NO_PENALTIES, Penalties, Sampling, choose

Scores = npt.NDArray[np.floating[Any]]


def check_writes(config: ModelConfig) -> None:
    """Check that a model of `config` writes texts.

    Raises:
        UsageError: it predicts masked tokens or a class.
    """
    if config.objective not in ("causal", "seq2seq"):
        what = "predicts masked tokens" if config.objective == "masked" else "predicts a class"
        raise UsageError(f"a {config.model_type} that {what} cannot generate text", "use a model that predicts the next token")


class Generator:
    """Writer of texts that continue prompts, or that answer prompts read by an encoder.

    Args:
        context: largest number of tokens that the model attends to, at most its longest sequence. With an encoder, prompt and text each have it.
        use_cache: whether keys and values are cached; False recomputes the whole text for every token, for comparison.
    """

    def __init__(self, model: LanguageModel, runtime: Runtime, context: int, *, use_cache: bool = True) -> None:
        self.model, self.runtime, self.context, self.use_cache = model, runtime, context, use_cache

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Check that prompts can be continued.

        Raises:
            UsageError: there is no prompt; a prompt is empty, longer than the context, or has ids that the model does not know; or the model
                cannot generate text.
        """
        check_writes(self.model.config)
        if not prompts:
            raise UsageError("generation needs at least one prompt, got none", "give one")
        for number, prompt in enumerate(prompts, 1):
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            if not prompt:
                raise UsageError(f"{which} must have at least one token, got none", "give it a text")
            if len(prompt) > self.context:
                raise UsageError(f"{which} has {len(prompt)} tokens, more than the model's context of {self.context}", "shorten it")
            if bad := [each for each in prompt if not 0 <= each < self.model.config.vocab_size]:
                raise UsageError(f"{which} has the id {bad[0]}, and the model knows 0 to {self.model.config.vocab_size - 1}", "use its own tokenizer")

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
        """Yield the next token of every text, None for texts that have ended, until all have ended.

        A text ends after `count` tokens, before a token of `stop`, or when its context is full.

        Args:
            prompts: ids of each prompt, at least one.
            count: maximum number of new tokens of a text.
            how: rule by which tokens are chosen.
            vocab_size: number of ids that may be chosen; the model's scores beyond them are ignored.
            stop: ids that end a text.
            first: number of the first text, which decides its draws.
            penalties: penalties for repetition.

        Raises:
            UsageError: a prompt cannot be continued (`check`).
            Diverged: the model's scores are not finite.
        """
        self.check(prompts)
        texts = self.begins(prompts)
        goes_on = [True] * len(texts)
        scores = self._scorer(prompts, texts, count)
        for number in range(count):
            logits = scores()
            tokens: list[int | None] = []
            for row, text in enumerate(texts):
                token = choose(logits[row, :vocab_size], how, how.draw(first + row, number), text, penalties) if goes_on[row] else None
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
        """Search for the most probable texts and return the hypotheses of each prompt, best first, at least one and at most `how.num_beams`.

        A text ends after `count` tokens, with a token of `stop`, or when its context is full. The arguments are those of `stream`; `how` has the
        settings of the beam search.

        Raises:
            UsageError: a prompt cannot be continued (`check`).
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
        """Return the ids that texts begin with: the prompts, or the start token of a model with an encoder."""
        start = self.model.start
        return [list(prompt) if start is None else [start] for prompt in prompts]

    def _scorer(self, prompts: Sequence[Sequence[int]], texts: list[list[int]], count: int) -> Callable[[], Scores]:
        """Return a function () -> (B, V) that scores the next token of each text at the time of the call."""
        length = self._cache_length(texts, count)
        if not self.use_cache:
            return lambda: self._scores_again(prompts, texts, length)
        cache = self.model.cache(len(texts), length)
        self._fill(cache, texts)
        self._attend_across(cache, prompts, 1)
        return _Steps(self.model, self.runtime, cache, texts).scores

    def _cache_length(self, texts: Sequence[Sequence[int]], count: int) -> int:
        """Return the number of positions of a cache for `count` new tokens of each text."""
        return min(self.context, max(map(len, texts)) + count - 1)

    def _attend_across(self, cache: KVCache, prompts: Sequence[Sequence[int]], num_beams: int) -> None:
        """Let the decoder attend to the prompts, if an encoder reads them."""
        if self.model.start is not None:
            cache.attend_across(attended(self.model, prompts, num_beams))

    def _fill(self, cache: KVCache, texts: Sequence[Sequence[int]]) -> None:
        """Fill the cache, tile by tile, with keys and values of all tokens but the last of each text.

        Shorter texts are padded at the end; padding is never read.
        """
        longest = max(map(len, texts)) - 1
        for start in range(0, longest, cache.tile):
            end = min(start + cache.tile, longest)
            tokens, positions = cache.inputs(end - start)
            tokens.write(filled([text[start:end] for text in texts], tokens.shape))
            positions.write(np.broadcast_to(np.arange(start, end, dtype=np.int32), tokens.shape))
            cache.grow(end)
            cache.leave(min(start, *(len(text) - 1 for text in texts)))
            with no_grad():
                self.model.trunk(tokens, None, cache.past(positions, range(start // cache.tile, start // cache.tile + 1)))

    def _scores_again(self, prompts: Sequence[Sequence[int]], texts: list[list[int]], longest: int) -> Scores:
        """Return scores (B, V) of the next tokens, computed from the whole texts.

        A text that ended with a full context is scored without its last token.

        Args:
            prompts: prompts, each with the same number of texts.
            longest: number of positions of a cache. Texts are padded to it if the frequencies of the model depend on the length.
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
        given[key].write(filled(texts, (len(texts), length)))
        last.write(np.array([len(text) - 1 for text in texts], np.int32))
        with no_grad():
            return model.next_logits(positions=last, **given).read()[:, 0]


def filled(texts: Sequence[Sequence[int]], shape: Sequence[int], padding: int = 0) -> npt.NDArray[np.int32]:
    """Return ids of texts as rows of an array, with padding at their ends."""
    ids = np.full(shape, padding, np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    return ids


def padded(model: LanguageModel, sources: Sequence[Sequence[int]], length: int | None = None) -> dict[str, TileTensor]:
    """Return tokens and documents (B, S) of prompts of unequal lengths; shorter ones are padded at the end.

    Args:
        sources: ids of each prompt.
        length: T, to add `decoder_tokens` (B, T), which are not written.
    """
    names = ("tokens", "documents") if length is None else ("tokens", "documents", "decoder_tokens")
    tensors = model.inputs(len(sources), max(map(len, sources)), names, length)
    tensors["tokens"].write(filled(sources, tensors["tokens"].shape, getattr(model.config, "pad_token_id", None) or 0))
    tensors["documents"].write(_is_text(sources))
    return tensors


def attended(model: LanguageModel, sources: Sequence[Sequence[int]], num_beams: int = 1) -> list[EncoderPast]:
    """Run the encoder once and return the keys and values of the prompts for each layer of the decoder, `num_beams` rows a prompt."""
    given = padded(model, sources)
    model.eval()
    with no_grad():
        pairs = [(keys.data, values.data) for keys, values in model.encode(**given)]
    return pasts(pairs, sources, num_beams)


def pasts(pairs: list[tuple[TileTensor, TileTensor]], sources: Sequence[Sequence[int]], num_beams: int) -> list[EncoderPast]:
    """Return the pasts of keys and values (B, S, G*D) of each layer. `pairs` is emptied, which frees its memory."""
    found: list[EncoderPast] = []
    while pairs:
        pair = pairs.pop(0)
        keys, values = (kept(each, num_beams) for each in pair)
        documents = found[0].documents if found else source_documents(keys, _is_text(sources))
        found.append(EncoderPast(keys, values, documents))
        del pair
    return found


def _is_text(sources: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Return (B, S): 1 for a token of a prompt, 0 for padding."""
    lengths = np.array([len(source) for source in sources])[:, None]
    return (np.arange(lengths.max()) < lengths).astype(np.int32)


class _Steps:
    """Scores of a batch of texts. All tokens but the last are in a cache; each step adds the last ones."""

    def __init__(self, model: LanguageModel, runtime: Runtime, cache: KVCache, texts: list[list[int]]) -> None:
        self._model, self._runtime, self._cache, self._texts = model, runtime, cache, texts
        self._tokens, self._positions = cache.inputs(1)
        self._sources, self._itself = cache.sources(), np.arange(len(texts), dtype=np.int32)
        self._shared = min(map(len, texts)) - 1
        self._written = range(0)
        self._recorded: dict[bool, tuple[Step, TileTensor]] = {}

    def scores(self, rows: Rows | None = None) -> Scores:
        """Return scores (B, V) of the next token of each text. The position of a text that has ended does not change.

        Args:
            rows: (B,) index of the text, among those with equal prompts, that each text continues by its last token; None if each continues itself.
        """
        positions = [len(text) - 1 for text in self._texts]
        last = self._cache.last_position
        step_positions = np.minimum(np.array(positions, np.int32), last)[:, None]
        self._tokens.write(np.array([[text[-1]] for text in self._texts], np.int32))
        self._positions.write(step_positions)
        moved = None if rows is None or np.array_equal(rows, self._itself) else rows
        if moved is not None:
            self._sources.write(moved)
        step, output = self._step(
            range(int(step_positions.min()) // self._cache.tile, int(step_positions.max()) // self._cache.tile + 1), moved is not None
        )
        scores: Scores = step.replay().read(output)[:, 0]
        return scores

    def _step(self, written: range, forks: bool) -> tuple[Step, TileTensor]:
        """Return the recorded step for tokens in the tiles `written` of the cache, and its scores; steps with `forks` are recorded apart."""
        if self._written != written:
            self._recorded.clear()
            self._written = written
        if forks not in self._recorded:
            self._cache.grow(written.stop * self._cache.tile)
            self._cache.leave(written.start * self._cache.tile)
            sources = self._sources if forks else None
            with no_grad(), self._runtime.record(groups=True) as step:
                output = self._model.continued_logits(self._tokens, self._cache.past(self._positions, written, sources, self._shared)).data
            self._recorded[forks] = step, output
        return self._recorded[forks]
