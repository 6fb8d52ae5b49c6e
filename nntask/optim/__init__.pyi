from .optimizers import Optimizer, Options, norm_of
from .sharded import DataShard, Emission, Exchange, Transport, buckets_of, data_shards, most_nodes, owners_of

__all__ = [
    "DataShard",
    "Emission",
    "Exchange",
    "Optimizer",
    "Options",
    "Transport",
    "buckets_of",
    "data_shards",
    "most_nodes",
    "norm_of",
    "owners_of",
]
