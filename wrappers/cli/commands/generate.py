"""``nntask generate``: texts from a run, a checkpoint, a model directory or a GGUF file.

A single text is printed as it grows. The texts of --prompt-file are printed in the order of the file, each under a line ``--- N`` with the number of
its line; the first incomplete text is printed as it grows. With --json each complete text is printed as a JSON object on one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from nntask.config import MachineSettings

from ..options.help import parse
from ..options.runtime_flags import machine_from, open_source, runtime_of
from ..output import json_line

if TYPE_CHECKING:
    from nntask.inference import Generator, Penalties, TextIds
    from nntask.models import LanguageModel

_OF_FILLED: Final = frozenset({"prompt", "prompt_file", "dtype", "tokenizer_path", "json"})
"""Settings that apply to texts with masks; the other settings apply only to texts that are continued."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Prompts, and the choice of tokens."""

    prompt: str = ""
    """beginning of the text (default: the model begins a new text)"""
    prompt_file: str = ""
    """file with one prompt per line; texts are printed in its order, each below a line --- N"""
    batch: int = 8
    """number of prompts of --prompt-file that are continued at the same time"""
    max_new_tokens: int = 100
    """largest number of tokens to add to a prompt"""
    temperature: float = 0.8
    """sampling temperature; 0 always takes the most probable token"""
    top_k: int = 0
    """sample from the k most probable tokens only; 0 for all"""
    top_p: float = 1.0
    """sample from the most probable tokens that together have this probability"""
    seed: int = 0
    """seed of the sampled tokens"""
    num_beams: int = 1
    """number of beams of a beam search, which needs --temperature 0; 1 for no search"""
    length_penalty: float = 1.0
    """exponent of the length by which a beam search divides the log-probability of a text"""
    early_stopping: Literal["false", "true", "never"] = "false"
    """end a beam search with --num-beams ended texts (true), if the best beam is no better now (false), or if it cannot become better (never)"""
    repetition_penalty: float = 1.0
    """factor by which tokens that the text already has are less probable; 1 for no penalty"""
    no_repeat_ngram_size: int = 0
    """forbid a sequence of N tokens to appear twice in a text; 0 allows all"""
    cache: bool = True
    """keep keys and values of attention; --no-cache recomputes them for every token, for comparison"""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """element type of weights and cache; auto is that of the run, and fp32 for a model directory"""
    tokenizer_path: str = ""
    """directory with tokenizer.json, for a model without a tokenizer"""
    json: bool = False
    """print one JSON object per text: number, prompt, text, tokens, end (stop, length or context)"""


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """Continue prompts with a trained model. MODEL is a run directory, one of its checkpoints, a model directory of
    transformers, or a GGUF file."""

    text: TextSettings = field(default_factory=TextSettings)
    machine: MachineSettings = field(default_factory=MachineSettings)


def run(argv: Sequence[str]) -> int:
    """Write texts and print them as they grow; returns 0."""
    settings, words = parse(GenerateSettings, argv, "nntask generate", words=("MODEL",))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    check(settings.text)
    machine = machine_from(settings.machine)
    prompts = prompts_of(settings.text)
    from nntask.inference import Generator, check_memory, check_writes
    from nntask.tiling import generation_tiling

    asked = settings.text
    source = open_source(words[0])
    if source.config.objective == "masked":
        _check_filled(asked, words[0])
    else:
        check_writes(source.config)
    _check_search(asked)
    ids = source.text_ids(source.tokenizer(asked.tokenizer_path))
    for note in ids.tokenizer.notes:
        print(f"tokenizer: {note}", file=sys.stderr, flush=True)
    tiling = generation_tiling(source.config, is_quantised=source.is_quantised)
    begins = [ids.prompt(prompt) for prompt in prompts]
    batch, longest = min(asked.batch, len(prompts)), max(map(len, begins))
    reads = source.config.objective == "seq2seq"  # an encoder reads the prompt; the text begins after one id
    if asked.cache and longest <= source.context and source.config.objective in ("causal", "seq2seq"):
        length = min(source.context, (1 if reads else longest) + asked.max_new_tokens - 1)
        check_memory(source, tiling, asked.dtype, machine, batch=batch, length=length, prompt_length=longest, num_beams=asked.num_beams)
    with runtime_of(machine, "--batch" if batch > 1 else "") as runtime:
        model = source.build(runtime, tiling, asked.dtype)
        if source.config.objective == "masked":
            _fill(model, ids, prompts, begins, asked)
            return 0
        generator = Generator(model, runtime, source.context, use_cache=asked.cache)
        generator.check(begins)
        for first in range(0, len(prompts), asked.batch):
            batch_of = slice(first, first + asked.batch)
            _write(generator, ids, prompts[batch_of], begins[batch_of], first, asked)
        stats = runtime.stats()
        if chosen := stats["conditional_hits"] + stats["conditional_misses"]:
            print(f"experts: {stats['conditional_hits'] / chosen:.1%} of the chosen ones were in memory", file=sys.stderr, flush=True)
    return 0


