"""The page at ``/``: a chat box for the model in one document that loads nothing but this server's own answers."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")


@cache
def page(model: str, *, is_chat: bool, has_key: bool, tokens: int) -> tuple[str, str]:
    """Return the document, and a content security policy that allows only its own script and style.

    Args:
        model: name of the model.
        is_chat: whether the model takes conversations; otherwise the page continues texts.
        has_key: whether requests need a key.
        tokens: default of the maximum number of new tokens of an answer.
    """
    settings = json.dumps({"model": model, "chat": is_chat, "key": has_key, "tokens": tokens}).replace("<", "\\u003c")
    text = _FILE.read_text(encoding="utf-8").replace("@MODEL@", html.escape(model)).replace('"@SETTINGS@"', settings)
    digests = {kind: _digest(text.partition(f"<{kind}>")[2].partition(f"</{kind}>")[0]) for kind in ("script", "style")}
    rules = [f"{kind}-src 'sha256-{digest}'" for kind, digest in digests.items()]
    return text, "; ".join(
        ["default-src 'none'", *rules, "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
