from .generator import Generator
from .memory_check import check_room, check_scoring
from .pretrained import ModelSource, TextIds
from .samples import sample_text
from .sampling import Sampling
from .scoring import perplexity

__all__ = ["Generator", "ModelSource", "Sampling", "TextIds", "check_room", "check_scoring", "perplexity", "sample_text"]
