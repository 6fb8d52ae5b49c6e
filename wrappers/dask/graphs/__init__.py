"""A Dask scheduler: any Dask graph on threads of this process, with memory budgets, eviction and the disk tier.

| module | what it is |
|---|---|
| `plan` | a graph made ready: culled, aliases resolved, in the order of `dask.order` |
| `evaluate` | what one node of a graph is worth, given what it reads |
| `values` | results as blocks of memory, which may leave and come back |
| `spill` | blocks in the unlinked tier file, and the threads that move them |
| `store` | which blocks are where: our scheduler's core over a node that counts bytes |
| `run` | one graph being run: what is ready, who runs it |
| `scheduler` | `get`, `runtime` |
| `tensors` | dask arrays as tile tensors and back |

How it works. A task whose inputs are small, and of whose kind nothing large is known, runs at once; it never meets the scheduler's core. Any other is
submitted to the core as something that reads the blocks of its inputs and works in as much room as the largest result of its kind took: so its inputs
are fetched, room is made by evicting what is used last, and the task waits until both are there. Its results are counted when they are known.

Guarantee: with W workers, results and reservations together never exceed the budget by more than W x the largest result, so resident memory stays
below budget + W x the largest (result + temporaries of a task), whatever the graph. A graph whose next task cannot fit fails with `DoesNotFit`.
"""
