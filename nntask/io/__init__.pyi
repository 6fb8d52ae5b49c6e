from .finite import first_not_finite
from .json_file import read_object
from .writable import check_writable

__all__ = ["check_writable", "first_not_finite", "read_object"]
