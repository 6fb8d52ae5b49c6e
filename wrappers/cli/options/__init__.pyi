from .flags import table_of, typed_text, unknown
from .help import parse
from .sources import request

__all__ = ["parse", "request", "table_of", "typed_text", "unknown"]
