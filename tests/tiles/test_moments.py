"""Moments in 8 bits: values of codes, blocks, codes of fast kernels, and AdamW on them.

Reports of what goes wrong elsewhere: a wrong unsigned table (bitsandbytes 152), residues of zero gradients that are divided by epsilon (unsloth-zoo
962), states of ragged sizes left in fp32 (torchao), state that is fp32 in truth (AiDotNet 1238).
"""

from __future__ import annotations

import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator, on_device

from scheduler import InlineRuntime
from tiles import TileTensor
from tiles.kernels.catalog import kernel
from tiles.kernels.reference.moments import BLOCK, FIRST, SECOND, decode, draws, encode, num_blocks, values
from tiles.ops import optimizer
from tiles.ops.elementwise import fill

OPTIONS = {"row": 0, "stream": 7, "tile": 2, "max_norm": 0.0, "clip": False, "master": False}


@pytest.mark.parametrize("largest", [FIRST, SECOND])
def test_values_are_floats_with_four_bits_of_mantissa(largest: int) -> None:
    """From 0 to 1, in equal steps first; 16 codes further each step is twice as large."""
    table = values(largest)
    assert (table.size, table[0], table[-1]) == (largest + 1, 0.0, 1.0)
    steps = np.diff(table.astype(np.float64))
    assert (steps[:15] / steps[0]) == pytest.approx(1, rel=1e-5)
    assert (steps[16:] / steps[:-16]) == pytest.approx(2, rel=1e-5)
    assert steps[0] == pytest.approx(2.0 ** (-4 - (largest + 1) / 16), rel=5e-3)


