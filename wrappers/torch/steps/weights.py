"""Weights that are never completely in memory: modules whose parameters have only shapes, and values in files, read when a task needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from nntask import DataError
from nntask.hf import attach_weights, weight_ranges
from nntask.io import FileRange, python_command, python_text
from tiles import TileTensor


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Create modules in the block with parameters that have shapes but no memory (the meta device), and with ordinary buffers::

        with empty_parameters():
            module = AutoModelForMaskedLM.from_config(config)
        session = Session(module, weights="bert-large-directory", ram="2GiB", disk="scratch")

    Each parameter has memory until its module has registered it. The block replaces a method of `torch.nn.Module` for all threads.
    """
    register = torch.nn.Module.register_parameter

    def register_without_memory(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a tied parameter has been replaced already
            self._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    torch.nn.Module.register_parameter = register_without_memory
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def _renamed(ranges: Mapping[str, FileRange], module: torch.nn.Module) -> tuple[dict[str, FileRange], list[str]]:
    """Return tensors in files by the names in a module of transformers, and the names of those that the module has in another layout."""
    if not hasattr(module, "base_model_prefix"):
        return dict(ranges), []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    own = module.state_dict(keep_vars=True)
    own_ranges, converted = {}, []
    for stored in sorted(ranges):
        name, pattern = rename_source_key(stored, renamings, converters, module.base_model_prefix, own)
        if pattern is not None and stored not in own:
            converted.append(stored)
        else:
            own_ranges[stored if stored in own else name] = ranges[stored]
    return own_ranges, converted


def attach_files(directory: Path, tensors: Mapping[str, TileTensor], module: torch.nn.Module) -> None:
    """Attach the tensors of a module to the safetensors files of a model directory, without reading a value yet.

    Names in the files are first converted as transformers does for this module, because some families had other names when their files were written.

    Args:
        directory: model directory in the format of ``save_pretrained``.
        tensors: name -> tensor, for all parameters and for the buffers that are saved.
        module: the module, for the other names of tied tensors, and for its prefix (`base_model_prefix`), which names in the files may have or lack.

    Raises:
        DataError: a file is missing or broken, or a tensor is missing, or has another shape or layout.
    """
    ranges, converted = _renamed(weight_ranges(directory), module)
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    aliases: dict[int, list[str]] = {}
    for name, value in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        aliases.setdefault(id(value), []).extend((name, name.removeprefix(prefix), prefix + name))
    by_name = {names[0]: names for names in aliases.values()}
    attached = {}
    for name, tensor in tensors.items():
        stored = next((alias for alias in by_name[name] if alias in ranges), None)
        if stored is None and converted:
            load, save = (
                f"M.from_pretrained({python_text(directory)})",
                f"save_pretrained({python_text(f'{directory}-plain')}, save_original_format=False)",
            )
            command = python_command(f"from transformers import {type(module).__name__} as M; {load}.{save}")
            raise DataError(
                f"{directory} stores {name} in another layout than the module has ({converted[0]} is a part of such a tensor)",
                f"write it anew: {command}",
            )
        if stored is None and name in (getattr(module, "_keys_to_ignore_on_save", None) or ()):
            raise DataError(
                f"{directory} has no tensor {name}, which {type(module).__name__} computes when it is made with memory",
                "make it with from_pretrained in a program, and give it to a session without weights=",
            )
        if stored is None:
            raise DataError(f"{directory} has no tensor {name} of shape {tensor.shape}, which the module needs", "use the weights of this module")
        where = ranges[stored]
        if where.shape == ():
            where = replace(where, shape=(1,), strides=(where.dtype.itemsize,))
        if where.shape != tensor.shape:
            raise DataError(f"{stored} in {directory} has shape {where.shape}, the module needs {tensor.shape}", "use the weights of this module")
        attached[name] = stored, where
    attach_weights(tensors, attached)
