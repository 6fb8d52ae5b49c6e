"""Adapters through the commands: train, resume, generate, plan, export to PEFT and merged; the base that they stand beside; what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.commands import refuse, rewrite_state
from support.model_directories import CONFIG, TEXT, losses

from nntask import no_grad
from nntask.checkpoints.store import find_checkpoint
from nntask.config.resolution import model_spec
from nntask.config.settings import from_dict
from nntask.data.tokenizer import train_bpe
from nntask.engine.models import load_model
from nntask.export.merged_weights import weights_of
from nntask.models.llama import LlamaConfig
from nntask.models.registry import build
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from wrappers.cli import main
from wrappers.torch.interchange import to_torch

LLAMA = LlamaConfig(
    vocab_size=300,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=4,
    max_position_embeddings=16,
)
CONFIGS = {"gpt2": replace(CONFIG, initializer_range=0.2), "llama": replace(LLAMA, initializer_range=0.2)}
FLAGS = "--train=lora:4 --lora-alpha=8 --dataset=text --dataset-path=text.txt --batch=4 --minibatch=2 --lr=1e-2 --warmup-steps=0 --sample-tokens=0"
TRAIN = ["train", *FLAGS.split(), "--ncpu=2"]


def write_base(path: Path, family: str, seed: int = 9) -> None:
    """A model directory as transformers writes it, with a tokenizer."""
    config = CONFIGS[family]
    arrays = {name: tensor.read() for name, tensor in build(config, ModelTiling(), InlineRuntime(), seed=seed).tensors().items()}
    theirs = config.names.to_hf(arrays, config)
    path.mkdir(exist_ok=True)
    head = {"lm_head.weight"} if config.tie_word_embeddings else set()
    save_file({name: np.ascontiguousarray(value) for name, value in theirs.items() if name not in head}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    train_bpe([TEXT], 290).save(path)


@pytest.fixture
def here(folder: Path) -> Path:
    """A directory with text, a GPT-2 to start from, and a config."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "small.json").write_text(json.dumps(CONFIGS["gpt2"].to_dict()))
    write_base(folder / "gpt2", "gpt2")
    return folder


def scores(run: str, ids: np.ndarray) -> np.ndarray:
    """Our logits of a run."""
    checkpoint = find_checkpoint(run)
    spec = model_spec(from_dict(checkpoint.state["settings"], run), checkpoint.config, ModelTiling())
    model = load_model(checkpoint, spec, InlineRuntime())
    model.eval()
    tokens, _ = model.input_tensors(*ids.shape)
    tokens.write(ids.astype(np.int32))
    with no_grad():
        return model.logits(tokens).read().astype(np.float32)


def their_scores(model, ids: np.ndarray) -> np.ndarray:
    """Logits of a module of torch."""
    with torch.no_grad():
        return model.eval().float()(torch.from_numpy(ids)).logits.numpy()


