"""Damaged images and arrays: read, or refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, random_bytes
from support.untrusted import fuzz, valid_files

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


def pictures() -> list[bytes]:
    """The same picture in all formats that are read, and in some modes."""
    from PIL import Image

    ramp, found = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3), []
    for kind in FORMATS:
        for mode in ("RGB", "L", *(["P"] if kind in ("PNG", "GIF", "BMP", "TIFF") else []), *(["I;16"] if kind in ("PNG", "TIFF") else [])):
            out = io.BytesIO()
            image = Image.fromarray(ramp[..., 0].astype(np.uint16) << 8) if mode == "I;16" else Image.fromarray(ramp).convert(mode)
            image.save(out, kind)
            found.append(out.getvalue())
    return found


@pytest.mark.long
@settings(max_examples=4000)
@given(st.sampled_from(pictures()).flatmap(damaged) | random_bytes(b"\x89PNG\r\n\x1a\n"))
def test_images(place: Path, content: bytes) -> None:
    """Bytes of pictures of all formats."""
    fuzz("images", place, content)


@pytest.mark.long
@settings(max_examples=1300)
@given(st.sampled_from(sorted(valid_files("arrays"))), st.data())
def test_arrays(place: Path, name: str, data: st.DataObject) -> None:
    """Bytes of images and labels in NumPy's files; heads preferred."""
    whole = valid_files("arrays")[name]
    fuzz(
        "arrays",
        place,
        data.draw(st.one_of(damaged(whole), damaged(whole[:128]).map(lambda head: head + whole[128:]), random_bytes(whole[:10]))),
        name,
    )
