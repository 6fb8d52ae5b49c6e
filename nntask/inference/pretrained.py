"""Trained models on disk: a run, one of its checkpoints, or a model directory of transformers.

A text of a model directory begins with the ids that its tokenizer puts before a text. Without a prompt it begins with the config's bos_token_id. It
ends at the eos_token_id. A text of a run that started from such a directory, or that was trained on conversations, begins in the same way. A text of
any other run begins after an end-of-text token, like every text of its training data. A conversation begins with the output of its chat template
and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler import TaskRuntime
from tiles import QuantisedTensor
from tiles.kernels import load_block_loops

from ..architecture.config_checks import LARGEST_COUNT
from ..architecture.family_config import ModelConfig
from ..checkpoints.store import RUN_CONFIG, STATE, Checkpoint, find_checkpoint, step_directories
from ..config.resolution import model_spec
from ..config.settings import TrainSettings, known
from ..config.stored_run import frozen_base_of, stored_settings
from ..data.encoding import RowEncoder, conversation_ids
from ..data.foreign_tokenizer import has_tokenizer, other_way
from ..data.known_ids import unknown
from ..data.special_tokens import CHAT_TEMPLATE, GENERATION
from ..data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from ..engine.models import build_model, load_model
from ..errors import DataError, UsageError
from ..gguf.model_file import is_gguf, open_gguf
from ..hf.model_directory import ADAPTER_CONFIG, CONFIG, ModelDirectory, block_sizes, read_config, read_values, stored_ranges
from ..io.json_file import read_object
from ..io.regular_file import read_text
from ..models.language import LanguageModel
from ..models.registry import config_notes
from ..tiling.model_tiling import ModelTiling
from .generation_keys import check_generation, generation_notes
from .samples import begins_as_rows


@dataclass(frozen=True, slots=True)
class TextIds:
    """Tokenizer of a model, with the ids that begin and end its texts.

    Args:
        tokenizer: tokenizer of the model.
        begin: ids in front of every text; without a prompt they are the whole beginning.
        alone: ids that a text without a prompt begins with; None if they are `begin`.
        stop: ids that end a text.
        vocab_size: number of ids that may be chosen. The model has a row for each; a run has not trained those beyond its tokenizer's ids.
        adds_special: whether the tokenizer puts ids of its own before a prompt.
        encodes_rows: whether a prompt is a whole row of its own, as in training; true if an encoder reads it.
    """

    tokenizer: Tokenizer
    begin: tuple[int, ...]
    alone: tuple[int, ...] | None
    stop: frozenset[int]
    vocab_size: int
    adds_special: bool
    encodes_rows: bool = False

    def known(self, ids: Iterable[int]) -> list[int]:
        """Return the ids of a prompt as Python integers.

        Raises:
            UsageError: the model has no row for one of them.
        """
        numbers = [int(each) for each in ids]
        wrong = next((each for each in numbers if each >= self.vocab_size), None)
        if wrong is not None:
            raise UsageError(unknown(wrong, self.tokenizer, self.vocab_size, "the prompt"))
        return numbers

    def conversation(self, text: str) -> list[int]:
        """Return the ids of a conversation that a chat template has written.

        Raises:
            UsageError: the model has no row for one of them.
        """
        return self.known(conversation_ids(self.tokenizer, text))

    def prompt(self, text: str) -> list[int]:
        """Return the ids at the beginning of a text that starts with `text`.

        Raises:
            UsageError: `text` is empty and the model has no token that begins a text; or the model has no row for a token of the text.
        """
        if self.encodes_rows:
            if not text:
                raise UsageError("this model reads a prompt as a whole input, and the prompt is empty", "give a text with --prompt")
            return self.known(RowEncoder(self.tokenizer).text(text, LARGEST_COUNT))
        if text:
            return self.known([*self.begin, *self.tokenizer.encode([text], special=self.adds_special)[0]])
        beginning = self.begin if self.alone is None else self.alone
        if not beginning:
            raise UsageError(
                f"an empty prompt needs a bos_token_id in {CONFIG} that the model has a row for, and there is none",
                "give the beginning of a text with --prompt",
            )
        return list(beginning)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Trained model on disk.

    Args:
        path: checkpoint or model directory.
        config: configuration of the model.
        settings: settings of the run that trained the model; for a model directory the defaults, with the longest sequence that its config allows.
        checkpoint: opened checkpoint; None for a model directory.
    """

    path: Path
    config: ModelConfig
    settings: TrainSettings
    checkpoint: Checkpoint | None

    @classmethod
    def open(cls, path: str | Path) -> ModelSource:
        """Open the model in a directory without reading its weights.

        Raises:
            DataError: the directory does not exist, holds no model, or has broken files.
            UsageError: its config is of no known family, or breaks a rule.
        """
        directory = Path(path)
        if not directory.exists():
            raise DataError(
                f"{directory} does not exist", "give a run directory, one of its checkpoints, a model directory of transformers, or a GGUF file"
            )
        if (directory / STATE).is_file() or (directory / RUN_CONFIG).is_file() or step_directories(directory):
            checkpoint = find_checkpoint(directory)
            settings = stored_settings(checkpoint)
            return cls(checkpoint.path, checkpoint.config, _with_length(settings, checkpoint.config), checkpoint)
        if directory.is_dir() and not any((directory / name).exists() for name in (CONFIG, ADAPTER_CONFIG)):
            raise DataError(
                f"{directory} holds no checkpoint and no model: a run has the files checkpoints/step-*, a checkpoint has {STATE}, a model "
                f"directory of transformers contains {CONFIG}",
                "give one of these",
            )
        config = read_config(directory)
        return cls(directory, config, _with_length(TrainSettings(), config), None)

    def notes(self) -> list[str]:
        """Return sentences for the caller to print about a model directory: keys that are ignored, and values that take effect only through a flag.

        Raises:
            DataError: a file is broken.
        """
        if self.checkpoint is not None:
            return []
        sentences = config_notes(*read_values(self.path))
        return (
            sentences + open_gguf(self.path).notes
            if is_gguf(self.path)
            else sentences + generation_notes(self._object(GENERATION), str(self.path / GENERATION))
        )

    @property
    def context(self) -> int:
        """Largest number of tokens that the model attends to.

        It is the length of inputs or outputs in training; for a model directory, the longest sequence that its config allows.
        """
        return max(known(self.settings.model.seq_len), self.settings.data.target_len or 0)

    def tokenizer(self, path: str = "") -> Tokenizer:
        """Return the tokenizer of the model, or the one at `path` if the model came without.

        Raises:
            UsageError: `path` is given although the model has its tokenizer.
            DataError: the model has no tokenizer and `path` is empty, or the tokenizer's files are broken.
        """
        kind = self._tokenizer_kind()
        if kind is not None and path:
            raise UsageError(
                f"is for models that came without a tokenizer, and {self.path} has its own", "drop it", flag="--tokenizer-path", value=path
            )
        if kind == "bytes":
            template = self.path / CHAT_TEMPLATE
            return ByteTokenizer(self.config.vocab_size, {CHAT_TEMPLATE: read_text(template)} if template.is_file() else None)
        if kind is None and not path and is_gguf(self.path) and (reason := open_gguf(self.path).untranslated):
            raise DataError(f"the tokenizer in {self.path} {reason}", "name its tokenizer.json with --tokenizer-path DIR, or use another file")
        if kind is None and not path:
            raise DataError(
                f"{self.path} came without a tokenizer and knows token ids only",
                f"name the one that made them with --tokenizer-path DIR{other_way(self.path)}",
            )
        return load_tokenizer(path or self.path)

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer came with the model."""
        return self._tokenizer_kind() is not None

    def _tokenizer_kind(self) -> str | None:
        """Return the kind of the tokenizer that came with the model; None if none did."""
        if self.checkpoint is not None:
            kind: str | None = self.checkpoint.state.get("tokenizer")
            return kind
        return "file" if has_tokenizer(self.path) else None

    def text_ids(self, tokenizer: Tokenizer) -> TextIds:
        """Return the tokenizer together with the ids that begin and end texts.

        Raises:
            DataError: a file of the directory has these ids in an unknown form.
        """
        rows = self.config.objective != "causal"
        if self.checkpoint is not None:
            adds_special = begins_as_rows(self.settings, self.checkpoint.state.get("form"))
            begin, stop = (tokenizer.begin_of_text,), frozenset(tokenizer.special.eos)
            vocab_size = min(tokenizer.vocab_size, self.config.vocab_size)
            return TextIds(tokenizer, () if adds_special else begin, begin, stop, vocab_size, adds_special=adds_special, encodes_rows=rows)
        check_generation(self._object(GENERATION), str(self.path / GENERATION))
        values = {key: value for name in (CONFIG, GENERATION) for key, value in self._object(name).items()}
        alone, ends = (self._ids(values, key) for key in ("bos_token_id", "eos_token_id"))
        return TextIds(tokenizer, (), alone[:1], frozenset(ends), self.config.vocab_size, adds_special=True, encodes_rows=rows)

    def _object(self, name: str) -> Mapping[str, Any]:
        """Return the contents of a JSON file of the directory; an empty mapping if the file does not exist."""
        if is_gguf(self.path):
            found: dict[str, Any] = json.loads(open_gguf(self.path).files.get(name, "{}"))
            return found
        file = self.path / name
        return read_object(file, "the file") if file.is_file() else {}

    def _ids(self, values: Mapping[str, Any], key: str) -> tuple[int, ...]:
        """Return the ids of a key whose value is one number, a list, or null.

        Ids without a row in the model, such as defaults of transformers, are left out.
        """
        value = values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in found):
            raise DataError(f"{key} in {self.path} must be an id or a list of ids, got {value!r}", "copy the directory again")
        return tuple(each for each in found if 0 <= each < self.config.vocab_size)

    @property
    def is_quantised(self) -> bool:
        """Whether matrices of the model, or of the base model of its adapters, are quantised; reads the headers of files.

        Raises:
            DataError: files are missing or broken, or not those that the adapters were trained with.
        """
        directory = self._directory()
        return directory is not None and any(each.is_quantised for each in stored_ranges(directory)[1].values())

    def _directory(self) -> Path | None:
        """Return the model directory or GGUF file that weights are read from; None if a checkpoint has all of them."""
        base = None if self.checkpoint is None else frozen_base_of(self.checkpoint)
        has_files = base is not None and base.kind in ("directory", "gguf")
        return self.path if self.checkpoint is None else Path(base.path) if base is not None and has_files else None

    def build(self, runtime: TaskRuntime, tiling: ModelTiling, dtype: str = "auto", *, read: bool = True) -> LanguageModel:
        """Build the model on a runtime.

        Weights of a checkpoint are loaded. Those of a model directory, or of the base model of adapters, are read at their first use.

        Args:
            dtype: auto, fp32 or bf16; auto is the run's own type, and fp32 for a model directory.
            read: whether weights are read; False only shows the sizes that the model needs.

        Raises:
            DataError: a tensor is missing or misshapen, or a file is broken.
        """
        directory = self._directory()
        sizes = () if directory is None else block_sizes(directory)
        spec = model_spec(self.settings, self.config, tiling.in_blocks(self.config, sizes))
        spec = spec if dtype == "auto" else replace(spec, dtype=dtype)
        if self.checkpoint is None:
            files = ModelDirectory.open(self.path)  # before the model, whose sizes it checks
            model = build_model(spec, runtime, fill=False)
            model.hold_blocks(files.blocks({name: tensor.shape for name, tensor in model.tensors().items()}))
            formats = {each.block_format for each in model.tensors().values() if isinstance(each, QuantisedTensor)}
            if read and formats and not runtime.has_gpus:
                load_block_loops(formats)
            files.attach(model.tensors())
            return model
        return load_model(self.checkpoint, spec, runtime, read=read)


def _with_length(settings: TrainSettings, config: ModelConfig) -> TrainSettings:
    """Return settings with a length of sequences: the model's longest if they have none, or `LARGEST_COUNT` if the model has no limit."""
    if settings.model.seq_len is not None:
        return settings
    return replace(settings, model=replace(settings.model, seq_len=config.longest or LARGEST_COUNT))
