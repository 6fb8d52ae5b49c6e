"""PyTorch: tiles lent without a copy, tensors and modules both ways."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from nntask.errors import DataError, UsageError
from nntask.models.gpt2 import GPT2Config
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime
from tiles import TileTensor
from wrappers.torch.interchange import from_tensor, from_torch, lend_tile, to_tensor, to_torch

transformers = pytest.importorskip("transformers")
CUT = ModelTiling(2, 5, 7, 11, 2, 13)
DTYPES = [(np.float32, torch.float32), (np.float64, torch.float64), (np.float16, torch.float16), (ml_dtypes.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize(("ours", "theirs"), DTYPES)
def test_tensors_both_ways(ours, theirs):
    """Every element type there and back, and a tile over the same memory."""
    with Runtime(1, ram=1 << 20) as runtime:
        tensor = TileTensor(runtime, (5, 7), (2, 3), ours)
        values = torch.randn(5, 7).to(theirs)
        from_tensor(values, tensor)
        assert to_tensor(tensor).dtype == theirs
        assert torch.equal(to_tensor(tensor), values)
        with lend_tile(runtime, tensor[1, 2], "RW") as tile:
            assert torch.equal(tile, values[2:4, 6:])
            tile.mul_(2)
        assert torch.equal(to_tensor(tensor)[2:4, 6:], values[2:4, 6:] * 2)
        with pytest.raises(UsageError, match=r"shape \(5, 7\), got a torch tensor of shape \(7, 5\)"):
            from_tensor(values.T, tensor)
        from_tensor(values.T.contiguous().T.to(torch.float32), tensor)  # strided and of another type


@pytest.mark.parametrize("tied", [True, False])
def test_modules_both_ways(tied):
    """from_torch computes what the module does, to_torch gives it back bit by bit."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_positions=9, n_embd=12, n_layer=2, n_head=3, initializer_range=0.2, tie_word_embeddings=tied)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config.to_dict(), bos_token_id=None, eos_token_id=None)).eval()
    model = from_torch(module, InlineRuntime(), CUT)
    back = to_torch(model)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in back.state_dict().items())
    tokens = torch.arange(18).reshape(2, 9)
    given, _ = model.input_tensors(2, 9)
    given.write(tokens.numpy().astype(np.int32))
    model.eval()
    assert torch.allclose(to_tensor(model.logits(given).data), module(tokens).logits, atol=1e-4)
    narrow = to_torch(from_torch(module.bfloat16(), InlineRuntime(), dtype=ml_dtypes.bfloat16))
    assert narrow.dtype == torch.bfloat16
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in narrow.state_dict().items())
    with pytest.raises(UsageError, match="model_type 'albert'"):
        from_torch(transformers.AlbertModel(transformers.AlbertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1)), InlineRuntime())
    with pytest.raises(UsageError, match=r"only the model have head\.transform\.bias"):
        from_torch(transformers.BertModel(transformers.BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1)), InlineRuntime())


def test_importing_it_imports_no_torch():
    """The module is a door that costs nothing until it is opened."""
    code = "import sys, wrappers.torch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_modules_that_are_refused():
    """No module of transformers, the weights of a body without its head, a value that is no number."""
    config = transformers.GPT2Config(vocab_size=61, n_positions=9, n_embd=12, n_layer=1, n_head=3, tie_word_embeddings=False)
    theirs = transformers.GPT2LMHeadModel(config)
    with pytest.raises(UsageError, match=r"families gpt2, llama, .*, got Linear"):
        from_torch(torch.nn.Linear(2, 2), InlineRuntime())
    with pytest.raises(DataError, match=r"the weights lack lm_head\.weight"):
        from_torch(theirs.transformer, InlineRuntime())
    with torch.no_grad():
        theirs.transformer.ln_f.weight[3] = float("nan")
    with pytest.raises(DataError, match=r"transformer\.ln_f\.weight holds nan, and weights must be finite"):
        from_torch(theirs, InlineRuntime())
