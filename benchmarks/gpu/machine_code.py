"""Instructions of a kernel's machine code (sm_70 to sm_90): basic blocks, and the path that a warp takes through them.

The path is the one that accesses the most bytes of global memory, and of those the one with the fewest instructions: 16 bytes at a time, with all
optional arrays. Branches that depend on values, such as those of slow divisions, are not taken.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

SIZE: Final = 16
"""Bytes of an instruction."""
_LOAD, _STORE, _BRANCH, _EXIT, _PRODUCT = 0x981, 0x986, 0x947, 0x94D, 0x23C
"""Operation codes of LDG, STG, BRA, EXIT and HMMA."""
_NARROW: Final = (1, 1, 2, 2, 4, 8, 16, 16)
"""Bytes of an access by its code of three bits."""


class Instruction(NamedTuple):
    """An instruction.

    Attributes:
        code: operation code.
        is_conditional: whether a predicate guards it.
        nbytes: bytes of global memory that a thread accesses.
        target: index of the instruction to which it branches; -1 if it is no branch.
    """

    code: int
    is_conditional: bool
    nbytes: int
    target: int


class Loop(NamedTuple):
    """A loop on the path.

    Attributes:
        instructions: instructions of an iteration, without those of `inner`.
        nbytes: bytes of global memory that a thread accesses in an iteration, without those of `inner`.
        inner: loops in it.
        has_products: whether it has tensor-core operations.
    """

    instructions: int
    nbytes: int
    inner: tuple[Loop, ...] = ()
    has_products: bool = False


class Path(NamedTuple):
    """Instructions of a warp.

    Attributes:
        straight: instructions outside `loops`.
        loops: loops that access global memory; of others one iteration counts.
        products, static: all tensor-core operations of the kernel, and all its instructions.
    """

    straight: int
    loops: tuple[Loop, ...]
    products: int
    static: int


def decoded(code: bytes) -> list[Instruction]:
    """Return the instructions of a kernel."""
    result = []
    for number, (low, high) in enumerate(struct.iter_unpack("<QQ", code)):
        operation, target = low & 0xFFF, -1
        if operation == _BRANCH:
            upper = (low >> 34 | (high & 0x3FFFF) << 30) & (1 << 40) - 1
            distance = (upper << 8 | (low >> 16 & 0xFF)) & (1 << 48) - 1
            distance -= (distance >> 47) << 48
            target = number + 1 + distance * 4 // SIZE
        nbytes = _NARROW[high >> 9 & 7] if operation in (_LOAD, _STORE) else 0
        result.append(Instruction(operation, low >> 12 & 7 != 7, nbytes, target))
    return result


def path_of(code: bytes) -> Path:
    """Return the path of a warp through a kernel."""
    instructions = decoded(code)
    starts = _starts(instructions)
    best: dict[int, tuple[int, int, int]] = {}  # first instruction of a block -> (bytes, -instructions, next block) of the best way to the end
    for first, end in reversed(list(zip(starts, [*starts[1:], len(instructions)], strict=True))):
        last = instructions[end - 1]
        nexts = [target for target in _followers(last, end) if target >= end]  # branches back are loops, which are counted apart
        _, nbytes, length, follower = max([(best[target][0], *best[target][:2], target) for target in nexts if target in best] or [(0, 0, 0, -1)])
        best[first] = (nbytes + sum(one.nbytes for one in instructions[first:end]), length - (end - first), follower)
    ends, taken, block = dict(zip(starts, [*starts[1:], len(instructions)], strict=True)), [], 0
    while block >= 0:
        taken.append(block)
        block = best[block][2]
    whole = _loop(instructions, ends, taken)
    return Path(whole.instructions, whole.inner, sum(one.code == _PRODUCT for one in instructions), len(instructions))


def _starts(instructions: list[Instruction]) -> list[int]:
    """Return the first instruction of each basic block."""
    targets = {one.target for one in instructions if one.target >= 0}
    after = {number + 1 for number, one in enumerate(instructions) if one.target >= 0 or one.code == _EXIT}
    return sorted(number for number in {0} | targets | after if number < len(instructions))


def _followers(last: Instruction, end: int) -> list[int]:
    """Return the blocks that may follow a block with this last instruction."""
    if last.code == _EXIT:
        return [end] if last.is_conditional else []
    if last.target < 0:
        return [end]
    return [last.target, end] if last.is_conditional else [last.target]


def _loop(instructions: list[Instruction], ends: dict[int, int], body: list[int]) -> Loop:
    """Return some blocks of a path, which are those of a loop, as a loop with its inner loops.

    Args:
        ends: end of each block, by its first instruction.
        body: the blocks.
    """
    inner, outside = list[Loop](), [*body]
    for block in reversed(body):
        target = instructions[ends[block] - 1].target
        if block not in outside or not 0 <= target <= block or target not in outside or (target == body[0] and block == body[-1]):
            continue
        own = [one for one in body if target <= one <= block]
        if any(one.nbytes for first in own for one in instructions[first : ends[first]]):
            inner.append(_loop(instructions, ends, own))
            outside = [one for one in outside if one not in own]
    count = sum(ends[first] - first for first in outside)
    nbytes = sum(one.nbytes for first in outside for one in instructions[first : ends[first]])
    has_products = any(one.code == _PRODUCT for first in body for one in instructions[first : ends[first]])
    return Loop(count, nbytes, tuple(reversed(inner)), has_products)
