from .sources import request

__all__ = ["request"]