@pytest.mark.parametrize(
    "start",
    [
        ["--init-from=gpt2"],
        pytest.param(["--config-path=small.json", "--init-from=base.safetensors"], marks=pytest.mark.long),
        pytest.param(["--config-path=small.json"], marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_goes_on_bit_by_bit(here: Path, start: list[str]) -> None:
    """Four steps equal two and two more, beside a directory, a file and the seed, with little memory, dropout and recomputation as well."""
    tokenizer = [] if "gpt2" in start[0] else ["--tokenizer-path=gpt2"]
    if "--init-from=base.safetensors" in start:
        rest = [each for each in TRAIN if "lora" not in each]
        assert main([*rest, "--config-path=small.json", *tokenizer, "--steps=1", "--run-dir=first"]) == 0
        assert main(["export", "first", "base.safetensors", "--format=weights"]) == 0
    more = [*start, *tokenizer, "--lora-dropout=0.2", "--recompute=block", "--grad-clip=0.5", "--lanes=4"]
    assert main([*TRAIN, *more, "--steps=4", "--run-dir=a"]) == 0
    assert main([*TRAIN, *more, "--steps=2", "--run-dir=b", "--ram=150KiB", "--disk=tier", "--order=layers"]) == 0
    assert main(["train", "--resume=b", "--steps=4", "--disk=tier", "--ncpu=1", "--sched=eager", "--sample-tokens=0"]) == 0
    assert losses(here / "a") == losses(here / "b")
    for name in ("model", "optimizer"):
        a, b = (load_file(here / run / "latest" / f"{name}.safetensors") for run in "ab")
        assert {key: value.tobytes() for key, value in a.items()} == {key: value.tobytes() for key, value in b.items()}
    assert all(".lora." in name for name in (*a, *load_file(here / "a" / "latest" / "model.safetensors")))
    assert main(["generate", "a", "--max-new-tokens=3"]) == 0


@pytest.mark.parametrize(("family", "dtype", "tolerance"), [("gpt2", "fp32", 1e-4), ("llama", "fp32", 1e-4), ("llama", "bf16", 3e-2)])
def test_peft_and_transformers_score_as_we_do(here: Path, capsys, family: str, dtype: str, tolerance: float) -> None:
    """The exported adapters beside their base, and the merged model, give our logits; the base alone does not."""
    import peft  # takes seconds

    write_base(here / family, family)
    assert main([*TRAIN, f"--init-from={family}", "--steps=4", "--run-dir=run", f"--dtype={dtype}"]) == 0
    capsys.readouterr()
    assert main(["export", "run", "adapters"]) == 0
    assert re.search(r"wrote [\d.]+k adapter weights of run", capsys.readouterr().out)
    assert main(["export", "run", "merged", "--merge", "--shard-size=20KB"]) == 0
    files = {path.name for path in (here / "adapters").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    values = json.loads((here / "adapters" / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["fan_in_fan_out"]) == (4, 8, family == "gpt2")
    ids = np.arange(32).reshape(2, 16) * 7 % 290
    ours = scores("run", ids)
    base = transformers.AutoModelForCausalLM.from_pretrained(here / family, dtype=torch.float32)
    away = np.abs(their_scores(base, ids) - ours).max()
    merged = transformers.AutoModelForCausalLM.from_pretrained(here / "merged")
    limit = tolerance * max(1.0, np.abs(ours).max())
    assert np.abs(their_scores(merged, ids) - ours).max() < limit
    assert np.abs(their_scores(to_torch("run"), ids) - ours).max() < limit
    theirs = peft.PeftModel.from_pretrained(base, here / "adapters")
    with safe_open(here / "adapters" / "adapter_model.safetensors", "np") as file:
        assert set(file.keys()) == set(peft.get_peft_model_state_dict(theirs))
    assert np.abs(their_scores(theirs, ids) - ours).max() < limit
    assert away > 2 * limit
    capsys.readouterr()
    code, err = refuse(capsys, ["export", "run", "adapters"])
    assert (code, "replace it with --force" in err) == (2, True)
    assert main(["export", "run", "adapters", "--force", "--dtype=fp16"]) == 0


def test_a_base_made_from_the_seed_is_merged_by_making_it_again(here: Path) -> None:
    """No file holds it; export --merge and our own scores agree."""
    assert main([*TRAIN, "--config-path=small.json", "--tokenizer-path=gpt2", "--steps=2", "--run-dir=run"]) == 0
    assert main(["export", "run", "merged", "--merge"]) == 0
    assert json.loads((here / "run" / "latest" / "state.json").read_text())["base"]["kind"] == "seed"
    ids = np.arange(16).reshape(1, 16)
    merged = transformers.AutoModelForCausalLM.from_pretrained(here / "merged")
    assert np.abs(their_scores(merged, ids) - scores("run", ids)).max() < 1e-4


@pytest.mark.long
def test_bf16_beside_a_base_made_from_the_seed(here: Path, capsys) -> None:
    """Equal bits over workers and budgets, in training and in text; a finer type is refused; merged weights are rounded once; windows of windows."""
    start = ["--config-path=small.json", "--tokenizer-path=gpt2", "--dtype=bf16", "--steps=2"]
    machines = {"a": ["--ncpu=2"], "b": ["--ncpu=1", "--sched=eager", "--no-prefetch", "--ram=110KiB", "--disk=tier"]}
    texts = set()
    for run, machine in machines.items():
        assert main([*TRAIN, *start, *machine, f"--run-dir={run}"]) == 0
        capsys.readouterr()
        assert main(["generate", "a", "--prompt=some", "--max-new-tokens=12", "--temperature=2", *machine]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1
    a, b = ((here / run / "latest" / "model.safetensors").read_bytes() for run in machines)
    assert a == b
    code, err = refuse(capsys, ["generate", "a", "--dtype=fp32"])
    assert (code, "adapters for weights in bfloat16, and reading these in float32 changes their values; drop --dtype" in err) == (2, True)
    for dtype in ("fp32", "bf16"):
        assert main(["export", "a", dtype, "--merge", f"--dtype={dtype}"]) == 0
    with safe_open(here / "fp32" / "model.safetensors", "pt") as fine, safe_open(here / "bf16" / "model.safetensors", "pt") as coarse:
        pairs = [(fine.get_tensor(name), coarse.get_tensor(name)) for name in fine.keys()]  # noqa: SIM118
    assert all(torch.equal(x.bfloat16(), y) for x, y in pairs)
    assert any(not torch.equal(x, y.float()) for x, y in pairs)
    for weight in weights_of(find_checkpoint("a")).values():
        whole = np.empty(weight.shape, np.float32)
        weight.read(whole)
        rest = [slice(0, extent) for extent in weight.shape[1:]]
        part = weight[[slice(4, 12), *rest]][[slice(2, 5), *rest]]
        found = np.empty(part.shape, np.float32)
        part.read(found)
        assert np.array_equal(found, whole[6:9])


def test_a_base_that_moved_or_changed_is_told(here: Path, capsys) -> None:
    """Resume, generate and a merging export name the file; putting it back is enough. The adapters alone need it not."""
    assert main([*TRAIN, "--init-from=gpt2", "--steps=2", "--run-dir=run"]) == 0
    commands = (["train", "--resume=run", "--steps=3", "--sample-tokens=0"], ["generate", "run"], ["export", "run", "out", "--merge"])
    (here / "gpt2").rename(here / "gone")
    for argv in commands:
        code, err = refuse(capsys, [*argv, *(["--tokenizer-path=gone"] if argv[0] == "train" else [])])
        assert code == 4
        assert f"adapters for the weights in {here / 'gpt2' / 'model.safetensors'}, which is not there" in err
        assert err.endswith(f"make a link to where that directory is now: ln -s NEW {here / 'gpt2'}\n")
    (here / "gpt2").symlink_to("gone")
    assert main(["generate", "run", "--max-new-tokens=1"]) == 0
    (here / "gone" / "model.safetensors").rename(here / "weights")
    capsys.readouterr()
    assert refuse(capsys, ["generate", "run"])[1].endswith(f"that file is now: ln -s NEW {here / 'gpt2' / 'model.safetensors'}\n")
    (here / "gpt2" / "model.safetensors").symlink_to(here / "weights")
    assert main(["generate", "run", "--max-new-tokens=1"]) == 0
    (here / "weights").replace(here / "gone" / "model.safetensors")
    (here / "gpt2").unlink()
    assert main(["export", "run", "adapters"]) == 0
    capsys.readouterr()
    (here / "gone").rename(here / "gpt2")
    for argv in (["gpt2", "--force"], ["gpt2", "--force", "--merge"], ["gpt2/adapters"]):
        code, err = refuse(capsys, ["export", "run", *argv])
        assert (code, "the frozen weights" in err, "name another place" in err) == (2, True, True)
    good = (here / "gpt2" / "model.safetensors").read_bytes()
    write_base(here / "gpt2", "gpt2", seed=10)
    for argv in (*commands, ["export", "run", "adapters", "--force"]):  # PEFT would add the adapters to whatever is there
        code, err = refuse(capsys, argv)
        assert code == 4
        assert "as it was, with fingerprint" in err
    (here / "gpt2" / "model.safetensors").write_bytes(good)
    for argv in commands:
        assert main(argv) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("base"), "does not name the frozen weights that its adapters belong to"),
        (lambda state: state.update(base=3), "must say a kind"),
        (lambda state: state["base"].update(kind="cloud"), "must say a kind"),
        (lambda state: state["base"].update(files=None), "must have the fingerprint of each file"),
    ],
)
def test_a_broken_state_says_so(here: Path, capsys, change, words: str) -> None:
    """File and key are named."""
    if not (here / "run").exists():
        assert main([*TRAIN, "--init-from=gpt2", "--steps=1", "--run-dir=run"]) == 0
    file = here / "run" / "checkpoints" / "step-000001" / "state.json"
    rewrite_state(file, change)
    for argv in (["train", "--resume=run", "--steps=2"], ["generate", "run"]):
        code, err = refuse(capsys, argv)
        assert code == 4
        assert words in err
        assert "state.json" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--train=lora:x"],
            "--train must be all, or lora:RANK or lora:RANK:experts with a rank of at least 1, got lora:x; for example --train lora:4",
        ),
        (["--train=lora:0"], "--train must be all, or lora:RANK or lora:RANK:experts with a rank of at least 1, got lora:0"),
        (["--train=lora"], "--train must be all, or lora:RANK"),
        (["--train=lora:6:expert"], "got lora:6:expert; for example --train lora:6:experts"),
        (["--train=lora:R:experts"], "got lora:R:experts; for example --train lora:4:experts"),
        (["--train=lora:4:experts"], "--train lora:4:experts is for mixtures of experts, and the model has none; use lora:4"),
        (["--train=lora:4:experts", "--lora-dropout=0.1"], "--lora-dropout 0.1 must be 0 with --train lora:4:experts: adapters of experts have no"),
        (["--train=some"], "--train must be all, or lora:RANK"),
        (["--train=lora:13"], "--train lora:13 must have a rank of at most 12, the smallest width of a matrix that gets an adapter"),
        (["--lora-alpha=0"], "--lora-alpha must be a finite number above 0, got 0"),
        (["--lora-alpha=nan"], "--lora-alpha must be a finite number above 0, got nan"),
        (["--lora-dropout=1"], "--lora-dropout must be at least 0 and below 1, got 1"),
        (["--train=all"], "--lora-alpha 8 is about adapters and --train all has none"),
    ],
)
def test_refusals(here: Path, capsys, argv: list[str], words: str) -> None:
    """One sentence, exit code 2, nothing written."""
    code, err = refuse(capsys, [*TRAIN, "--init-from=gpt2", "--steps=2", "--run-dir=run", *argv])
    assert words in err
    assert code == 2
    assert not (here / "run").exists()


