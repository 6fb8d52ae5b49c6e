"""Conversion of models to other element types and files: from a run, a checkpoint, a model directory or a GGUF file to a GGUF file or a directory.

The file is created with its header and its final size first. Targets are ranges of it with the names and layouts of transformers' files
(`nntask.gguf`, `nntask.io.translated_files`). Every weight is copied window by window from its source to its range, and blocks are encoded on the
way; only a window is in memory. The result appears complete or not at all (`nntask.io.atomic_write`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from scheduler import CapturingRuntime, Shortage
from tiles import BLOCK_FORMATS, ENCODED_FORMATS

from ..adapters.lora import adapted, expert_layers
from ..checkpoints.store import Checkpoint
from ..data.special_tokens import Special
from ..data.tokenizer import Tokenizer
from ..errors import DoesNotFit, UsageError
from ..hf.layout import FileLayout, blanks, names_of, shapes_of
from ..hf.model_directory import ModelDirectory, read_values
from ..inference.samples import begins_after_end
from ..io.block_ranges import BlockRange, turned
from ..io.strided_ranges import FileRange, Rows, windows
from ..io.units import format_size
from ..models.blocks import Mixture
from ..models.language import LanguageModel
from ..models.registry import build
from ..tiling.model_tiling import ModelTiling
from .huggingface import as_stored
from .merged_weights import Weight, weights_of

TYPES: Final = ("q8_0", "q4_0", "f16", "bf16", "f32")
_LARGEST_WINDOW: Final = 8 << 20
_COPIES: Final = 4
"""Number of arrays of a window's size that exist at once: values read, values converted, and temporaries of both."""
_LARGEST_SCALED: Final = {"q8_0": 65504.0 * 127, "q4_0": 65504.0 * 8}
"""Magnitude of the largest value whose block has a finite scale."""


