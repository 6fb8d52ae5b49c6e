from .adamw8bit import AdamW8bit
from .muon import Muon
from .optimizers import Optimizer, Options, norm_of
from .sharded import DataShard, Emission, Exchange, Transport, buckets_of, data_shards, most_nodes, owners_of

__all__ = [
    "AdamW8bit",
    "DataShard",
    "Emission",
    "Exchange",
    "Muon",
    "Optimizer",
    "Options",
    "Transport",
    "buckets_of",
    "data_shards",
    "most_nodes",
    "norm_of",
    "owners_of",
]
