"""Batches for models of transformers, by rules over the arguments of `forward`.

Several sets of inputs and kinds of labels are tried, the most complete first; what the model takes in eager PyTorch is used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from hf_configs import IMAGE, LENGTH, VOCABULARY
from torch import nn

ROWS: Final = 2
SAMPLES: Final = 1600
FRAMES: Final = 2 * LENGTH
Maker = Callable[["Shapes"], torch.Tensor]


class Shapes:
    """Sizes that a configuration demands of inputs.

    Args:
        config: configuration of the model.
        name: name of the model's class.
    """

    def __init__(self, config: Any, name: str) -> None:
        self._config, self._name = config, name
        self.image_tokens = 0

    def find(self, *names: str, default: Any = None) -> Any:
        """First of some fields that the configuration, or one nested in it, has."""
        parts = [self._config, *(value for value in vars(self._config).values() if hasattr(value, "model_type"))]
        for name in names:
            for part in parts:
                try:
                    value = getattr(part, name, None)
                except AttributeError:
                    value = None
                if value is not None:
                    return value
        return default

    @property
    def lead(self) -> tuple[int, ...]:
        """First axes of text: rows, and choices if the model chooses."""
        return (ROWS, 2) if self._name.endswith("ForMultipleChoice") else (ROWS,)

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of images."""
        size = self.find("image_size", "img_size", "input_size", default=IMAGE)
        size = size.get("height", IMAGE) if isinstance(size, dict) else size
        pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return (pair[-2], pair[-1]) if len(pair) > 1 else (pair[0], pair[0])

    @property
    def channels(self) -> int:
        """Channels of images."""
        found = self.find("num_channels", "in_channels", "num_input_channels", default=3)
        return found if isinstance(found, int) and found <= 4 else 3

    @property
    def mels(self) -> int:
        """Bins of a spectrogram."""
        return int(self.find("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim", default=16))

    @property
    def frames(self) -> int:
        """Frames of a video."""
        return int(self.find("num_frames", "frames_per_clip", "num_image_with_embedding", default=4))

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        found = self.find("vocab_size", default=VOCABULARY)
        return max(4, min(found if isinstance(found, int) else VOCABULARY, VOCABULARY))


