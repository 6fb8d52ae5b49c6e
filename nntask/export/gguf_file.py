"""Export of models as GGUF files: header and metadata of a config and a tokenizer, and the weights in their types."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from tiles import BLOCK_FORMATS

from ..data.chat_source import templates_of
from ..data.special_tokens import CHAT_TEMPLATE
from ..errors import DataError, StorageError, UsageError
from ..gguf.architectures import ALL_FACTORS, ARCHITECTURES, POSITIONS, Architecture, architecture_for
from ..gguf.config_keys import NO_WINDOWS, config_from, metadata_of
from ..gguf.model_file import is_gguf
from ..gguf.new_file import FILE_TYPES, check_writer, nbytes_of, new_gguf
from ..gguf.rope_keys import factors_of
from ..gguf.split_files import shard_paths
from ..gguf.tensor_ranges import FLOATS, Heads, LocatedTensor
from ..gguf.text_ends import id_keys
from ..gguf.vocabulary import NAME
from ..gguf.vocabulary_keys import keys_of
from ..hf.tokenizer_files import tokenizer_files
from ..io.atomic_write import written_aside
from ..models.registry import config_from_dict
from ..models.same_model import differing_keys, is_same_model
from .conversion import Conversion, Converted, Convertible, copy_weights, kinds_of, staying
from .huggingface import check_apart, check_new_file

_STORED: Final = {dtype: name for name, dtype in FLOATS.items()}


def check_gguf_target(path: Path, source: Path, *, force: bool) -> None:
    """Check that a GGUF file may be written to `path`.

    Raises:
        UsageError: `path` exists, and `force` is false or it is not a GGUF file; or it is the source; or it cannot be written.
    """
    for shard in shard_paths(source):
        check_apart(path, shard)
    check_new_file(path, "a GGUF file", is_gguf, force=force)


def write_gguf(source: Convertible, path: Path, asked: Conversion, *, force: bool = False) -> Converted:
    """Write a model as a GGUF file.

    Raises:
        UsageError: the file may not be written, the family has no GGUF architecture, or GGUF cannot express its config.
        DataError: the gguf package is not installed, or the model is broken.
        StorageError: the disk is full or failed; an existing file is kept.
    """
    check_writer()
    check_gguf_target(path, source.path, force=force)
    architecture, metadata = _described(source)
    kinds, stayed = kinds_of(source, asked)
    dtypes, tensors = source.dtypes(), dict[str, tuple[str, tuple[int, ...]]]()
    targets = _targets(architecture, source)
    kinds |= {name: "" for name, (short, _) in targets.items() if architecture.is_router(short)}
    for name, (short, shape) in targets.items():
        kind = _kind(short, shape, kinds[name], dtypes[name])
        if tensors.setdefault(short, (kind, shape)) != (kind, shape):
            raise UsageError(
                f"experts of a block are one tensor in GGUF files, and {name} would be {kind} in {short}, which is {tensors[short][0]}",
                "let all of them stay with --keep, or none",
            )
    factors = _factors(source.config)
    tensors = {**{name: ("F32", values.shape) for name, values in factors.items()}, **tensors}
    metadata |= {"general.file_type": FILE_TYPES[_kind("", (1, 1), asked.type, np.dtype(np.float32))]}
    vocabulary, notes = _vocabulary(source, path.stem)
    notes += _window_notes(architecture, source.config)
    metadata |= {"general.quantization_version": 2, **vocabulary}
    try:
        with written_aside(path) as new:
            located = new_gguf(new, metadata, tensors, architecture, Heads.of(source.config.to_dict()))
            for name, values in factors.items():
                located[name].values().write(values)
            apart = {name: _apart(located[short], name) for name, (short, _) in targets.items()}
            blocks = {name: apart[name].blocks() for name in staying(source, kinds)}
            copy_weights(source, {name: each.values() for name, each in apart.items()}, blocks, kinds, asked)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}", "make room or name another file") from error
    weights = sum(prod(shape) for name, (_, shape) in tensors.items() if name not in ALL_FACTORS)
    return Converted(source.nbytes, sum(nbytes_of(*each) for each in tensors.values()), weights, stayed, tuple(notes))


def _described(source: Convertible) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture and the metadata of a model's config; raise UsageError if GGUF cannot express it."""
    config = source.config
    architecture = architecture_for(config.model_type)
    if architecture is None:
        families = ", ".join(sorted({kind for each in ARCHITECTURES.values() for kind in each.model_types}))
        raise UsageError(f"{source.path} is a {config.model_type}, and GGUF files can only be written of {families}", "write a directory instead")
    values, scaling = config.to_dict(), getattr(config, "rope_scaling", None)
    values |= {"rope_theta": getattr(config, "rope_theta", None), "rope_scaling": None if scaling is None else scaling.to_dict()}
    metadata = metadata_of(values, architecture)
    shapes = dict(_targets(architecture, source).values())
    advice = f"{source.path} cannot be written as GGUF, whose {architecture.name} is another model in"
    try:
        values, _ = config_from(metadata, shapes, str(source.path), rotary_factors=_factors(config), ties=False)
        again: Any = config_from_dict(values)
    except (DataError, UsageError) as error:
        raise UsageError(f"{advice} this: {error}") from None
    if not is_same_model(again, config):
        ours = {field.name: getattr(config, field.name) for field in fields(config)} | config.to_dict()
        keys = differing_keys(config, again) if type(config) is type(again) else ["model_type"]
        raise UsageError(f"{advice} {', '.join(f'{key} {ours[key]}' for key in keys)}", "write a directory instead")
    return architecture, metadata


