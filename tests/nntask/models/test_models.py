"""Every model family against transformers, and against itself under other tilings. What one family has alone: `test_gpt2` and `test_llama`."""

from dataclasses import astuple, replace

import ml_dtypes
import numpy as np
import pytest
import torch
from support.families import BATCH, FAMILIES, LENGTH, Family
from support.gpt2_oracle import batches, hf_loss, relative
from support.llama_oracle import SCALINGS

from nntask import AdamW, no_grad
from nntask.errors import UsageError
from nntask.models.registry import build
from nntask.optim.lr_schedule import make_schedule
from nntask.optim.optimizers import decay_groups, norm_of
from nntask.tiling.model_tiling import ModelTiling
from scheduler import CapturingRuntime, InlineRuntime, Runtime
from scheduler.planning.recompute import Values
from scheduler.planning.value_groups import all_groups

families = pytest.mark.parametrize("family", FAMILIES, ids=str)
one_family = pytest.mark.parametrize("family", [pytest.param(FAMILIES[0], marks=pytest.mark.long), FAMILIES[1]], ids=str)
"""LLaMA by default, both with the long tests."""
gpt2, llama = FAMILIES


def late(*values):
    """A case of the long tests."""
    return pytest.param(*values, marks=pytest.mark.long)


def loss_and_gradients(family: Family, model, tokens, targets, **how):
    """One forward and backward pass; the loss, and gradients under Hugging Face's names."""
    ours = model.input_tensors(*tokens.shape)
    for tensor, values in zip(ours, (tokens, targets), strict=True):
        tensor.write(values)
    loss = model(*ours, **how)
    loss.backward()
    return float(loss.read()[0]), family.oracle.our_gradients(model)


def check_parity(family: Family, config, tiling, tolerance=1e-4, *, dtype=np.float32, lanes=1, **options):
    """Logits, loss and every gradient within `tolerance` of the oracle's; LLaMA's logits absolutely, and its loss within a tenth of that."""
    tokens, targets = batches(config, 1, 3, config.n_positions - 1)[0]
    theirs = family.oracle.hf_model(config, dtype)
    loss = hf_loss(theirs, tokens, targets)
    loss.backward()
    model = family.oracle.our_model(theirs, config, tiling, InlineRuntime(lanes=lanes), dtype=dtype, **options)
    given, _ = model.input_tensors(*tokens.shape)
    given.write(tokens)
    with no_grad(), torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
        scale = max(1.0, np.abs(expected).max()) if family is gpt2 else 1.0
        assert np.abs(model.logits(given).read() - expected).max() < tolerance * scale
    ours, gradients = loss_and_gradients(family, model, tokens, targets)
    assert ours == pytest.approx(loss.item(), abs=tolerance if family is gpt2 else tolerance / 10)
    expected_gradients = family.oracle.hf_gradients(theirs)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert relative(gradients[name], gradient) < tolerance, name


@pytest.mark.parametrize(
    ("family", "seed"),
    [(family, seed) if seed < 4 else late(family, seed) for family, number in ((gpt2, 6), (llama, 12)) for seed in range(number)],
    ids=str,
)
def test_logits_and_gradients_are_those_of_transformers(family, seed):
    """Random shapes, activations, groups, biases, flags, tied and untied; every rotary scaling; whole and ragged tilings; one and three lanes."""
    config = family.oracle.random_config(seed, **({"rope_scaling": SCALINGS[seed % len(SCALINGS)]} if family is llama else {}))
    tilings = family.tilings(config)
    check_parity(family, config, tilings[seed % len(tilings)], lanes=1 + 2 * (seed % 2))


@families
@pytest.mark.parametrize("tied", [True, False])
def test_stored_scores_change_nothing(family, tied):
    """Same bounds with the scores kept."""
    config = gpt2.oracle.random_config(7) if family is gpt2 else replace(family.config, mlp_bias=tied)
    check_parity(family, replace(config, tie_word_embeddings=tied), family.uneven[tied], flash=False)


def test_fp64_is_exact_to_ten_digits():
    """What is left between us and torch is rounding; LLaMA's oracle computes its angles in fp32, so it is held against itself in fp64 below."""
    check_parity(gpt2, gpt2.oracle.random_config(3), gpt2.uneven[0], 1e-10, dtype=np.float64)


