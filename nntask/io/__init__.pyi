from .finite import first_not_finite
from .json_file import read_object
from .places import check_writable

__all__ = ["check_writable", "first_not_finite", "read_object"]
