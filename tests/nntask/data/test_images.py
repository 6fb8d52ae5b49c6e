"""Images: folders and arrays, patches, scales, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.objective_data import ImageLearner, opened

from nntask.config.settings import DataSettings
from nntask.data import BatchStream, Dataset
from nntask.data.image_file import read_image
from nntask.data.images import ImageRows, patches
from nntask.data.objectives import ImageShape
from nntask.data.sampler import in_order
from nntask.errors import DataError


def dataset_of(path: Path, config: ImageLearner, **data: Any) -> Dataset:
    """The dataset of a place."""
    return opened(config, DataSettings(dataset="images", dataset_path=str(path), **data))


def test_patches_are_rows_of_pixels() -> None:
    """Patch by patch from left to right and down, in each its rows, with the channels of a pixel together."""
    shape = ImageShape(4, 2, 3)
    pixels = np.arange(48, dtype=np.float32).reshape(4, 4, 3)
    found = patches(pixels, shape)
    assert found.shape == (shape.num_patches, shape.width) == (4, 12)
    assert (found[1] == pixels[:2, 2:].reshape(-1)).all()
    assert (found[2] == pixels[2:, :2].reshape(-1)).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_folders_are_classes(tmp_path: Path, channels: int) -> None:
    """Sorted names are the classes in order, or the config's; sizes and channels are made the model's, and every twentieth is for validation."""
    image = pytest.importorskip("PIL.Image")
    for at, name in enumerate(("b", "a")):
        (tmp_path / "all" / name).mkdir(parents=True)
        for number in range(15):
            image.new("RGB", (8, 8) if number else (20, 10), (255 * at,) * 3).save(tmp_path / "all" / name / f"{number:02}.png")
    dataset = dataset_of(tmp_path / "all", ImageLearner(num_channels=channels))
    examples = ImageRows(dataset.train, dataset.spec.objective)
    assert (examples.num_sequences, examples.length) == (29, 4)
    first = dataset.examples(0).arrays(np.arange(8), 0)["targets"]
    assert 0 < first.sum() < 8  # though files are sorted by class
    assert len(in_order(dataset.scored_examples(0), 4, 8)) == 1
    found = examples.arrays(np.arange(29), 0)
    assert found["images"].shape == (29, 4, 16 * channels)
    assert found["images"].dtype == np.float32
    assert [found["targets"][:15].max(), found["targets"][15:].min()] == [0, 1]  # a before b
    assert (found["images"][0] == 1).all()
    assert (found["images"][-1] == -1).all()
    named = dataset_of(tmp_path / "all", ImageLearner(num_channels=channels, id2label={0: "b", 1: "a"}))
    assert ImageRows(named.train, named.spec.objective).arrays(np.array([0]), 0)["targets"].tolist() == [[1]]
    assert named.fingerprint != dataset.fingerprint
    assert dataset_of(tmp_path / "all", ImageLearner(num_channels=channels), val_path=str(tmp_path / "all")).scored_examples(0).num_sequences == 30
    (tmp_path / "all" / "a" / "00.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"00\.png is not an image that Pillow can read"):
        dataset_of(tmp_path / "all", ImageLearner(num_channels=channels)).examples(0).arrays(np.arange(29), 0)


def test_digits_of_scikit_learn(tmp_path: Path) -> None:
    """An .npz and an .npy with labels beside it give the same images, in batches of a shuffled stream."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images = np.round(digits.images * 255 / 16).astype(np.uint8)
    np.savez(tmp_path / "digits.npz", images=images, labels=digits.target)
    np.save(tmp_path / "digits.npy", images)
    np.save(tmp_path / "digits_labels.npy", digits.target)
    config = ImageLearner(num_labels=10)
    datasets = [dataset_of(tmp_path / f"digits.{suffix}", config) for suffix in ("npz", "npy")]
    assert datasets[0].fingerprint == datasets[1].fingerprint
    one, two = (BatchStream(dataset.examples(0), 32, seed=5).next() for dataset in datasets)
    assert (one.arrays["images"] == two.arrays["images"]).all()
    assert one.arrays["images"].shape == (32, 4, 16)
    assert (one.arrays["images"].min(), one.arrays["images"].max()) == (-1, 1)
    assert set(one.targets[:, 0]) <= set(range(10))
    assert datasets[0].examples(0).num_sequences == 1797 - 1797 // 20
    whole = np.concatenate([one.arrays["images"][0].reshape(2, 2, 4, 4)[r, :, i].reshape(-1) for r in range(2) for i in range(4)])
    assert (np.round((whole + 1) * 127.5).astype(np.uint8) == images.reshape(-1, 64)).all(1).any()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": np.zeros((3, 9, 8))}, "is not a file of images: .*labels"),
        ({"images": np.zeros((3, 9, 8)), "labels": np.zeros(3, int)}, r"must have images \(n, 8, 8, 1\), got \(3, 9, 8\)"),
        ({"images": np.zeros((3, 8, 8)), "labels": np.zeros(2, int)}, r"must have a label for each image, got 3 images and labels \(2,\)"),
        ({"images": np.full((3, 8, 8), "x"), "labels": np.zeros(3, int)}, "must have images of integers from 0 to 255 or floats"),
        ({"images": np.zeros((3, 8, 8)), "labels": np.array([0, 1, 2])}, "must have whole labels from 0 to 1, got 2 for image 2; fix"),
        ({"images": np.zeros((3, 8, 8)), "labels": np.zeros(3)}, "must have whole labels from 0 to 1, got float64; fix"),
    ],
)
def test_arrays_of_another_shape_are_refused(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    """One sentence with what was received."""
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=words):
        dataset_of(tmp_path / "x.npz", ImageLearner())


