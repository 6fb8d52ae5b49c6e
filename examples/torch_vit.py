"""A ViT of transformers on scikit-learn's handwritten digits, in a session of PyTorch on a memory budget.

    python examples/torch_vit.py --steps 200
    python examples/torch_vit.py --steps 200 --ram 3MB --disk scratch    # the same losses in a third of the memory

The model is transformers' own, unchanged, and PyTorch computes. Without scikit-learn, striped images with ten slopes replace the digits. The script
runs offline, in some seconds.

Letters: B images in a batch, N images in all, S pixels of a side.
"""

import argparse

import numpy as np
import torch
from transformers import ViTConfig, ViTForImageClassification

from wrappers.torch import Session

B, S, CLASSES = 32, 32, 10
HELD_OUT = 256  # number of images that are not trained on


def digits():
    """Return 1,797 handwritten digits of 8 x 8 pixels, enlarged four times: (N, 1, S, S) between 0 and 1, (N,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32)[:, None]  # (N, 1, 8, 8)
    return torch.nn.functional.interpolate(images, scale_factor=S // 8, mode="bilinear"), torch.tensor(data.target)


def stripes(count=1024):
    """Return images of stripes with noise, whose slope is their class: (N, 1, S, S), (N,)."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, count)
    angle, phase = labels * np.pi / CLASSES, rng.uniform(0, 2 * np.pi, count)
    rows, columns = np.mgrid[:S, :S]
    waves = np.sin(rows * np.cos(angle)[:, None, None] + columns * np.sin(angle)[:, None, None] + phase[:, None, None])  # (N, S, S)
    return torch.tensor(waves + rng.normal(0, 0.5, waves.shape), dtype=torch.float32)[:, None], torch.tensor(labels)


def train(steps, images, labels, **budgets):
    """Train a model; return the loss of each step, and the share of held-out images that are classified correctly."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    config = ViTConfig(image_size=S, patch_size=8, num_channels=1, num_labels=CLASSES, **sizes)
    order = np.random.default_rng(0).permutation(len(images))
    held_out, learnt = order[:HELD_OUT], order[HELD_OUT:]
    with Session(ViTForImageClassification(config), lr=1e-3, minibatches=2, **budgets) as session:
        losses = []
        for number in range(steps):
            chosen = np.random.default_rng(number).choice(learnt, B, replace=False)
            losses.append(session.step(pixel_values=images[chosen], labels=labels[chosen]))
        predictions = [session.predict(pixel_values=images[part]).logits.argmax(-1) for part in held_out.reshape(-1, B)]
        right = (torch.cat(predictions) == labels[held_out]).float().mean().item()
        peak = session.runtime.stats()["peak_bytes"]["ram"]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps, {right:.0%} of {HELD_OUT} other images correct; peak {peak / 1e6:.1f} MB")
    return losses, right


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, choices=range(1, 10_001), metavar="N", help="optimizer steps, at least 1")
    parser.add_argument("--ram", help="memory budget, such as 3MB (default: 0.9 of the free memory)")
    parser.add_argument("--disk", help="directory of a disk tier below the memory")
    options = parser.parse_args()
    try:
        data = digits()
    except ModuleNotFoundError:
        print("scikit-learn is not installed; training on stripes")
        data = stripes()
    train(options.steps, *data, ram=options.ram, disk=options.disk)


if __name__ == "__main__":
    main()
