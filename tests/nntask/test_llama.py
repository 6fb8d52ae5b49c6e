"""LLaMA against transformers, and against itself under other tilings."""

from dataclasses import astuple, replace

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from hf_oracle import batches, hf_loss, relative
from llama_oracle import SCALINGS, hf_gradients, hf_model, our_gradients, our_model, random_config

from nntask import AdamW, no_grad
from nntask.errors import DataError, UsageError
from nntask.models.config import PRESETS
from nntask.models.llama import Llama, rotary_frequencies
from nntask.models.llama_config import LlamaConfig
from nntask.models.llama_names import from_hf, to_hf
from nntask.models.registry import build
from nntask.optim import decay_groups, norm_of
from nntask.schedule import make_schedule
from nntask.tiling import ModelTiling
from scheduler import InlineRuntime

MIXED = LlamaConfig(
    vocab_size=61,
    hidden_size=30,
    intermediate_size=47,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    max_position_embeddings=13,
    rope_theta=100.0,
    rope_scaling=SCALINGS[-1],
    attention_bias=True,
)
"""Three groups of two heads of queries whose heads together are wider than the residual stream; an untied head."""

NOWHERE_EVEN = [
    ModelTiling(2, 5, 7, 11, 4, 13),
    ModelTiling(3, 4, 8, 10, 2, 9),
    ModelTiling(4, 3, 9, 20, 4, 25),
    ModelTiling(2, 7, 11, 46, 4, 60),
    ModelTiling(3, 10, 29, 3, 2, 7),
]
"""Tile sizes that divide no dimension of 5 sequences of 11 tokens with `MIXED`; heads are cut into groups 2 + 1, and into single groups."""


def tilings(config):
    """No tiles, and ragged ones of one and of two groups of heads."""
    group = config.n_head // config.n_kv_head
    return [ModelTiling(), ModelTiling(2, 5, 7, 11, group, 13), ModelTiling(1, 4, 64, 16, 2 * group, 32)]


def loss_and_gradients(model, tokens, targets, **how):
    """One forward and backward pass; the loss, and gradients under Hugging Face's names."""
    ours = model.input_tensors(*tokens.shape)
    for tensor, values in zip(ours, (tokens, targets), strict=True):
        tensor.write(values)
    loss = model(*ours, **how)
    loss.backward()
    return float(loss.read()[0]), our_gradients(model)


def check_parity(config, tiling, *, lanes=1, **options):
    """Logits within 1e-4, loss and every gradient within 1e-4 relative of the oracle's."""
    tokens, targets = batches(config, 1, 3, config.n_positions - 1)[0]
    theirs = hf_model(config)
    loss = hf_loss(theirs, tokens, targets)
    loss.backward()
    model = our_model(theirs, config, tiling, InlineRuntime(lanes=lanes), **options)
    given, _ = model.input_tensors(*tokens.shape)
    given.write(tokens)
    with no_grad(), torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
        assert np.abs(model.logits(given).read() - expected).max() < 1e-4
    ours, gradients = loss_and_gradients(model, tokens, targets)
    assert ours == pytest.approx(loss.item(), abs=1e-5)
    expected_gradients = hf_gradients(theirs)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert relative(gradients[name], gradient) < 1e-4, name


@pytest.mark.parametrize("seed", range(12))
def test_logits_and_gradients_are_those_of_transformers(seed):
    """Random shapes, groups, biases, tied and untied; every rotary scaling; whole and ragged tilings; one and three lanes."""
    config = random_config(seed, rope_scaling=SCALINGS[seed % len(SCALINGS)])
    check_parity(config, tilings(config)[seed % 3], lanes=1 + 2 * (seed % 2))


@pytest.mark.parametrize("options", [{"recompute": True}, {"flash": False}, {"recompute": True, "flash": False}], ids=str)
def test_recomputation_and_stored_scores_change_nothing(options):
    """Same bounds with checkpoint() around every block, and with the scores kept."""
    check_parity(MIXED, NOWHERE_EVEN[0], **options)
    check_parity(replace(MIXED, tie_word_embeddings=True, mlp_bias=True), NOWHERE_EVEN[1], **options)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.rope_type if scaling else "default")
def test_frequencies_are_those_of_transformers(scaling):
    """To the last digits of fp32, in heads long enough that llama3 has short, long and blended waves; and the scalings differ."""
    config = replace(MIXED, head_dim=64, rope_scaling=scaling, rope_theta=500000.0, max_position_embeddings=8192)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_dict())).model.rotary_emb.inv_freq.numpy()
    ours = rotary_frequencies(config)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    plain = rotary_frequencies(replace(config, rope_scaling=None))
    assert np.array_equal(ours, plain) == (scaling is None or scaling.rope_type == "dynamic")


