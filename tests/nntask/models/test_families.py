"""Every family against its class in transformers: gradients, training, and names and layouts both ways."""

import numpy as np
import pytest
import torch
from support.gpt2_oracle import relative
from support.transformers_oracle import CONFIGS, hf_gradients, hf_loss, hf_model, in_files, our_gradients, our_model, random_batch, state_of, tiles

from nntask import SGD
from nntask.models.mixtures import MixtureConfig
from nntask.models.registry import build, config_from_dict
from nntask.nn.kv_cache import KVCache
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime

families = pytest.mark.parametrize("name", CONFIGS)


def written(model, batch):
    """Tensors of a batch."""
    decoded = batch.get("decoder_tokens")
    given = model.inputs(*batch["tokens"].shape, tuple(batch), None if decoded is None else decoded.shape[1])
    for name, tensor in given.items():
        tensor.write(batch[name])
    return given


@pytest.mark.every
@families
def test_gradients_are_those_of_transformers(name):
    """Loss and every gradient of a first step, in ragged tiles, with padding where the objective has it."""
    config = CONFIGS[name]
    theirs = hf_model(config).train()
    model = our_model(theirs, config, tiles(config), InlineRuntime())
    batch = random_batch(config, 1)
    expected = hf_loss(theirs, config, batch)
    expected.backward()
    loss = model(**written(model, batch))
    loss.backward()
    assert loss.read()[0] == pytest.approx(expected.item(), rel=2e-5)
    found, largest = our_gradients(model), max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
    for weight, gradient in hf_gradients(theirs).items():
        ours = found[weight]
        if np.abs(gradient).max() > 1e-6 * largest:  # the bias of keys moves all scores of a row alike: its gradient is rounding
            assert relative(ours, gradient) < 1e-5, weight
        else:
            assert np.abs(ours).max() < 1e-5 * largest, weight


@pytest.mark.parametrize("name", [name if name == "t5" else pytest.param(name, marks=pytest.mark.long) for name in CONFIGS])
def test_computing_blocks_again_changes_nothing(name):
    """A step bit by bit, of a decoder whose blocks share what the encoder says; a block's data is not kept. Stacks of one kind are `long`."""
    config = CONFIGS[name]
    theirs, batch, found, live = hf_model(config), random_batch(config, 1), [], []
    for recompute in ("none", "block"):
        with Runtime(cpu_workers=1) as runtime:
            model = our_model(theirs, config, ModelTiling(3, 6, 16, 24, -1, 31), runtime)
            optimizer, given = SGD(model.parameters(), 0.05), written(model, batch)
            with runtime.record(recompute=recompute) as step:
                loss = model(**given)
                loss.backward()
                optimizer.step()
            optimizer.prepare(1)
            found.append([step.replay().read(loss.data), *(parameter.read() for parameter in model.parameters())])
            live.append(np.mean(step.plan.live_bytes()))
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))
    assert live[1] < live[0] or config.description.stack.num_idle(config.n_embd)  # the weights of experts outweigh the data of so few tokens


@families
def test_steps_of_training_are_those_of_transformers(name):
    """Losses within 2e-5 over five steps of gradient descent on equal batches, over ten for mixtures of experts."""
    config = CONFIGS[name]
    theirs = hf_model(config).train()
    model = our_model(theirs, config, ModelTiling(3, 6, 16, 24, -1, 31), InlineRuntime())
    ours, reference = SGD(model.parameters(), 0.05), torch.optim.SGD(theirs.parameters(), 0.05)
    for step in range(10 if isinstance(config, MixtureConfig) else 5):
        batch = random_batch(config, step)
        reference.zero_grad()
        expected = hf_loss(theirs, config, batch)
        expected.backward()
        reference.step()
        loss = model(**written(model, batch))
        loss.backward()
        ours.step()
        model.zero_grad()
        assert loss.read()[0] == pytest.approx(expected.item(), rel=2e-5), step


@families
def test_names_convert_both_ways(name):
    """to_hf undoes from_hf, bit by bit; the model has exactly these names; and the number of parameters is counted right."""
    config = CONFIGS[name]
    theirs = hf_model(config)
    state = {key: value for key, value in state_of(theirs).items() if not key.startswith(config.names.unused or ("-",))}
    ours = config.names.from_hf(state, config)
    model = build(config, tiles(config), InlineRuntime(), seed=None)
    assert set(ours) == set(model.named_parameters())
    named = {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters() if not name.startswith(config.names.unused or ("-",))}
    assert model.num_parameters == config.num_parameters == sum(state[name].size for name in in_files(theirs, named))
    model.load(ours)
    back = config.names.to_hf({key: tensor.read() for key, tensor in model.tensors().items()}, config)
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[key], state[key]) for key in state)


@families
def test_configs_convert_both_ways(name):
    """What is written for transformers is read as the same config, and by transformers, too."""
    config = CONFIGS[name]
    assert config_from_dict(config.to_dict()) == config
    theirs = hf_model(config).config.to_dict()
    again = config_from_dict({**theirs, "architectures": config.to_dict()["architectures"]})
    assert again.description == config.description


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt"])
def test_scores_with_a_past_are_those_without(name):
    """Positions that begin at another row begin there with cached keys and values, too."""
    config = CONFIGS[name]
    runtime, tiling = InlineRuntime(), ModelTiling(2, 4, 16, 24, -1, 31)
    model = build(config, tiling, runtime, seed=1)
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, (2, 8), np.int32)
    given = model.inputs(2, 8, ("tokens",))["tokens"]
    given.write(tokens)
    model.training = False
    expected = model.logits(given).data.read()
    cache = KVCache(config, tiling, runtime, 2, 8, np.float32)
    for at in range(8):
        cache.grow(at + 1)
        ids, positions = cache.inputs(1)
        ids.write(tokens[:, at : at + 1])
        positions.write(np.full((2, 1), at, np.int32))
        found = model.continued_logits(ids, cache.past(positions, range(at // cache.tile, at // cache.tile + 1))).data.read()
        assert relative(found[:, 0], expected[:, at]) < 1e-5
