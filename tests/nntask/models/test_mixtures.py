"""Mixtures of experts where others have gone wrong: scores of experts, ties, experts without tokens, the load-balancing loss, files, adapters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support.gpt2_oracle import relative
from support.quantised_directories import write_decoded, write_plain, write_quantised
from support.transformers_oracle import (
    BATCH,
    CONFIGS,
    LENGTH,
    hf_gradients,
    hf_loss,
    hf_model,
    hf_outputs,
    our_gradients,
    our_logits,
    our_model,
    random_batch,
    state_of,
    tiles,
)
from transformers import AutoModelForCausalLM

from nntask import AdamW
from nntask.adapters.lora import LoRA, add_adapters
from nntask.architecture.family_config import ModelConfig
from nntask.errors import DataError, UsageError
from nntask.hf.model_directory import ModelDirectory
from nntask.inference.generator import Generator
from nntask.inference.pretrained import ModelSource
from nntask.inference.sampling import Sampling
from nntask.models.registry import build, config_from_dict
from nntask.nn.autograd import ParameterEdge, Tensor, checkpoint, no_grad
from nntask.nn.experts import balance_loss, routed
from nntask.optim.optimizers import decay_groups
from nntask.tiling.model_tiling import ModelTiling, generation_tiling
from scheduler import InlineRuntime, Runtime
from scheduler.core.records import RAM
from tiles import TileTensor

KINDS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
WHOLE = ModelTiling(3, 6, 16, 24, -1, 31)


def written(model: Any, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tensors of a batch."""
    given: dict[str, Any] = model.inputs(*batch["tokens"].shape, tuple(batch))
    for name, tensor in given.items():
        tensor.write(batch[name])
    return given


