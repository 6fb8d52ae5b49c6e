from .plugin import Dashboard, Publisher, check_record, collector, install, publish

__all__ = ["Dashboard", "Publisher", "check_record", "collector", "install", "publish"]
