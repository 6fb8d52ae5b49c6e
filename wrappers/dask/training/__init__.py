"""Training on the nodes of a Dask cluster: the connection to the cluster, one actor per node, and the exchange of tiles between the nodes."""
