"""Model directories as transformers writes them: every element where it belongs, nothing before it is needed, and plain refusals."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import transformers_oracle
from support.deadline import DEADLINE
from support.gpt2_oracle import hf_model, random_config
from support.model_directories import CUTS, weights

from nntask.errors import DataError, UsageError
from nntask.hf.model_directory import ModelDirectory
from nntask.io.finite import first_not_finite
from nntask.io.safetensors_file import TensorFile
from nntask.models.gpt2 import GPT2, NAMES
from nntask.models.registry import build
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime, TaskError

ROOT = Path(__file__).parents[3]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A directory that transformers wrote, and its config."""
    path = tmp_path_factory.mktemp("theirs")
    config = random_config(3, tie_word_embeddings=True)
    hf_model(config).save_pretrained(path)
    return path, config


def rewrite(source: Path, target: Path, change) -> Path:
    """A copy of a directory whose tensors `change` has had its way with."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file(change(dict(tensors)) or tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("tiling", CUTS, ids=["whole", "ragged"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_tile_holds_its_elements(theirs, tmp_path, stored, tiling, dtype):
    """fp32, fp16 and bf16 files into fp32 and bf16 tiles of any size: the bits that converting the whole tensor gives."""
    path = rewrite(theirs[0], tmp_path / "m", lambda tensors: {name: value.astype(DTYPES[stored]) for name, value in tensors.items()})
    expected = NAMES.from_hf(load_file(path / "model.safetensors"), theirs[1])
    for runtime in (InlineRuntime(), Runtime(2, ram=1 << 26)):
        found = weights(path, tiling, runtime, dtype)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert np.array_equal(found[name].view(np.uint8), np.ascontiguousarray(value.astype(dtype)).view(np.uint8)), name
        if isinstance(runtime, Runtime):
            runtime.close()


def test_shards_untied_heads_and_bare_models(tmp_path):
    """What save_pretrained writes with shards and an untied head; without the prefix, with masks and a head that is tied."""
    config = random_config(5, tie_word_embeddings=False)
    model = hf_model(config)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    expected = weights(tmp_path / "whole")
    found = weights(tmp_path / "shards", CUTS[1])
    assert all(np.array_equal(found[name], value) for name, value in expected.items())

    def bare(tensors):
        tensors.pop("lm_head.weight")
        masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 9, 9), np.uint8) for layer in range(config.n_layer)}
        head = {"lm_head.weight": tensors["transformer.wte.weight"].copy()}  # tied, and written all the same
        return {**{name.removeprefix("transformer."): value for name, value in tensors.items()}, **masks, **head}

    rewrite(tmp_path / "whole", tmp_path / "bare", bare)
    text = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(json.dumps({**text, "tie_word_embeddings": True}))
    found = weights(tmp_path / "bare")
    assert set(expected) - set(found) == {"lm_head"}
    assert all(np.array_equal(value, expected[name]) for name, value in found.items())


def test_less_memory_than_weights(theirs, tmp_path):
    """A budget of a few tiles and a disk below: the same bits."""
    expected = weights(theirs[0], CUTS[1])
    with Runtime(2, ram=40 * 4096, disk=tmp_path) as runtime:
        directory = ModelDirectory.open(theirs[0])
        model = GPT2(directory.config, CUTS[1], runtime, seed=None)
        directory.attach(model.tensors())
        assert runtime.stats()["tasks"] == 0
        found = {name: tensor.read() for name, tensor in model.tensors().items()}
        assert runtime.stats()["evictions"] > 0
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_opening_four_gigabytes(tmp_path):
    """A sparse file of 4 GB: opening it and attaching every tile reads under 10 MiB and takes under 100 MiB; using one tile takes little more."""
    header = {}
    config = {"vocab_size": 50000, "n_positions": 512, "n_embd": 2048, "n_layer": 18, "n_head": 16, "model_type": "gpt2"}
    config = {**config, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    shapes = {"wte.weight": (50000, 2048), "wpe.weight": (512, 2048), "ln_f.weight": (2048,), "ln_f.bias": (2048,)}
    for layer in range(18):
        for name, rows, columns in (("attn.c_attn", 2048, 6144), ("attn.c_proj", 2048, 2048), ("mlp.c_fc", 2048, 8192), ("mlp.c_proj", 8192, 2048)):
            shapes[f"h.{layer}.{name}.weight"] = rows, columns
            shapes[f"h.{layer}.{name}.bias"] = (columns,)
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{name}.weight"] = shapes[f"h.{layer}.{name}.bias"] = (2048,)
    end = 0
    for name, shape in shapes.items():
        nbytes = 4 * int(np.prod(shape))
        header[f"transformer.{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    assert end > 4e9
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = """
import sys, json
from pathlib import Path
from nntask.hf.model_directory import ModelDirectory
from nntask.models.gpt2 import GPT2
from nntask.tiling.model_tiling import ModelTiling
from scheduler import Runtime
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) << 10
def read():
    return int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])