def test_what_belongs_to_one_kind_of_run_only(here: Path, capsys) -> None:
    """Another rank or alpha on --resume, --merge of a whole model, shards of adapters."""
    assert main([*TRAIN, "--init-from=gpt2", "--steps=1", "--run-dir=run"]) == 0
    rest = [each for each in TRAIN if "lora" not in each]
    assert main([*rest, "--init-from=gpt2", "--steps=1", "--run-dir=whole"]) == 0
    for argv, words in (
        (
            ["train", "--resume=run", "--steps=2", "--train=lora:8", "--lora-alpha=9"],
            "(was lora:4, is lora:8), --lora-alpha (was 8.0, is 9.0)",
        ),
        (["train", "--resume=run", "--steps=2", "--train=all"], "but these differ: --train (was lora:4, is all); drop those flags"),
        (["train", "--resume=whole", "--steps=2", "--train=lora:8"], "--train (was all, is lora:8)"),
        (["export", "whole", "out", "--merge"], "--merge is about adapters"),
        (["export", "run", "out", "--shard-size=1MB"], "--shard-size 1MB is about whole models"),
    ):
        code, err = refuse(capsys, argv)
        assert code == 2
        assert words in err
    assert not (here / "out").exists()


def test_small_parameters_keep_fp32_moments(here: Path, capsys) -> None:
    """A run with 8-bit moments says so if most of what it trains has none."""
    wide = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 16, "n_embd": 64, "n_layer": 1, "n_head": 2}
    (here / "wide.json").write_text(json.dumps(wide))
    common = [*(each for each in TRAIN if "lora" not in each), "--config-path=wide.json", "--optimizer=adamw8bit", "--tokenizer=bytes", "--steps=1"]
    assert main([*common, "--train=lora:4", "--run-dir=adapters"]) == 0
    words = "adamw8bit: 100% of the trained weights have fp32 moments, in parameters of fewer than 4,096 elements\n"
    assert words in capsys.readouterr().out
    assert main([*common, "--run-dir=whole"]) == 0
    assert "fp32 moments" not in capsys.readouterr().out


