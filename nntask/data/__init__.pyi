from .dataset import DATASETS, Dataset, DataSpec, check_spec, open_dataset
from .hub import WIKITEXT
from .prepare import TokenizedDataset, tokenize_dataset
from .sampler import Batch, BatchStream, Cursor, in_order
from .special_tokens import Special
from .token_file import TokenFile
from .tokenizer import TOKENIZER_FILE, ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "DATASETS",
    "TOKENIZER_FILE",
    "WIKITEXT",
    "Batch",
    "BatchStream",
    "ByteTokenizer",
    "Cursor",
    "DataSpec",
    "Dataset",
    "Special",
    "TokenFile",
    "TokenizedDataset",
    "Tokenizer",
    "check_spec",
    "in_order",
    "load_tokenizer",
    "open_dataset",
    "tokenize_dataset",
]
