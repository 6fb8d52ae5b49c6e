from .batch import Batch, Cursor
from .chat_process import ChatProcess
from .chat_source import ChatSource, template_notes
from .dataset import Dataset, open_dataset
from .foreign_tokenizer import TOKENIZER_FILE
from .hub import WIKITEXT
from .objectives import Objective, random_batch
from .prepare import TokenizedDataset, tokenize_dataset
from .sampler import BatchStream
from .spec import DataSpec
from .special_tokens import Special
from .token_file import TokenFile
from .tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "TOKENIZER_FILE",
    "WIKITEXT",
    "Batch",
    "BatchStream",
    "ChatProcess",
    "ChatSource",
    "Cursor",
    "DataSpec",
    "Dataset",
    "Objective",
    "Special",
    "TokenFile",
    "TokenizedDataset",
    "Tokenizer",
    "load_tokenizer",
    "open_dataset",
    "random_batch",
    "template_notes",
    "tokenize_dataset",
]