def test_frequencies_of_the_presets_are_those_of_transformers():
    """Llama 3.2 with its own scaling: short waves unscaled, long ones divided by 32, blended ones between."""
    config = PRESETS["llama-1b"]
    small = {**config.to_dict(), "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).model.rotary_emb.inv_freq.numpy()
    ours = rotary_frequencies(config)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    ratios = rotary_frequencies(replace(config, rope_scaling=None)) / ours
    assert (ratios[0], ratios[-1]) == (1, 32)
    assert ((ratios > 1) & (ratios < 32)).any()


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_twenty_steps_of_adamw_follow_torch(options, tied):
    """With clipping, warm-up and decay of matrices only: losses within 1e-4, norms alike."""
    config = replace(MIXED, tie_word_embeddings=tied, initializer_range=0.1)
    theirs = hf_model(config)
    model = our_model(theirs, config, NOWHERE_EVEN[0], InlineRuntime(), **options)
    schedule = make_schedule("cosine", 1e-2, steps=20, warmup_steps=5, min_lr=1e-4)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    oracle = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95))
    ours = AdamW(decay_groups(model, 0.1), betas=(0.9, 0.95), max_norm=0.5)
    given = model.input_tensors(3, config.n_positions - 1)
    for step, (tokens, targets) in enumerate(batches(config, 20, 3, config.n_positions - 1), 1):
        oracle.zero_grad()
        expected = hf_loss(theirs, tokens, targets)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in oracle.param_groups:
            group["lr"] = schedule(step)
        oracle.step()
        given[0].write(tokens)
        given[1].write(targets)
        ours.prepare(step, schedule(step))
        loss = model(*given)
        loss.backward()
        ours.step()
        assert float(loss.read()[0]) == pytest.approx(expected.item(), abs=1e-4)
        assert norm_of(ours.grad_norm.read()) == pytest.approx(norm.item(), rel=1e-3)


def train(config, tiling, *, dtype=np.float32, batch=5, length=11, steps=6):
    """Losses of a few steps with dropout."""
    model = Llama(config, tiling, InlineRuntime(), seed=4, dtype=dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    given = model.input_tensors(batch, length)
    losses = []
    for step, (tokens, targets) in enumerate(batches(config, steps, batch, length), 1):
        given[0].write(tokens)
        given[1].write(targets)
        model.dropout_key.write(np.array([4, step], np.uint64))
        optimizer.prepare(step)
        loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.read()[0]))
    return losses


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-11)])
def test_losses_do_not_depend_on_the_tiling(dtype, tolerance):
    """No tiles, and five tilings with ragged edges in every dimension, dropout on: losses of six steps differ by rounding only."""
    config = replace(MIXED, attention_dropout=0.1)
    dimensions = (5, 11, config.n_embd, config.inner_size, config.n_head, config.vocab_size)
    for tiling in NOWHERE_EVEN:
        sizes = [*astuple(tiling)[:4], astuple(tiling)[5]]
        assert all(1 < size < whole and whole % size for size, whole in zip(sizes, [*dimensions[:4], dimensions[5]], strict=True)), tiling
    runs = [train(config, tiling, dtype=dtype) for tiling in [ModelTiling(), *NOWHERE_EVEN]]
    assert len(set(runs[0])) == 6
    assert np.abs(np.array(runs) - runs[0]).max() < tolerance
    assert train(replace(MIXED, attention_dropout=0.0), ModelTiling(), dtype=dtype) != runs[0]


def test_bf16_stays_near_fp32():
    """Weights and activations in bf16 with fp32 masters, grouped queries in ragged tiles: losses within its three digits."""
    wide, narrow = (train(MIXED, NOWHERE_EVEN[0], dtype=dtype) for dtype in (np.float32, ml_dtypes.bfloat16))
    assert narrow == pytest.approx(wide, rel=2e-2)