def routing_of(scores: np.ndarray, num_chosen: int, *, renormalises: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choices, weights and flags of scores (B, T, E), in one tile."""
    logits = TileTensor(InlineRuntime(), scores.shape, (-1, -1, -1), scores.dtype)
    logits.write(scores)
    routing = routed(Tensor(logits), num_chosen, renormalises=renormalises).routing
    return tuple(tensor.read() for tensor in routing)  # type: ignore[return-value]


def test_of_equal_scores_the_first_expert_is_chosen() -> None:
    """In all places: torch leaves them open (its topk is not stable), so that two devices may differ there."""
    choices, weights, flags = routing_of(np.zeros((1, 3, 5), np.float32), 2, renormalises=False)
    assert choices.tolist() == [[[0, 1]] * 3]
    assert np.allclose(weights, 0.2)
    assert flags.reshape(-1).tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("renormalises", [False, True])
def test_weights_are_probabilities_of_all_experts(renormalises: bool) -> None:
    """The softmax comes before the choice, and the sum over the chosen ones divides it only if the config says so."""
    scores = np.random.default_rng(0).standard_normal((2, 5, 9)).astype(np.float32)
    choices, weights, flags = routing_of(scores, 3, renormalises=renormalises)
    values, indices = torch.topk(torch.softmax(torch.from_numpy(scores), -1), 3)
    expected = values / values.sum(-1, keepdim=True) if renormalises else values
    assert np.array_equal(choices, indices.numpy())
    assert np.allclose(weights, expected.numpy(), rtol=1e-6)
    assert np.array_equal(np.flatnonzero(flags), np.unique(choices))


@pytest.mark.parametrize("kind", KINDS)
def test_norm_topk_prob_changes_what_it_says(kind: str) -> None:
    """Both values, for the families that have the key; a Mixtral always divides."""
    config: Any = CONFIGS[kind]
    if kind == "mixtral":
        assert config.description.stack.blocks[0].feed_forward.renormalises
        return
    batch, found = random_batch(config, 2), []
    for value in (False, True):
        other = replace(config, norm_topk_prob=value)
        theirs = hf_model(other)
        model = our_model(theirs, other, tiles(other), InlineRuntime())
        found.append(our_logits(model.eval() or model, batch))
        assert relative(found[-1], hf_outputs(theirs, other, batch).logits.detach().reshape(-1, 61).numpy()) < 1e-5
    assert relative(*found) > 1e-3


def test_clipped_queries_keys_and_values() -> None:
    """clip_qkv limits them after their norms and before rotation; loss and gradients are those of transformers."""
    config = replace(CONFIGS["olmoe"], clip_qkv=0.75)
    theirs, batch = hf_model(config), random_batch(config, 1)
    model = our_model(theirs, config, tiles(config), InlineRuntime())
    expected = hf_loss(theirs, config, batch)
    expected.backward()
    loss = model(**written(model, batch))
    loss.backward()
    assert loss.read()[0] == pytest.approx(expected.item(), rel=2e-5)
    ours, free = our_gradients(model), our_model(theirs, CONFIGS["olmoe"], tiles(config), InlineRuntime())
    for name, gradient in hf_gradients(theirs).items():
        assert relative(ours[name], gradient) < 1e-5, name
    assert relative(our_logits(free.eval() or free, batch), our_logits(model.eval() or model, batch)) > 1e-3
    assert config_from_dict(theirs.config.to_dict() | {"architectures": ["OlmoeForCausalLM"]}).description == config.description


def test_experts_without_tokens_decay_as_in_torch() -> None:
    """transformers holds all experts in one parameter: gradients of those without tokens are zero, and AdamW moves and decays them."""
    config = replace(CONFIGS["olmoe"], num_experts=40, num_experts_per_tok=1)
    theirs = hf_model(config)
    model = our_model(theirs, config, WHOLE, InlineRuntime())
    ours = AdamW(decay_groups(model, 0.1), 1e-2)
    vectors, matrices = ([p for p in theirs.parameters() if (p.ndim < 2) == is_vector] for is_vector in (True, False))
    reference = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], 1e-2)
    before, idle = model.tensors()["layers.0.mlp.experts.0.up_proj.weight"].read(), set[str]()
    for step in range(3):
        batch = random_batch(config, step)
        reference.zero_grad()
        hf_loss(theirs, config, batch).backward()
        reference.step()
        model(**written(model, batch)).backward()
        if not step:
            idle = {name for name, array in our_gradients(model).items() if ".experts." in name and not array.any()}
        ours.prepare(step + 1, 1e-2)
        ours.step()
        model.zero_grad()
    assert idle
    assert before.shape == (47, 48)
    expected = state_of(theirs)
    for name, array in config.names.to_hf({key: tensor.read() for key, tensor in model.tensors().items()}, config).items():
        assert relative(array, expected[name]) < 2e-3 if name not in idle else relative(array, expected[name]) < 1e-4, name


def test_learnt_experts_without_tokens_run_once_a_step() -> None:
    """Their first backward task writes zeros; their other tasks are skipped, and gradients are those of one tile."""
    config = replace(CONFIGS["olmoe"], num_experts=40, num_experts_per_tok=1)
    theirs, batch, gradients, skipped = hf_model(config), random_batch(config, 1), [], []
    for tiling in (ModelTiling(1, 4, 16, 24, -1, 31), ModelTiling(BATCH, LENGTH, 16, 24, -1, 31)):
        with Runtime(1) as runtime:
            model = our_model(theirs, config, tiling, runtime)
            loss = model(**written(model, batch))
            runtime.wait()
            skipped.append(runtime.stats()["skipped_tasks"])
            loss.backward()
            runtime.wait()
            skipped.append(runtime.stats()["skipped_tasks"] - skipped[-1])
            gradients.append(our_gradients(model))
    in_tiles, backward, alone, backward_alone = skipped
    num_tasks = 2 * 40 * config.num_hidden_layers  # of a pass and a tile of tokens, since I is two tiles
    assert 0.8 * 15 * num_tasks < in_tiles < 15 * num_tasks  # four tokens choose four experts at most
    assert in_tiles - num_tasks < backward < in_tiles
    assert 0 < alone < num_tasks
    assert backward_alone == 0
    for name, gradient in gradients[0].items():
        whole = gradients[1][name]
        assert relative(gradient, whole) < 1e-5 if whole.any() else not gradient.any(), name


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_padding_does_not_count_in_the_load_balancing_loss(share: float) -> None:
    """Loss and gradients with an attention mask are those of transformers; of half a batch, its loss counts half."""
    config = CONFIGS["mixtral balanced"]
    theirs = hf_model(config).train()
    model = our_model(theirs, config, tiles(config), InlineRuntime())
    batch = random_batch(config, 3)
    lengths = np.array([11, 3, 7, 5, 9])
    batch["documents"] = (np.arange(11) < lengths[:, None]).astype(np.int32)
    batch["targets"] = np.where(batch["documents"] > 0, batch["targets"], -1).astype(np.int32)
    batch["factor"] = np.array([1 / (batch["targets"] >= 0).sum()], np.float32)
    found = hf_outputs(theirs, config, batch)
    targets = torch.from_numpy(batch["targets"].astype(np.int64)).flatten()
    expected = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), targets, ignore_index=-1)
    expected = expected + share * config.router_aux_loss_coef * found.aux_loss
    expected.backward()
    loss = model(**written(model, batch), share=share)
    loss.backward()
    assert loss.read()[0] == pytest.approx(expected.item(), rel=2e-5)
    ours = our_gradients(model)
    for name, gradient in hf_gradients(theirs).items():
        assert relative(ours[name], gradient) < 2e-5, name


def test_only_training_adds_the_load_balancing_loss() -> None:
    """Perplexities of a model are those of its text."""
    config = CONFIGS["mixtral balanced"]
    model, batch = our_model(hf_model(config), config, tiles(config), InlineRuntime()), random_batch(config, 3)
    with_balance = model(**written(model, batch)).read()[0]
    model.eval()
    without = model(**written(model, batch)).read()[0]
    assert with_balance > without + 0.2  # the coefficient is 0.3, and the loss at least 1 for each choice


@pytest.mark.parametrize("frozen", [("gate_proj",), ("up_proj", "down_proj")])
def test_partly_frozen_experts_are_refused(frozen: tuple[str, ...]) -> None:
    """With the tape on, since the matrices that learn would have no gradient; without it the model computes."""
    config = CONFIGS["olmoe"]
    model, batch = build(config, WHOLE, InlineRuntime(), seed=0), random_batch(config, 1)
    for name in frozen:
        model.named_parameters()[f"layers.0.mlp.experts.2.{name}.weight"].freeze()
    words = f"all three matrices of an expert must be learnt or none, got {3 - len(frozen)} of 3 in expert 2; freeze them together"
    with pytest.raises(UsageError, match=words):
        model(**written(model, batch))
    with no_grad():
        assert np.isfinite(model(**written(model, batch)).read()).all()


def test_routing_without_a_tape_has_no_load_balancing_loss() -> None:
    """Routing inside a checkpointed block has no place on the tape, and the gradient of its loss would be lost."""
    scores = TileTensor(InlineRuntime(), (1, 3, 5), (-1, -1, -1), np.float32)
    scores.write(np.zeros(scores.shape, np.float32))
    inside = []

    def block(x: Tensor) -> Tensor:
        inside.append(routed(x, 2, renormalises=False))
        return inside[-1].weights

    checkpoint(block, Tensor(scores, ParameterEdge(scores)))
    with pytest.raises(UsageError, match=r"the load-balancing loss needs routing with the tape on, got routing inside checkpoint\(\) or no_grad\(\)"):
        balance_loss(inside, None, scale=1.0)
    with no_grad():
        assert balance_loss(inside, None, scale=1.0).read()[0] == pytest.approx(2.0)


def saved(path: Path, config: ModelConfig, **how: Any) -> Any:
    """A module, and its files as transformers writes them."""
    theirs = hf_model(config).eval()
    theirs.save_pretrained(path, **how)
    return theirs


def logits_of(path: Path, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Scores of the model of a directory."""
    directory = ModelDirectory.open(path)
    model = build(directory.config, tiles(directory.config), InlineRuntime(), seed=None)
    directory.attach(model.tensors())
    model.eval()
    return np.asarray(our_logits(model, batch))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_apart", [True, False])
def test_files_with_and_without_an_array_of_all_experts(tmp_path: Path, kind: str, is_apart: bool) -> None:
    """Rows of the gate are the first half, whatever the sizes; tiles come from within the array."""
    config = CONFIGS[kind]
    theirs = saved(tmp_path, config, save_original_format=is_apart)
    batch = random_batch(config, 5)
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "model.safetensors")) != is_apart
    with torch.no_grad():
        expected = hf_outputs(theirs, config, batch).logits.reshape(-1, config.vocab_size).numpy()
    assert relative(logits_of(tmp_path, batch), expected) < 1e-5


