from .generator import Generator
from .memory_check import check_memory, check_scoring
from .pretrained import ModelSource, TextIds
from .samples import sample_text
from .sampling import Sampling
from .scoring import perplexity

__all__ = ["Generator", "ModelSource", "Sampling", "TextIds", "check_memory", "check_scoring", "perplexity", "sample_text"]
