"""The packages that models without tiles need, and the sentence that announces training through PyTorch. PyTorch itself is not imported here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

_PACKAGES: Final = ("torch", "transformers")


def load_torch(untiled: tuple[Mapping[str, Any], str]) -> None:
    """Check that the packages of the extra are installed, in releases that are new enough.

    Args:
        untiled: content and path of the model's config.json.

    Raises:
        UsageError: a package is missing or older than the tested releases.
    """
    from nntask import UsageError

    values, source = untiled
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"model_type in {source} is {values['model_type']}, which is trained through PyTorch, and that needs the {' and '.join(missing)} "
            f"package{'s' if len(missing) > 1 else ''}",
            "pip install -e '.[torch]', or use a gpt2 or llama",
        )
    from ...torch.releases import refuse_older

    refuse_older()


def through_torch(untiled: tuple[Mapping[str, Any], str]) -> str:
    """Return the sentence that announces that a model is trained through PyTorch."""
    return f"{untiled[0]['model_type']} is trained through PyTorch: nntask has no tiles for it"