def _check_filled(asked: TextSettings, model: str) -> None:
    """Check that no flag of continued texts is set.

    Raises:
        UsageError: a flag would have no effect.
    """
    from nntask import UsageError

    usual = TextSettings()
    for name in (each.name for each in fields(asked) if each.name not in _OF_FILLED):
        if getattr(asked, name) != getattr(usual, name):
            flag, value = ("--no-cache", None) if name == "cache" else (f"--{name.replace('_', '-')}", getattr(asked, name))
            raise UsageError(f"is for text generation, and {model} fills masks", "drop it", flag=flag, value=value)


def _check_search(asked: TextSettings) -> None:
    """Check that a search does not also sample.

    Raises:
        UsageError: the flags ask for both.
    """
    from nntask import UsageError

    if asked.num_beams > 1 and asked.temperature > 0:
        raise UsageError(
            f"searches and draws nothing, and --temperature is {asked.temperature}", "add --temperature 0", flag="--num-beams", value=asked.num_beams
        )


def _fill(model: LanguageModel, ids: TextIds, prompts: Sequence[str], begins: Sequence[list[int]], asked: TextSettings) -> None:
    """Print the prompts with the best token in place of each mask; with --json print also the five best of each."""
    from nntask.inference import fill

    for number, (prompt, begin) in enumerate(zip(prompts, begins, strict=True), 1):
        predictions, filled = fill(model, ids, begin), list(begin)
        for mask in predictions:
            filled[mask.position] = mask.tokens[0]
        text = ids.tokenizer.decode(filled)
        if asked.json:
            masks = [
                [
                    {"token": ids.tokenizer.decode([token]) or ids.tokenizer.word(token), "probability": p}
                    for token, p in zip(mask.tokens, mask.probabilities, strict=True)
                ]
                for mask in predictions
            ]
            print(json_line({"number": number, "prompt": prompt, "text": text, "masks": masks}))
        else:
            print(f"--- {number}\n{text}" if asked.prompt_file else text)


def check(asked: TextSettings) -> None:
    """Check the values of the flags.

    Raises:
        UsageError: the first value that breaks its rule.
    """
    from nntask import UsageError
    from nntask.config import check_prompt
    from nntask.inference import STEEPEST
    from nntask.io import LARGEST

    rules = (
        ("--batch", asked.batch, asked.batch >= 1, "at least 1", "1"),
        ("--max-new-tokens", asked.max_new_tokens, 1 <= asked.max_new_tokens <= LARGEST, "at least 1", "1"),
        ("--temperature", asked.temperature, 0 <= asked.temperature < float("inf"), "0 or more", "0"),
        ("--top-k", asked.top_k, asked.top_k >= 0, "0 or more", "0"),
        ("--top-p", asked.top_p, 0 < asked.top_p <= 1, "above 0 and at most 1", "1"),
        ("--num-beams", asked.num_beams, 1 <= asked.num_beams <= LARGEST, "at least 1", "1"),
        ("--length-penalty", asked.length_penalty, abs(asked.length_penalty) <= STEEPEST, f"from -{STEEPEST} to {STEEPEST}", "1"),
        ("--repetition-penalty", asked.repetition_penalty, 0 < asked.repetition_penalty < float("inf"), "above 0", "1"),
        ("--no-repeat-ngram-size", asked.no_repeat_ngram_size, asked.no_repeat_ngram_size >= 0, "0 or more", "0"),
        ("--seed", asked.seed, 0 <= asked.seed <= LARGEST, f"at least 0 and at most {LARGEST}", "0" if asked.seed < 0 else str(LARGEST)),
    )
    for flag, value, ok, rule, near in rules:
        if not ok:
            raise UsageError(f"must be {rule}, got {value}", f"the nearest legal value is {near}", flag=flag)
    if asked.num_beams == 1 and (asked.length_penalty, asked.early_stopping) != (1.0, "false"):
        flag = "--early-stopping" if asked.length_penalty == 1 else "--length-penalty"
        raise UsageError("is for a beam search, and --num-beams is 1", f"raise it, or drop {flag}", flag=flag)
    check_prompt(asked.prompt)
    if asked.prompt and asked.prompt_file:
        raise UsageError(f"and --prompt-file {asked.prompt_file} both say how texts begin", "drop one of them", flag="--prompt")


