"""``nntask train`` and ``plan`` for language models without tiles: the losses of transformers, budgets, resumption, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.commands import refuse
from support.counted_calls import count_calls
from support.language_directories import write_language_model
from support.model_directories import losses

hf = pytest.importorskip("transformers")

from nntask import UsageError  # noqa: E402
from nntask.data import BatchStream, DataSpec, open_dataset  # noqa: E402
from nntask.data.sampler import Windows  # noqa: E402
from nntask.optim.lr_schedule import make_schedule  # noqa: E402
from scheduler.api.recording import Recorder  # noqa: E402
from wrappers.cli import main  # noqa: E402
from wrappers.torch.capture.capture import capture  # noqa: E402
from wrappers.torch.trainer.collation import Collator, load_tokenizer  # noqa: E402
from wrappers.torch.trainer.language import language_config  # noqa: E402

KINDS = {"stablelm": hf.AutoModelForCausalLM, "electra": hf.AutoModelForMaskedLM, "bart": hf.AutoModelForSeq2SeqLM}
MOSTLY = ["electra", *(pytest.param(name, marks=pytest.mark.long) for name in ("stablelm", "bart"))]
"""The kinds for tests that take seconds: one in the default run."""
KIND_OF = {"stablelm": "causal", "electra": "masked", "bart": "pairs"}
LENGTH = 48
FLAGS = [
    *["--dataset=text", "--dataset-path=text", "--batch=4", "--minibatch=2", "--seq-len=48", "--steps=4", "--lr=1e-2", "--sample-tokens=0"],
    *["--weight-decay=0.1", "--grad-clip=1", "--schedule=cosine", "--warmup-steps=2"],
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directories, by family."""
    path = tmp_path_factory.mktemp("models")
    for family in (*KINDS, "vit"):
        write_language_model(path / family, family)
    return path


@pytest.fixture
def here(text: Path, directories: Path) -> Path:
    """A working directory with texts and model directories."""
    for family in directories.iterdir():
        shutil.copytree(family, text.parent / family.name)
    return text.parent


def train(family: str, name: str, *more: str) -> list[float]:
    """The losses of a run from a directory."""
    assert main(["train", f"--init-from={family}", *FLAGS, f"--run-dir={name}", *more]) == 0
    return losses(Path(name))


