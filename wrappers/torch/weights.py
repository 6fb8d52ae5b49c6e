"""Weights that are never whole in memory: modules whose parameters have shapes only, and their values in files, read when a task needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from nntask import DataError
from nntask.hf import attach_weights, weight_ranges
from tiles import TileTensor


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Make modules whose parameters have shapes and no memory (the meta device), and whose buffers are as usual::

        with empty_parameters():
            module = AutoModelForMaskedLM.from_config(config)
        session = Session(module, weights="bert-large-directory", ram="2GiB", disk="scratch")

    Each parameter has memory until its module has registered it. The block changes a method of `torch.nn.Module` for all threads.
    """
    register = torch.nn.Module.register_parameter

    def register_without_memory(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None and not parameter.is_meta:  # one that is tied is there already
            self._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    torch.nn.Module.register_parameter = register_without_memory
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def attach_files(directory: Path, tensors: Mapping[str, TileTensor], module: torch.nn.Module) -> None:
    """Attach the tensors of a module to the safetensors files of a model directory; no value is read yet.

    Args:
        directory: as ``save_pretrained`` writes it.
        tensors: name -> tensor, of all parameters and of the buffers that are saved.
        module: knows the other names of tied tensors, and its prefix (`base_model_prefix`), with or without which names in the files may be.

    Raises:
        DataError: a file is missing or broken, or a tensor is missing, or has another shape.
    """
    ranges = weight_ranges(directory)
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    aliases: dict[int, list[str]] = {}
    for name, value in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        aliases.setdefault(id(value), []).extend((name, name.removeprefix(prefix), prefix + name))
    by_name = {names[0]: names for names in aliases.values()}
    found = {}
    for name, tensor in tensors.items():
        stored = next((alias for alias in by_name[name] if alias in ranges), None)
        if stored is None:
            raise DataError(f"{directory} has no tensor {name} of shape {tensor.shape}, which the module needs; use the weights of this module")
        where = ranges[stored]
        if where.shape == ():
            where = replace(where, shape=(1,), strides=(where.dtype.itemsize,))
        if where.shape != tensor.shape:
            raise DataError(f"{stored} in {directory} has shape {where.shape}, the module needs {tensor.shape}; use the weights of this module")
        found[name] = stored, where
    attach_weights(tensors, found)
