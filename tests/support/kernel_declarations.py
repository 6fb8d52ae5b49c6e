"""What kernel sources declare: the parameters of each kernel, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from support.fake_cuda import KernelParameter, KernelPointer

_SIZES = {"float": 4, "bf16": 2, "int": 4, "u32": 4, "double": 8, "u64": 8, "long long": 8, "unsigned char": 1}
_READ_BY = {"flash": 16, "flash_dropout": 16, "flash_options": 16}
"""Sources that read elements in larger units; bytes."""


class Declared(NamedTuple):
    """A parameter: its type, whether it is a pointer, and what the launch has to know."""

    kind: str
    is_pointer: bool
    parameter: KernelParameter


class _Kinds:
    """Types of a source: of elements, and structs.

    Args:
        element: what T is.
        least: bytes that elements in half precision are read in.
    """

    def __init__(self, text: str, element: str, least: int) -> None:
        self._sizes = {**_SIZES, "T": _SIZES[element]}
        self._units = {**self._sizes, **{name: max(self._sizes[name], least) for name in ("bf16", "T") if self._sizes[name] == _SIZES["bf16"]}}
        constants = {name: int(value) for name, value in re.findall(r"#define\s+(\w+)\s+(\d+)\s", text)}
        self._structs: dict[str, KernelParameter] = {}
        for name, body in re.findall(r"struct\s+(\w+)\s*\{([^{}]*)\};", text):
            if name not in self._sizes:
                self._structs[name] = self._struct([line.strip() for line in body.split(";") if line.strip()], constants)

    def parameter(self, declared: str) -> KernelParameter:
        """One of a kernel's parameters, as it is declared."""
        kind, is_constant = self.kind(declared)
        if "*" in declared:
            return KernelParameter(8, [KernelPointer(0, self._units[kind], not is_constant)])
        return self._structs.get(kind) or KernelParameter(8, [])

    def kind(self, declared: str) -> tuple[str, bool]:
        """The type, and whether it is constant, of what is declared first."""
        words = declared.partition("[")[0].replace("*", " ").partition(",")[0].split()
        return " ".join(word for word in words[:-1] if word != "const"), "const" in words

    def _struct(self, lines: Sequence[str], constants: Mapping[str, int]) -> KernelParameter:
        """A struct of these lines, such as ``const T *x[MOST], *y``."""
        at, pointers = 0, []
        for line in lines:
            kind, is_constant = self.kind(line)
            for field in line.split(","):
                extent = re.search(r"\[([^]]*)\]", field)
                count = 1 if extent is None else sum(constants[term] if term in constants else int(term) for term in extent[1].split(" + "))
                size = 8 if "*" in field else self._sizes[kind]
                at = -(-at // size) * size
                if "*" in field:
                    pointers += [KernelPointer(at + 8 * number, self._units[kind], not is_constant) for number in range(count)]
                at += size * count
        return KernelParameter(-(-at // 8) * 8, pointers)


@cache
def declared_in(source: str, text: str, element: str) -> dict[str, list[Declared]]:
    """The parameters of each kernel of a source, for elements of a type."""
    text = re.sub(r"//[^\n]*", "", text.replace("\\\n", " "))
    kinds = _Kinds(text, element, _READ_BY.get(source, 1))
    found = {}
    for name, parameters in re.findall(r"KERNEL\s+(?:__launch_bounds__\([^)]*\)\s+)?([\w#]+)\s*\(([^)]*)\)", text):
        declared = [Declared(kinds.kind(one)[0], "*" in one, kinds.parameter(one)) for one in parameters.split(",")]
        for ending in re.findall(r"^FLASH\((\w+),", text, re.MULTILINE) if "##NAME" in name else ("",):
            found[name.replace("##NAME", ending)] = declared
    return found
