from .graphs.scheduler import get, runtime
from .graphs.tensors import from_array, to_array
from .training.cluster import Connection, local_cluster
from .training.cluster_engine import DaskCluster
from .training.exchange import PeerComms

__all__ = ["Connection", "DaskCluster", "PeerComms", "from_array", "get", "local_cluster", "runtime", "to_array"]