def prompts_of(asked: TextSettings) -> list[str]:
    """Return the beginnings of the texts.

    Raises:
        DataError: the file cannot be read, or one of its lines is empty.
    """
    from nntask import DataError

    if not asked.prompt_file:
        return [asked.prompt]
    try:
        with open(asked.prompt_file, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}", "give a text file with one prompt a line", flag="--prompt-file", value=asked.prompt_file
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"is not text in UTF-8: {error.reason} at byte {error.start}", "convert it", flag="--prompt-file", value=asked.prompt_file
        ) from None
    lines = text.removesuffix("\n").split("\n")  # splitlines() would also end prompts at form feeds and similar characters
    if not text:
        raise DataError("is empty", "write one prompt a line", flag="--prompt-file", value=asked.prompt_file)
    if "" in lines:
        raise DataError(f"line {lines.index('') + 1} of --prompt-file {asked.prompt_file} is empty", "write one prompt a line, or remove it")
    return lines


class _Text:
    """A text during its generation."""

    def __init__(self, number: int, prompt: str, begin: list[int], ids: TextIds) -> None:
        from nntask.inference import Spelling

        self.number, self.prompt = number, prompt
        self.new: list[int] = []
        self.is_complete = False
        self._tokenizer, self._begin, self._num_given = ids.tokenizer, [int(i) for i in ids.tokenizer.encode([prompt])[0]], len(begin)
        if ids.encodes_rows:  # the text is an answer and does not begin with the prompt
            self._begin, self._num_given = [], 1
        self._spelling = Spelling(ids.tokenizer.decode)
        self._spelling.ids.extend(self._begin)

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        self.new.extend(tokens)
        self._spelling.ids.extend(tokens)

    @property
    def text(self) -> str:
        """Return the whole text, the prompt included."""
        return self._tokenizer.decode([*self._begin, *self.new])

    def news(self) -> str:
        """Return the characters since the last call; an incomplete character waits for its remaining bytes, unless the text is complete."""
        return self._spelling.news(is_last=self.is_complete)

    def end(self, context: int, count: int) -> str:
        """Return the reason why the text is complete: "context", "length" or "stop"."""
        if self._num_given + len(self.new) > context:
            return "context"
        return "length" if len(self.new) == count else "stop"


def _write(generator: Generator, ids: TextIds, prompts: Sequence[str], begins: Sequence[list[int]], first: int, asked: TextSettings) -> None:
    """Write the texts of one batch, whose prompts have the ids `begins`; `first` is the number of texts before it."""
    from nntask.inference import Penalties, Sampling

    texts = [_Text(first + row + 1, prompt, begin, ids) for row, (prompt, begin) in enumerate(zip(prompts, begins, strict=True))]
    printer = _Printer(texts, asked, generator.context)
    penalties = Penalties(asked.repetition_penalty, asked.no_repeat_ngram_size)
    if asked.num_beams > 1:
        _search(generator, ids, texts, begins, asked, penalties)
    else:
        how = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
        drawn = generator.stream(begins, asked.max_new_tokens, how, vocab_size=ids.vocab_size, stop=ids.stop, first=first, penalties=penalties)
        for tokens in drawn:
            for text, token in zip(texts, tokens, strict=True):
                if token is None:
                    text.is_complete = True
                else:
                    text.add([token])
            printer.show()
    for text in texts:
        text.is_complete = True
    printer.show()


def _search(
    generator: Generator, ids: TextIds, texts: Sequence[_Text], begins: Sequence[list[int]], asked: TextSettings, penalties: Penalties
) -> None:
    """Give each text the best continuation of its beams."""
    from nntask.inference import BeamSearch

    how = BeamSearch(asked.num_beams, asked.length_penalty, asked.early_stopping)
    found = generator.beams(begins, asked.max_new_tokens, how, vocab_size=ids.vocab_size, stop=ids.stop, penalties=penalties)
    for text, (best, *_) in zip(texts, found, strict=True):
        text.add(best.tokens)


class _Printer:
    """Prints a batch of texts in their order, each as soon as those before it are complete."""

    def __init__(self, texts: list[_Text], asked: TextSettings, context: int) -> None:
        self._left, self._asked, self._context = texts, asked, context
        self._begun = False

    def show(self) -> None:
        """Print all complete texts in order, and the new characters of the first incomplete one."""
        while self._left and (self._left[0].is_complete or not self._asked.json):
            text = self._left[0]
            if self._asked.json:
                print(json_line(self._facts(text)))
            else:
                if self._asked.prompt_file and not self._begun:
                    print(f"--- {text.number}")
                self._begun = True
                sys.stdout.write(text.news())
                if not text.is_complete:
                    break
                sys.stdout.write("\n")
                if text.end(self._context, self._asked.max_new_tokens) == "context":
                    which = f"text {text.number}" if self._asked.prompt_file else "the text"
                    print(f"nntask: {which} ends here because the model's context of {self._context} tokens is full", file=sys.stderr)
            self._left, self._begun = self._left[1:], False
        sys.stdout.flush()

    def _facts(self, text: _Text) -> dict[str, Any]:
        end = text.end(self._context, self._asked.max_new_tokens)
        return {"number": text.number, "prompt": text.prompt, "text": text.text, "tokens": len(text.new), "end": end}