def test_minibatches_sum_to_the_batch():
    """Gradients of minibatches, each loss divided by their number, are those of the whole batch; so is the loss."""
    tokens, targets = batches(MIXED, 1, 4, 10)[0]
    theirs = hf_model(MIXED)
    expected, expected_gradients = loss_and_gradients(our_model(theirs, MIXED, NOWHERE_EVEN[0], InlineRuntime()), tokens, targets)
    model = our_model(theirs, MIXED, NOWHERE_EVEN[0], InlineRuntime(lanes=2))
    parts = [loss_and_gradients(model, tokens[i : i + 2], targets[i : i + 2], scale=0.5, minibatch=i // 2) for i in (0, 2)]
    assert sum(loss for loss, _ in parts) == pytest.approx(expected, abs=1e-6)
    for name, gradient in parts[-1][1].items():
        assert relative(gradient, expected_gradients[name]) < 1e-5, name


def test_next_logits_are_a_row_of_the_logits():
    """For positions in different tiles; what follows them does not matter."""
    model = Llama(MIXED, NOWHERE_EVEN[0], InlineRuntime(), seed=2)
    model.eval()
    tokens, _ = model.input_tensors(3, 11)
    ids = batches(MIXED, 1, 3, 11)[0][0]
    positions = model.position_tensor(3)
    positions.write(np.array([0, 10, 6], np.int32))
    with no_grad():
        tokens.write(ids)
        whole = model.logits(tokens).read()
        ids[0, 1:] = 0
        ids[2, 7:] = 1
        tokens.write(ids)
        chosen = model.next_logits(tokens, positions).read()
    assert np.abs(chosen[:, 0] - whole[[0, 1, 2], [0, 10, 6]]).max() < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_names_convert_both_ways(tied):
    """to_hf undoes from_hf without touching an array, with and without the prefix and the frequencies of older checkpoints."""
    config = replace(MIXED, tie_word_embeddings=tied)
    state = {name: value.numpy() for name, value in hf_model(config).state_dict().items()}
    ours = from_hf(state, config)
    model = build(config, ModelTiling(), InlineRuntime(), seed=None)
    assert isinstance(model, Llama)
    assert set(ours) == set(model.named_parameters())
    back = to_hf(ours, config)
    assert back.keys() == state.keys()
    assert all(back[name] is state[name] for name in state if not (tied and name == "lm_head.weight"))
    older = {name.removeprefix("model."): value for name, value in state.items() if not (tied and name == "lm_head.weight")}
    older["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert from_hf(older, config).keys() == ours.keys()


def test_an_untied_head_that_is_missing_is_named():
    """The weights of a bare model do not make one with a head."""
    state = {name: value.numpy() for name, value in hf_model(MIXED).state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(DataError, match=r"lack lm_head\.weight"):
        from_hf(state, MIXED)


def test_first_weights_depend_on_the_seed_only():
    """Not on the tiling; all matrices have the config's deviation, norms begin at 1 and biases at 0."""
    models = [Llama(replace(MIXED, hidden_size=60), tiling, InlineRuntime(), seed=3) for tiling in (ModelTiling(), NOWHERE_EVEN[0])]
    first, second = ({name: p.read() for name, p in model.named_parameters().items()} for model in models)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert first["layers.0.self_attn.q_proj.weight"].shape == (48, 60)
    assert first["layers.1.mlp.down_proj.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert not np.array_equal(first["layers.0.self_attn.k_proj.weight"], first["layers.1.self_attn.k_proj.weight"])
    assert set(first["norm.weight"]) == {1.0}
    assert set(first["layers.0.self_attn.k_proj.bias"]) == {0.0}


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (2, 999)])
def test_batches_that_do_not_fit_are_refused(batch, length):
    """The message calls the longest sequence what the config calls it."""
    model = Llama(MIXED, ModelTiling(), InlineRuntime(), seed=None)
    with pytest.raises(UsageError, match="max_position_embeddings = 13"):
        model.input_tensors(batch, length)


def test_tiles_hold_whole_groups_of_heads():
    """Two heads of queries share one of keys: tiles of an odd number are refused, with the nearest legal size."""
    with pytest.raises(UsageError, match=r"head_tile must be a multiple of 2, because 2 heads .* got 3; the nearest legal value is 4"):
        Llama(MIXED, ModelTiling(head_tile=3), InlineRuntime(), seed=None)
    with pytest.raises(UsageError, match="the nearest legal value is 2"):
        Llama(MIXED, ModelTiling(head_tile=1), InlineRuntime(), seed=None)


def test_num_parameters_is_that_of_transformers():
    """Tied heads count once, in the config's formula too."""
    for seed in range(6):
        config = random_config(seed)
        model = Llama(config, ModelTiling(), InlineRuntime(), seed=None)
        assert model.num_parameters == config.num_parameters == hf_model(config).num_parameters()
