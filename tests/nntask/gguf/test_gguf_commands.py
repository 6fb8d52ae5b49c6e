"""GGUF files where commands take model directories: texts, scores, plans, training, adapters, tokenizers and chat templates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_files import write_gguf
from support.model_directories import TEXT, losses, write_model
from support.transformers_oracle import hf_model

from nntask.checkpoints import find_checkpoint
from nntask.data import ChatSource
from nntask.data.tokenizer import load_tokenizer
from nntask.gguf.vocabulary import files_from
from nntask.gguf.vocabulary_keys import keys_of
from nntask.models.gpt2 import GPT2Config
from wrappers.cli import main

CONFIG = GPT2Config(vocab_size=300, n_positions=16, n_embd=32, n_layer=2, n_head=4).with_dropout(0.0)
TRAIN = ("--dataset=text", "--dataset-path=text.txt", "--steps=2", "--batch=2", "--seq-len=8", "--sample-tokens=0", "--save-every=0")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, the same as a file, and a text."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", CONFIG)
    theirs = hf_model(CONFIG)
    theirs.save_pretrained("model")
    Path("model/generation_config.json").unlink()  # with ids of the real GPT-2
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "bos_token_id": 0, "eos_token_id": 0}))
    write_gguf(tmp_path / "model.gguf", theirs, tokenizer=tmp_path / "model")
    Path("text.txt").write_text(TEXT)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints."""
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def without_times(text: str) -> str:
    """What is printed but for seconds."""
    return re.sub(r'"seconds": [\d.]+', "", text)


def test_texts_scores_and_plans_are_those_of_the_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`generate`, `perplexity` and `plan`."""
    for argv in (
        ("generate", "{}", "--prompt=some", "--max-new-tokens=8", "--temperature=0"),
        ("generate", "{}", "--prompt=", "--max-new-tokens=8", "--temperature=0"),
        ("perplexity", "{}", "--dataset=text", "--dataset-path=text.txt", "--json"),
    ):
        ours, theirs = (printed(capsys, *(each.format(path) for each in argv)) for path in ("model.gguf", "model"))
        assert without_times(ours.replace("model.gguf", "model")) == without_times(theirs)
    ours, theirs = (printed(capsys, "plan", f"--init-from={path}", *TRAIN[:-2]) for path in ("model.gguf", "model"))
    assert ours.splitlines()[:3] == theirs.splitlines()[:3]  # memory for readers differs
    assert "feasible            yes" in ours


def test_training_begins_with_the_weights_of_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses are those of the directory, of the whole model and of adapters, which remember the file."""
    for name, more in {"full": (), "lora": ("--train=lora:4",)}.items():
        for path in ("model.gguf", "model"):
            assert main(["train", f"--init-from={path}", *TRAIN, *more, f"--run-dir={name}-{path}", "--save-every=1"]) == 0
        assert losses(here / f"{name}-model.gguf") == losses(here / f"{name}-model")
    base = find_checkpoint(here / "lora-model.gguf").state["base"]
    assert base["kind"] == "gguf"
    capsys.readouterr()
    ours, theirs = (
        printed(capsys, "generate", f"lora-{path}", "--prompt=some", "--temperature=0", "--max-new-tokens=8") for path in ("model.gguf", "model")
    )
    assert ours == theirs
    with open("model.gguf", "r+b") as file:
        file.seek(-64, 2)
        file.write(np.full(16, 0.5, np.float32).tobytes())
    assert main(["generate", "lora-model.gguf"]) == 4
    assert "as it was, with fingerprint" in capsys.readouterr().err


def test_a_tokenizer_and_its_template(here: Path) -> None:
    """Ids, ends of texts and the chat template come from the file."""
    ours, theirs = load_tokenizer(here / "model.gguf"), load_tokenizer(here / "model")
    assert ours.encode([TEXT])[0].tolist() == theirs.encode([TEXT])[0].tolist()
    assert ours.special.eos == theirs.special.eos == (0,)
    assert ours.decode(ours.encode([TEXT])[0]) == TEXT
    assert ChatSource.of(ours, "").terms()[:30].count("messages")


def test_a_tokenizer_comes_back(here: Path) -> None:
    """Through the keys of a file: as it was with its tokenizer.json, and with the same ids without it."""
    files = {"tokenizer.json": Path("model/tokenizer.json").read_text(), "tokenizer_config.json": json.dumps({"chat_template": "hello"})}
    keys, _ = keys_of(files, 300, begin=0, ends=(0,))
    back = files_from(keys | {"tokenizer.ggml.token_type": np.array(keys["tokenizer.ggml.token_type"])}, 16, 300)
    assert back["tokenizer.json"] == files["tokenizer.json"]
    assert json.loads(back["tokenizer_config.json"])["chat_template"] == "hello"
    del keys["tokenizer.huggingface.json"]
    keys["tokenizer.ggml.token_type"] = np.array(keys["tokenizer.ggml.token_type"])
    (here / "again").mkdir()
    for name, text in files_from(keys, 16, 300).items():
        (here / "again" / name).write_text(text)
    one, two = load_tokenizer(here / "model"), load_tokenizer(here / "again")
    assert one.encode([TEXT])[0].tolist() == two.encode([TEXT])[0].tolist()
    assert one.vocab_size == two.vocab_size


