"""Floating-point operations per sequence: NNTile's formula for a GPT-2, and the same count from the matrices of any model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nntask.hardware.flops import flop_counts, flop_counts_of
from nntask.models.registry import PRESETS


@pytest.mark.parametrize("flash", [True, False])
def test_gpt2_has_nntiles_formula(flash):
    """L(4ndi + 8nd^2 + {6 | 4} n^2 d) + 2ndV forward, L(8ndi + 16nd^2 + {14 | 8} n^2 d) + 4ndV backward, 6N + 12Ldn per token."""
    n, d, i, layers, vocab = 1024, 768, 3072, 12, 50257
    found = flop_counts_of(PRESETS["gpt2"], n, flash=flash)
    assert found.forward == layers * (4 * n * d * i + 8 * n * d * d + (6 if flash else 4) * n * n * d) + 2 * n * d * vocab
    assert found.backward == layers * (8 * n * d * i + 16 * n * d * d + (14 if flash else 8) * n * n * d) + 4 * n * d * vocab
    assert found.model == n * (6 * 124_439_808 + 12 * layers * d * n)
    assert found == flop_counts(n=n, d=d, i=i, layers=layers, vocab=vocab, num_parameters=124_439_808, flash=flash)


def test_frozen_weights_are_multiplied_twice_and_adapters_three_times():
    """4N + 6A + 12Ldn per token; of the products with weights, forward and input's gradient, and those of adapters whole."""
    config, n, size = PRESETS["gpt2"], 1024, 1_179_648
    whole, found = flop_counts_of(config, n, flash=True), flop_counts_of(config, n, flash=True, num_adapter_weights=size)
    assert found.model == whole.model - 2 * n * config.num_parameters + 6 * n * size
    assert found.forward == whole.forward + 2 * n * size
    products = whole.forward - 12 * 6 * n * n * 768
    assert found.backward == whole.backward - products + 4 * n * size


@pytest.mark.parametrize("name", ["llama-tiny", "llama-1b", "llama-3b"])
def test_products_of_a_llama_are_its_matrices(name):
    """Two operations per element of each matrix and token, and attention over the width of all heads of queries."""
    config = replace(PRESETS[name], tie_word_embeddings=True)
    n, width = 100, config.n_head * config.head_size
    matrices = config.num_parameters - (2 * config.n_layer + 1) * config.n_embd  # all but the norms
    found = flop_counts_of(config, n, flash=True)
    assert found.forward == 2 * n * matrices + config.n_layer * 6 * n * n * width
    assert found.backward == 4 * n * matrices + config.n_layer * 14 * n * n * width
    assert found.model == n * (6 * config.num_parameters + 12 * config.n_layer * width * n)
