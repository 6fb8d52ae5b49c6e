from .beams import STEEPEST, BeamSearch, search
from .filled_masks import fill
from .generator import Generator, check_writes
from .memory_check import check_memory, check_scoring, fitted
from .pretrained import ModelSource, TextIds
from .row_steps import BatchShape
from .running_batch import NextToken, RunningBatch, RunningText, TextRequest, TokenScore
from .samples import HOW, sample_prompt, sample_text
from .sampling import OutputPenalties, Penalties, Sampling, choose
from .scoring import perplexity
from .spelling import Spelling, TokenBytes, TokenOffsets

__all__ = [
    "HOW",
    "STEEPEST",
    "BatchShape",
    "BeamSearch",
    "Generator",
    "ModelSource",
    "NextToken",
    "OutputPenalties",
    "Penalties",
    "RunningBatch",
    "RunningText",
    "Sampling",
    "Spelling",
    "TextIds",
    "TextRequest",
    "TokenBytes",
    "TokenOffsets",
    "TokenScore",
    "check_memory",
    "check_scoring",
    "check_writes",
    "choose",
    "fill",
    "fitted",
    "perplexity",
    "sample_prompt",
    "sample_text",
    "search",
]