@pytest.mark.parametrize("left_out", ["mlp.gate.weight", "experts.3.up_proj.weight"])
def test_missing_weights_are_not_ignored(tmp_path: Path, left_out: str) -> None:
    """Neither a router nor one matrix of one expert."""
    saved(tmp_path, CONFIGS["qwen3_moe"])
    file = tmp_path / "model.safetensors"
    save_file({name: array for name, array in load_file(file).items() if not name.endswith(left_out)}, file, {"format": "pt"})
    with pytest.raises(DataError, match=left_out):
        logits_of(tmp_path, random_batch(CONFIGS["qwen3_moe"], 5))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok in x.json must be at most num_local_experts = 5, got 6"),
        ("olmoe", {"num_experts_per_tok": 8}, "num_experts_per_tok in x.json must be at most num_experts = 7, got 8"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok in x.json must be at least 1, got 0"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size in x.json must be at least 1, got 0"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts in x.json must be at least 1, got 0"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size in x.json must be at least 1, got 0"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step in x.json must be at least 1, got 0"),
        ("qwen2_moe", {"mlp_only_layers": [1.5]}, "mlp_only_layers in x.json must be a list of numbers of blocks from 0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise in x.json must be 0.0"),
        ("mixtral", {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef in x.json must be 0 or above, and finite, got -0.1"),
        ("mixtral", {"num_experts": 4}, "x.json has num_local_experts twice"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv in x.json must be positive and finite, got 0"),
        ("olmoe", {"head_dim": 4}, "head_dim in x.json must be hidden_size / num_attention_heads = 8, got 4"),
    ],
)
def test_wrong_configs_are_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    """In one sentence, with the remedy."""
    with pytest.raises(UsageError) as error:
        config_from_dict({**CONFIGS[kind].to_dict(), **changes}, "x.json")
    assert words in str(error.value)
    assert "; " in str(error.value)


def test_dense_blocks_are_where_the_config_says() -> None:
    """mlp_only_layers and decoder_sparse_step, both from block 0."""
    config = replace(CONFIGS["qwen3_moe"], decoder_sparse_step=2, mlp_only_layers=(3,)).with_layers(6)
    assert [config.has_experts(layer) for layer in range(6)] == [False, True, False, False, False, True]
    assert config.block(0).feed_forward.inner_size == config.intermediate_size
    assert config_from_dict({**config.to_dict(), "mlp_only_layers": None}, "x.json") == replace(config, mlp_only_layers=())


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_leave_routers_and_experts_alone(kind: str) -> None:
    """As PEFT's do, for which arrays of all experts and routers are no linear layers; the shared expert has adapters."""
    config = CONFIGS[kind]
    model = build(config, tiles(config), InlineRuntime(), seed=0)
    add_adapters(model, LoRA(rank=2, alpha=4.0))
    names = {name for name in model.trained_tensors() if name.endswith("lora.A")}
    assert names
    assert not any(".experts." in name or (name.endswith("gate.lora.A") and "gate_proj" not in name) for name in names if "shared" not in name)
    model(**written(model, random_batch(config, 1))).backward()
    assert all(parameter.gradient is None for parameter in model.parameters() if not parameter.trainable)


def chosen_experts(directory: Path, ids: list[int]) -> list[set[tuple[int, int]]]:
    """For each token, the experts that transformers chooses, as (layer, expert)."""
    model = AutoModelForCausalLM.from_pretrained(directory, output_router_logits=True)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).router_logits  # (T, E) of each layer
    best = torch.stack([scores.topk(model.config.num_experts_per_tok).indices for scores in logits])
    return [{(layer, int(expert)) for layer, row in enumerate(best[:, token]) for expert in row} for token in range(len(ids))]


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


class Absent:
    """The bytes of each expert that are not in memory, at each end of a routing task: dictionaries by (layer, expert).

    It looks at the events of a runtime's machine before they are handled.
    """

    def __init__(self, runtime: Runtime, model: Any) -> None:
        self.at_choices: list[dict[tuple[int, int], int]] = []
        self._records: dict[tuple[int, int], list[Any]] = {}
        for name, tensor in model.tensors().items():
            if match := re.match(r"layers\.(\d+)\..*experts\.(\d+)\.", name):
                records = [tensor[index].record for index in np.ndindex(*tensor.grid)]
                self._records.setdefault((int(match[1]), int(match[2])), []).extend(records)
        machine: Any = runtime._executor.machine
        self._handle, machine.handle = machine.handle, self.handle

    def handle(self, event: Any) -> Any:
        """Pass an event on."""
        if getattr(event, "flags", None) is not None:
            absent = {
                expert: sum(record.spec.nbytes for record in records if RAM not in record.replicas) for expert, records in self._records.items()
            }
            self.at_choices.append(absent)
        return self._handle(event)


@pytest.mark.parametrize("kind", ["", "q4_0"])
def test_generation_fetches_chosen_experts_only(tmp_path: Path, kind: str) -> None:
    """In a quarter of the memory, above files, a token reads the weights of the experts that transformers' router chooses for it, unless they are in
    memory, and nothing else."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64}
    num_layers = 8 if kind else 2  # a decoded matrix is as large as seven encoded ones, and must be a small part of the memory
    config = replace(CONFIGS["olmoe"], **sizes, num_experts=64, num_experts_per_tok=2, num_hidden_layers=num_layers)
    write_plain(tmp_path / "model", config)
    if kind:
        write_decoded(tmp_path / "model", tmp_path / "decoded", write_quantised(tmp_path / "model", tmp_path / "small", kind))
    source, count = ModelSource.open(tmp_path / ("small" if kind else "model")), 40
    of_all = sum(tensor.nbytes for tensor in source.build(InlineRuntime(), generation_tiling(config), "fp32").tensors().values())
    with Runtime(1, ram=of_all // 4, disk=tmp_path / "tier") as runtime:
        model = source.build(runtime, generation_tiling(config), "fp32")
        text, moved, read, absent = [5], [0], [bytes_read()], Absent(runtime, model)
        for (token,) in Generator(model, runtime, 64).stream([[5]], count, Sampling(temperature=9.0)):
            assert token is not None
            text.append(token)
            moved.append(sum(nbytes for route, nbytes in runtime.stats()["moved_bytes"].items() if route.endswith("->ram")))
            read.append(bytes_read())
        stats = runtime.stats()
    assert len(absent.at_choices) == count * config.n_layer
    chosen = chosen_experts(tmp_path / ("decoded" if kind else "model"), text[:-1])
    needed = sum(absent.at_choices[token * config.n_layer + expert[0]][expert] for token in range(1, count) for expert in chosen[token])
    assert 0 < needed <= moved[-1] - moved[1] <= 1.05 * needed
    assert read[-1] - read[1] <= 1.05 * needed
    assert stats["skipped_tasks"] >= count * config.n_layer * 62
