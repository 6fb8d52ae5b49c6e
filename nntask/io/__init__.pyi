from .atomic_write import written_aside
from .finite import first_not_finite
from .json_file import read_object
from .json_text import check_size
from .regular_file import open_text, read_bytes, read_text
from .safetensors_file import STORAGE, checksum_of, load_tensors, save_tensors
from .sealed_json import sealed, unsealed
from .strided_ranges import FileRange
from .system_limits import of_system_limit
from .terminal_text import printable, python_command, python_text
from .units import LARGEST, format_count, format_least, format_size, is_size, parse_rate, parse_size
from .writable import check_writable

__all__ = [
    "LARGEST",
    "STORAGE",
    "FileRange",
    "check_size",
    "check_writable",
    "checksum_of",
    "first_not_finite",
    "format_count",
    "format_least",
    "format_size",
    "is_size",
    "load_tensors",
    "of_system_limit",
    "open_text",
    "parse_rate",
    "parse_size",
    "printable",
    "python_command",
    "python_text",
    "read_bytes",
    "read_object",
    "read_text",
    "save_tensors",
    "sealed",
    "unsealed",
    "written_aside",
]
