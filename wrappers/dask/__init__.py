"""Doors to Dask: training on its clusters, its graphs on our runtime."""
