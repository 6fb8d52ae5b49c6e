"""Adapters of experts beside PEFT's for transformers' arrays of all experts: gradients, losses, experts without tokens, texts, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.cuda_emulator import COMPILER, Emulator
from support.gpt2_oracle import relative
from support.gpu_training import on_gpus
from support.peft_oracle import joined_factors, peft_module
from support.transformers_oracle import CONFIGS, IDLE_EXPERTS, hf_loss, hf_model, our_logits, our_model, random_batch, tiles

from nntask.adapters.lora import LoRA, add_adapters, largest_rank, merged_arrays, num_idle_factors
from nntask.errors import UsageError
from nntask.inference.generator import Generator
from nntask.inference.sampling import Sampling
from nntask.models.registry import build
from nntask.nn.autograd import no_grad
from nntask.optim.optimizers import AdamW
from nntask.tiling.model_tiling import ModelTiling, generation_tiling
from scheduler import InlineRuntime, Runtime

KINDS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
LORA = LoRA(3, 6.0, experts=True)
IDLE = replace(CONFIGS["olmoe"], num_experts=40, num_experts_per_tok=1)


def written(model: Any, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tensors of a batch."""
    given: dict[str, Any] = model.inputs(*batch["tokens"].shape, tuple(batch))
    for name, tensor in given.items():
        tensor.write(batch[name])
    return given


def with_adapters(model: Any) -> Any:
    """The model with adapters, of which B are not zero as at the beginning, since A has no gradient there."""
    add_adapters(model, LORA, seed=1)
    rng = np.random.default_rng(7)
    for tensor in model.trained_tensors().values():
        tensor.write((rng.standard_normal(tensor.shape) * 0.2).astype(tensor.dtype))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_are_pefts(kind: str) -> None:
    """First gradients within 1e-5 and losses within 2e-5, by AdamW with decay and clipping, in tiles that divide nothing."""
    config = CONFIGS[kind]
    theirs = hf_model(config)
    model = with_adapters(our_model(theirs, config, tiles(config), InlineRuntime()))
    module = peft_module(model, theirs)
    learnt = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    reference = torch.optim.AdamW(learnt.values(), lr=1e-2, weight_decay=0.1)
    ours = AdamW(model.parameters(), 1e-2, weight_decay=0.1, max_norm=0.5)
    losses = []
    for step in range(10):
        batch = random_batch(config, step % 2)
        expected = hf_loss(module, config, batch)
        reference.zero_grad()
        expected.backward()
        loss = model(**written(model, batch))
        loss.backward()
        if not step:
            gradients = joined_factors(model, lambda factor: factor.gradient.read())
            for name, parameter in learnt.items():
                assert relative(gradients[name.replace(".default", "")], parameter.grad.numpy()) < 1e-5, name
        torch.nn.utils.clip_grad_norm_(learnt.values(), 0.5)
        reference.step()
        ours.prepare(step + 1)
        ours.step()
        losses.append(expected.item())
        assert float(loss.read()[0]) == pytest.approx(expected.item(), rel=2e-5)
    assert losses[-1] < losses[1] - 0.05  # it learnt, so the comparison says something