def ids(shapes: Shapes, *lead: int) -> torch.Tensor:
    """Tokens that are not special; the first ones of each row stand for an image if the model asks for such."""
    lead = lead or (*shapes.lead, LENGTH)
    special = {value for key, value in _numbers(shapes._config) if re.search(r"token_(id|index)$", key) and isinstance(value, int)}
    plain = torch.tensor([each for each in range(3, shapes.vocabulary) if each not in special] or [3])
    found = plain[torch.randint(0, len(plain), lead)]
    token = shapes.find("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    if shapes.image_tokens and token is not None:
        each = shapes.image_tokens // lead[0]
        found = torch.cat([torch.full((*lead[:-1], each), token), found], -1)
    return found


def _numbers(config: Any) -> Iterator[tuple[str, Any]]:
    for key, value in vars(config).items():
        if hasattr(value, "model_type"):
            yield from _numbers(value)
        else:
            yield key, value


def mask(shapes: Shapes) -> torch.Tensor:
    """Attention mask of rows, of which the last is padded."""
    length = LENGTH + shapes.image_tokens // ROWS
    found = torch.ones(*shapes.lead, length, dtype=torch.int64)
    found[-1, ..., length - LENGTH // 4 :] = 0
    return found


def boxes(shapes: Shapes) -> torch.Tensor:
    """A box for each token."""
    return torch.cat([torch.randint(0, 40, (*shapes.lead, LENGTH, 2)), torch.randint(50, 90, (*shapes.lead, LENGTH, 2))], -1)


def series(shapes: Shapes) -> torch.Tensor:
    """Past values of time series."""
    length, channels = shapes.find("context_length", "seq_length", default=32), shapes.find("num_input_channels", default=1)
    return torch.randn(ROWS, length, channels)


INPUTS: Final[Mapping[str, tuple[Maker, ...]]] = {
    "input_ids": (ids,),
    "attention_mask": (mask,),
    "bbox": (boxes,),
    "pixel_values": (
        lambda s: torch.randn(ROWS, s.channels, *s.image),
        lambda s: torch.randn(ROWS, s.frames, s.channels, *s.image),
        lambda s: torch.randn(ROWS, 3, 64, 64),
    ),
    "pixel_values_videos": (lambda s: torch.randn(ROWS, s.frames, s.channels, *s.image),),
    "image": (lambda s: torch.randn(ROWS, s.channels, *s.image),),
    "input_values": (
        lambda s: torch.randn(ROWS, SAMPLES),
        lambda s: torch.randn(ROWS, 1, SAMPLES),
        lambda s: torch.randn(ROWS, s.find("max_length", default=FRAMES), s.mels),
        lambda s: ids(s, ROWS, LENGTH),
    ),
    "input_features": (
        lambda s: torch.randn(ROWS, s.mels, 2 * s.find("max_source_positions", default=LENGTH)),
        lambda s: torch.randn(ROWS, FRAMES, s.mels),
        lambda s: torch.randn(ROWS, 1, s.find("spec_size", default=64), s.mels),
    ),
    "past_values": (series,),
    "decoder_input_ids": (lambda s: ids(s, ROWS, LENGTH),),
    "hidden_states": (lambda s: torch.randn(ROWS, LENGTH, s.find("hidden_size", default=32)),),
    "audio_codes": (lambda s: torch.randint(0, 16, (ROWS, s.find("num_codebooks", "num_quantizers", default=2), LENGTH)),),
}
"""Argument of forward -> what it may hold; every entry but the first is for models that refuse the one before it."""

PRIMARY: Final = ("input_ids", "pixel_values", "pixel_values_videos", "image", "input_values", "input_features", "past_values", "audio_codes")


def _choice(number: int) -> Maker:
    return lambda s: torch.randint(0, number, (ROWS,))


def _tokens(number: int) -> Maker:
    return lambda s: torch.randint(0, number, (ROWS, LENGTH))


LABELLED: Final[tuple[tuple[str, tuple[Mapping[str, Maker], ...]], ...]] = (
    (r"For(Sequence|Image|Video|Audio)Classification|ForXVector|ForDecision", ({"labels": _choice(2)},)),
    (r"ForMultipleChoice|ForNextSentencePrediction|ForTimeSeriesClassification", ({"labels": _choice(2)}, {"target_values": _choice(2)})),
    (r"ForTokenClassification", ({"labels": _tokens(2)},)),
    (r"ForAudioFrameClassification", ()),
    (r"QuestionAnswering", ({"start_positions": _choice(8), "end_positions": _choice(8)}, {"labels": _choice(2)}, {"labels": ids})),
    (r"ForCTC|ForRNNT|ForTDT", ({"labels": lambda s: torch.randint(3, 16, (ROWS, 3))},)),
    (r"ForSemanticSegmentation", ({"labels": lambda s: torch.randint(0, 2, (ROWS, *s.image))},)),
    (r"ForDepthEstimation", ({"labels": lambda s: torch.rand(ROWS, *s.image)},)),
    (
        r"ForPreTraining",
        (
            {"labels": ids, "next_sentence_label": _choice(2)},
            {"labels": ids, "sentence_order_label": _choice(2)},
            {"labels": ids},
            {"labels": _tokens(2)},
        ),
    ),
    (r"ForPrediction|ForRegression", ({"future_values": lambda s: torch.randn(ROWS, s.find("prediction_length", default=8), 1)},)),
    (r"ForCausalLM|LMHead|ForMaskedLM|ConditionalGeneration|ForSpeechSeq2Seq|MTModel|ForCausal", ({"labels": ids},)),
)
"""Pattern of a class's name -> labels that it may take."""


def projected(result: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Loss of a model without labels: the mean of each floating tensor of its result under fixed weights, and a little of its square."""
    found = [each for each in _tensors(result) if each.requires_grad and each.numel()]
    if not found:
        raise ValueError("the result has no tensor that depends on the parameters")
    weights = [torch.cos(torch.arange(each.numel(), dtype=torch.float32)).view(each.shape) for each in found]
    return sum(((each * weight).mean() + 0.1 * each.square().mean() for each, weight in zip(found, weights, strict=True)), torch.zeros(()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


Plan = tuple[dict[str, Maker], bool]
"""Arguments with what makes them, and whether the model has a loss of its own."""


def plans(model_class: Any) -> Iterator[Plan]:
    """Sets of inputs for a class, the most complete first."""
    names = list(inspect.signature(model_class.forward).parameters)
    main = getattr(model_class, "main_input_name", "input_ids")
    present = [name for name in INPUTS if name in names]
    if main in INPUTS and main not in present:
        present.insert(0, main)
    sets = [[name for name in present if name not in ("decoder_input_ids", "hidden_states", "pixel_values_videos", "audio_codes")]]
    if "input_ids" in present:
        sets += [["input_ids", "attention_mask"], ["input_ids", "attention_mask", "decoder_input_ids"], ["input_ids"]]
    sets += [[name] for name in PRIMARY if name in present] + [[name, "decoder_input_ids"] for name in PRIMARY if name in present]
    sets += [[name] for name in present if name == "hidden_states"]
    seen: set[tuple[str, ...]] = set()
    unique: list[list[str]] = []
    for each in sets:
        chosen = tuple(name for name in each if name in present and (name != "attention_mask" or "input_ids" in each))  # a mask of tokens
        if chosen and chosen not in seen:
            seen.add(chosen)
            unique.append(list(chosen))
    labelled = [
        {name: maker for name, maker in labels.items() if name in names}
        for pattern, options in LABELLED
        if re.search(pattern, model_class.__name__)
        for labels in options
        if set(labels) <= set(names)
    ]
    for labels in [*labelled, {}]:
        for chosen_names in unique:
            for chosen_makers in _combinations(chosen_names):
                yield {**chosen_makers, **labels}, bool(labels)


def _combinations(names: Sequence[str]) -> Iterator[dict[str, Maker]]:
    """The first maker of every argument, then the further ones of one argument each."""
    first = {name: INPUTS[name][0] for name in names}
    yield first
    for name in names:
        for maker in INPUTS[name][1:]:
            yield {**first, name: maker}


def batch_of(plan: Plan, shapes: Shapes, number: int) -> dict[str, Any]:
    """The batch of a step."""
    torch.manual_seed(1000 + number)
    return {name: maker(shapes) for name, maker in plan[0].items()}


def accepted(module: nn.Module, shapes: Shapes) -> tuple[Plan, str]:
    """The first plan that the module trains with.

    Raises:
        ValueError: there is none; it says what the module raised for the first plan.
    """
    first = ""
    for plan in plans(type(module)):
        shapes.image_tokens = 0
        for _ in range(2):
            try:
                _try(module, plan, shapes)
            except Exception as error:
                first = first or f"{type(error).__name__}: {error}"
                counts = re.search(r"tokens: (\d+), features:? (\d+)", str(error))
                if not counts or shapes.image_tokens:
                    break
                shapes.image_tokens = int(counts[2])
            else:
                images = " with tokens of an image" if shapes.image_tokens else ""
                return plan, ", ".join(plan[0]) + images
    raise ValueError(first or "forward has no argument that the rules know")


def _try(module: nn.Module, plan: Plan, shapes: Shapes) -> None:
    batch = batch_of(plan, shapes, 0)
    result = module(**batch)
    loss = getattr(result, "loss", None) if plan[1] else projected(result, batch)
    if loss is None or loss.numel() != 1 or not loss.requires_grad or not loss.isfinite():
        raise ValueError("the result has no finite scalar loss that depends on the parameters")
