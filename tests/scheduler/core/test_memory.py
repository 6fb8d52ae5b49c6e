"""Extents and windows: allocation against a model that remembers every byte."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.search import search

from scheduler.core.errors import InvalidEvent
from scheduler.core.memory.eviction_policies import FirstInFirstOut, Foresight
from scheduler.core.memory.extents import PAGE, ExtentAllocator, rounded
from scheduler.core.memory.memory_node import MemoryNode
from scheduler.core.memory.victim_selection import Candidates
from scheduler.core.records import RAM, HandleId, HandleRecord, HandleSpec, Replica
from scheduler.storage import HostArena
from scheduler.storage.limits import default_ram_budget, memory_limit

OPERATIONS = st.lists(st.tuples(st.sampled_from(["take", "take", "give", "claim"]), st.integers(0, 63), st.integers(1, 5)), max_size=80)


@given(pages=st.integers(1, 24) | st.just(300), operations=OPERATIONS)
@search(200)
def test_extents_partition_the_memory(pages: int, operations: list) -> None:
    """No byte is handed out twice, a request fails only if no hole is large enough, and the ledger adds up after every step."""
    node = MemoryNode("ram", pages * PAGE)
    owner: list[int | None] = [None] * pages
    taken: list[Replica] = []
    for number, (what, pick, size) in enumerate(operations):
        holes = [size for _, size in node.extents.all_free()]
        if what == "give":
            if taken:
                replica = taken.pop(pick % len(taken))
                node.vacate(replica)
                for page in range(replica.offset // PAGE, (replica.offset + replica.handle.spec.size) // PAGE):
                    owner[page] = None
            continue
        offset: int | None
        if what == "take":
            offset = node.take(size * PAGE, "activations")
            assert (offset is None) == (max(holes, default=0) < size * PAGE)
            if offset is None:
                continue
        else:
            offset = pick % pages * PAGE
            place = owner[offset // PAGE : offset // PAGE + size]
            if len(place) < size or any(page is not None for page in place):
                with pytest.raises(InvalidEvent, match=r"not free"):
                    fresh_like(node, taken).take_at(offset, size * PAGE)
                continue
            node.take_at(offset, size * PAGE, "activations")
        for page in range(offset // PAGE, offset // PAGE + size):
            assert owner[page] is None
            owner[page] = number
        taken.append(resident(number, offset, size))
        node.occupy(taken[-1])
        node.mark()
        node.validate()
    assert node.used == sum(page is not None for page in owner) * PAGE <= node.peak <= pages * PAGE
    assert node.extents.largest_hole() == longest_run(owner) * PAGE


def resident(number: int, offset: int, pages: int) -> Replica:
    """The sole replica of a handle of so many pages."""
    handle = HandleRecord(HandleId(number), HandleSpec(pages * PAGE, pages * PAGE, None, "", "temporary", "activations"))
    replica = handle.replicas[RAM] = Replica(handle, RAM, offset, "modified")
    return replica


@given(pages=st.lists(st.integers(1, 4), min_size=1, max_size=8), gone=st.sets(st.integers(0, 7)))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_replicas_are_packed_in_order(pages: list[int], gone: set[int]) -> None:
    """Those that stay lie side by side from the beginning on; what moved is told with its former offset, and all that is free is one hole."""
    node = MemoryNode("ram", sum(pages) * PAGE)
    replicas = []
    for number, size in enumerate(pages):
        offset = node.take(size * PAGE, "activations")
        assert offset is not None
        replicas.append(resident(number, offset, size))
        node.occupy(replicas[-1])
    for number in gone:
        if number < len(replicas):
            node.vacate(replicas[number])
    before = {replica: replica.offset for replica in node.starts.values()}
    moved = node.pack()
    node.validate()
    assert moved == [(replica, offset) for replica, offset in sorted(before.items(), key=lambda pair: pair[1]) if replica.offset != offset]
    assert node.used == sum(replica.handle.spec.size for replica in before)
    assert node.extents.largest_hole() == node.budget - node.used


def test_a_ledger_that_lost_a_replica_is_noticed() -> None:
    """Bytes in use that no replica occupies, and a replica whose end is not where it was, are refused."""
    node = MemoryNode("ram", 4 * PAGE)
    offset = node.take(PAGE, "activations")
    assert offset is not None
    with pytest.raises(InvalidEvent, match=r"ledger of node ram"):
        node.validate()
    replica = resident(0, offset, 1)
    node.occupy(replica)
    node.validate()
    replica.handle.spec.size += PAGE
    with pytest.raises(InvalidEvent, match=r"lost track"):
        node.validate()


def test_an_offset_that_somebody_may_want_again_is_left() -> None:
    """What finds its own taken gets untouched memory, while there is much of it; what has had none gets what was given back."""
    extents = ExtentAllocator(16 * PAGE, keeps_offsets=True)
    first, second = (extents.allocate(PAGE) or 0 for _ in range(2))
    extents.free(first, PAGE)
    extents.free(second, PAGE)
    assert extents.allocate(PAGE, wanted=0) == 0
    other = extents.allocate(PAGE, wanted=0)
    assert other not in (first, second)
    assert [extents.allocate(PAGE, wanted=first), extents.allocate(PAGE, wanted=second)] == [first, second]
    extents.free(first, PAGE)
    assert extents.allocate(PAGE) == first
    while extents.high - extents.low > 4 * PAGE:
        extents.allocate(2 * PAGE)
    extents.free(second, PAGE)
    assert extents.allocate(PAGE, wanted=first) == second


def test_an_offset_is_found_in_what_was_merged() -> None:
    """Where offsets are kept, an extent is cut out of the larger one that its own has become a part of."""
    extents = ExtentAllocator(16 * PAGE, keeps_offsets=True)
    offsets = [extents.allocate(PAGE) or 0 for _ in range(4)]
    for offset in offsets:
        extents.free(offset, PAGE)
    assert extents.all_free() == [(0, 16 * PAGE)]
    assert [extents.allocate(PAGE, wanted=offset) for offset in offsets[1:3]] == offsets[1:3]


def fresh_like(node: MemoryNode, taken: list[Replica]) -> ExtentAllocator:
    """An allocator of the same layout, which a refused claim may spoil."""
    twin = ExtentAllocator(node.budget)
    for replica in taken:
        twin.take_at(replica.offset, replica.handle.spec.size)
    return twin


def longest_run(owner: list[int | None]) -> int:
    """Most pages in a row that nobody owns."""
    best = run = 0
    for page in owner:
        run = 0 if page is not None else run + 1
        best = max(best, run)
    return best


def occupied(node: MemoryNode, number: int, offset: int, nbytes: int, kind: str, since: int) -> Replica:
    """A replica that takes these bytes of a node; one that is "used" is pinned."""
    node.take_at(offset, nbytes, "activations")
    handle = HandleRecord(HandleId(number), HandleSpec(nbytes, nbytes, None, "", "temporary", "activations"))
    replica = handle.replicas[RAM] = Replica(handle, RAM, offset, "modified", pins=int(kind == "used"), since=since)
    node.occupy(replica)
    return replica


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["free", "used", "kept", "kept", "kept"])), min_size=1, max_size=9),
    need=st.integers(1, 8),
)
@search(300)
def test_a_plan_lets_the_oldest_neighbours_go(sizes: list, need: int) -> None:
    """The hole lies over free memory and unused replicas, exists if any such run is large enough, and no other run lets only older ones go."""
    node = MemoryNode("ram", sum(size for size, _ in sizes) * PAGE)
    candidates = Candidates(node, FirstInFirstOut(Foresight()))
    offset, spans = 0, []
    for number, (size, kind) in enumerate(sizes):
        since = number * 7 % 11
        spans.append((offset, size * PAGE, kind, since))
        if kind != "free":
            candidates.add(occupied(node, number, offset, size * PAGE, kind, since))
        offset += size * PAGE
    runs = [spans[first:last] for first in range(len(spans)) for last in range(first + 1, len(spans) + 1)]
    runs = [run for run in runs if all(span[2] != "used" for span in run) and sum(span[1] for span in run) >= need * PAGE]
    plan = candidates.plan([need * PAGE])
    assert (plan is None) == (not runs)
    if plan is not None:
        (start,), victims = plan
        touched = [span for span in spans if span[0] < start + need * PAGE and span[0] + span[1] > start]
        assert [span[0] for span in touched if span[2] != "free"] == sorted(victim.offset for victim in victims)
        youngest = max((victim.since for victim in victims), default=-1)
        assert youngest <= min(max((span[3] for span in run if span[2] == "kept"), default=-1) for run in runs)


class ByAge:
    """The older, the cheaper; prices add up."""

    tolerance = 1.0
    adds_up = True
    foresees = False

    def key(self, replica: Replica) -> float:
        """Its age."""
        return -replica.since

    def price(self, key: float, *, dirty: bool) -> float:
        """How young it is."""
        return 1.0 - key


def filled_candidates(sizes: list[tuple[int, str, int]]) -> Candidates:
    """A node full of extents of (pages, "free" or "used" or "kept", since), with the replicas that are not free."""
    node = MemoryNode("ram", sum(size for size, _, _ in sizes) * PAGE)
    candidates = Candidates(node, ByAge())
    offset = 0
    for number, (size, kind, since) in enumerate(sizes):
        if kind != "free":
            candidates.add(occupied(node, number, offset, size * PAGE, kind, since))
        offset += size * PAGE
    return candidates


def test_one_large_tile_does_not_go_where_small_ones_side_by_side_cost_less() -> None:
    """In the order of prices alone the first hole is the large tile: no two of the cheapest ones are neighbours."""
    candidates = filled_candidates([(1, "kept", 0), (1, "kept", 60)] * 4 + [(4, "kept", 50), (1, "kept", 99)])
    plan = candidates.plan([4 * PAGE])
    assert plan is not None
    assert sorted(replica.since for replica in plan[1]) == [0, 0, 60, 60]


def test_what_lies_in_a_file_lies_at_its_beginning() -> None:
    """However large: what lies beyond the budget is discarded with each extent."""
    node = MemoryNode("disk", 64 * PAGE, is_storage=True)
    assert [node.take(size * PAGE, "activations") for size in (1, 63)] == [0, PAGE]
    assert MemoryNode("disk", 64 * PAGE, is_storage=True).take(64 * PAGE, "activations") == 0


def test_tiny_tiles_count_like_larger_ones() -> None:
    """Their room is not worth their copies: four pages cost more than six that were used later, though fewer bytes would move."""
    candidates = filled_candidates([(1, "kept", 0)] * 4 + [(8192, "used", 0), (6, "kept", 1)])
    plan = candidates.plan([4 * PAGE])
    assert plan is not None
    assert [replica.since for replica in plan[1]] == [1]


def test_a_tiny_tile_goes_where_nothing_else_can() -> None:
    """Also for a tile of another size."""
    candidates = filled_candidates([(1, "kept", 0), (1, "free", 0), (8192, "used", 50)])
    plan = candidates.plan([2 * PAGE])
    assert plan is not None
    assert [replica.since for replica in plan[1]] == [0]


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(["free", "used", "kept", "kept", "kept"]), st.integers(0, 99)), min_size=1, max_size=9
    ),
    need=st.integers(1, 8),
)
@search(300)
def test_where_prices_add_up_no_neighbours_cost_less(sizes: list[tuple[int, str, int]], need: int) -> None:
    """What goes costs no more than any other hole, or than as many bytes of the cheapest replicas wherever they lie."""
    plan = filled_candidates(sizes).plan([need * PAGE])
    runs = [sizes[first:last] for first in range(len(sizes)) for last in range(first + 1, len(sizes) + 1)]
    runs = [run for run in runs if all(kind != "used" for _, kind, _ in run) and sum(size for size, _, _ in run) >= need]
    assert (plan is None) == (not runs)
    if plan is not None:
        victims = [(replica.handle.spec.size // PAGE, replica.since) for replica in plan[1]]
        cost = sum(size * (1 + since) for size, since in victims)
        least = min(sum(size * (1 + since) for size, kind, since in run if kind == "kept") for run in runs)
        missing, scattered = sum(size for size, _ in victims), 0
        for since, size in sorted((since, size) for size, kind, since in sizes if kind == "kept"):
            if missing > 0:
                missing, scattered = missing - size, scattered + size * (1 + since)
        assert cost <= max(least, scattered)


def test_sizes_round_up_to_pages() -> None:
    """The ledger counts whole pages, at least one."""
    assert [rounded(nbytes) for nbytes in (0, 1, 4096, 4097)] == [4096, 4096, 4096, 8192]


def test_peak_is_kept_by_class() -> None:
    """The classes at the moment of the highest use are remembered, and a recent peak can begin anew."""
    node = MemoryNode("ram", 10 * PAGE)
    first = node.take(2 * PAGE, "parameters")
    second = node.take(3 * PAGE, "activations")
    assert first is not None
    assert second is not None
    node.mark()
    node.give(second, 3 * PAGE, "activations")
    node.forget_recent_peak()
    node.take(PAGE, "gradients")
    node.mark()
    assert (node.peak, node.recent_peak) == (5 * PAGE, 3 * PAGE)
    assert {name: size for name, size in node.peak_by_class.items() if size} == {"parameters": 2 * PAGE, "activations": 3 * PAGE}


def test_arenas_copy_bytes_between_each_other() -> None:
    """A copy moves exactly the bytes asked for."""
    one, two = HostArena(2 * PAGE), HostArena(2 * PAGE)
    one.memory[10:14] = b"tile"
    two.copy_from(one, 10, 100, 4)
    assert two.memory[99:105] == b"\0tile\0"


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their request is refused, and the memory is reserved all the same."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # an advice that no kernel knows
    arena = HostArena(2 * PAGE)
    with pytest.raises(OSError, match="Invalid argument"):
        arena.memory.madvise(mmap.MADV_HUGEPAGE)
    arena.memory[PAGE : PAGE + 4] = b"tile"
    assert arena.memory[PAGE : PAGE + 4] == b"tile"


def test_default_budget_stays_below_the_limit() -> None:
    """The default budget leaves room for what the process uses already."""
    assert 0 < default_ram_budget() <= 0.9 * memory_limit()


def test_what_is_clean_is_counted() -> None:
    """What can be dropped at once, unused, and as of when it was last added; not what is used, written, dropped or in use by the program."""
    candidates = filled_candidates([(1, "kept", at) for at in range(4)])
    first, second, third, _ = replicas = list(candidates.node.starts.values())
    assert candidates.clean_nbytes(1 << 60) == 0  # all of them are the only ones of their data
    for replica in replicas:
        replica.handle.lost = "no task needs it"
        candidates.add(replica)
    assert candidates.clean_nbytes(1 << 60) == 4 * PAGE
    assert candidates.clean_nbytes(2 * PAGE) == 2 * PAGE
    first.pins += 1
    candidates.add(second)
    assert candidates.clean_nbytes(1 << 60) == 3 * PAGE  # once, though it was added twice
    third.pins += 1
    candidates.add(third)
    candidates.leave(second)
    assert candidates.clean_nbytes(1 << 60) == PAGE
