"""Small data and configs of models that learn other things than the next token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nntask.config.objective import objective_of, with_objective
from nntask.config.settings import DataSettings, ModelSettings, TrainSettings
from nntask.data import Dataset, DataSpec, open_dataset
from nntask.models.registry import PRESETS

TEXTS = [f"the cat number {at} sat on the mat and saw the dog number {at + 1} run over the hill" for at in range(60)]
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Learner:
    """A config as data and settings see it."""

    objective: str = "causal"
    objectives: tuple[str, ...] = ("causal", "masked", "seq2seq", "classify")
    model_type: str = "learner"
    positions_key: str = "n_positions"
    vocab_size: int = 600
    n_positions: int = 64
    longest: int | None = 64
    num_parameters: int = 0
    num_labels: int = 2
    id2label: Mapping[int, str] = field(default_factory=dict)
    pad_token_id: int | None = 0
    decoder_start_token_id: int | None = 0

    def to_dict(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class ImageLearner(Learner):
    """The same of a model of images."""

    objective: str = "classify"
    objectives: tuple[str, ...] = ("classify",)
    image_size: int = 8
    patch_size: int = 4
    num_channels: int = 1


TINY = PRESETS["tiny"]


def lines_in(path: Path, rows: Sequence[Any]) -> Path:
    """A file with an object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tokenizer_in(directory: Path, words: Sequence[str], template: str = "", **named: str) -> Path:
    """A tokenizer of whole words and of what is left, with special tokens, a template of post-processing, and a tokenizer_config.json."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    if template == "bert":
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    directory.mkdir(parents=True)
    inner.save(str(directory / "tokenizer.json"))
    names = {"mask_token": "[MASK]", "eos_token": "[SEP]", "bos_token": "[CLS]", "pad_token": "[PAD]"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**names, **named}))
    return directory


def opened(config: Learner, data: DataSettings, length: int = 16) -> Dataset:
    """The dataset of settings as a run opens it."""
    settings = with_objective(TrainSettings(model=ModelSettings(seq_len=length), data=data), config)
    found = settings.data
    return open_dataset(
        DataSpec(
            found.dataset,
            found.dataset_path,
            found.val_path,
            found.dataset_select,
            found.tokenizer,
            found.tokenizer_path,
            config.vocab_size,
            objective_of(settings, config),
        )
    )