def test_a_run_is_exported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a file in its own type and in another; with adapters merged in; and quantised."""
    assert main(["train", "--init-from=model", *TRAIN, "--save-every=1", "--run-dir=run"]) == 0
    assert main(["train", "--init-from=model", *TRAIN, "--train=lora:4", "--save-every=1", "--run-dir=beside"]) == 0
    capsys.readouterr()
    assert main(["export", "beside", "b.gguf", "--format=gguf"]) == 2
    assert "add --merge" in capsys.readouterr().err
    assert main(["export", "run", "r.gguf", "--format=gguf", "--shard-size=1MB"]) == 2
    capsys.readouterr()
    for name, flags, words in (("r.gguf", (), "add --format gguf"), ("r", ("--format=gguf",), "ends with .gguf, got r; name it r.gguf")):
        assert main(["export", "run", name, *flags]) == 2
        assert words in capsys.readouterr().err
        assert not Path(name).exists()
    for run, more in {"run": (), "beside": ("--merge",)}.items():
        printed(capsys, "export", run, f"{run}-hf", *more)
        assert "weights of" in printed(capsys, "export", run, f"{run}.gguf", "--format=gguf", *more)
        printed(capsys, "export", run, f"{run}-16.gguf", "--format=gguf", "--dtype=bf16", *more)
        printed(capsys, "quantize", run, f"{run}-8.gguf")
        texts = [printed(capsys, "generate", path, "--prompt=some", "--temperature=0", "--max-new-tokens=8") for path in (f"{run}.gguf", f"{run}-hf")]
        assert texts[0] == texts[1]
        for name in (f"{run}-16.gguf", f"{run}-8.gguf"):
            assert printed(capsys, "generate", name, "--prompt=some", "--temperature=0", "--max-new-tokens=8")
    again = [printed(capsys, "perplexity", path, "--dataset=text", "--dataset-path=text.txt", "--json") for path in ("run.gguf", "run-hf")]
    assert without_times(again[0].replace(".gguf", "-hf")) == without_times(again[1])


def test_adapters_beside_a_quantised_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same losses and merged weights as beside a directory with the same blocks."""
    for name in ("small.gguf", "small"):
        printed(capsys, "quantize", "model", name, "--type=q4_0", "--embeddings")
        assert main(["train", f"--init-from={name}", *TRAIN, "--train=lora:4", f"--run-dir=run-{name}", "--save-every=1"]) == 0
        capsys.readouterr()
        printed(capsys, "export", f"run-{name}", f"merged-beside-{'file' if name.endswith('.gguf') else 'directory'}", "--merge")
        printed(capsys, "quantize", f"run-{name}", f"again-{name}.gguf", "--type=q4_0")
    assert losses(here / "run-small.gguf") == losses(here / "run-small")
    merged = [Path(f"merged-beside-{each}/model.safetensors").read_bytes() for each in ("file", "directory")]
    assert merged[0] == merged[1]
    one, two = ({each.name: each.data for each in gguf.GGUFReader(here / f"again-{name}.gguf").tensors} for name in ("small.gguf", "small"))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_what_quantize_refuses_to_make_larger(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of 4 bits gain nothing in blocks of 8, unless they stay and the embedding is what is asked for; a tied head is no head of its own."""
    printed(capsys, "quantize", "model", "four.gguf", "--type=q4_0")
    printed(capsys, "quantize", "model", "four", "--type=q4_0")
    for path in ("four.gguf", "four"):
        assert main(["quantize", path, "eight.gguf", "--type=q8_0"]) == 2
        refusal = capsys.readouterr().err
        assert re.search(r"has transformer\.\S+ and \d+ more in q4_0 already, and in q8_0 they would be larger and no better; .*--keep", refusal)
        assert not Path("eight.gguf").exists()
        printed(capsys, "quantize", path, "both.gguf", "--type=q8_0", "--embeddings", "--keep=*.h.*", "--force")
        assert {str(each.tensor_type.name) for each in gguf.GGUFReader("both.gguf").tensors} == {"F32", "Q4_0", "Q8_0"}
        printed(capsys, "quantize", path, "floats.gguf", "--type=f32", "--force")
    assert main(["quantize", "model", "head.gguf", "--head"]) == 2
    assert "--head is for a head with its own weights, and the head of model is the embedding; use --embeddings" in capsys.readouterr().err


def test_kinds_of_workers_are_compared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the weights of a file, whole and in blocks."""
    printed(capsys, "quantize", "model", "small.gguf")
    for name in ("model.gguf", "small.gguf"):
        assert "equal within" in printed(capsys, "compare", name, "--batch=2", "--seq-len=8")