@pytest.mark.parametrize(("family", "tied"), [(gpt2, True), (llama, False), late(gpt2, False), late(llama, True)], ids=str)
def test_twenty_steps_of_adamw_follow_torch(family, tied):
    """With clipping, warm-up and decay of matrices only: losses within 1e-4, norms alike."""
    config = gpt2.oracle.random_config(11, n_layer=2) if family is gpt2 else replace(family.config, initializer_range=0.1)
    config = replace(config, tie_word_embeddings=tied)
    theirs = family.oracle.hf_model(config)
    model = family.oracle.our_model(theirs, config, family.uneven[3], InlineRuntime())
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


def train(family, config, tiling, *, dtype=np.float32, batch=BATCH, length=LENGTH, steps=6):
    """Losses of a few steps."""
    model = family.kind(config, tiling, InlineRuntime(), seed=4, dtype=dtype)
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


@families
@pytest.mark.parametrize(("dtype", "tolerance", "number"), [(np.float32, 1e-5, 2), late(np.float32, 1e-5, 5), late(np.float64, 1e-11, 5)])
def test_losses_do_not_depend_on_the_tiling(family, dtype, tolerance, number):
    """No tiles, and tilings with ragged edges in every dimension, dropout on: losses of six steps differ by rounding only."""
    config = family.with_dropout(0.1)
    dimensions = (BATCH, LENGTH, config.n_embd, config.inner_size, config.n_head, config.vocab_size)
    whole_heads = 4 if family is llama else -1  # LLaMA's heads come in groups of two
    for tiling in family.uneven:
        sizes = [pair for at, pair in enumerate(zip(astuple(tiling), dimensions, strict=True)) if at != whole_heads]
        assert all(1 < size < whole and whole % size for size, whole in sizes), tiling
    assert all(len({astuple(tiling)[at] for tiling in family.uneven}) > 2 - (at == whole_heads) for at in range(6))
    runs = [train(family, config, tiling, dtype=dtype) for tiling in [ModelTiling(), *family.uneven[:number]]]
    assert len(set(runs[0])) == 6
    assert np.abs(np.array(runs) - runs[0]).max() < tolerance
    assert train(family, family.config, ModelTiling(), dtype=dtype) != runs[0]


@one_family
def test_bf16_stays_near_fp32(family):
    """Weights and activations in bf16 with fp32 masters, in ragged tiles: losses of a few steps on one batch within its three digits."""
    runs = []
    for dtype in (np.float32, ml_dtypes.bfloat16):
        model = family.kind(family.config, family.uneven[3], InlineRuntime(), seed=4, dtype=dtype)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        given = model.input_tensors(3, LENGTH)
        for tensor, ids in zip(given, batches(family.config, 1, 3, LENGTH)[0], strict=True):
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
    assert runs[1] != runs[0]


def emission(family, runtime, config):
    """Model, optimizer, inputs, and a function that emits a step of two minibatches, with clipping."""
    model = family.kind(config, family.uneven[3], runtime, seed=4)
    optimizer = AdamW(model.parameters(), lr=1e-2, max_norm=0.1)
    given = [model.input_tensors(2, LENGTH) for _ in range(2)]

    def emit():
        losses = [model(*pair, scale=0.5, minibatch=i) for i, pair in enumerate(given)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        return [*losses, optimizer.grad_norm]

    return model, optimizer, given, emit


def recorded(family, runtime, config, recompute="none"):
    """Losses, norms and final weights of two steps of two minibatches each, with dropout, clipping and lanes; recorded where the runtime records."""
    model, optimizer, given, emit = emission(family, runtime, config)
    if isinstance(runtime, Runtime):
        with runtime.record(recompute=recompute) as step:
            outputs = emit()
    found = []
    for number, (tokens, targets) in enumerate(batches(config, 2, 4, LENGTH), 1):
        for i, pair in enumerate(given):
            pair[0].write(tokens[2 * i : 2 * i + 2])
            pair[1].write(targets[2 * i : 2 * i + 2])
        model.dropout_key.write(np.array([4, number], np.uint64))
        optimizer.prepare(number)
        if isinstance(runtime, Runtime):
            ticket = step.replay()
            found += [ticket.read(output) for output in outputs]
        else:
            found += [output.read() for output in emit()]
    return [*found, *(p.read() for p in model.parameters())]


DEFAULT = [("none", gpt2), ("block", llama), ("all", llama)]
"""What is made again by default, in which family; the rest is long."""


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        pytest.param(family, what, id=f"{what}-{family}", marks=() if (what, family) in DEFAULT else pytest.mark.long)
        for what in ("none", "block", "half", "all")
        for family in FAMILIES
    ],
)
def test_a_recorded_step_on_workers_gives_the_bits_of_the_inline_one(family, recompute):
    """Recording reads no value, keeps nothing too short, and neither the order in which workers run matters nor what is made again, under dropout."""
    config = family.with_dropout(0.1)
    expected = recorded(family, InlineRuntime(lanes=3), config)
    if recompute in ("half", "all"):
        captured = CapturingRuntime(3)
        *_, emit = emission(family, captured, config)
        with captured.record():
            outputs = emit()
        share = 0.5 if recompute == "half" else 1
        recompute = ",".join(f"{group.name}:{share}" for group in all_groups(Values(captured.plan)))
        del outputs
    with Runtime(cpu_workers=2, lanes=3, ram=1 << 28) as runtime:
        found = recorded(family, runtime, config, recompute)
    assert len(found) == len(expected)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@families