with Runtime(1, ram=1 << 30) as runtime:
    before, begun = resident(), read()
    directory = ModelDirectory.open(Path(sys.argv[1]))
    model = GPT2(directory.config, ModelTiling(1, 512, 1024, 1024, 8, 5000), runtime, seed=None)
    directory.attach(model.tensors())
    opened, asked = resident() - before, read() - begun
    with runtime.acquire(model.tensors()["h.3.attn.k.weight"][0, 0], "R") as view:
        assert not view.any() and view.shape == (1024, 1024)
    print(json.dumps([opened, asked, resident() - before, runtime.stats()["peak_bytes"]["ram"]]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    opened, asked, used, ledger = json.loads(done.stdout)
    print(f"opened: {opened / 2**20:.1f} MiB, {asked / 2**20:.1f} MiB read; after one tile of 4 MiB: {used / 2**20:.1f} MiB")
    assert opened < 100 << 20
    assert asked < 10 << 20
    assert used - opened < 20 << 20
    assert ledger <= 2 * (4 << 20)


def _drop(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _set(name, value):
    return lambda tensors: {**tensors, name: value}


BIAS = "transformer.h.0.mlp.c_fc.bias"


def test_a_tied_head_that_is_another_is_refused(theirs, tmp_path):
    """It would be lost without a word: one value in the last piece, or another shape; the message says how to keep it, and that works."""

    def another(tensors):
        head = tensors["transformer.wte.weight"].copy()
        head[-1, -1] += 1
        return {**tensors, "lm_head.weight": head}

    path = rewrite(theirs[0], tmp_path / "m", another)
    with pytest.raises(DataError, match=r'lm_head\.weight in .* is not transformer\.wte\.weight.*"tie_word_embeddings": false in .*config\.json'):
        weights(path)
    (path / "config.json").write_text(json.dumps(replace(theirs[1], tie_word_embeddings=False).to_dict()))
    found = weights(path)
    assert found["lm_head"][-1, -1] == found["wte.weight"][-1, -1] + 1
    path = rewrite(theirs[0], tmp_path / "n", lambda tensors: {**tensors, "lm_head.weight": np.zeros((3, 3), np.float32)})
    with pytest.raises(DataError, match=r"lm_head\.weight .* has shape \(3, 3\), config\.json makes it"):
        weights(path)


def test_files_without_an_index_and_pickles_in_parts(theirs, tmp_path):
    """Parts of a pickle, Meta's own pickles, a pickle under a wrong name: the command that converts them, which overwrites nothing."""
    text = (theirs[0] / "config.json").read_text()
    for name, words in (
        ("pytorch_model-00001-of-00002.bin", r'torch pickle.*save_pretrained\("\S+m-safetensors"\)'),
        ("consolidated.00.pth", r"convert_llama_weights_to_hf --input_dir \S+/m --model_size SIZE --output_dir \S+/m-safetensors"),
        ("model.safetensors", r"\"\S+/model-converted\.safetensors\"\)', then put model-converted\.safetensors in the place of"),
    ):
        path = tmp_path / name / "m"
        path.mkdir(parents=True)
        (path / "config.json").write_text(text)
        (path / name).write_bytes(b"PK\x03\x04" + b"\0" * 50)
        with pytest.raises(DataError, match=words):
            ModelDirectory.open(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: {**h, "x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [8, 12]}}, "x in .* has element type F8_E4M3, .* store it as F32"),
        (lambda h: {**h, "x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "x begins at byte 4 and the tensors before it end at byte 8"),
        (lambda h: {**h, "x": {"dtype": "F16", "shape": [1], "data_offsets": [10, 12]}}, "x begins at byte 10"),
        (lambda h: {**h, "x": {"dtype": "F16", "shape": [10**18], "data_offsets": [8, 12]}}, "claims bytes 8 to 12"),
    ],
)
def test_headers_that_lie(tmp_path, change, words):
    """Types that are not read, tensors over each other, bytes of nobody, sizes beyond everything; and a header that never ends."""
    header = json.dumps(change({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 12)
    with pytest.raises(DataError, match=words):
        TensorFile(tmp_path / "x")
    header = b'{"a":' + b"[" * 200_000
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DataError, match="cannot be parsed"):
        TensorFile(tmp_path / "x")


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_value_that_is_not_finite_is_found(dtype):
    """The same as NumPy says, over all values of 16 bits (of fp32: their upper halves), and where it lies does not matter."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = patterns.view(dtype) if np.dtype(dtype).itemsize == 2 else (patterns.astype(np.uint32) << 16).view(dtype)
    with np.errstate(invalid="ignore"):
        expected = np.isfinite(values)
    for value, finite in zip(values[::7], expected[::7], strict=True):
        assert (first_not_finite(np.array([value])) is None) == finite
    many = np.ones(200_000, dtype)
    assert first_not_finite(many) is None
    many[[150_000, 199_999]] = np.inf, np.nan
    assert first_not_finite(many.reshape(400, 500)) == np.inf


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop(BIAS), [f"has no tensor {BIAS} of shape (", "config.json asks for"]),
        (_set(BIAS, np.zeros(7, np.float32)), [BIAS, "has shape (7,), config.json makes it ("]),
        (_set("transformer.h.0.attn.c_attn.weight", np.zeros((4, 9), np.float32)), ["h.0.attn.c_attn.weight", "has shape (4, 9)"]),
        (lambda tensors: {**tensors, "h.0.mlp.c_fc.bias": tensors[BIAS]}, ["has both ", "h.0.mlp.c_fc.bias and ", "are the same weight; remove"]),
        (_set("transformer.nothing", np.zeros(0, np.float32)), ["transformer.nothing", "has shape (0,) and no elements; remove it"]),
        (_set("transformer.h.0.extra.weight", np.zeros((4, 9), np.float32)), ["has a tensor transformer.h.0.extra.weight of shape (4, 9)", "lacks"]),
    ],
)
def test_tensors_that_do_not_belong(theirs, tmp_path, change, words):
    """Missing, misshapen and surplus tensors are told by the names that the files have, and their shapes."""
    path = rewrite(theirs[0], tmp_path / "m", change)
    with pytest.raises(DataError) as told:
        weights(path)
    assert all(word in str(told.value) for word in words), told.value


@pytest.mark.parametrize(
    ("family", "kind", "first"),
    [
        ("bert", "BertForMaskedLM", "cls.predictions.transform.dense.weight"),
        ("roberta", "RobertaForMaskedLM", "lm_head.dense.weight"),
        ("mistral", "MistralForCausalLM", "lm_head.weight"),
        ("phi", "PhiForCausalLM", "lm_head.weight"),
    ],
)
def test_models_without_their_head(tmp_path, family, kind, first):
    """BertModel, MistralModel and the like: nothing is missing of what they are, so copying again would not help. A classifier begins there."""
    model = transformers_oracle.hf_model(transformers_oracle.CONFIGS[family])
    model.base_model.save_pretrained(tmp_path)
    directory = ModelDirectory.open(tmp_path)
    shapes = {name: tensor.shape for name, tensor in build(directory.config, ModelTiling(), InlineRuntime()).tensors().items()}
    with pytest.raises(DataError, match=f"has no head: it ends where a {kind} would have {first}.*; use the directory of a {kind}") as told:
        directory.check(shapes)
    assert ("--objective classify" in str(told.value)) == (directory.config.objective == "masked")
    if directory.config.objective == "masked":
        model.save_pretrained(tmp_path)
        rewrite(tmp_path, tmp_path / "short", _drop(first))
        with pytest.raises(DataError, match=f"has no tensor {first} of shape"):
            ModelDirectory.open(tmp_path / "short").check(shapes)


def test_whole_numbers_are_no_weights(theirs, tmp_path):
    """An element type that is not a float."""
    path = rewrite(theirs[0], tmp_path / "m", lambda tensors: {**tensors, BIAS: tensors[BIAS].astype(np.int32)})
    with pytest.raises(DataError, match=r"h\.0\.mlp\.c_fc\.bias .* holds int32, and weights must be"):
        weights(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite(theirs, tmp_path, bad):
    """The tensor and the file are named when the tile is read; the other tiles can be used."""

    def change(tensors):
        value = tensors[BIAS].copy()
        value[-1] = bad
        return {**tensors, BIAS: value}

    directory = ModelDirectory.open(rewrite(theirs[0], tmp_path / "m", change))
    with Runtime(1, ram=1 << 26) as runtime:
        model = GPT2(directory.config, CUTS[1], runtime, seed=None)
        directory.attach(model.tensors())
        tensor = model.tensors()["h.0.mlp.c_fc.bias"]
        with runtime.acquire(tensor[0,], "R") as view:
            assert np.isfinite(view).all()
        runtime.submit(_touch(), [(tensor.handles[-1], "R")])
        with pytest.raises(TaskError) as told:
            runtime.wait()
        assert isinstance(told.value.__cause__, DataError)
        assert f"{BIAS} in " in str(told.value.__cause__)
        assert "weights must be finite" in str(told.value.__cause__)


def _touch():
    from scheduler import Codelet

    return Codelet("touch", cpu=lambda view: None)


def test_directories_that_are_none(theirs, tmp_path):
    """Pickles, missing files, broken indices, other families: what is wrong and what to do."""
    shards = tmp_path / "shards"
    hf_model(theirs[1]).save_pretrained(shards, max_shard_size="20KB")
    index = json.loads((shards / "model.safetensors.index.json").read_text())

    def broken(name, change, like=shards):
        path = tmp_path / name
        path.mkdir()
        for file in like.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        change(path)
        return path

    def reindex(**changes):
        return lambda path: (path / "model.safetensors.index.json").write_text(json.dumps({**index, **changes}))

    def configure(**changes):
        text = json.loads((theirs[0] / "config.json").read_text())
        return lambda path: (path / "config.json").write_text(json.dumps({**text, **changes}))

    names = sorted(each.name for each in shards.glob("model-*"))
    entry = next(iter(index["weight_map"]))
    cases = [
        (broken("a", lambda path: (path / names[1]).unlink()), DataError, f"has no {names[1]}, which model.safetensors.index.json names"),
        (broken("b", reindex(weight_map={k: v for k, v in index["weight_map"].items() if v != names[1]})), DataError, f"does not name {names[1]}"),
        (broken("c", reindex(weight_map={k: v for k, v in index["weight_map"].items() if k != entry})), DataError, f"has a tensor {entry}"),
        (broken("d", reindex(weight_map={**index["weight_map"], "x": names[0]})), DataError, "lacks the tensor x"),
        (broken("e", reindex(weight_map={**index["weight_map"], entry: "../x"})), DataError, "which is no file name"),
        (broken("f", reindex(weight_map=[])), DataError, "is not an index"),
        (broken("g", lambda path: (path / "model.safetensors.index.json").unlink()), DataError, "and no model.safetensors.index.json"),
        (broken("h", configure(model_type="mamba"), theirs[0]), UsageError, 'model_type in .*config.json must be one of gpt2.*, got "mamba"'),
        (broken("i", configure(activation_function="mish"), theirs[0]), UsageError, "activation_function in .* must be one of"),
        (broken("j", lambda path: (path / "config.json").unlink(), theirs[0]), DataError, "config.json cannot be read"),
        (
            broken("k", lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), theirs[0]),
            DataError,
            "torch pickle.*convert it: ",
        ),
        (broken("l", lambda path: (path / "model.safetensors").unlink(), theirs[0]), DataError, "has no weights"),
        (broken("m", lambda path: (path / "model.safetensors").write_bytes(b"12345678901"), theirs[0]), DataError, "not a whole safetensors"),
        (tmp_path / "nowhere", DataError, "does not exist"),
    ]
    for path, kind, words in cases:
        with pytest.raises(kind, match=words):
            ModelDirectory.open(path)
    (tmp_path / "weights.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"weights\.bin is a torch pickle.*convert it"):
        ModelDirectory.open(tmp_path / "weights.bin")


def test_configs_of_another_size(theirs, tmp_path):
    """Weights of one model and the config of another do not load."""
    path = rewrite(theirs[0], tmp_path / "m", lambda tensors: tensors)
    (path / "config.json").write_text(json.dumps(replace(theirs[1], vocab_size=theirs[1].vocab_size + 1).to_dict()))
    with pytest.raises(DataError, match=r"wte\.weight in .* has shape"):
        weights(path)
