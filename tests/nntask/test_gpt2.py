"""GPT-2 against transformers, and against itself under other tilings."""

from dataclasses import astuple, replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hf_oracle import batches, hf_gradients, hf_loss, hf_model, our_gradients, our_model, random_config, relative

from nntask import AdamW, Group, no_grad
from nntask.errors import UsageError
from nntask.models.gpt2 import GPT2
from nntask.models.gpt2_names import from_hf, to_hf
from nntask.optim import norm_of
from nntask.schedule import make_schedule
from nntask.tiling import ModelTiling
from scheduler import InlineRuntime, Runtime

RAGGED = [
    ModelTiling(),
    ModelTiling(2, 5, 7, 11, 2, 13),
    ModelTiling(1, 4, 64, 16, 1, 32),
    ModelTiling(3, 9, 9, 70, 3, 50),
    ModelTiling(2, 3, 16, 5, 2, 7),
]


NOWHERE_EVEN = [
    ModelTiling(2, 5, 7, 11, 2, 13),
    ModelTiling(3, 4, 8, 10, 3, 9),
    ModelTiling(4, 3, 9, 20, 4, 25),
    ModelTiling(2, 7, 11, 46, 3, 60),
    ModelTiling(3, 10, 29, 3, 2, 7),
]
"""Tile sizes that divide no dimension of 5 sequences of 11 tokens, width 30, inner width 47, 5 heads, 61 ids."""


def loss_and_gradients(model, tokens, targets, **how):
    """Run one forward and backward pass; the loss, and gradients under Hugging Face's names."""
    ours = model.input_tensors(*tokens.shape)
    for tensor, values in zip(ours, (tokens, targets), strict=True):
        tensor.write(values)
    loss = model(*ours, **how)
    loss.backward()
    return float(loss.read()[0]), our_gradients(model)


def check_parity(config, tiling, tolerance, *, dtype=np.float32, lanes=1, **options):
    """Logits, loss and every gradient within `tolerance` of the oracle's."""
    (tokens, targets), batch = batches(config, 1, 3, config.n_positions - 1)[0], 3
    theirs = hf_model(config, dtype)
    loss = hf_loss(theirs, tokens, targets)
    loss.backward()
    model = our_model(theirs, config, tiling, InlineRuntime(lanes=lanes), dtype=dtype, **options)
    given, _ = model.input_tensors(batch, tokens.shape[1])
    given.write(tokens)
    with no_grad(), torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
        assert np.abs(model.logits(given).read() - expected).max() < tolerance * max(1.0, np.abs(expected).max())
    ours, gradients = loss_and_gradients(model, tokens, targets)
    assert ours == pytest.approx(loss.item(), abs=tolerance)
    expected_gradients = hf_gradients(theirs)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert relative(gradients[name], gradient) < tolerance, name


@pytest.mark.parametrize("seed", range(6))
def test_logits_and_gradients_are_those_of_transformers(seed):
    """Random shapes, activations, scale flags, tied and untied; whole and ragged tilings; one and three lanes."""
    check_parity(random_config(seed), RAGGED[seed % len(RAGGED)], 1e-4, lanes=1 + 2 * (seed % 2))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{"recompute": True}, {"flash": False}, {"recompute": True, "flash": False}])
def test_recomputation_and_stored_scores_change_nothing(options, tied):
    """Same bounds with checkpoint() around every block, and with the scores kept."""
    check_parity(random_config(7, tie_word_embeddings=tied), RAGGED[1], 1e-4, **options)


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_fp64_is_exact_to_ten_digits(options):
    """What is left between us and torch is rounding."""
    check_parity(random_config(3), RAGGED[1], 1e-10, dtype=np.float64, **options)


def test_recomputation_gives_the_same_bits():
    """Also under dropout, whose masks depend on position only."""
    config = random_config(2, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2, n_layer=3)
    tokens, targets = batches(config, 1, 3, 11)[0]
    found = [loss_and_gradients(GPT2(config, RAGGED[1], InlineRuntime(), recompute=again), tokens, targets) for again in (False, True)]
    assert found[0][0] == found[1][0]
    for name, gradient in found[0][1].items():
        assert np.array_equal(gradient, found[1][1][name]), name


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
@pytest.mark.parametrize("tied", [True, False])
def test_twenty_steps_of_adamw_follow_torch(options, tied):
    """With clipping, warm-up and decay of matrices only: losses within 1e-4, norms alike."""
    config = random_config(11, tie_word_embeddings=tied, n_layer=2)
    theirs = hf_model(config)
    model = our_model(theirs, config, RAGGED[1], InlineRuntime(), **options)
    schedule = make_schedule("cosine", 1e-2, steps=20, warmup_steps=5, min_lr=1e-4)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    oracle = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95))
    ours = AdamW(
        [Group([p for p in model.parameters() if len(p.shape) > 1], 0.1), Group([p for p in model.parameters() if len(p.shape) == 1], 0.0)],
        betas=(0.9, 0.95),
        max_norm=0.5,
    )
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


