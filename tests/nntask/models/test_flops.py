"""Floating-point operations per sequence: NNTile's formula for a GPT-2, and the same count from the matrices of any model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nntask.config.resolution import resolve
from nntask.config.settings import ModelSettings, TrainSettings
from nntask.engine.recorded import RecordedEngine
from nntask.hardware.flops import _product, flop_counts, flop_counts_of, gemm_peak, known_gemm_peak
from nntask.models.registry import PRESETS
from scheduler import Runtime
from tiles.kernels import has_bf16_products


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


def test_a_classifier_scores_one_token():
    """The products of its blocks for all tokens, of its head for the first one."""
    config, n, d = PRESETS["bert-base"], 128, 768
    blocks, head = 12 * (12 * d * d), 3 * d
    found = flop_counts_of(replace(config, num_labels=3), n, flash=False)
    assert found.forward == 2 * n * blocks + 2 * head + 12 * 4 * n * n * d
    assert found.backward == 4 * n * blocks + 4 * head + 12 * 8 * n * n * d
    assert flop_counts_of(config, n, flash=False).forward == 2 * n * (blocks + 30522 * d) + 12 * 4 * n * n * d


@pytest.mark.parametrize("target", [100, 30])
def test_weights_of_an_encoder_meet_the_input_and_those_of_a_decoder_the_output(target):
    """Also the keys and values that a decoder sees of the input; attention goes over pairs of tokens."""
    config, n = PRESETS["t5-v1.1-small"], 100
    d, a, layers = config.d_model, config.num_heads * config.d_kv, config.num_layers
    feed_forward, read = 3 * d * config.d_ff, layers * 2 * d * a
    encoder, decoder = layers * (4 * d * a + feed_forward), layers * (6 * d * a + feed_forward) + config.vocab_size * d
    pairs = layers * (n * n + target * target + target * n)
    found = flop_counts_of(config, n, flash=True, target_len=target)
    assert found.forward == 2 * n * (encoder + read) + 2 * target * decoder + 6 * pairs * a
    assert found.backward == 4 * n * (encoder + read) + 4 * target * decoder + 14 * pairs * a
    of_input = config.description.encoder.num_parameters(d) + read
    assert found.model == 6 * (n * of_input + target * (config.num_parameters - of_input)) + 12 * pairs * a
    adapted = flop_counts_of(config, n, flash=True, target_len=target, num_adapter_weights=1000)
    assert found.backward - adapted.backward == 2 * n * (encoder + read) + 2 * target * decoder - 4 * sum(
        length * size for length, size in ((n, 1000 * of_input // config.num_parameters), (target, 1000 - 1000 * of_input // config.num_parameters))
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_is_held_against_products_of_its_type(dtype):
    """Where a processor multiplies bf16 faster than fp32, a bf16 run is not told to be beyond the peak."""
    config = PRESETS["tiny"]
    with Runtime(cpu_workers=1, ram=1 << 30) as runtime:
        run = resolve(TrainSettings(model=ModelSettings(model="tiny", dtype=dtype)), config)
        assert RecordedEngine(run, runtime).peak_flops() == known_gemm_peak(1, dtype)
    assert known_gemm_peak(1, "fp32") != known_gemm_peak(1, "bf16")


@pytest.mark.skipif(not has_bf16_products(), reason="this processor has no bf16 instructions, or there is no oneDNN")
def test_the_peak_of_bf16_is_that_of_its_own_products():
    """Of bf16 matrices as they are, as CPU workers multiply them; speeds are the machine's."""
    multiply, element = _product("bf16")
    assert element.name == "bfloat16"
    a = np.eye(4, dtype=element) + np.ones((4, 4), element)
    out = np.empty_like(a)
    multiply(a, out)
    np.testing.assert_array_equal(out.astype(np.float32), a.astype(np.float32) @ a.astype(np.float32))
    assert min(gemm_peak(1, "bf16"), gemm_peak(1, "fp64")) > 0
