from .lr_schedule import make_schedule
from .optimizers import SGD, Adam, AdamW, Group, Optimizer, decay_groups, norm_of
from .sharded import Emission, Exchange, Share, buckets_of, most_nodes, owners_of, shares

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Emission",
    "Exchange",
    "Group",
    "Optimizer",
    "Share",
    "buckets_of",
    "decay_groups",
    "make_schedule",
    "most_nodes",
    "norm_of",
    "owners_of",
    "shares",
]
