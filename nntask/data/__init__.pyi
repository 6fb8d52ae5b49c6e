from .batch import Batch, Cursor
from .chat import ChatSource, ChatTemplate
from .chat_process import ChatProcess
from .chat_source import template_notes
from .dataset import DATASETS, Dataset, check_spec, open_dataset
from .foreign_tokenizer import TOKENIZER_FILE
from .hub import WIKITEXT
from .objectives import KINDS, Objective, random_batch
from .prepare import TokenizedDataset, tokenize_dataset
from .sampler import BatchStream, Windows, in_order
from .spec import DataSpec
from .special_tokens import Special
from .token_file import TokenFile
from .tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "DATASETS",
    "KINDS",
    "TOKENIZER_FILE",
    "WIKITEXT",
    "Batch",
    "BatchStream",
    "ByteTokenizer",
    "ChatProcess",
    "ChatSource",
    "ChatTemplate",
    "Cursor",
    "DataSpec",
    "Dataset",
    "Objective",
    "Special",
    "TokenFile",
    "TokenizedDataset",
    "Tokenizer",
    "Windows",
    "check_spec",
    "in_order",
    "load_tokenizer",
    "open_dataset",
    "random_batch",
    "template_notes",
    "tokenize_dataset",
]
