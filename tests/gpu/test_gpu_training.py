"""GPT-2 on the device: the CPU's losses within rounding, equal bits whatever the memory, bands for bf16 and tf32, torch's losses on the same card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu_training import Training, on_gpus

from nntask.models.gpt2 import GPT2Config
from nntask.tiling.model_tiling import ModelTiling
from scheduler import Runtime
from tiles.kernels.registry import BF16

CONFIG = GPT2Config(vocab_size=1000, n_positions=128, n_embd=128, n_layer=3, n_head=4)
TRAINING = Training(CONFIG, ModelTiling(minibatch_tile=1, seq_tile=64, vocab_tile=300), 12, 1e-3)
losses = TRAINING.losses


def on_gpu(gpus: list[Any], nbytes: int = 1 << 30, ram: int = 1 << 30, **more: Any) -> Runtime:
    """A runtime on devices alone."""
    return on_gpus(gpus, nbytes, ram, **more)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_losses_are_those_of_the_cpu(dropout: float, open_gpus: Any) -> None:
    """fp32, dropout masks included."""
    np.testing.assert_allclose(losses(on_gpu(open_gpus(1)), dropout=dropout), losses(Runtime(ram=1 << 30), dropout=dropout), rtol=1e-4)


def test_memory_and_parts_change_no_bit(open_gpus: Any, tmp_path: Path) -> None:
    """With graphs and without; a budget below the state, a disk below that; two parts of a card within rounding, both busy."""
    want = losses(on_gpu(open_gpus(1)))
    assert losses(on_gpu(open_gpus(1))) == want
    assert losses(on_gpu(open_gpus(1), graphs=False)) == want
    assert losses(on_gpu(open_gpus(1), 3 << 20)) == want
    assert losses(on_gpu(open_gpus(1), 3 << 20, 24 << 20, disk=tmp_path)) == want
    two = on_gpu(open_gpus(2), 8 << 20)
    np.testing.assert_allclose(losses(two), want, rtol=1e-6)
    assert all(seconds > 0 for seconds in two.stats()["busy_seconds"].values())


@pytest.mark.parametrize(("name", "band"), [("bf16", 1e-2), ("tf32", 1e-3)])
def test_bands_of_other_types(name: str, band: float, open_gpus: Any) -> None:
    """Loss curves near that of fp32."""
    want = losses(on_gpu(open_gpus(1)))
    found = losses(on_gpu(open_gpus(1, tf32=name == "tf32")), dtype=BF16 if name == "bf16" else np.float32)
    np.testing.assert_allclose(found, want, rtol=band)


def test_losses_are_torchs(open_gpus: Any) -> None:
    """transformers' GPT-2 from the same weights on the same card: forward and backward in fp32, the same AdamW, clipped alike."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA; the CPU's run is compared above")
    transformers = pytest.importorskip("transformers")
    from nntask.models.gpt2 import NAMES

    weights: dict[str, np.ndarray] = {}
    ours = losses(on_gpu(open_gpus(1)), weights=weights)
    torch.backends.cuda.matmul.allow_tf32 = False
    config = transformers.GPT2Config(**{**CONFIG.to_dict(), "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    model = transformers.GPT2LMHeadModel(config).cuda().train()
    state = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in NAMES.to_hf(weights, CONFIG).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("lm_head" in name or "attn.bias" in name for name in missing)
    model.tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    theirs = []
    for ids in TRAINING.ids():
        optimizer.zero_grad()
        total = 0.0
        for part in ids:
            tokens = torch.from_numpy(part.astype(np.int64)).cuda()
            logits = model(tokens[:, :-1]).logits
            loss = 0.5 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        theirs.append(total)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
