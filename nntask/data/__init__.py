"""Training data: text or token files become shuffled batches of token windows, with an exact cursor."""

from .dataset import DATASETS, Dataset, DataSpec, check_spec, open_dataset
from .order import Batch, BatchStream, Cursor, in_order
from .tokenizer import FILE_NAME as TOKENIZER
from .tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from .tokens import TokenFile

__all__ = [
    "DATASETS",
    "TOKENIZER",
    "Batch",
    "BatchStream",
    "ByteTokenizer",
    "Cursor",
    "DataSpec",
    "Dataset",
    "TokenFile",
    "Tokenizer",
    "check_spec",
    "in_order",
    "load_tokenizer",
    "open_dataset",
]
