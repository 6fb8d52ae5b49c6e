"""A Dask scheduler: any Dask graph on threads of this process, with memory budgets, eviction and the disk tier (`scheduler.get`, `runtime`)."""