def planned(family: str, *more: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """The figures of a plan."""
    capsys.readouterr()
    assert main(["plan", f"--init-from={family}", *FLAGS, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def eager(family: str) -> list[float]:
    """The losses of PyTorch itself on the same batches."""
    module = KINDS[family].from_pretrained(family).train()
    dataset = open_dataset(DataSpec("text", "text", tokenizer_path=family, vocab_size=300))
    stream = BatchStream(Windows(dataset.train, LENGTH), 4, seed=0)
    collate = Collator(KIND_OF[family], load_tokenizer(family), module, 0)  # type: ignore[arg-type]
    groups = [
        {"params": [p for p in module.parameters() if (p.dim() > 1) == is_matrix], "weight_decay": 0.1 * is_matrix} for is_matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    rate = make_schedule("cosine", 1e-2, steps=4, warmup_steps=2)
    found = []
    for step in range(1, 5):
        tokens, parts = stream.next().tokens, []
        for number in range(2):
            loss = module(**collate.training(tokens[2 * number : 2 * number + 2], step, number)).loss
            (loss / 2).backward()
            parts.append(loss.item())
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(sum(parts) / 2)
    return found


@pytest.mark.parametrize("family", MOSTLY)
def test_losses_are_those_of_transformers_with_any_memory(here: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Eager's within 1e-5; the same bits in the least memory that the plan says with one worker, and on simulated devices. It says who computes."""
    found = train(family, "a")
    assert f"{family} is trained through PyTorch: nntask has no tiles for it" in capsys.readouterr().out
    assert found == pytest.approx(eager(family), abs=1e-5)
    figures = planned(family, "--disk=scratch", capsys=capsys)
    least = figures["minimum_budget_bytes"]["ram"]
    assert least < figures["needed_bytes"] / 4
    assert train(family, "b", f"--ram={least}", "--disk=scratch", "--ncpu=1") == found
    summary = json.loads(Path("b/summary.json").read_text())
    assert summary["peak_bytes"]["ram"] <= least
    assert summary["tasks_per_step"] >= figures["tasks_per_step"]  # what is made again in so little memory depends on the speed of this machine
    assert "torch" in summary["versions"]
    assert train(family, "c", "--sim-gpu=2", "--gpu-memory=8MB") == found
    code, err = refuse(capsys, ["train", f"--init-from={family}", *FLAGS, f"--ram={least - 1000}", "--disk=scratch"])
    assert (code, "--ram" in err, "ram=" in err.replace("--ram=", "")) == (3, True, False), err


@pytest.mark.parametrize("more", [[], ["--dropout=0.1"], ["--ram=4MiB", "--disk=scratch", "--ncpu=1"]], ids=["", "dropout", "short memory"])
def test_a_step_is_captured_and_recorded_once(here: Path, more: list[str]) -> None:
    """By the check before memory is taken; the session runs that step on its own tensors, in a resumed run as well."""
    assert count_calls(lambda: train("electra", "a", *more), capture, Recorder.finish) == [1, 1]
    assert count_calls(lambda: main(["train", "--resume=a", "--steps=5"]), capture, Recorder.finish) == [1, 1]


@pytest.mark.parametrize("family", MOSTLY)
def test_a_resumed_run_goes_on_with_the_same_bits(here: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the directory it began with gone; its checkpoint is a model directory, with the weights that training has reached."""
    found = train(family, "a", "--save-every=2")
    assert main(["train", f"--init-from={family}", *FLAGS, "--run-dir=b", "--save-every=2", "--trace-steps=1:2"]) == 0
    shutil.rmtree("b/checkpoints/step-000004")
    Path("b/latest").unlink()
    Path("b/latest").symlink_to("checkpoints/step-000002")
    Path("b/metrics.jsonl").write_text("".join(line + "\n" for line in Path("b/metrics.jsonl").read_text().splitlines()[:2]))
    Path(family).rename("gone")
    assert main(["train", "--resume=b", "--tokenizer-path=gone", "--steps=4"]) == 0
    assert losses(Path("b")) == found
    ours, theirs = (load_file(Path(name) / "latest" / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    module = KINDS[family].from_pretrained("b/latest")
    assert all(torch.equal(value, ours[name]) for name, value in module.state_dict().items() if name in ours)
    assert len(hf.AutoTokenizer.from_pretrained("b/latest")) == 300
    capsys.readouterr()
    assert main(["generate", "b"]) == 4
    assert f"holds a {family}, for which nntask has no tiles" in capsys.readouterr().err


@pytest.mark.long
def test_validation_and_sample(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two validations of a masked model are of the same masks; a causal one says bits per byte and ends with text, also within the least memory."""
    train("electra", "a", "--lr=0", "--eval-every=1", "--eval-batches=3")
    lines = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines() if "validation loss" in line]
    assert len(lines) == 4
    assert len(set(lines)) == 1
    assert "bits/byte" not in lines[0]
    least = planned("stablelm", "--disk=scratch", capsys=capsys)["minimum_budget_bytes"]["ram"]
    train("stablelm", "b", "--eval-every=2", "--sample-tokens=5", "--prompt=line 5", f"--ram={least}", "--disk=scratch")
    out = capsys.readouterr().out
    assert out.count("bits/byte") == 2
    assert "--- sample\nline 5" in out


def test_the_loss_of_a_validation_is_that_of_its_sequences(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 3 sequences in minibatches of 2, the empty place counts for nothing: transformers' mean over the three."""
    train("stablelm", "a", "--lr=0", "--steps=1", "--eval-every=1", "--dataset=train.bin", "--dataset-path=ids", *ids(here, "stablelm", 3))
    said = next(line for line in capsys.readouterr().out.splitlines() if "validation loss" in line)
    module = hf.AutoModelForCausalLM.from_pretrained("stablelm")
    tokens = torch.from_numpy(np.fromfile("ids/val.bin", np.uint16).astype(np.int64)[: 3 * LENGTH]).view(3, LENGTH)
    assert f"loss {module(input_ids=tokens, labels=tokens).loss.item():.4f} " in said


def ids(here: Path, family: str, num_validation: int) -> list[str]:
    """A directory `ids` with train.bin and val.bin of so many sequences; returns no further flags."""
    (here / "ids").mkdir()
    generator = np.random.Generator(np.random.PCG64(0))
    generator.integers(3, 300, 8 * LENGTH + 1).astype(np.uint16).tofile(here / "ids" / "train.bin")
    generator.integers(3, 300, num_validation * LENGTH + 1).astype(np.uint16).tofile(here / "ids" / "val.bin")
    return []


def test_what_blocks_make_again_is_counted(here: Path) -> None:
    """In every step, by the tasks that make it, some of which end beside the step before; nothing without --recompute block."""
    train("stablelm", "kept")
    train("stablelm", "again", "--recompute=block")
    kept, again = ([json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()] for name in ("kept", "again"))
    assert {line["recomputed_tasks"] for line in kept} == {0}
    counts = [line["recomputed_tasks"] for line in again]
    assert min(counts) > 0
    assert sum(counts) % len(counts) == 0
    assert all(line["recompute_seconds"] > 0 for line in again)


@pytest.mark.long
def test_recomputation_and_dropout(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--recompute block needs less memory and has the same losses; --dropout changes them, and is seeded."""
    found = train("stablelm", "a")
    assert train("stablelm", "b", "--recompute=block") == found
    needs = [planned("stablelm", *more, capsys=capsys)["needed_bytes"] for more in ([], ["--recompute=block"])]
    assert needs[1] < needs[0]
    dropped = [train("stablelm", name, "--dropout=0.5", *more) for name, more in (("c", []), ("d", ["--recompute=block"]))]
    assert dropped[0] != found
    assert dropped[0] == dropped[1]


def test_a_plan_says_what_a_step_takes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters, tasks, memory and time, of this machine and of an imaginary one; no weight is read."""
    length = (here / "electra" / "model.safetensors").stat().st_size
    with (here / "electra" / "model.safetensors").open("r+b") as file:
        file.seek(length - 4)
        file.write(b"\xff\xff\xff\x7f")  # nan, which a reader would refuse
    assert main(["plan", "--init-from=electra", *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "electra is trained through PyTorch: nntask has no tiles for it"
    assert "tiles               each tensor is one" in lines
    assert lines[-1] == "feasible            yes"
    (outside,) = (line for line in lines if line.startswith("outside --ram       "))
    assert outside.endswith(" of imports, and up to 64 MiB of recorded steps and kernels' working memory")
    module = hf.AutoModelForMaskedLM.from_config(hf.AutoConfig.from_pretrained("electra"))
    figures = planned("electra", "--devices=2x4MB@1TF", "--ram=1GB", capsys=capsys)
    assert figures["parameters"] == figures["trained_parameters"] == sum(p.numel() for p in module.parameters())
    assert set(figures["budget_bytes"]) == {"ram", "gpu:0", "gpu:1"}
    assert figures["seconds_per_step"] > 0
    assert figures["outside_budget_bytes"]["beside"] == 64 << 20 < figures["outside_budget_bytes"]["imports"]
    assert main(["plan", "--init-from=electra", *FLAGS, "--ram=500KB"]) == 3
    assert "it would fit with --ram" in capsys.readouterr().err
    assert main(["plan", "--init-from=electra", *FLAGS, "--explain=gemm"]) == 2
    assert "--explain must name a task of the step, got 'gemm'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "more", "code", "words"),
    [
        ("electra", ["--seq-tile=16"], 2, "--seq-tile 16 is about the tiles of nntask's own models"),
        ("electra", ["--auto-tile=measured"], 2, "--auto-tile measured is about the tiles"),
        ("electra", ["--lanes=2"], 2, "--lanes 2 sums gradients of nntask's own models in parallel"),
        ("electra", ["--dtype=bf16"], 2, "--dtype bf16 is another arithmetic than fp32"),
        ("electra", ["--attention=stored"], 2, "--attention stored is about nntask's own models"),
        ("electra", ["--train=lora:4"], 2, "--train lora:4 puts adapters into nntask's own models"),
        ("electra", ["--dask=local:2", "--lanes=2"], 2, "--lanes 2"),
        ("electra", ["--ngpu=1"], 2, "--ngpu 1 is about GPUs, and PyTorch computes on CPUs here"),
        ("electra", ["--ngpu=-1"], 2, "--ngpu -1 is about GPUs, and PyTorch computes on CPUs here"),
        ("electra", ["--sample-tokens=8"], 2, "--sample-tokens 8 is for the text of a model that predicts the next token, which this electra is not"),
        ("electra", ["--seq-len=65"], 2, "--seq-len must be at most max_position_embeddings = 64, got 65"),
        ("stablelm", ["--seq-len=1"], 2, "--seq-len must be at least 2 for a stablelm"),
        ("electra", ["--tokenizer=bytes"], 2, "the tokenizer of the data has none; name the model's own with --tokenizer-path DIR"),
        ("vit", [], 2, "model_type in vit/config.json is vit (ViTForImageClassification), and models that nntask trains through PyTorch are causal"),
        ("electra", ["--ram=500KB"], 3, "it would fit with --ram"),
        ("electra", ["--model=gpt2"], 2, "--init-from electra brings its own config and weights"),
    ],
)
def test_refusals(here: Path, capsys: pytest.CaptureFixture[str], family: str, more: list[str], code: int, words: str) -> None:
    """One sentence with what to do, before anything is written."""
    found, err = refuse(capsys, ["train", f"--init-from={family}", *FLAGS, "--run-dir=run", *more])
    assert (found, words in err) == (code, True), err
    assert not Path("run").exists()


def test_directories_that_cannot_be_used(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer, a family that nobody knows, weights of another shape, and packages that are not there."""
    argv = ["train", "--init-from=electra", *FLAGS, "--run-dir=run"]
    config = json.loads(Path("electra/config.json").read_text())
    Path("electra/config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    code, err = refuse(capsys, argv)
    assert (code, "has shape (64, 32), the module needs (48, 32)" in err) == (4, True), err
    Path("electra/tokenizer.json").unlink()
    code, err = refuse(capsys, argv)
    assert (code, "--init-from electra has no tokenizer.json, and its weights belong to the ids of one tokenizer" in err) == (4, True), err
    Path("electra/config.json").write_text(json.dumps({**config, "model_type": "bort"}))
    code, err = refuse(capsys, argv)
    assert (code, 'model_type in electra/config.json is "bort", which neither nntask nor transformers' in err) == (2, True), err
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None if name == "torch" else real(name, package))
    for command in ("train", "plan"):
        code, err = refuse(capsys, [command, "--init-from=stablelm", *FLAGS])
        words = "is stablelm, which is trained through PyTorch, and that needs the torch package; pip install -e '.[torch]'"
        assert (code, words in err) == (2, True), err


def test_a_variable_that_asks_for_tiles_is_named(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment or a TOML file says is refused under its own name."""
    Path("run.toml").write_text("seq_tile = 16\n")
    code, err = refuse(capsys, ["train", "--init-from=electra", *FLAGS, "--config=run.toml"])
    assert (code, "seq_tile = 16 in run.toml is about the tiles" in err) == (2, True), err


def test_a_pickle_is_converted_by_the_command_that_is_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The class is the config's, so that a masked model keeps its head; tokenizer files are converted where there are some."""
    weights = load_file("electra/model.safetensors")
    torch.save(weights, "electra/pytorch_model.bin")
    Path("electra/model.safetensors").unlink()
    code, err = refuse(capsys, ["train", "--init-from=electra", *FLAGS, "--run-dir=run"])
    assert (code, "from transformers import ElectraForMaskedLM as M, AutoTokenizer as T; " in err) == (4, True), err
    command = err.split("python -c '")[1].split("', then give electra-safetensors")[0]
    exec(command, {})
    assert json.loads(Path("electra-safetensors/config.json").read_text())["architectures"] == ["ElectraForMaskedLM"]
    found = load_file("electra-safetensors/model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert main(["train", "--init-from=electra-safetensors", *FLAGS, "--run-dir=run"]) == 0
    for path in Path("electra").glob("tokenizer*"):
        path.unlink()
    capsys.readouterr()
    code, err = refuse(capsys, ["train", "--init-from=electra", *FLAGS, "--run-dir=other", "--tokenizer-path=electra-safetensors"])
    assert (code, "from transformers import ElectraForMaskedLM as M; " in err, "AutoTokenizer" in err) == (4, True, False), err


def test_weights_that_a_family_stores_otherwise(folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts that files have one by one and the module as one tensor are refused with the command that writes them anew, which is then read."""
    write_language_model(folder / "flex_olmo", "flex_olmo")
    capsys.readouterr()
    code, err = refuse(capsys, ["plan", "--init-from=flex_olmo", *FLAGS])
    assert (code, "in another layout than the module has" in err, "save_original_format=False" in err) == (4, True, True), err
    hf.AutoModelForCausalLM.from_pretrained("flex_olmo").save_pretrained("flex_olmo", save_original_format=False)
    assert main(["plan", "--init-from=flex_olmo", *FLAGS]) == 0
    write_language_model(folder / "marian", "marian")
    capsys.readouterr()
    code, err = refuse(capsys, ["plan", "--init-from=marian", *FLAGS])
    assert (code, "which MarianMTModel computes when it is made with memory" in err) == (4, True), err


def test_what_a_model_learns_follows_from_its_config() -> None:
    """Encoder with decoder, then the class that is named, then whether the family masks; longest sequences are those of the module."""
    bert = {"model_type": "bert", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    assert language_config(bert, "x").kind == "masked"
    assert language_config({**bert, "architectures": ["BertForPreTraining"]}, "x").kind == "masked"
    assert language_config({**bert, "architectures": ["BertLMHeadModel"]}, "x").kind == "masked"  # which sees what it would learn to predict
    assert language_config({**bert, "architectures": ["BertLMHeadModel"], "is_decoder": True}, "x").kind == "causal"
    assert language_config({**bert, "model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 66}, "x").n_positions == 64
    small = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    assert language_config({"model_type": "t5", **small}, "x").kind == "pairs"
    assert language_config({"model_type": "t5", **small}, "x").longest is None
    bart = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "max_position_embeddings": 32, **small}
    assert language_config(bart, "x").kind == "pairs"
    assert language_config(bart, "x").n_positions == 64
    for kind in ("whisper", "resnet"):
        with pytest.raises(UsageError, match=f"model_type in x is {kind}"):
            language_config({"model_type": kind}, "x")
    for values in ({"model_type": "gpt_neox", "hidden_size": 33, "num_attention_heads": 2}, {**bert, "hidden_size": 33}):  # one checks it late
        with pytest.raises(UsageError, match=rf"x is no config of a {values['model_type']}: .*attention heads.*; copy it again$") as error:
            language_config(values, "x")
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=r"--dropout 0\.1 is for dropouts of the config"):
        language_config({"model_type": "mamba", "vocab_size": 300}, "x", 0.1)
