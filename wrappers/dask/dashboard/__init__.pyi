from .plugin import install, publish

__all__ = ["install", "publish"]