def test_losses_do_not_depend_on_the_tiling():
    """No tiles, and five tilings with ragged edges in every dimension, dropout on: losses of six steps within 1e-5."""
    config = random_config(5, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, n_layer=2, initializer_range=0.02)
    config = replace(config, vocab_size=61, n_positions=13, n_embd=30, n_head=5, n_inner=47)
    batch, length, num_steps = 5, 11, 6
    dimensions = (batch, length, config.n_embd, config.inner_size, config.n_head, config.vocab_size)
    for tiling in NOWHERE_EVEN:
        assert all(1 < size < whole and whole % size for size, whole in zip(astuple(tiling), dimensions, strict=True)), tiling
    assert all(len({astuple(tiling)[i] for tiling in NOWHERE_EVEN}) > 2 for i in range(6))
    runs = []
    for tiling in [ModelTiling(), *NOWHERE_EVEN]:
        model = GPT2(config, tiling, InlineRuntime(), seed=4)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        given = model.input_tensors(batch, length)
        losses = []
        for step, (tokens, targets) in enumerate(batches(config, num_steps, batch, length), 1):
            given[0].write(tokens)
            given[1].write(targets)
            model.dropout_key.write(np.array([4, step], np.uint64))
            optimizer.prepare(step)
            loss = model(*given)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.read()[0]))
        runs.append(losses)
    assert len(set(runs[0])) == num_steps
    assert np.abs(np.array(runs) - runs[0]).max() < 1e-5


