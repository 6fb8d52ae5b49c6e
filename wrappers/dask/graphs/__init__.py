"""A Dask scheduler: any Dask graph on threads of this process, with memory budgets, eviction and the disk tier.

| module | contents |
|---|---|
| `plan` | a graph ready to run: culled, aliases resolved, in the order of `dask.order` |
| `evaluate` | the value of one node of a graph, given the values that it reads |
| `values` | results as blocks of memory, which may be evicted and fetched |
| `spill` | blocks in the unlinked tier file, and the threads that move them |
| `store` | the location of every block: the scheduler's core over a node that counts bytes |
| `run` | one graph during its execution: ready tasks and worker threads |
| `scheduler` | `get`, `runtime` |
| `tensors` | dask arrays as tile tensors and back |

How it works. A task with small inputs runs at once if no task of its kind has had a large result; it never meets the scheduler's core. Any other task
is submitted to the core: it reads the blocks of its inputs, and its scratch memory is as large as the largest result of its kind so far. So its
inputs are fetched, blocks with the furthest next use are evicted for its scratch memory, and the task waits until both are in place. Its results are
counted when they are known.

Guarantee: with W workers, results and reservations together never exceed the budget by more than W x the largest result. So resident memory stays
below budget + W x the largest (result + temporaries of a task), whatever the graph. A graph whose next task cannot fit fails with `DoesNotFit`.
"""
