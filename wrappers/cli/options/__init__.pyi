from .help import parse
from .sources import request

__all__ = ["parse", "request"]
