"""A custom kernel for GELU: a function and its registration. Models, gradients and element types need no change.

    python examples/custom_kernel.py

The script trains a small GPT-2 for some steps with the built-in kernel, then with this one, and prints the largest difference of the losses.
"""

import sys

import numpy as np

from nntask import GPT2, AdamW, GPT2Config, ModelTiling
from scheduler import Runtime
from tiles import register_activation

SCALE = 2 * (2 / np.pi) ** 0.5


def gelu(x, y):
    """y = x / (1 + exp(-2u)), which is 0.5 x (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3); Hendrycks and Gimpel, 2016."""
    np.multiply(x, x, out=y)
    y *= -0.044715 * SCALE
    y -= SCALE
    y *= x
    with np.errstate(over="ignore"):  # exp(-2u) = inf gives the correct result 0
        np.exp(y, out=y)
    y += 1
    np.divide(x, y, out=y)


def use_it():
    register_activation("gelu_new")(gelu)


def losses(steps=10):
    """Return the losses of some steps on fixed tokens, offline."""
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=64, n_layer=2, n_head=4).with_dropout(0)
    step_losses = []
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        model = GPT2(config, ModelTiling(minibatch_tile=2, inner_tile=96), runtime)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        tokens, targets = model.input_tensors(batch=4)
        with runtime.record() as step:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
        for number in range(1, steps + 1):
            ids = np.random.default_rng(number).integers(0, 97, (4, 33))
            tokens.write(ids[:, :-1])
            targets.write(ids[:, 1:])
            optimizer.prepare(number)
            step_losses.append(float(step.replay().read(loss)[0]))
    return np.array(step_losses)


def main():
    built_in = losses()
    use_it()
    own = losses()
    difference = float(np.abs(own - built_in).max())
    print(f"loss after {len(own)} steps: {built_in[-1]:.6f} with the built-in kernel, {own[-1]:.6f} with ours; largest difference {difference:.1e}")
    return difference


if __name__ == "__main__":
    sys.exit(main() > 1e-5)