def test_minibatches_sum_to_the_batch(family):
    """Gradients of minibatches, each loss divided by their number, are those of the whole batch; so is the loss."""
    config = family.config
    tokens, targets = batches(config, 1, 4, 10)[0]
    theirs = family.oracle.hf_model(config)
    whole = family.oracle.our_model(theirs, config, family.uneven[0], InlineRuntime())
    expected, expected_gradients = loss_and_gradients(family, whole, tokens, targets)
    model = family.oracle.our_model(theirs, config, family.uneven[0], InlineRuntime(lanes=2))
    parts = [loss_and_gradients(family, model, tokens[i : i + 2], targets[i : i + 2], scale=0.5, minibatch=i // 2) for i in (0, 2)]
    assert sum(loss for loss, _ in parts) == pytest.approx(expected, abs=1e-6)
    for name, gradient in parts[-1][1].items():
        assert relative(gradient, expected_gradients[name]) < 1e-5, name


@families
def test_next_logits_are_a_row_of_the_logits(family):
    """For positions in different tiles; what follows them does not matter."""
    config = family.config
    model = family.kind(config, family.uneven[0], InlineRuntime(), seed=2)
    model.eval()
    tokens, _ = model.input_tensors(3, LENGTH)
    ids = batches(config, 1, 3, LENGTH)[0][0]
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


@families
@pytest.mark.parametrize("tied", [True, False])
def test_names_convert_both_ways(family, tied):
    """to_hf undoes from_hf, with and without the prefix and what older checkpoints hold besides: masks, frequencies."""
    config = replace(family.config, tie_word_embeddings=tied)
    state = {name: value.numpy() for name, value in family.oracle.hf_model(config).state_dict().items()}
    ours = family.names.from_hf(state, config)
    model = build(config, ModelTiling(), InlineRuntime(), seed=None)
    assert isinstance(model, family.kind)
    assert set(ours) == set(model.named_parameters())
    back = family.names.to_hf(ours, config)
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[name], state[name]) for name in state)
    if family is llama:  # whose matrices are stored as they are used
        assert all(back[name] is state[name] for name in state if not (tied and name == "lm_head.weight"))
    prefix, extra = ("transformer.", "h.0.attn.bias") if family is gpt2 else ("model.", "layers.0.self_attn.rotary_emb.inv_freq")
    older = {name.removeprefix(prefix): value for name, value in state.items() if not (tied and name == "lm_head.weight")}
    older[extra] = np.ones((1, 1, 4, 4) if family is gpt2 else 4, np.float32)
    assert family.names.from_hf(older, config).keys() == ours.keys()


@families
@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (2, 999)])
def test_batches_that_do_not_fit_are_refused(family, batch, length):
    """Counts of at least one, and sequences of at most what the config calls the longest one."""
    model = family.kind(family.config, ModelTiling(), InlineRuntime(), seed=None)
    with pytest.raises(UsageError, match=f"{family.longest} = 13"):
        model.input_tensors(batch, length)


@families
def test_num_parameters_is_that_of_transformers(family):
    """Tied heads count once, in the config's formula too."""
    for seed in range(4 if family is gpt2 else 6):
        config = family.oracle.random_config(seed)
        model = family.kind(config, ModelTiling(), InlineRuntime(), seed=None)
        assert model.num_parameters == config.num_parameters == family.oracle.hf_model(config).num_parameters()
