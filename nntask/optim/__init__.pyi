from .lr_schedule import make_schedule
from .optimizers import SGD, Adam, AdamW, Group, Optimizer, Options, decay_groups, norm_of
from .sharded import DataShard, Emission, Exchange, buckets_of, data_shards, most_nodes, owners_of

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "DataShard",
    "Emission",
    "Exchange",
    "Group",
    "Optimizer",
    "Options",
    "buckets_of",
    "data_shards",
    "decay_groups",
    "make_schedule",
    "most_nodes",
    "norm_of",
    "owners_of",
]
