"""Image files that come from somebody else: the formats of their suffixes, a limit on pixels, and one sentence for whatever is wrong.

Pillow would try every format that it knows whatever the name says, some by starting other programs, and a small compressed file may decode to
gigabytes. So the formats are listed, and the size is looked at before any pixel is decoded.
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
"""Names of the formats of these suffixes in Pillow."""
_MOST_PIXELS: Final = 1 << 26
_PER_BYTE: Final = 16
_BESIDES: Final = 60 << 20
"""Bytes of memory for decoded pixels: for each byte of the file, of which photographs have one for two pixels, and besides."""
_SIDE_NBYTES: Final = 48
"""Bytes of Pillow's tables for resizing, for each pixel of a row or column."""
_PIXEL_NBYTES: Final = {"1": 1, "L": 1, "P": 1, "I;16": 6, "I;16B": 6, "I;16L": 6, "I": 12}
"""Bytes of a pixel in a mode of Pillow; 4 in others. Those of 16 bits are copied on their way to 8."""
MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}


def read_image(file: Path, size: int, channels: int) -> npt.NDArray[np.float32]:
    """Return the pixels of an image file, resized if need be  # (size, size, channels) of 0 to 255.

    Raises:
        DataError: the file is no image of a listed format, is damaged, has more than 64 Mi pixels, or far more than its bytes.
    """
    from PIL import Image

    try:
        with os.fdopen(open_regular(file), "rb") as opened, Image.open(opened, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise ValueError(f"it has {width} x {height} pixels, and at most {_MOST_PIXELS >> 20} Mi are read")
            wanted = MODES[channels]
            each = _PIXEL_NBYTES.get(image.mode, 4) + (0 if image.mode == wanted else _PIXEL_NBYTES.get(wanted, 4))
            if width * height * each + (width + height) * _SIDE_NBYTES > _PER_BYTE * os.fstat(opened.fileno()).st_size + _BESIDES:
                raise ValueError(f"it has {width} x {height} pixels in a file that is too small for them, so save it in a smaller size")
            found = _in_bytes(image)
            if found.mode != wanted:  # else convert() would copy
                found = found.convert(wanted)
            if found.size != (size, size):
                found = found.resize((size, size), Image.Resampling.BICUBIC)
            return np.asarray(found, np.float32).reshape(size, size, channels)
    except Exception as error:  # of many types: decoders meet what they were not made for
        raise DataError(f"{file} is no image that Pillow can read: {error}; remove it") from None


def _in_bytes(image: Any) -> Any:
    """Return the image; one of 16 bits a pixel with its upper eight, since Pillow's own conversion makes all above 255 white."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)  # uint16, or int32
    if values.dtype != np.uint16:
        values = values.clip(0, (1 << 16) - 1).astype(np.uint16)
    return Image.fromarray((values >> 8).astype(np.uint8))