def test_broken_files_are_refused(tmp_path: Path) -> None:
    """Cut short, damaged, empty, and of the other kind: each is a sentence, none is taken for a pickle."""
    good = tmp_path / "good.npz"
    np.savez_compressed(good, images=np.random.default_rng(0).random((20, 8, 8)), labels=np.zeros(20, int))
    np.save(tmp_path / "good.npy", np.zeros((20, 8, 8)))
    whole, array = good.read_bytes(), (tmp_path / "good.npy").read_bytes()
    files = {
        "cut.npz": (whole[:-30], "it is not a whole .npz archive"),
        "text.npz": (b"hello", "it is not a whole .npz archive"),
        "array.npz": (array, "it is not a whole .npz archive"),
        "empty.npz": (b"", "it is not a whole .npz archive"),
        "damaged.npz": (whole[:400] + bytes(100) + whole[500:], "images.npy"),
        "archive.npy": (whole, "the magic string is not correct"),
        "empty.npy": (b"", "magic"),
        "cut.npy": (array[:500], "greater than file size"),
    }
    for name, (content, words) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        np.save(tmp_path / f"{path.stem}_labels.npy", np.zeros(20, int))
        with pytest.raises(DataError, match=f"{name} is not a file of images: .*{words}"):
            dataset_of(path, ImageLearner())


def test_integers_are_pixels(tmp_path: Path) -> None:
    """Those of more than eight bits are refused when they are read."""
    images = np.zeros((21, 8, 8), np.uint16)
    images[3, 0, 0] = 4095
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(21) % 2)
    with pytest.raises(DataError, match=r"must be from 0 to 255, got 0 to 4095 in image 3; scale them"):
        dataset_of(tmp_path / "x.npz", ImageLearner()).examples(0).arrays(np.arange(20), 0)


def test_a_directory_of_other_classes_is_refused(tmp_path: Path) -> None:
    """As many folders as classes, or their names."""
    for name in "abc":
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="must have a folder for each of the 2 classes of the config, got 3: a, b, c"):
        dataset_of(tmp_path, ImageLearner())
    with pytest.raises(DataError, match="has no image"):
        dataset_of(tmp_path, ImageLearner(num_labels=3))


def test_images_of_sixteen_bits_keep_their_shades(tmp_path: Path) -> None:
    """Their upper eight bits are read, as those of an image of eight."""
    image = pytest.importorskip("PIL.Image")
    for at, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        image.fromarray(np.full((8, 8), (10 + 200 * at) * 256 + 17, np.uint16)).save(tmp_path / name / "0.png")
    dataset = dataset_of(tmp_path, ImageLearner())
    found = ImageRows(dataset.train, dataset.spec.objective).arrays(np.arange(2), 0)["images"]
    expected = np.array([10, 210], np.float32) / np.float32(127.5) - np.float32(1)
    assert (found == expected[:, None, None]).all()


def test_files_of_images_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many pixels for Pillow, and a number of channels that files do not have."""
    image = pytest.importorskip("PIL.Image")
    for name in "ab":
        (tmp_path / name).mkdir()
        image.new("L", (8, 8)).save(tmp_path / name / "0.png")
    with pytest.raises(DataError, match="read with 1, 3 or 4 channels, and the config's num_channels is 2"):
        dataset_of(tmp_path, ImageLearner(num_channels=2))
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DataError, match="is not an image that Pillow can read: Image size"):
        dataset_of(tmp_path, ImageLearner()).examples(0).arrays(np.arange(2), 0)


@pytest.mark.timeout(120)
def test_hostile_images_take_no_memory_and_start_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gigabytes of pixels in a small file none is decoded; a file of another format is refused whatever its name, and so is a pipe."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/started\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    image.new("I;16", (9000, 9000)).save(tmp_path / "large.png", compress_level=1)
    (tmp_path / "postscript.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    for name, words in (
        ("large", "9000 x 9000 pixels, more than the limit of 64 Mi"),
        ("postscript", "cannot identify"),
        ("pipe", "a pipe"),
        ("endless", "a pipe"),
    ):
        with pytest.raises(DataError, match=words):
            read_image(tmp_path / f"{name}.png", 8, 3)
    assert not (tmp_path / "started").exists(), (tmp_path / "started").read_text()