def test_a_plan_counts_the_smaller_state(here: Path, capsys) -> None:
    """Gradients and optimizer state of the adapters alone; a budget that a whole training does not fit is enough."""
    figures = []
    for train in (["--train=all"], ["--train=lora:4"]):
        assert main(["plan", "--model=llama-tiny", "--batch=2", "--recompute=none", "--json", *train]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    whole, adapters = figures
    assert adapters["parameters"] == whole["parameters"] == whole["trained_parameters"]
    assert adapters["trained_parameters"] < whole["parameters"] / 20
    share = adapters["trained_parameters"] * 4
    assert share <= adapters["bytes_by_class"]["gradients"] < 1.3 * share  # pages are whole
    assert adapters["bytes_by_class"]["optimizer"] == 2 * adapters["bytes_by_class"]["gradients"]
    assert main(["plan", "--model=gpt2", "--seq-len=64", "--json", "--train=lora:700"]) == 0  # tiny, which is no larger, is not asked
    capsys.readouterr()
    least = adapters["minimum_budget_bytes"]["ram"]
    assert least < 0.6 * whole["minimum_budget_bytes"]["ram"]
    flags = [
        "--model=llama-tiny",
        "--batch=2",
        "--dataset=text",
        "--dataset-path=text.txt",
        "--tokenizer=bytes",
        "--dry-run",
        "--recompute=none",
        f"--ram={least}B",
    ]
    code, err = refuse(capsys, ["train", *flags])
    assert (code, "it would fit with" in err) == (3, True)
    assert main(["train", "--train=lora:4", *flags]) == 0
