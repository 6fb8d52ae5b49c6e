"""What GPT-2 has alone, and what one family shows for both: reductions, evaluation, first weights. The rest: `test_models`."""

import numpy as np
import pytest
from support.gpt2_oracle import batches, random_config

from nntask import no_grad
from nntask.errors import UsageError
from nntask.models.gpt2 import GPT2
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime

RAGGED = [
    ModelTiling(),
    ModelTiling(2, 5, 7, 11, 2, 13),
]


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