def _targets(architecture: Architecture, source: Convertible) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name in the family's files -> name and shape of the tensor of a GGUF file that it is, or that it is a part of."""
    shapes, targets = source.shapes(), dict[str, tuple[str, tuple[int, ...]]]()
    for name, shape in shapes.items():
        short = architecture.name_here(name)
        if short is None:
            raise UsageError(f"{name} has no name in GGUF files of the architecture {architecture.name}", "write a directory instead")
        there = shape[::-1] if architecture.is_transposed(short) else shape
        targets[name] = short, there[1:] if architecture.is_row(short) else there
    counts = Counter(short for short, _ in targets.values())
    return {name: (short, (counts[short], *shape) if architecture.has_experts(short) else shape) for name, (short, shape) in targets.items()}


def _apart(tensor: LocatedTensor, name: str) -> LocatedTensor:
    """Return the part of a tensor that has the given name in the family's files: one expert, or all of it."""
    architecture = tensor.architecture
    return tensor.expert(architecture.expert_of(name)) if architecture.has_experts(tensor.name) else tensor


def _kind(name: str, shape: tuple[int, ...], kind: str, dtype: np.dtype[Any]) -> str:
    """Return the type of a tensor: llama.cpp needs F32 for vectors and positions, and keeps routers in it."""
    if len(shape) == 1 or name == POSITIONS or Architecture.is_router(name):
        return "F32"
    return kind.upper() if kind in BLOCK_FORMATS or kind.upper() in FLOATS else _STORED.get(dtype, "F32").replace("F64", "F32")


def _factors(config: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return name -> divisors of the rotary frequencies, if the scaling has divisors of its own."""
    scaling = getattr(config, "rope_scaling", None)
    return {} if scaling is None else factors_of(scaling.to_dict(), config.rope_theta, config.head_size)


def _window_notes(architecture: Architecture, config: Any) -> list[str]:
    """Return a sentence if the model has windows that llama.cpp does not have for this architecture."""
    window = getattr(config, "sliding_window", None)
    if architecture.name not in NO_WINDOWS or not window or window >= config.n_positions:
        return []
    return [f"llama.cpp has no windows in a {architecture.name}: texts of more than {window} tokens are computed otherwise there"]


def _vocabulary(source: Convertible, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata of a tokenizer, and sentences about llama.cpp's differences; without a tokenizer, metadata that says so."""
    special = source.special
    if source.tokenizer is None:
        return {NAME: name, "tokenizer.ggml.model": "none", **id_keys(special.bos, special.eos, ())}, []
    files = tokenizer_files(source.tokenizer, source.config.n_positions, begins_after_end=source.begins_after_end)
    if template := templates_of(files).get("default"):  # of several templates by name
        files[CHAT_TEMPLATE] = template
    return keys_of(files, source.config.vocab_size, begin=special.bos, ends=special.eos, name=name)
