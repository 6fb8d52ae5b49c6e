"""Reading of untrusted image files: a list of allowed formats, a limit on pixels, and an error of one sentence for any fault.

By default Pillow tries every format that it knows, regardless of the file's name, and in some cases by starting other programs. A small compressed
file may also decode to gigabytes. Therefore only the listed formats are tried, and the size is checked before any pixel is decoded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..io.regular_file import open_regular

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")
_FORMATS: Final = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Pillow's names of the allowed formats."""
_MOST_PIXELS: Final = 1 << 26
_PER_BYTE: Final = 16
_BESIDES: Final = 60 << 20
"""Memory limit for decoded pixels, in bytes: a number for each byte of the file, plus a constant. A photograph has about one byte for two pixels."""
_SIDE_NBYTES: Final = 48
"""Size of Pillow's resizing tables in bytes, for each pixel of a row or column."""
_PIXEL_NBYTES: Final = {"1": 1, "L": 1, "P": 1, "I;16": 6, "I;16B": 6, "I;16L": 6, "I": 12}
"""Pillow mode -> bytes per pixel; 4 for other modes. The 16-bit modes include copies made during conversion to 8 bits."""
MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}


def read_image(file: Path, size: int, channels: int) -> npt.NDArray[np.float32]:
    """Return the pixels of an image file, (size, size, channels) from 0 to 255, resized if necessary.

    Raises:
        DataError: the file is not an image of an allowed format, is damaged, has more than 64 Mi pixels, or far more pixels than its size allows.
    """
    from PIL import Image

    try:
        with os.fdopen(open_regular(file), "rb") as opened, Image.open(opened, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise ValueError(f"it has {width} x {height} pixels, more than the limit of {_MOST_PIXELS >> 20} Mi")
            wanted = MODES[channels]
            pixel_nbytes = _PIXEL_NBYTES.get(image.mode, 4) + (0 if image.mode == wanted else _PIXEL_NBYTES.get(wanted, 4))
            if width * height * pixel_nbytes + (width + height) * _SIDE_NBYTES > _PER_BYTE * os.fstat(opened.fileno()).st_size + _BESIDES:
                raise ValueError(f"its {width} x {height} pixels are far more than a file of its bytes should have, so save it with fewer pixels")
            converted = _in_bytes(image)
            if converted.mode != wanted:  # convert() would copy
                converted = converted.convert(wanted)
            if converted.size != (size, size):
                converted = converted.resize((size, size), Image.Resampling.BICUBIC)
            return np.asarray(converted, np.float32).reshape(size, size, channels)
    except Exception as error:  # decoders raise errors of many types for malformed files
        raise DataError(f"{file} is not an image that Pillow can read: {error}", "remove it") from None


def _in_bytes(image: Any) -> Any:
    """Return the image with 8 bits per value. 16-bit values keep their upper 8 bits; Pillow's own conversion turns all above 255 white."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)  # uint16, or int32
    if values.dtype != np.uint16:
        values = values.clip(0, (1 << 16) - 1).astype(np.uint16)
    return Image.fromarray((values >> 8).astype(np.uint8))
