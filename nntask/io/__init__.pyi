from .finite import first_not_finite
from .json_file import read_object

__all__ = ["first_not_finite", "read_object"]