@dataclass(frozen=True, slots=True)
class Convertible:
    """A model on disk that can be read weight by weight.

    Args:
        path: path of the checkpoint, the model directory or the GGUF file.
        config: config of the model.
        weights: our name -> weight.
        matrices: names in the family's files of the matrices of layers.
        tokenizer: tokenizer of the model; None without one.
        special: ids around texts.
        begins_after_end: whether texts begin after an end-of-text token.
    """

    path: Path
    config: Any
    weights: Mapping[str, Weight]
    matrices: frozenset[str]
    tokenizer: Tokenizer | None
    special: Special
    begins_after_end: bool

    @classmethod
    def of(cls, path: Path, config: Any, checkpoint: Checkpoint | None, tokenizer: Tokenizer | None) -> Convertible:
        """Return the model of a checkpoint, with adapters merged in, or of a model directory or a GGUF file; only headers are read.

        Raises:
            DataError: the model is broken.
        """
        stored = ModelDirectory.open(path) if checkpoint is None else weights_of(checkpoint)  # first, because it checks the sizes of the model
        model = build(config, ModelTiling(), CapturingRuntime(1), seed=None)
        matrices = _matrices(model)
        special = Special() if tokenizer is None else tokenizer.special
        if not isinstance(stored, ModelDirectory):
            return cls(path, config, stored, matrices, tokenizer, special, checkpoint is not None and begins_after_end(checkpoint))
        if tokenizer is None:
            special = _declared(read_values(path)[0], config.vocab_size)
        stored.check({name: tensor.shape for name, tensor in model.tensors().items()})
        return cls(path, config, {name: where for name, (_, where) in stored.weights().items()}, matrices, tokenizer, special, False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name in the family's files -> shape there, without the second name of a tied head."""
        return shapes_of(self.config.names.to_hf(blanks({name: each.shape for name, each in self.weights.items()}), self.config))

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Return name in the family's files -> widest element type of its stored parts; fp32 for blocks."""
        found: dict[str, np.dtype[Any]] = {}
        for ours, name in self._names().items():
            dtype = self.weights[ours].dtype
            found[name] = max(dtype, found.get(name, dtype), key=lambda each: each.itemsize)
        return found

    def formats(self) -> dict[str, str]:
        """Return name in the family's files -> format, for the matrices that are quantised already."""
        found = {name: getattr(self.weights[ours], "block_format", None) for ours, name in self._names().items()}
        return {name: each.name for name, each in found.items() if each is not None and each.is_quantised}

    def _names(self) -> dict[str, str]:
        return names_of(self.config, {name: each.shape for name, each in self.weights.items()})

    @property
    def nbytes(self) -> int:
        """Number of bytes of the weights as they are stored now."""
        return sum(_stored_nbytes(each) for each in self.weights.values())


def _matrices(model: LanguageModel) -> frozenset[str]:
    """Return names in the family's files of the matrices of layers, except those that choose or weigh experts."""
    shapes = {name: tensor.shape for name, tensor in model.tensors().items()}
    modules, theirs = dict(model.named_modules()), names_of(model.config, shapes)
    experts = {id(layer) for layer in expert_layers(model)}
    gates = {id(module.shared_gate) for module in modules.values() if isinstance(module, Mixture)}
    added, removed = ({theirs[f"{name}.weight"] for name, module in modules.items() if id(module) in ids} for ids in (experts, gates))
    return frozenset(f"{name}.weight" for name in adapted(model)) - removed | added


def _declared(values: Mapping[str, Any], vocab_size: int) -> Special:
    """Return the ids around texts in the config of a model without a tokenizer."""
    begin, ends = values.get("bos_token_id"), values.get("eos_token_id")
    ends = [each for each in (ends if isinstance(ends, list) else [ends]) if type(each) is int and 0 <= each < vocab_size]
    return Special(begin if type(begin) is int and 0 <= begin < vocab_size else None, tuple(ends))


def _stored_nbytes(weight: Weight) -> int:
    blocks = getattr(weight, "blocks", None)
    return prod(weight.shape) * weight.dtype.itemsize if blocks is None else prod(blocks.shape)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Options of a conversion.

    Args:
        type: one of `TYPES`.
        embeddings, head: whether to quantise the embedding, and an untied head, too.
        keep: patterns of names, in the family's files, of further tensors that stay as they are.
        nbytes: memory for windows; None for no limit.
    """

    type: str
    embeddings: bool = False
    head: bool = False
    keep: tuple[str, ...] = ()
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """Summary of a conversion.

    Args:
        before, nbytes: bytes of the weights before and after.
        num_weights: number of their elements.
        stayed: reason -> names of the matrices that were not quantised for this reason.
        notes: sentences about differences that other readers of the file have.
    """

    before: int
    nbytes: int
    num_weights: int
    stayed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def kinds_of(source: Convertible, asked: Conversion) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return name in the family's files -> new type, "" for no change; and reason -> names, for the matrices that stay.

    Raises:
        UsageError: a pattern of tensors to keep fits none, or a matrix has fewer bits already.
    """
    shapes, stayed = source.shapes(), dict[str, list[str]]()
    for pattern in asked.keep:
        if not any(fnmatchcase(name, pattern) for name in shapes):
            raise UsageError(
                f"fits none of the {len(shapes)} tensors, such as {next(iter(shapes))}", "correct it, or drop it", flag="--keep", value=pattern
            )
    kinds, formats = {}, source.formats()
    for name, shape in shapes.items():
        kinds[name] = "" if asked.type in ENCODED_FORMATS and len(shape) == 1 else asked.type
        reason = _reason_to_stay(source, asked, name, shape) if asked.type in ENCODED_FORMATS and len(shape) > 1 else ""
        if any(fnmatchcase(name, pattern) for pattern in asked.keep):
            kinds[name], reason = "", "--keep"
        if reason:
            kinds[name] = ""
            stayed.setdefault(reason, []).append(name)
    _check_gain(source.path, kinds, formats)
    kinds = {name: kind or formats.get(name, "") for name, kind in kinds.items()}
    return kinds, {reason: tuple(names) for reason, names in stayed.items()}


def staying(source: Convertible, kinds: Mapping[str, str]) -> list[str]:
    """Return names, in the family's files, of the matrices whose blocks are copied as they are."""
    formats = source.formats()
    return [name for name, kind in kinds.items() if kind and kind == formats.get(name)]


def _check_gain(path: Path, kinds: Mapping[str, str], formats: Mapping[str, str]) -> None:
    """Raise UsageError if blocks would become blocks of more bits, which store the rounded values in more bytes."""

    def nbytes(kind: str) -> float:
        return BLOCK_FORMATS[kind].block_bytes / BLOCK_FORMATS[kind].block_values

    if grown := [name for name, kind in kinds.items() if kind in ENCODED_FORMATS and name in formats and nbytes(kind) > nbytes(formats[name])]:
        name, more = grown[0], f" and {len(grown) - 1} more" if len(grown) > 1 else ""
        raise UsageError(
            f"{path} has {name}{more} in {formats[name]} already, and in {kinds[name]} they would be larger and no better",
            f"use the model that it was made from, or let them stay with --keep, names or patterns such as {name}",
        )


def _reason_to_stay(source: Convertible, asked: Conversion, name: str, shape: tuple[int, ...]) -> str:
    """Return why a matrix is not quantised; "" if it is."""
    names = source.config.names
    if name == names.embedding and not asked.embeddings:
        return "--embeddings quantises it"
    if name == names.head and not asked.head:
        return "--head quantises it"
    is_table = name in (names.embedding, names.head)
    if not is_table and name not in source.matrices:
        return "is a router of experts, or no matrix of a product"
    columns = shape[0] if is_turned(source.config, name) else shape[-1]
    size = BLOCK_FORMATS[asked.type].block_values
    return f"rows are not whole blocks of {size}" if columns % size else ""


def is_turned(config: Any, name: str) -> bool:
    """Return whether a matrix is (in, out) in the family's files, so that its transpose is quantised."""
    return bool(config.description.has_rows_in) and name not in (config.names.embedding, config.names.head)


def copy_weights(
    source: Convertible, targets: Mapping[str, FileRange], blocks: Mapping[str, FileRange], kinds: Mapping[str, str], asked: Conversion
) -> None:
    """Copy all weights to their ranges.

    Args:
        source: model to copy.
        targets: name in the family's files -> range of the numbers.
        blocks: the same name -> range of the bytes (out, bytes of a row), for the matrices that keep their blocks.
        kinds: the same name -> new type, for messages and bounds.
        asked: options, with the memory for windows.

    Raises:
        DoesNotFit: a row of the widest weight needs more memory.
        Diverged: a weight is not finite.
        UsageError: a weight is too large for its new type.
    """
    layout = FileLayout({**targets, **blocks})
    placeholders = {name: array.T if name in blocks and is_turned(source.config, name) else array for name, array in layout.arrays().items()}
    for ours, array in source.config.names.from_hf(placeholders, source.config).items():
        weight, target, name = source.weights[ours], layout.range_of(array), layout.name_of(array)
        if name in blocks and isinstance(weight, BlockRange):
            weight, target = weight.blocks, turned(target) if is_turned(source.config, name) else target
        for window in _windows(target, weight.dtype.itemsize, asked.nbytes, name):
            values = weight[window]
            piece = np.empty(values.shape, weight.dtype)
            values.read(piece)
            target[window].write(piece if name in blocks else _checked(name, piece, kinds[name], target.dtype))


def _windows(target: Rows, itemsize: int, budget: int | None, name: str) -> Iterator[tuple[slice, ...]]:
    """Yield windows of whole rows in the order of the file, so that blocks are whole; raise DoesNotFit if a row needs more than the budget."""
    shape = target.shape
    axis = target.order[0] if isinstance(target, FileRange) else 0
    row = prod(shape) // shape[axis] * max(itemsize, target.dtype.itemsize)
    most = _LARGEST_WINDOW if budget is None else min(_LARGEST_WINDOW, budget // _COPIES)
    if most < row and budget is not None:
        least = format_size(row * _COPIES)
        raise DoesNotFit(
            f"is too little for a row of {name}, which needs {least}",
            f"the least that will do is {least}",
            flag="--ram",
            value=format_size(budget),
            shortage=Shortage("task", "ram", row * _COPIES, budget, task=name),
        )
    yield from windows(shape, max(itemsize, target.dtype.itemsize), most, axis)


def _checked(name: str, piece: np.ndarray[Any, Any], kind: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return values of a weight in the element type of their range; raise Diverged or UsageError if one is not finite or too large."""
    values = as_stored(name, piece, dtype, shown=kind, advice="use --type bf16 or f32")
    if kind in _LARGEST_SCALED and max(-values.min(), values.max()) > _LARGEST_SCALED[kind]:
        raise UsageError(f"{name} holds values too large for a scale of {kind}", f"let it stay: --keep {name}")
    return values
