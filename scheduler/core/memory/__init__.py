"""Memory of nodes inside the core: extents, replicas, admission, reservations, eviction, transfers and prefetch."""