def test_adapters_of_experts_without_tokens_decay_as_pefts() -> None:
    """Their gradients are zero, with which AdamW moves and decays them."""
    theirs = hf_model(IDLE)
    model = with_adapters(our_model(theirs, IDLE, ModelTiling(3, 6, 16, 24, -1, 31), InlineRuntime()))
    module = peft_module(model, theirs)
    learnt = {name.replace(".default", ""): parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    reference = torch.optim.AdamW(learnt.values(), 1e-2, weight_decay=0.1)
    ours = AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    idle = set[str]()
    for step in range(3):
        batch = random_batch(IDLE, step)
        reference.zero_grad()
        hf_loss(module, IDLE, batch).backward()
        reference.step()
        model(**written(model, batch)).backward()
        if not step:
            idle = {name for name, parameter in model.named_parameters().items() if parameter.trainable and not parameter.gradient.read().any()}
        ours.prepare(step + 1)
        ours.step()
        model.zero_grad()
    assert any(name.endswith("gate_proj.lora.A") for name in idle)
    for name, array in joined_factors(model, lambda factor: factor.read()).items():
        assert relative(array, learnt[name].detach().numpy()) < 2e-3, name


@pytest.mark.parametrize("lanes", [1, 3])
def test_tasks_of_experts_without_tokens_are_skipped(lanes: int) -> None:
    """In both passes, so that neither they nor their adapters are fetched; tasks of their own write the zeros of their gradients."""
    config, gradients = IDLE, []
    for tiling in (ModelTiling(1, 4, 16, 24, -1, 31), ModelTiling(5, 11, 16, 24, -1, 31)):
        with Runtime(1, lanes=lanes) as runtime:
            model = with_adapters(build(config, tiling, runtime, seed=3))
            loss = model(**written(model, random_batch(config, 1)))
            runtime.wait()
            forward = runtime.stats()["skipped_tasks"]
            loss.backward()
            runtime.wait()
            backward = runtime.stats()["skipped_tasks"] - forward
            gradients.append({name: p.gradient.read() for name, p in model.named_parameters().items() if p.trainable})
        num_tasks = 2 * config.num_experts * config.num_hidden_layers  # of a pass and a tile of tokens, since I is two tiles
        assert forward > 0.8 * 14 * num_tasks if len(gradients) == 1 else 0 < forward < num_tasks
        assert backward == forward
    for name, gradient in gradients[0].items():
        whole = gradients[1][name]
        assert relative(gradient, whole) < 1e-5 if whole.any() else not gradient.any(), name


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_score_the_same(kind: str) -> None:
    """Adapters beside experts, the same merged, and a text token by token."""
    config = CONFIGS[kind]
    with Runtime(1, ram=1 << 27) as runtime:
        model = with_adapters(build(config, generation_tiling(config), runtime, seed=3))
        plain, whole = (build(config, tiles(config), runtime, seed=3) for _ in range(2))
        whole.load(merged_arrays(model))
        batch = random_batch(config, 2)
        scores = [our_logits(each.eval() or each, batch) for each in (model, whole, plain)]
        texts = [list(Generator(each, runtime, 12).stream([[5, 7]], 8, Sampling(temperature=0))) for each in (model, whole)]
    assert relative(scores[0], scores[1]) < 1e-5
    assert relative(scores[2], scores[1]) > 1e-2
    assert texts[0] == texts[1]


def test_bf16_keeps_experts_as_stored() -> None:
    """Masters and moments are the adapters' alone; losses are near those of fp32."""
    config, losses = IDLE_EXPERTS, []
    for dtype in (ml_dtypes.bfloat16, np.float32):
        model = with_adapters(build(config, tiles(config), InlineRuntime(), seed=3, dtype=dtype))
        before = {name: tensor.read().tobytes() for name, tensor in model.frozen_tensors().items()}
        optimizer = AdamW(model.parameters(), 1e-2)
        for step in range(2):
            loss = model(**written(model, random_batch(config, 0)))
            loss.backward()
            optimizer.prepare(step + 1)
            optimizer.step()
        losses.append(float(loss.read()[0]))
        assert {name: tensor.read().tobytes() for name, tensor in model.frozen_tensors().items()} == before
        assert {name.partition(".")[2] for name in optimizer.tensors()} == set(model.trained_tensors())
    assert losses[0] == pytest.approx(losses[1], rel=3e-2)


@pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
@pytest.mark.parametrize("kind", ["qwen2_moe"])
def test_losses_on_a_gpu_are_those_of_the_cpu(kind: str, cuda_libraries: Path) -> None:
    """The GPU emulated on the CPU, where products take all rows of a tile."""
    config, losses = CONFIGS[kind].with_layers(1), []
    for runtime in (Runtime(1, ram=1 << 27), on_gpus([Emulator(cuda_libraries)], 1 << 26, 1 << 27)):
        with runtime:
            model = with_adapters(build(config, tiles(config), runtime, seed=3))
            optimizer = AdamW(model.parameters(), 1e-2, max_norm=1.0)
            given = model.inputs(5, 11, ("tokens", "targets"))
            with runtime.record() as step:
                loss = model(**given)
                loss.backward()
                optimizer.step()
            for number in range(1, 4):
                for name, tensor in given.items():
                    tensor.write(random_batch(config, 0)[name])
                optimizer.prepare(number)
                losses.append(float(step.replay().read(loss.data)[0]))
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-4)
    assert losses[2] < losses[0]


def test_what_has_adapters_of_experts() -> None:
    """All three matrices of each expert, of which gate and up share A; the count of those that a token does not pass through; routers have none."""
    for kind in KINDS:
        config = CONFIGS[kind]
        model, plain = (build(config, tiles(config), InlineRuntime(), seed=None) for _ in range(2))
        add_adapters(model, LORA)
        add_adapters(plain, LoRA(3, 6.0))
        shapes = [block.feed_forward for block in config.description.stack.blocks if hasattr(block.feed_forward, "num_experts")]
        of_expert = 3 * (2 * config.n_embd + 3 * shapes[0].expert.inner_size)
        assert model.num_trained - plain.num_trained == sum(shape.num_experts for shape in shapes) * of_expert
        assert num_idle_factors(config, LORA) == sum(shape.num_experts - shape.num_chosen for shape in shapes) * of_expert
        assert num_idle_factors(config, LoRA(3, 6.0)) == 0
        router = "block_sparse_moe.gate." if kind == "mixtral" else "mlp.gate."
        assert not any(router in name for name in model.trained_tensors())


def test_refusals() -> None:
    """Dense models, dropout, a rank above an expert's width, matrices that are learnt, factors that are not."""
    with pytest.raises(UsageError, match=r"a LoRA of experts must have a dropout of 0, as in PEFT, got 0\.1; set it to 0"):
        LoRA(2, 4.0, 0.1, experts=True)
    dense = build(CONFIGS["llama"], ModelTiling(), InlineRuntime(), seed=None)
    with pytest.raises(UsageError, match="a LoRA of experts needs a mixture of experts, and the model has none"):
        add_adapters(dense, LORA)
    config = CONFIGS["qwen2_moe"]
    assert (largest_rank(config), largest_rank(config, experts=True)) == (24, 19)
    model = build(config, tiles(config), InlineRuntime(), seed=3)
    with pytest.raises(UsageError, match="at most 19, the smallest width of a matrix that it adapts, got 20"):
        add_adapters(model, LoRA(20, 1.0, experts=True))
    given = written(with_adapters(model), random_batch(config, 0))
    factor = model.named_parameters()["layers.0.mlp.experts.2.up_proj.lora.B"]
    edge, factor.edge = factor.edge, None
    with pytest.raises(UsageError, match="must be learnt, and its matrices frozen, got 4 factors and 0 matrices that are learnt"):
        model(**given)
    with no_grad():
        assert np.isfinite(model(**given).read()).all()
    factor.edge = edge
    for name in ("gate_proj", "up_proj", "down_proj"):
        model.named_parameters()[f"layers.0.mlp.experts.2.{name}.weight"].edge = edge
    with pytest.raises(UsageError, match="got 5 factors and 3 matrices that are learnt; freeze the matrices alone"):
        model(**given)
