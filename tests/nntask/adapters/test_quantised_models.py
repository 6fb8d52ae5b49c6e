"""Models whose weights are quantised in their directory: every family, beside the same numbers as floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.quantised_directories import wide, write_decoded, write_plain, write_quantised
from support.small_texts import prompts_of
from support.transformers_oracle import CONFIGS

from nntask import no_grad
from nntask.errors import DataError, UsageError
from nntask.hf.model_directory import ModelDirectory, weight_ranges
from nntask.inference.generator import Generator
from nntask.inference.pretrained import ModelSource
from nntask.inference.sampling import Sampling
from nntask.models.registry import build
from nntask.nn.module import Blocks
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime
from tiles import BLOCK_FORMATS, QuantisedTensor

FAMILIES = [name for name in CONFIGS if "classifier" not in name and name != "mlp_mixer"]
TILES = ModelTiling(2, 4, 32, 32, 2, 13)


@pytest.fixture
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory of the family that a test names."""
    return write_plain(tmp_path / "plain", wide(request.param))


def model_of(path: Path, runtime: Any, tiling: ModelTiling, dtype: str = "fp32") -> Any:
    """The model of a directory, read where it lies."""
    return ModelSource.open(path).build(runtime, tiling, dtype)


def loss_of(path: Path, tiling: ModelTiling, dtype: str = "fp32") -> float:
    """The loss of a fixed batch."""
    runtime = InlineRuntime()
    model = model_of(path, runtime, tiling, dtype)
    rng, given = (
        np.random.default_rng(5),
        model.inputs(2, 9, ("tokens", "decoder_tokens", "targets") if model.start is not None else ("tokens", "targets")),
    )
    for tensor in given.values():
        tensor.write(rng.integers(2, 61, tensor.shape).astype(np.int32))
    model.eval()
    with no_grad():
        return float(model(**given, reduction="sum").read()[0])


@pytest.mark.parametrize("plain", FAMILIES, indirect=True)
@pytest.mark.parametrize(("kind", "tables"), [("q4_0", False), ("q8_0", True)])
def test_loss_is_that_of_the_decoded_weights(plain: Path, tmp_path: Path, kind: str, tables: bool) -> None:
    """Whole and cut, in fp32 and bf16; matrices of layers are blocks, and norms are not."""
    numbers = write_quantised(plain, tmp_path / "small", kind, tables=tables)
    write_decoded(plain, tmp_path / "decoded", numbers)
    for tiling in (ModelTiling(), TILES):
        want = loss_of(tmp_path / "decoded", tiling)
        assert loss_of(tmp_path / "small", tiling) == pytest.approx(want, rel=2e-6)
    assert loss_of(tmp_path / "small", TILES, "bf16") == pytest.approx(want, rel=2e-2)
    model = model_of(tmp_path / "small", InlineRuntime(), TILES)
    held = {name for name, tensor in model.tensors().items() if isinstance(tensor, QuantisedTensor)}
    assert held == set(ModelDirectory.open(tmp_path / "small").blocks({name: tensor.shape for name, tensor in model.tensors().items()}))
    assert len(held) >= 6 * len(model.stack.blocks) - 1
    decoded = model_of(tmp_path / "decoded", InlineRuntime(), TILES).tensors()
    for name, tensor in model.tensors().items():  # q, k and v, which some families join in their files, too
        np.testing.assert_array_equal(tensor.read(), decoded[name].read())


@pytest.mark.parametrize("plain", ["gpt2", "llama", pytest.param("t5", marks=pytest.mark.long), "gemma3"], indirect=True)
def test_texts(plain: Path, tmp_path: Path) -> None:
    """Greedy texts of prompts of unequal lengths are those of the decoded weights, with and without the cache, and within a small budget."""
    numbers = write_quantised(plain, tmp_path / "small", "q8_0", tables=True)
    write_decoded(plain, tmp_path / "decoded", numbers)
    prompts = prompts_of(61, 3, 7, 1)
    found = []
    for name, use_cache in (("decoded", True), ("small", True), ("small", False)):
        with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
            model = model_of(tmp_path / name, runtime, ModelTiling(2, 6, 32, 32, 2, 31))
            generator = Generator(model, runtime, 13, use_cache=use_cache)
            found.append([list(each) for each in generator.stream(prompts, 5, Sampling(temperature=0))])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
def test_bytes_in_memory(plain: Path, tmp_path: Path) -> None:
    """The tiles of the matrices take the bytes of their blocks."""
    write_quantised(plain, tmp_path / "small", "q4_0")
    held = model_of(tmp_path / "small", InlineRuntime(), TILES).tensors()
    blocks = [tensor for tensor in held.values() if isinstance(tensor, QuantisedTensor)]
    assert sum(handle.view.nbytes for tensor in blocks for handle in tensor.handles) == sum(np.prod(tensor.shape) for tensor in blocks) * 18 // 32


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
def test_what_is_refused(plain: Path, tmp_path: Path) -> None:
    """Metadata that are not so, formats unknown here, norms as blocks, cut blocks, scales that are not finite, and readers of floats only."""
    write_quantised(plain, tmp_path / "small", "q8_0")
    file = tmp_path / "small" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name, value in tensors.items() if value.dtype == np.uint8)

    def refused(formats: Any, error: type[Exception], match: str, **changed: np.ndarray) -> None:
        save_file({**tensors, **changed}, file, metadata={"quantised": formats if isinstance(formats, str) else json.dumps(formats)})
        with pytest.raises(error, match=match):
            loss_of(tmp_path / "small", ModelTiling())

    good = {name: "q8_0" for name, value in tensors.items() if value.dtype == np.uint8}
    refused("{", DataError, "cannot be parsed")
    refused("[]", DataError, "cannot be parsed")
    refused({**good, name: "q3_x"}, DataError, "one of q8_0, q4_0, q4_1, ")
    refused({**good, "nothing": "q8_0"}, DataError, "nothing in .* but is not there")
    refused({**good, "model.norm.weight": "q8_0"}, DataError, "is float32")
    refused({**good, name: "q4_0"}, DataError, "whole blocks of 18|has shape")
    refused({}, DataError, "has shape")
    bad = tensors[name].copy()
    bad[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    refused(good, DataError, "weights must be finite", **{name: bad})
    save_file(tensors, file, metadata={"quantised": json.dumps(good)})
    directory = ModelDirectory.open(tmp_path / "small")
    model = build(directory.config, ModelTiling(embd_tile=24), InlineRuntime(), seed=None)
    with pytest.raises(UsageError, match=r"whole blocks of 32.*--embd-tile"):
        model.hold_blocks(directory.blocks({name: tensor.shape for name, tensor in model.tensors().items()}))
    with pytest.raises(UsageError, match=r"norm\.weight is quantised"):
        model.hold_blocks({"norm.weight": Blocks(BLOCK_FORMATS["q8_0"])})
    with pytest.raises(DataError, match="only nntask's own models support"):
        weight_ranges(tmp_path / "small")
