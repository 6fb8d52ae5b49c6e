"""Labelled images: a directory with a folder for each class, read file by file with Pillow, or arrays in a NumPy file.

Pixels are scaled to [-1, 1]. A patch is stored row by row, with the channels of a pixel adjacent. Pillow is imported when an image is read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..io.regular_file import open_regular
from .image_file import MODES, SUFFIXES, read_image
from .objectives import ImageShape, Objective
from .splits import Split, split_folders
from .texts import VALIDATION_SHARE

IMAGES: Final = "images"
_PER_BYTE: Final = 4
_BESIDES: Final = 48 << 20
"""Memory limit for the arrays of an archive, in bytes: a number for each byte of the archive, plus a constant."""
Floats = npt.NDArray[np.float32]


class ImageFolder:
    """Image files in a directory; images of another size are resized.

    Args:
        path: the directory.
        files: paths of the image files.
        labels: (n,) int32, classes of the images.
        chosen: numbers of the images that belong to this split.
    """

    def __init__(self, path: Path, files: Sequence[Path], labels: npt.NDArray[np.int32], chosen: npt.NDArray[np.int64]) -> None:
        self.path, self.name, self._files, self.labels = path, str(path), [files[number] for number in chosen], labels[chosen]

    def pixels(self, number: int, shape: ImageShape) -> Floats:
        """Return the pixels of image `number`, (size, size, channels) in [-1, 1].

        Raises:
            DataError: the image cannot be read.
        """
        values = read_image(self._files[number], shape.size, shape.channels)
        return (values / np.float32(127.5) - np.float32(1)).astype(np.float32)

    def digest(self) -> str:
        """Return a hash of the files' names, sizes and labels."""
        said = [
            f"{file.relative_to(self.path).as_posix()} {file.stat().st_size} {label}" for file, label in zip(self._files, self.labels, strict=True)
        ]
        return hashlib.sha256("\n".join(said).encode("utf-8", "surrogateescape")).hexdigest()


class ImageArray:
    """Images in a NumPy array, which may be a memory map.

    Args:
        path: path of the NumPy file.
        images: (n, size, size) or (n, size, size, channels), integers from 0 to 255 or floats in [-1, 1].
        labels: (n,) int32, classes of the images.
        chosen: numbers of the images that belong to this split.
    """

    def __init__(self, path: Path, images: npt.NDArray[Any], labels: npt.NDArray[np.int32], chosen: npt.NDArray[np.int64]) -> None:
        self.path, self.name, self._images, self.labels, self._chosen = path, str(path), images, labels[chosen], chosen

    def pixels(self, number: int, shape: ImageShape) -> Floats:
        """Return the pixels of image `number`, (size, size, channels) in [-1, 1].

        Raises:
            DataError: the image has integers outside [0, 255].
        """
        values = np.asarray(self._images[self._chosen[number]])
        if np.issubdtype(values.dtype, np.integer):
            if values.min() < 0 or values.max() > 255:
                raise DataError(
                    f"integers in the images of {self.path} must be from 0 to 255, got {values.min()} to {values.max()} in image "
                    f"{self._chosen[number]}",
                    "scale them, or give floats from -1 to 1",
                )
            values = values.astype(np.float32) / np.float32(127.5) - np.float32(1)
        return values.astype(np.float32).reshape(shape.size, shape.size, shape.channels)

    def digest(self) -> str:
        """Return a hash of the images and their labels."""
        digest = hashlib.sha256(self.labels.tobytes())
        for number in self._chosen:
            digest.update(np.ascontiguousarray(self._images[number]).tobytes())
        return digest.hexdigest()


ImageSource = ImageFolder | ImageArray
"""The images of one split."""


