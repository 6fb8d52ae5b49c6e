"""Hostile data: JSON lines, tables, token ids, images and arrays. See `hostile_inputs`."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from support.untrusted import png, valid_files

MIB: Final = 1 << 20
ROWS: Final = valid_files("JSON lines")["rows.jsonl"]


def row(text: str) -> bytes:
    """Some good lines, and one of that text."""
    return ROWS + text.encode("utf-8", "surrogatepass") + b"\n"


def packed(pack: Callable[[bytes], bytes], line: bytes, times: int) -> bytes:
    """A line that is the same bytes so many times, packed."""
    return pack(b'{"text":"' + line * times + b'"}\n')


LINES: Final = {
    "empty": b"",
    "line feeds alone": b"\n" * 100_000,
    "a line that is null": row("null"),
    "a line that is a number": row("7"),
    "a line that is a list": row('[{"text": "a"}]'),
    "a line that is cut": row('{"text": "a'),
    "two objects on a line": row('{"text": "a"} {"text": "b"}'),
    "a comma between lines": row('{"text": "a"},'),
    "quotes of the other kind": row("{'text': 'a'}"),
    "Infinity": row('{"text": "a", "n": -Infinity}'),
    "a number of 5,000 digits": row('{"text": "a", "n": ' + "9" * 5000 + "}"),
    "a number of 400 digits": row('{"text": "a", "n": 1' + "0" * 400 + "}"),
    "a key twice": row('{"text": "a", "text": ["b"]}'),
    "a hundred thousand keys": lambda: row("{" + ",".join(f'"k{number}":0' for number in range(100_000)) + "}"),
    "a key of a MiB": lambda: row('{"' + "k" * MIB + '": 1}'),
    "halves of pairs of UTF-16": row('{"text": "\\ud800 \\udfff", "\\ud800": "\\udc00"}'),
    "half a pair of UTF-16 as bytes": row('{"text": "\ud800"}'),
    "overlong UTF-8": ROWS + b'{"text": "\xc0\xaf"}\n',
    "a byte order mark in the middle": ROWS + b'\xef\xbb\xbf{"text": "a"}\n',
    "a separator of lines of Unicode": row('{"text": "a\u2028b\u0085c"}'),
    "carriage returns alone": ROWS.replace(b"\n", b"\r"),
    "brackets without end": lambda: row('{"text": ' + "[" * 500_000),
    "brackets that are closed": lambda: row('{"text": ' + "[" * 900 + "]" * 900 + "}"),
    "three million empty lists": lambda: row('{"text": [' + "[]," * (3 * MIB) + "0]}"),
    "a million empty objects": lambda: row('{"a": [' + "{}," * (2 * MIB) + "0]}"),
    "a million texts of two letters": lambda: row('{"a": [' + '"ab",' * (2 * MIB) + "0]}"),
    "a line of 8 MiB without an end": lambda: ROWS + b'{"text": "' + b"a" * (8 * MIB),
    "gzip of a line of 100 MiB": lambda: packed(functools.partial(gzip.compress, compresslevel=1), b"a" * MIB, 100),
    "bzip2 of a line of 40 MiB": lambda: packed(functools.partial(bz2.compress, compresslevel=1), b"a" * MIB, 40),
    "xz of a line of 40 MiB": lambda: packed(functools.partial(lzma.compress, preset=0), b"a" * MIB, 40),
    "gzip of 100 MiB of blank lines": lambda: gzip.compress((b" " * 10_000 + b"\n") * 10_000, 1),
    "gzip in gzip": lambda: gzip.compress(gzip.compress(ROWS)),
    "gzip without its end": lambda: gzip.compress(ROWS)[:-6],
    "gzip with another checksum": lambda: gzip.compress(ROWS)[:-8] + bytes(8),
    "gzip with bytes after it": lambda: gzip.compress(ROWS) + b"abc",
}


def _table(columns: dict[str, Any], **options: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, **options)
    return out.getvalue()


def _repeated(text: str, times: int, *, nested: bool = False) -> bytes:
    """A table of the same text so many times, stored once."""
    import pyarrow as pa

    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(times, np.int32)), pa.array([text]))
    if nested:
        inside = pa.StructArray.from_arrays([values], ["content"])
        values = pa.ListArray.from_arrays(pa.array(np.arange(times + 1), pa.int32()), inside)
    return _table({"text": values}, store_schema=False, compression="zstd", dictionary_pagesize_limit=1 << 30)


def _stream(columns: dict[str, Any], *, is_file: bool = False) -> bytes:
    import pyarrow as pa

    table, out = pa.table(columns), io.BytesIO()
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


@functools.cache
def _plain() -> bytes:
    return valid_files("tables")["rows.parquet"]


def _footer(length: int) -> bytes:
    return _plain()[:-8] + struct.pack("<i", length) + b"PAR1"


def _not_utf8() -> bytes:
    import pyarrow as pa

    raw = pa.array([b"\xff\xfe", b"ok"], pa.binary())
    return _stream({"text": pa.Array.from_buffers(pa.string(), 2, raw.buffers())})


TABLES: Final = {
    "empty": b"",
    "magic alone": b"PAR1",
    "magic twice": b"PAR1PAR1",
    "a footer of no bytes": lambda: _footer(0),
    "a footer of 2^31 - 1 bytes": lambda: _footer((1 << 31) - 1),
    "a footer below zero": lambda: _footer(-1),
    "a footer that is zeros": lambda: _plain()[:-300] + bytes(292) + _plain()[-8:],
    "no end": lambda: _plain()[:-1],
    "no beginning": lambda: b"XXXX" + _plain()[4:],
    "an encrypted footer": lambda: _plain()[:-4] + b"PARE",
    "zeros in place of pages": lambda: _plain()[:4] + bytes(200) + _plain()[204:],
    "no rows": lambda: _table({"text": []}),
    "no columns": lambda: _table({}),
    "a column of numbers called text": lambda: _table({"text": [1, 2]}),
    "a column of lists called text": lambda: _table({"text": [["a"], ["b"]]}),
    "columns of one name": lambda: _stream_of_twins(),
    "nulls alone": lambda: _table({"text": [None, None]}),
    "a name of escapes": lambda: _table({"\x1b[2J\n": [1], "b": [2]}),
    "a name of a MiB": lambda: _table({"n" * MIB: ["a"], "b": ["c"]}),
    "a thousand columns": lambda: _table({f"c{number}": ["a"] for number in range(1000)}),
    "lists to a depth of 60": lambda: _table({"text": [functools.reduce(lambda value, _: [value], range(60), "a")]}),
    "a text of a MiB ten thousand times": lambda: _repeated("x" * MIB, 10_000),
    "a text of 8 MiB a hundred times": lambda: _repeated("x" * (8 * MIB), 100),
    "messages of a MiB two thousand times": lambda: _repeated("x" * MIB, 2000, nested=True),
    "zstd of a page of 100 MiB": lambda: _table({"text": ["x" * (100 * MIB)]}, compression="zstd", use_dictionary=False),
    "gzip of pages of 100 MiB": lambda: _table({"text": ["x" * (100 * MIB)]}, compression="gzip", use_dictionary=False),
    "times beyond the calendar": lambda: _stream(_times()),
    "bytes that are no UTF-8": _not_utf8,
    "a stream that is cut": lambda: _stream({"text": ["a"] * 100})[:300],
    "a stream of magic alone": b"\xff\xff\xff\xff",
    "a stream with a message of 2^31 - 1 bytes": b"\xff\xff\xff\xff" + struct.pack("<i", (1 << 31) - 1) + bytes(100),
    "a stream with a message below zero": b"\xff\xff\xff\xff" + struct.pack("<i", -8) + bytes(100),
    "an IPC file that is cut": lambda: _stream({"text": ["a"] * 100}, is_file=True)[:-20],
    "an IPC file of magic alone": b"ARROW1\0\0ARROW1",
    "an IPC file with zeros in its footer": lambda: _zeroed(_stream({"text": ["a"] * 100}, is_file=True), -120, 100),
}


def _zeroed(raw: bytes, first: int, count: int) -> bytes:
    return raw[:first] + bytes(count) + raw[first + count :]


def _times() -> dict[str, Any]:
    import pyarrow as pa

    return {"text": ["a"], "when": pa.array([1 << 62], pa.timestamp("s")), "long": pa.array([1 << 62], pa.duration("s"))}


def _stream_of_twins() -> bytes:
    import pyarrow as pa

    table, out = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def sidecar(text: str | bytes) -> dict[str, bytes]:
    """Another sidecar beside the valid ids."""
    return {"train.bin.json": text.encode() if isinstance(text, str) else text}


IDS: Final = {
    "empty": b"",
    "one byte": b"\0",
    "one id": b"\0\0",
    "an odd number of bytes": bytes(4001),
    "ids of the largest value": b"\xff" * 4000,
    "one id beyond the vocabulary at the end": bytes(8000) + b"\xff\xff",
    "ids of floats": np.ones(1000, np.float32).tobytes(),
    "the header of llm.c": struct.pack("<3i", 20240520, 1, 1000) + bytes(1012 + 2000),
    "the other header of llm.c": struct.pack("<3i", 20240801, 7, 1 << 30) + bytes(1012 + 2000),
    "an array of NumPy": lambda: _npy({"descr": "<u2", "fortran_order": False, "shape": (1000,)}, bytes(2000)),
    "gzip of ids": lambda: gzip.compress(bytes(8000)),
    "text": b"these are words and no ids at all " * 100,
    "a pickle": b"\x80\x04\x95" + bytes(2000),
    "a sidecar without letters": sidecar(""),
    "a sidecar of null": sidecar("null"),
    "a sidecar of a list": sidecar('["uint16"]'),
    "a sidecar of a number": sidecar('{"dtype": 16}'),
    "a sidecar of a list as type": sidecar('{"dtype": ["uint16"]}'),
    "a sidecar of floats": sidecar('{"dtype": "float64"}'),
    "a sidecar of objects of Python": sidecar('{"dtype": "O"}'),
    "a sidecar of another byte order": sidecar('{"dtype": ">u2"}'),
    "a sidecar of eight bytes": sidecar('{"dtype": "uint64"}'),
    "a sidecar of four bytes": sidecar('{"dtype": "uint32"}'),
    "a sidecar of 60,000 brackets": sidecar("[" * 60_000),
    "a sidecar of 64 kB and more": sidecar('{"dtype": "uint16", "a": "' + "a" * 70_000 + '"}'),
    "a sidecar of no UTF-8": sidecar(b"\xff\xfe{}"),
    "a sidecar of escapes": sidecar('{"dtype": "\\u001b[2J\\n"}'),
    "a sidecar of 10^400": sidecar('{"dtype": 1' + "0" * 400 + "}"),
    "a sidecar that is cut": sidecar('{"dtype": "uint1'),
    "a sidecar of half a pair of UTF-16": sidecar('{"dtype": "\\ud800"}'),
}


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, *chunks: bytes, depth: int = 8, kind: int = 0, method: int = 0) -> bytes:
    """A PNG of chunks."""
    head = struct.pack(">IIBBBBB", width, height, depth, kind, method, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IEND", b"")


def flat(width: int, height: int, kind: int = 0, depth: int = 8) -> bytes:
    """A PNG of zeros, of any size."""
    samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    pack, out = zlib.compressobj(1), b""
    for _ in range(height):
        out += pack.compress(bytes(1 + width * samples * depth // 8))
    palette = [chunk(b"PLTE", bytes(3))] if kind == 3 else []
    return png_of(width, height, *palette, chunk(b"IDAT", out + pack.flush()), depth=depth, kind=kind)


def saved(kind: str, mode: str = "RGB", size: tuple[int, int] = (16, 16)) -> bytes:
    """A picture of zeros in a format."""
    from PIL import Image

    out = io.BytesIO()
    Image.new(mode, size).save(out, kind)
    return out.getvalue()


GOOD: Final = png(np.zeros((8, 8, 3), np.uint8))
IMAGES: Final = {
    "empty": b"",
    "the first eight bytes": GOOD[:8],
    "no chunk of pixels": png_of(8, 8),
    "no pixels in one direction": png_of(0, 8, chunk(b"IDAT", zlib.compress(b""))),
    "a width of 2^31 - 1": png_of((1 << 31) - 1, 1, chunk(b"IDAT", zlib.compress(b"\0"))),
    "both sides of 2^31 - 1": png_of((1 << 31) - 1, (1 << 31) - 1, chunk(b"IDAT", zlib.compress(b"\0"))),
    "a depth of 99": png_of(8, 8, chunk(b"IDAT", zlib.compress(bytes(72))), depth=99),
    "a kind of 5": png_of(8, 8, chunk(b"IDAT", zlib.compress(bytes(72))), kind=5),
    "a method of 7": png_of(8, 8, chunk(b"IDAT", zlib.compress(bytes(72))), method=7),
    "pixels that are no zlib": png_of(8, 8, chunk(b"IDAT", b"not zlib at all")),
    "fewer pixels than said": png_of(8, 8, chunk(b"IDAT", zlib.compress(bytes(9)))),
    "more pixels than said": png_of(8, 8, chunk(b"IDAT", zlib.compress(bytes(10 * MIB)))),
    "a chunk of 2^32 - 1 bytes": GOOD[:33] + struct.pack(">I", (1 << 32) - 1) + b"IDAT",
    "a text that unpacks to 200 MiB": lambda: png_of(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200 * MIB), 9))),
    "a hundred texts of a MiB": lambda: png_of(8, 8, *[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(MIB - 1), 9))] * 100),
    "a colour profile of 200 MiB": lambda: png_of(8, 8, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(200 * MIB), 9))),
    "100,000 empty chunks": lambda: png_of(8, 8, *[chunk(b"teSt", b"")] * 100_000),
    "grey of 7,000 x 7,000": lambda: flat(7000, 7000),
    "grey of 16 bits, 6,000 x 6,000": lambda: flat(6000, 6000, depth=16),
    "colours of 5,000 x 5,000": lambda: flat(5000, 5000, kind=2),
    "colours with alpha of 5,000 x 5,000": lambda: flat(5000, 5000, kind=6),
    "a palette of 7,000 x 7,000": lambda: flat(7000, 7000, kind=3),
    "bits of 8,000 x 8,000": lambda: flat(8000, 8000, depth=1),
    "a row of 8,000,000 pixels": lambda: flat(8_000_000, 1),
    "a JPEG of two bytes": b"\xff\xd8",
    "a JPEG without an end": lambda: saved("JPEG")[:-30],
    "a JPEG of 65,535 x 65,535": lambda: saved("JPEG").replace(b"\x00\x10\x00\x10", b"\xff\xff\xff\xff", 1),
    "a GIF of 65,535 x 65,535": lambda: saved("GIF", "P")[:6] + b"\xff" * 4 + saved("GIF", "P")[10:],
    "a BMP of 2^31 - 1 rows": lambda: saved("BMP")[:22] + struct.pack("<i", (1 << 31) - 1) + saved("BMP")[26:],
    "a BMP of -2^31 rows": lambda: saved("BMP")[:22] + struct.pack("<i", -(1 << 31)) + saved("BMP")[26:],
    "a TIFF with a directory of itself": b"II*\0\x08\0\0\0\x01\0\x00\x01\x03\0\x01\0\0\0\x08\0\0\0\x08\0\0\0",
    "a TIFF of 65,535 entries": b"II*\0\x08\0\0\0\xff\xff" + bytes(100),
    "a WebP of 16,383 x 16,383": lambda: saved("WEBP", size=(16, 16)).replace(b"\x10\x00\x10\x00", b"\xff\x3f\xff\x3f", 1),
    "a PPM of 10^9 x 10^9": b"P6 1000000000 1000000000 255 ",
    "a PPM of a size that is text": b"P6 a b c ",
    "a drawing in SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="/etc/passwd"/></svg>',
    "a font that Pillow knows as FITS": b"SIMPLE  =                    T" + bytes(3000),
}


def _npy(head: dict[str, Any] | str, data: bytes = b"", version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    text = (head if isinstance(head, str) else repr(head)).encode() + b"\n"
    size = struct.pack("<H" if version == (1, 0) else "<I", (len(text) if length is None else length) & (0xFFFF if version == (1, 0) else 0xFFFFFFFF))
    return b"\x93NUMPY" + bytes(version) + size + text + data


def array(shape: Any = (40, 8, 8, 1), kind: Any = "|u1", data: bytes = bytes(2560), *, order: Any = False, **more: Any) -> bytes:
    """An array of images, with another head."""
    return _npy({"descr": kind, "fortran_order": order, "shape": shape}, data, **more)


def labels(content: bytes) -> dict[str, bytes]:
    """Other labels beside the valid images."""
    return {"images_labels.npy": content}


ARRAYS: Final = {
    "empty": b"",
    "magic alone": b"\x93NUMPY",
    "version 9": array(version=(9, 0)),
    "a head of 2^32 - 1 bytes": array(version=(2, 0), length=(1 << 32) - 1),
    "a head that is cut": array(data=b"")[:40],
    "a head that is no dictionary": _npy("[1, 2, 3]"),
    "a head of code": _npy("{'descr': __import__('os').system('touch hacked'), 'fortran_order': False, 'shape': (1,)}"),
    "a head of brackets": _npy("(" * 9000),
    "a head of an open text": _npy("{'descr': '|u1"),
    "a head of an open triple text": _npy("{'descr': '''"),
    "a head of NUL bytes": _npy("\0" * 100),
    "a head of 60,000 letters": _npy(repr({"descr": "|u1", "fortran_order": False, "shape": (40, 8, 8, 1)}) + " " * 60_000, bytes(2560)),
    "a head of minus signs": _npy("-" * 9000 + "1"),
    "a key too many": _npy({"descr": "|u1", "fortran_order": False, "shape": (1,), "more": 1}, b"\0"),
    "a key too few": _npy({"descr": "|u1", "shape": (1,)}, b"\0"),
    "a shape that is a list": array(shape=[40, 8, 8, 1]),
    "a shape below zero": array(shape=(-40, 8, 8, 1)),
    "a shape whose product wraps": array(shape=(1 << 32, 1 << 32, 8, 1)),
    "a shape of 10^30": array(shape=(10**30,)),
    "a shape of forty axes": array(shape=(1,) * 40, data=b"\0"),
    "a shape of floats": array(shape=(40.0, 8, 8, 1)),
    "no axes": array(shape=(), data=b"\0"),
    "no images": array(shape=(0, 8, 8, 1), data=b""),
    "more images than bytes": array(shape=(1 << 30, 8, 8, 1)),
    "objects of Python": array(kind="|O"),
    "texts": array(shape=(640,), kind="<U1"),
    "a record of a million fields": lambda: array(kind=[(f"f{number}", "|u1") for number in range(3000)], version=(2, 0)),
    "a type of 2^31 bytes": array(kind="|V2147483648"),
    "an order that is text": array(order="yes"),
    "labels that are not there": labels(b""),
    "labels of floats": labels(array(shape=(40,), kind="<f8", data=bytes(320))),
    "labels of objects": labels(array(shape=(40,), kind="|O", data=bytes(320))),
    "labels of 2^63": labels(array(shape=(40,), kind="<u8", data=b"\xff" * 320)),
    "labels of two axes": labels(array(shape=(40, 1), kind="|u1", data=bytes(40))),
    "labels of a head of code": labels(_npy("{'descr': (lambda: 1)(), 'fortran_order': False, 'shape': (40,)}")),
}
