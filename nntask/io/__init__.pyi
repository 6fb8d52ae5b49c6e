from .atomic_write import written_aside
from .finite import first_not_finite
from .json_file import read_object
from .safetensors_file import checksum_of, load_tensors, save_tensors
from .strided_ranges import FileRange
from .writable import check_writable

__all__ = ["FileRange", "check_writable", "checksum_of", "first_not_finite", "load_tensors", "read_object", "save_tensors", "written_aside"]