class ImageRows:
    """Images as sequences of patches, with their labels as targets; the objective has the shape of the images."""

    names: Sequence[str] = ("images", "targets")

    def __init__(self, source: ImageSource, objective: Objective) -> None:
        assert objective.image is not None  # an objective of images has a shape
        self.source, self.name, self._shape = source, source.name, objective.image
        self.length = self._shape.num_patches

    @property
    def num_sequences(self) -> int:
        """Number of images."""
        return len(self.source.labels)

    def too_few(self, batch: int) -> str:
        """Return the error message for fewer images than `batch`."""
        return f"{self.name} has {self.num_sequences} images for training, and --batch is {batch}; use more images, or a smaller --batch"

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a batch: images (n, N, P) fp32 and targets (n, 1) int32."""
        images = np.empty((len(numbers), self._shape.num_patches, self._shape.width), np.float32)
        for row, number in zip(images, numbers, strict=True):
            row[:] = patches(self.source.pixels(int(number), self._shape), self._shape)
        return {"images": images, "targets": self.source.labels[numbers][:, None].astype(np.int32)}


def patches(pixels: Floats, shape: ImageShape) -> Floats:
    """Return the patches (N, P) of an image (size, size, channels), row by row."""
    side = shape.size // shape.patch
    cut = pixels.reshape(side, shape.patch, side, shape.patch, shape.channels).transpose(0, 2, 1, 3, 4)  # (rows, columns, p, p, channels)
    return np.ascontiguousarray(cut).reshape(shape.num_patches, shape.width)


def open_images(path: str, val_path: str, objective: Objective) -> tuple[ImageSource, ImageSource | None]:
    """Open images for training and for validation; without a validation split, one in twenty is held out.

    Args:
        path: one of three forms. A directory with a folder for each class, named as in the config or else in the order of the class numbers; splits
            may be folders above these. An .npz with `images` and `labels`, which is read whole. An .npy of images, with its labels in the file
            `NAME_labels.npy` of the same directory.
        val_path: images for validation, in the same forms; "" for none.
        objective: training objective, with the shape and the classes of the images.

    Raises:
        DataError: there are no images, their shape is not the model's, or their labels are not among the model's classes.
    """
    splits = split_directories(path, objective)
    whole = _opened(splits.get("train", path), objective, "--dataset-path")
    if val_path:
        inner = split_directories(val_path, objective, "--val-path")
        return whole(None), _opened(inner.get("validation", val_path), objective, "--val-path")(None)
    if "validation" in splits:
        return whole(None), _opened(splits["validation"], objective, "--dataset-path")(None)
    train, held = whole(False), whole(True)
    return train, held if len(held.labels) else None


def split_directories(path: str, objective: Objective, flag: str = "--dataset-path") -> Mapping[Split, str]:
    """Return split -> folder for a directory of images; empty if its folders are classes.

    A folder is a split if it has the name of a split and contains folders but no images. Folders named as classes of the config are classes.

    Raises:
        DataError: several folders belong to one split, or a folder belongs to no split.
    """
    root = Path(path)
    folders = _subfolders(root) if root.is_dir() else []
    by_split = split_folders(folder.name for folder in folders)
    if "train" not in by_split or {folder.name for folder in folders} <= set(objective.labels):
        return {}
    of_splits = [name for names in by_split.values() for name in names]
    if not all(_subfolders(root / name) and not _has_images(root / name) for name in of_splits):
        return {}
    if len(of_splits) < len(folders) or any(len(names) > 1 for names in by_split.values()):
        raise DataError(
            f"must have a folder for each split or for each class, got {', '.join(folder.name for folder in folders[:8])}",
            f"name the folder of the classes, as in {flag} {root / by_split['train'][0]}",
            flag=flag,
            value=path,
        )
    return {split: str(root / names[0]) for split, names in by_split.items()}


def told_images(path: str, val_path: str, objective: Objective) -> str:
    """Return a report of the folders used for each split; "" for a directory of classes or for arrays."""
    splits = split_directories(path, objective)
    if not splits:
        return ""
    validation = val_path or splits.get("validation", "")
    said = [f"training {splits['train']}"]
    said += [f"validation {validation}"] if validation else []
    said += [f"test {splits['test']}, not read"] if "test" in splits else []
    return f"--dataset-path {path}: {'; '.join(said)}"


def _subfolders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def _has_images(folder: Path) -> bool:
    return any(each.suffix.lower() in SUFFIXES for each in folder.iterdir())


def _opened(path: str, objective: Objective, flag: str) -> Callable[[bool | None], ImageSource]:
    """Open images; return a function that selects them: True for the held-out ones, False for the others, None for all."""
    root = Path(path)
    if root.is_dir():
        files, labels = _folders(root, objective, flag)
        return lambda held: ImageFolder(root, files, labels, _chosen(len(files), held))
    images, labels = _arrays(root, objective, flag)
    return lambda held: ImageArray(root, images, labels, _chosen(len(labels), held))


def _chosen(count: int, held: bool | None) -> npt.NDArray[np.int64]:
    """Return the numbers of the images that are held out if `held`, of the others if not, and of all if it is None."""
    numbers = np.arange(count)
    return numbers if held is None else np.flatnonzero((numbers % VALIDATION_SHARE == VALIDATION_SHARE - 1) == held)


def _folders(root: Path, objective: Objective, flag: str) -> tuple[list[Path], npt.NDArray[np.int32]]:
    """Return the files of a directory of classes, and their labels."""
    if importlib.util.find_spec("PIL") is None:
        raise DataError(f"reading the images of {flag} {root} needs Pillow", "pip install -e '.[images]', or give an .npz of arrays")
    channels = 0 if objective.image is None else objective.image.channels
    if channels not in MODES:
        raise DataError(
            f"files of images are read with 1, 3 or 4 channels, and the config's num_channels is {channels}", f"give an .npz of arrays as {flag}"
        )
    folders = _subfolders(root)
    names = [each.name for each in folders]
    by_name = bool(names) and set(names) <= set(objective.labels)
    if not by_name and len(names) != objective.num_labels:
        raise DataError(
            f"must have a folder for each of the {objective.num_labels} classes of the config, got {len(names)}: {', '.join(names[:8]) or 'none'}",
            "set num_labels, or call them as id2label does",
            flag=flag,
            value=root,
        )
    files: list[Path] = []
    labels: list[int] = []
    for number, folder in enumerate(folders):
        images = sorted(each for each in folder.rglob("*") if each.suffix.lower() in SUFFIXES and not each.name.startswith("."))
        files += images
        labels += [objective.labels.index(folder.name) if by_name else number] * len(images)
    if not files:
        raise DataError("has no image", "give a directory with a folder of images for each class", flag=flag, value=root)
    return files, np.array(labels, np.int32)


def _arrays(path: Path, objective: Objective, flag: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Return the images and labels of a NumPy file."""
    shape = objective.image
    assert shape is not None  # an objective of images has a shape
    beside = path.with_name(f"{path.stem}_labels.npy")
    try:
        for file in (path, beside) if path.suffix == ".npy" else (path,):
            _check_head(file)
        if path.suffix == ".npy":
            images, labels = np.lib.format.open_memmap(path, mode="r"), np.array(np.lib.format.open_memmap(beside, mode="r"))
        elif not zipfile.is_zipfile(path):  # NumPy would read it as a pickle
            raise ValueError("it is not a whole .npz archive")
        else:
            _check_unpacked(path)
            with np.load(path, allow_pickle=False) as archive:
                images, labels = archive["images"], archive["labels"]
    except Exception as error:  # errors have many types: NumPy evaluates a header as Python, and decoders meet malformed data
        raise DataError(
            f"is not a file of images: {error}",
            f"give an .npz with images and labels, an .npy together with {beside.name}, or a directory with a folder for each class",
            flag=flag,
            value=path,
        ) from None
    if images.dtype.kind not in "biuf":
        raise DataError(
            f"must have images of integers from 0 to 255 or floats from -1 to 1, got {images.dtype}", "convert them", flag=flag, value=path
        )
    wanted = (shape.size, shape.size, shape.channels)
    if images.shape[1:] not in ((wanted[:2], wanted) if shape.channels == 1 else (wanted,)):
        raise DataError(
            f"must have images (n, {', '.join(map(str, wanted))}), got {images.shape}",
            "resize the images, or set image_size and num_channels in the config",
            flag=flag,
            value=path,
        )
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"must have a label for each image, got {len(images)} images and labels {labels.shape}", "correct one of them", flag=flag, value=path
        )
    is_whole = np.issubdtype(labels.dtype, np.integer)
    wrong = np.flatnonzero((labels < 0) | (labels >= objective.num_labels)) if is_whole else np.arange(0)
    if not is_whole or len(wrong):
        got = f"{labels[wrong[0]]} for image {wrong[0]}" if is_whole else f"{labels.dtype}"
        raise DataError(
            f"must have whole labels from 0 to {objective.num_labels - 1}, got {got}",
            "fix them, or set num_labels in the config",
            flag=flag,
            value=path,
        )
    return images, labels.astype(np.int32)


def _check_head(path: Path) -> None:
    """Check that a NumPy file is regular, so that reading cannot block, and that its header is not longer than the file.

    NumPy allocates the claimed length of the header before it reads it.

    Raises:
        OSError: the file cannot be opened, or is a pipe or a device.
        ValueError: the header claims more bytes than the file has.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        start, size = file.read(12), os.fstat(file.fileno()).st_size
    if start.startswith(b"\x93NUMPY") and start[6:7] != b"\x01" and int.from_bytes(start[8:12], "little") > size:
        raise ValueError(f"its header claims {int.from_bytes(start[8:12], 'little')} bytes, and the file has {size}")


def _check_unpacked(path: Path) -> None:
    """Raise ValueError if an archive, all of which is held in memory, unpacks to far more than its size."""
    with zipfile.ZipFile(path) as archive:
        nbytes = sum(member.file_size for member in archive.infolist())
    if nbytes > _PER_BYTE * path.stat().st_size + _BESIDES:
        raise ValueError(f"its arrays have {nbytes:,} bytes, far more than the file; save the images as an .npy, which is not held in memory")