def train(runtime, config, *, recorded):
    """Losses, norms and final weights of three steps of two minibatches each, with dropout, clipping and lanes."""
    model = GPT2(config, RAGGED[1], runtime, seed=4, recompute=True)
    optimizer = AdamW(model.parameters(), lr=1e-2, max_norm=0.1)
    given = [model.input_tensors(2, 11) for _ in range(2)]

    def emit():
        losses = [model(*pair, scale=0.5, minibatch=i) for i, pair in enumerate(given)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        return [*losses, optimizer.grad_norm]

    if recorded:
        with runtime.record() as step:
            outputs = emit()
    found = []
    for number, (tokens, targets) in enumerate(batches(config, 3, 4, 11), 1):
        for i, pair in enumerate(given):
            pair[0].write(tokens[2 * i : 2 * i + 2])
            pair[1].write(targets[2 * i : 2 * i + 2])
        model.dropout_key.write(np.array([4, number], np.uint64))
        optimizer.prepare(number)
        if recorded:
            ticket = step.replay()
            found += [ticket.read(output) for output in outputs]
        else:
            found += [output.read() for output in emit()]
    return [*found, *(p.read() for p in model.parameters())]


def test_a_recorded_step_on_workers_gives_the_bits_of_the_inline_one():
    """Recording reads no value, keeps nothing too short, and the order in which workers run does not matter."""
    config = random_config(5, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, n_layer=2)
    expected = train(InlineRuntime(lanes=3), config, recorded=False)
    with Runtime(cpu_workers=2, lanes=3, ram=1 << 28) as runtime:
        found = train(runtime, config, recorded=True)
    assert len(found) == len(expected)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_bf16_stays_near_fp32():
    """Weights and activations in bf16 with fp32 masters: losses of a few steps within its three digits."""
    config = random_config(5, n_layer=2, initializer_range=0.02)
    runs = []
    for dtype in (np.float32, ml_dtypes.bfloat16):
        model = GPT2(config, RAGGED[1], InlineRuntime(), seed=4, dtype=dtype)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        given = model.input_tensors(3, 11)
        for tensor, ids in zip(given, batches(config, 1, 3, 11)[0], strict=True):
            tensor.write(ids)
        runs.append([])
        for step in range(1, 6):
            optimizer.prepare(step)
            loss = model(*given)
            loss.backward()
            optimizer.step()
            runs[-1].append(float(loss.read()[0]))
    assert runs[0][-1] < runs[0][0] - 0.3
    assert runs[1] == pytest.approx(runs[0], rel=2e-2)


def test_minibatches_sum_to_the_batch():
    """Gradients of minibatches, each loss divided by their number, are those of the whole batch; so is the loss."""
    config = random_config(6)
    tokens, targets = batches(config, 1, 4, 10)[0]
    theirs = hf_model(config)
    whole = our_model(theirs, config, RAGGED[1], InlineRuntime())
    expected, expected_gradients = loss_and_gradients(whole, tokens, targets)
    model = our_model(theirs, config, RAGGED[1], InlineRuntime(lanes=2))
    parts = [loss_and_gradients(model, tokens[i : i + 2], targets[i : i + 2], scale=0.5, minibatch=i // 2) for i in (0, 2)]
    assert sum(loss for loss, _ in parts) == pytest.approx(expected, abs=1e-6)
    for name, gradient in parts[-1][1].items():
        assert relative(gradient, expected_gradients[name]) < 1e-5, name


def test_sum_is_the_mean_times_the_tokens():
    """And ignored targets count in neither sum nor gradient."""
    config = random_config(8)
    model = GPT2(config, ModelTiling(), InlineRuntime(), seed=1)
    tokens, targets = batches(config, 1, 2, 9)[0]
    with no_grad():
        tensors = model.input_tensors(2, 9)
        tensors[0].write(tokens)
        tensors[1].write(targets)
        mean, total = model(*tensors).read()[0], model(*tensors, reduction="sum").read()[0]
    assert total == pytest.approx(18 * mean, rel=1e-6)
    with pytest.raises(UsageError, match="reduction"):
        model(*tensors, reduction="avg")


def test_dropout_is_off_in_evaluation_and_differs_between_minibatches():
    """eval() gives the model without dropout; minibatch and step choose the masks."""
    config = random_config(9, resid_pdrop=0.5, initializer_range=0.5)
    model = GPT2(config, ModelTiling(), InlineRuntime(), seed=1)
    given = model.input_tensors(2, 9)
    for tensor, values in zip(given, batches(config, 1, 2, 9)[0], strict=True):
        tensor.write(values)
    with no_grad():
        first, again, other = (float(model(*given, minibatch=i).read()[0]) for i in (0, 0, 1))
        model.dropout_key.write(np.array([1, 1], np.uint64))
        later = float(model(*given).read()[0])
        model.eval()
        off = float(model(*given).read()[0])
        model.train()
        on = float(model(*given).read()[0])
    assert first == again
    assert on == later
    assert len({first, other, later, off}) == 4


def test_next_logits_are_a_row_of_the_logits():
    """For positions in different tiles; what follows them does not matter."""
    config = random_config(10)
    model = GPT2(config, RAGGED[1], InlineRuntime(), seed=2)
    model.eval()
    tokens, _ = model.input_tensors(3, 11)
    ids = batches(config, 1, 3, 11)[0][0]
    positions = model.position_tensor(3)
    positions.write(np.array([0, 10, 6], np.int32))
    with no_grad():
        tokens.write(ids)
        whole = model.logits(tokens).read()
        ids[0, 1:] = 0
        ids[2, 7:] = 1
        tokens.write(ids)
        chosen = model.next_logits(tokens, positions).read()
    assert chosen.shape == (3, 1, config.vocab_size)
    assert np.abs(chosen[:, 0] - whole[[0, 1, 2], [0, 10, 6]]).max() < 1e-5


def test_names_convert_both_ways():
    """to_hf undoes from_hf, with and without the prefix and the masks of Hub checkpoints."""
    config = random_config(1, tie_word_embeddings=True)
    state = {name: value.numpy() for name, value in hf_model(config).state_dict().items()}
    ours = from_hf(state, config)
    assert set(ours) == set(GPT2(config, ModelTiling(), InlineRuntime(), seed=None).named_parameters())
    back = to_hf(ours, config)
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[name], state[name]) for name in state)
    bare = {name.removeprefix("transformer."): value for name, value in state.items() if name != "lm_head.weight"}
    bare["h.0.attn.bias"] = np.ones((1, 1, 4, 4))
    assert from_hf(bare, config).keys() == ours.keys()


def test_first_weights_depend_on_the_seed_only():
    """Not on the tiling; projections to the residual stream are smaller by sqrt(2 L); vectors begin at 0 and 1."""
    config = random_config(4, n_embd=48, n_head=3, n_layer=2, initializer_range=0.02)
    models = [GPT2(config, tiling, InlineRuntime(), seed=3) for tiling in RAGGED[:2]]
    first, second = ({name: p.read() for name, p in model.named_parameters().items()} for model in models)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert first["h.0.attn.q.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert first["h.1.attn.c_proj.weight"].std() == pytest.approx(0.01, rel=0.05)
    assert not np.array_equal(first["h.0.attn.q.weight"], first["h.1.attn.q.weight"])
    assert set(first["ln_f.weight"]) == {1.0}
    assert set(first["ln_f.bias"]) == {0.0}


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (2, 999)])
def test_batches_that_do_not_fit_are_refused(batch, length):
    """Counts of at least one and at most n_positions tokens."""
    model = GPT2(random_config(0), ModelTiling(), InlineRuntime(), seed=None)
    with pytest.raises(UsageError, match="n_positions"):
        model.input_tensors(batch, length)


def test_num_parameters_is_that_of_transformers():
    """Tied heads count once, in the config's formula too."""
    for seed in range(4):
        config = random_config(seed)
        model = GPT2(config, ModelTiling(), InlineRuntime(), seed=None)
        assert model.num_parameters == config.num_parameters == hf_model(config).num_parameters()
