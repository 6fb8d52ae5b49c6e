"""Damaged tables: read, or refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, random_bytes
from support.untrusted import fuzz

pa = pytest.importorskip("pyarrow")


def tables() -> list[bytes]:
    """The same rows as parquet, as a stream and as an IPC file."""
    import pyarrow.parquet as pq

    rows = pa.table({"text": [f"row {number}" for number in range(20)], "more": [[{"a": number}] for number in range(20)]})
    found = []
    for compression in ("none", "snappy", "zstd"):
        out = io.BytesIO()
        pq.write_table(rows, out, compression=compression)
        found.append(out.getvalue())
    for new in (pa.ipc.new_stream, pa.ipc.new_file):
        out = io.BytesIO()
        with new(out, rows.schema) as writer:
            writer.write_table(rows)
        found.append(out.getvalue())
    return found


@pytest.mark.long
@settings(max_examples=1500)
@given(st.sampled_from(tables()).flatmap(damaged) | random_bytes(b"PAR1") | random_bytes(b"ARROW1\0\0"))
def test_tables(place: Path, content: bytes) -> None:
    """Bytes of tables; which kind it is, the first bytes say."""
    fuzz("tables", place, content)