def moments(shape: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Parameter, gradient, and moments in 8 bits of two earlier steps."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    param, grad = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    grad *= np.exp(3 * rng.standard_normal(shape)).astype(np.float32)
    args = [param, grad, *(part for _ in range(2) for part in (np.zeros(shape, np.uint8), np.zeros(num_blocks(size), np.float32)))]
    for step in (1, 2):
        kernel("adam8bit", "reference")(*args, hyper(step), **OPTIONS)
    return args


def hyper(step: int, lr: float = 0.01) -> np.ndarray:
    """Options of a step."""
    return np.array([[lr, 1 - 0.9**step, 1 - 0.95**step, 0.9, 0.95, 1e-8, 0.1, step]])


def same_codes(want: list[np.ndarray], have: list[np.ndarray]) -> None:
    """Parameters and scales up to rounding; codes differ by one where a number is half-way between two."""
    for number in (0, 3, 5):
        np.testing.assert_allclose(have[number], want[number], rtol=2e-5, atol=1e-7)
    for number in (2, 4):
        away = np.abs(have[number].astype(int) - want[number].astype(int))
        assert away.max() <= 1
        assert away.mean() < 1e-3


@pytest.mark.parametrize("shape", [(7, 5), (16, 16), (13, 61), (1, 257), (40, 96)], ids=str)
def test_fast_codes_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    """Compiled loops and NumPy's, with blocks that are whole, ragged and alone."""
    args = moments(shape)
    want, fast = [array.copy() for array in args], [array.copy() for array in args]
    wide = [array.astype(np.float64) if number < 2 else array.copy() for number, array in enumerate(args)]
    kernel("adam8bit", "reference")(*want, hyper(3), **OPTIONS)
    kernel("adam8bit", "cpu")(*fast, hyper(3), **OPTIONS)
    kernel("adam8bit", "cpu")(*wide, hyper(3), **OPTIONS)
    same_codes(want, fast)
    same_codes(want, wide)


def moments_of(backend: str, values: np.ndarray, step: int = 1) -> list[np.ndarray]:
    """Codes and scales of m and v of a weight whose gradient is the given one, with betas of 0: m is the gradient, v its square  # (B, 256)."""
    codes, scales = ([np.zeros(shape, dtype) for _ in range(2)] for shape, dtype in ((values.shape, np.uint8), (values.shape[0], np.float32)))
    options = np.array([[0.01, 1.0, 1.0, 0.0, 0.0, 1e-8, 0.0, step]])
    kernel("adam8bit", backend)(np.zeros_like(values), values, codes[0], scales[0], codes[1], scales[1], options, **OPTIONS)
    return [codes[0], scales[0], codes[1], scales[1]]


@pytest.mark.parametrize("sign", [1, -1])
def test_fast_codes_are_those_of_the_reference_at_all_places_of_the_tables(sign: int) -> None:
    """Values of the tables, numbers next to them and between, squares of all magnitudes: one in 10,000 is rounded otherwise, by one code."""
    exact = np.concatenate([values(largest) for largest in (FIRST, SECOND)])
    between = [exact[:-1] + share * np.diff(exact) for share in (0.01, 0.3, 0.5, 0.99)]
    edges = np.concatenate([exact, np.nextafter(exact, np.float32(2)), np.nextafter(exact, np.float32(0)), *between])
    numbers = np.concatenate([edges, np.sqrt(edges.clip(0)), 2.0 ** -np.arange(20, 70), [0.0]]).astype(np.float32)
    grad = np.ones((4 * -(-numbers.size // 255), BLOCK), np.float32)  # column 0 makes every scale 1
    grad[:, 1:] = sign * np.resize(numbers, (grad.shape[0], 255))
    want, have = (moments_of(backend, grad) for backend in ("reference", "cpu"))
    for number in (0, 2):
        away = np.abs(have[number].astype(int) - want[number].astype(int))
        assert away.max() <= 1
        assert away.mean() < 1e-4
    assert len(np.unique(want[2])) > 250
    assert (want[2][grad == 1] == 255).all()
    assert (have[2][grad == 1] == 255).all()


@pytest.mark.parametrize("largest", [1.0, -1.0])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_rounding_has_no_bias(backend: str, largest: float) -> None:
    """The mean over many blocks of a number's decoded moments is the number, of both signs and all magnitudes, that of the scale included."""
    numbers = np.concatenate([[largest], np.exp(np.random.default_rng(0).uniform(np.log(3e-6), 0, 255))]).astype(np.float32)
    numbers[1:] *= np.where(np.arange(255) % 2, 1, -1)
    rows = np.tile(numbers, (500, 1))
    for exact, top, codes in ((rows, FIRST, 0), (rows**2, SECOND, 2)):
        encoded, table = moments_of(backend, rows), values(top)
        decoded = decode(encoded[codes], encoded[codes + 1], top)
        ratio = np.abs(exact[0])
        below, above = table[np.searchsorted(table, ratio, "right") - 1], table[np.searchsorted(table, ratio, "left")]
        large = ratio > (0 if top == FIRST else table[1])  # smaller second moments have the lowest code above zero
        away = np.abs(decoded.mean(axis=0) - exact[0]) / np.maximum(above - below, 1e-9)
        assert away[large].max() < 5 * 0.5 / np.sqrt(500)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_moments_follow_changes_below_half_a_step_of_the_table(backend: str) -> None:
    """Second moments fall by at most 0.8 % a step. Rounded to the nearest, they would keep the codes of the first step."""
    grad = np.full((1, BLOCK), 0.6, np.float32)
    grad[0, 0] = 1.0  # keeps the scale
    codes, scales = ([np.zeros(shape, dtype) for _ in range(2)] for shape, dtype in ((grad.shape, np.uint8), (1, np.float32)))
    for step in range(1, 102):
        options = np.array([[0.01, 1.0, 1.0, 0.0, 0.99 if step > 1 else 0.0, 1e-8, 0.0, step]])
        kernel("adam8bit", backend)(np.zeros_like(grad), grad, codes[0], scales[0], codes[1], scales[1], options, **OPTIONS)
        grad[0, 1:] = 0.3
    want = 0.3**2 + (0.6**2 - 0.3**2) * 0.99**100
    assert decode(codes[1], scales[1], SECOND)[0, 1:].mean() == pytest.approx(want, rel=0.02)


def test_rounding_differs_between_steps_tiles_and_parameters() -> None:
    """Half of the codes of numbers half-way between two values change with any of the three numbers, whose order matters; the same three repeat."""
    codes = {key: draws(*key, range(4096)) >> 31 for key in ((1, 7, 2), (2, 7, 2), (1, 8, 2), (1, 7, 3), (2, 7, 1), (1, 2, 7))}
    for one in codes:
        assert 0.47 < codes[one].mean() < 0.53
        for other in codes:
            assert one == other or 0.47 < (codes[one] == codes[other]).mean() < 0.53
    np.testing.assert_array_equal(draws(1, 7, 2, range(100, 200)), draws(1, 7, 2, range(4096))[100:200])


@pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
@pytest.mark.parametrize("shape", [(7, 5), (13, 61), (40, 96)], ids=str)
def test_codes_of_the_gpu_are_those_of_the_reference(shape: tuple[int, int], cuda_libraries) -> None:  # type: ignore[no-untyped-def]
    """The emulated kernel has tables of its own."""
    emulator = Emulator(cuda_libraries, eager=True)
    emulator.enter(emulator.stream())
    args = moments(shape)
    want, device = [array.copy() for array in args], [array.copy() for array in args]
    kernel("adam8bit", "reference")(*want, hyper(3), **OPTIONS)
    kernel("adam8bit", "cuda")(*map(on_device, [*device, hyper(3)]), **OPTIONS)
    same_codes(want, device)


@pytest.mark.parametrize("largest", [FIRST, SECOND])
def test_codes_are_the_neighbours(largest: int) -> None:
    """Every number of a block is between the values below and above its code, of its sign, whatever the random bits."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(1000).astype(np.float32) if largest == FIRST else np.abs(rng.standard_normal(1000).astype(np.float32))
    codes, scales, table = np.empty(1000, np.uint8), np.empty(4, np.float32), values(largest)
    for random in (np.zeros(1000, np.uint32), np.full(1000, 65535, np.uint32), rng.integers(0, 65536, 1000).astype(np.uint32)):
        encode(numbers, codes, scales, largest, random)
        ratios, magnitudes = np.abs(numbers) / np.repeat(scales, BLOCK)[:1000], (codes & largest).astype(int)
        assert (table[np.maximum(magnitudes - 1, 0)] <= ratios + 1e-6).all()
        assert (table[np.minimum(magnitudes + 1, largest)] >= ratios - 1e-6).all()
        np.testing.assert_array_equal(codes > magnitudes, numbers < 0)
        assert scales[3] == np.abs(numbers[768:]).max()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_zero_gradients_leave_parameters_alone(backend: str) -> None:
    """A weight whose gradient is always zero decays and does nothing else, among others whose gradients are not."""
    args = moments((16, 16))
    args[0], args[1] = args[0].copy(), np.zeros((16, 16), np.float32)
    args[1][0] = 1e3
    args[2:] = [np.zeros((16, 16), np.uint8), np.zeros(1, np.float32), np.zeros((16, 16), np.uint8), np.zeros(1, np.float32)]
    before = args[0].copy()
    for step in range(1, 51):
        kernel("adam8bit", backend)(*args, hyper(step), **OPTIONS)
    np.testing.assert_allclose(args[0][1:], before[1:] * (1 - 0.01 * 0.1) ** 50, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_small_second_moments_are_not_lost(backend: str) -> None:
    """Of a weight with small gradients among large ones, v would round to 0 while m does not: no step is longer than those of fp32 moments may be."""
    grad = np.full((1, 256), 1.0, np.float32)
    grad[0, 1:] = 2e-4  # v is 4e-8 of the largest one, below half of the least value of the table
    args = [np.zeros((1, 256), np.float32), grad, np.zeros((1, 256), np.uint8), np.zeros(1, np.float32)]
    args += [np.zeros((1, 256), np.uint8), np.zeros(1, np.float32)]
    kernel("adam8bit", backend)(*args, hyper(1), **OPTIONS)
    assert (args[4] > 0).all()
    before = args[0].copy()
    args[1][:] = 0
    kernel("adam8bit", backend)(*args, hyper(2), **OPTIONS)
    assert np.abs(args[0] - before).max() < 0.02


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_nan_shows(backend: str) -> None:
    """A NaN stays in its weight, and spreads to its block in the next step."""
    args = moments((2, 256))
    args[1][0, 3] = np.nan
    kernel("adam8bit", backend)(*args, hyper(3), **OPTIONS)
    assert np.isnan(args[0]).sum() == 1
    assert np.isnan(args[3]).tolist() == [True, False]
    args[1][:] = 0
    kernel("adam8bit", backend)(*args, hyper(4), **OPTIONS)
    assert np.isnan(args[0][0]).all()
    assert not np.isnan(args[0][1]).any()


def test_blocks_are_those_of_tiles() -> None:
    """Each tile of a tensor is encoded on its own, and steps stay near those of fp32 moments."""
    runtime, rng = InlineRuntime(), np.random.default_rng(0)
    start = rng.standard_normal((70, 90)).astype(np.float32)

    def data(values: np.ndarray, tile: tuple[int, int] = (32, 40)) -> TileTensor:
        result = TileTensor(runtime, values.shape, tile, values.dtype)
        result.write(values)
        return result

    param, plain = data(start), data(start)
    m, v = (fill(param.like(dtype=np.uint8), 0.0) for _ in range(2))
    m_scales, v_scales = (fill(optimizer.moment_scales(param, name), 0.0) for name in "mv")
    wide = [fill(param.like(), 0.0) for _ in range(2)]
    assert m_scales.grid == (9,)
    assert m_scales.tile == (5,)
    for step in range(1, 11):
        gradient = rng.standard_normal(start.shape).astype(np.float32)
        given = {"grad": data(gradient), "hyper": data(hyper(step), (-1, -1))}
        optimizer.adamw8bit(optimizer.Update(param=param, **given), m, m_scales, v, v_scales, stream=1)
        optimizer.adamw(optimizer.Update(param=plain, **given), *wide)
    moved = np.abs(plain.read() - start).mean()
    assert np.abs(param.read() - plain.read()).mean() < 0.03 * moved
    assert m.nbytes + v.nbytes + m_scales.nbytes + v_scales.nbytes < 2.1 * start.size
