"""Names and layouts of a family's weights in its files: one table for both directions of the translation.

Our modules take their names from the files (`Names.modules`), so most weights differ by a prefix at most. Both directions are pure functions on
arrays, for weights and gradients alike. `nntask.hf.layout` also applies them to placeholders without memory. They must not read values; they may
rename, slice, split and reshape to views, and `to_hf` may concatenate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError

Arrays = dict[str, npt.NDArray[Any]]

_HEAD: Final = "lm_head"
_OF_HEAD: Final = (_HEAD, "head_bias", "head.")


def is_of_head(name: str) -> bool:
    """Return whether our name of a parameter or module belongs to the layers between the last block and the scores."""
    return name.startswith(_OF_HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Layers whose weights are one matrix in the files.

    Args:
        members: names of our layers, all in one module.
        whole: name of the layer in the files, in the same module.
        axis: axis along which the weights are concatenated; biases always have one axis.
        by_head: whether rows are ordered by head first and by layer second; needs equal numbers of heads of queries and of keys.
        by_groups: whether the members are projections to queries, keys and values, whose numbers of rows may differ.
    """

    members: tuple[str, ...]
    whole: str
    axis: int
    by_head: bool = False
    by_groups: bool = False

    def whole_of(self, pieces: list[npt.NDArray[Any]], config: Any) -> npt.NDArray[Any]:
        """Return the array of the files from the arrays of our layers, of equal shapes unless they are `by_groups`."""
        shape = pieces[0].shape
        if not self.by_head:
            return np.concatenate(pieces, axis=self.axis if len(shape) > 1 else 0)
        rows = [piece.reshape((config.n_head, config.head_size, *shape[1:])) for piece in pieces]  # (H*D, ..) -> (H, D, ..)
        return np.concatenate(rows, axis=1).reshape((len(pieces) * shape[0], *shape[1:]))

    def pieces_of(self, array: npt.NDArray[Any], name: str, config: Any) -> list[npt.NDArray[Any]]:
        """Return views of an array of the files, one for each of our layers; those by head have one more axis, (H, D, ..) instead of (H*D, ..).

        Raises:
            DataError: the array is not divisible.
        """
        axis, count = self.axis if array.ndim > 1 else 0, len(self.members)
        divisor = count * config.n_head * config.head_size if self.by_head else count
        queries, keys = config.n_head * config.head_size, config.n_kv_head * config.head_size
        wanted = f"{queries + 2 * keys}" if self.by_groups else f"a multiple of {divisor}"
        if array.shape[axis] != queries + 2 * keys if self.by_groups else array.shape[axis] % divisor:
            raise DataError(
                f"{name} must hold {', '.join(self.members)} along axis {axis}, {wanted}, got shape {array.shape}",
                "use the config it was trained with",
            )
        if not self.by_head:
            return np.split(array, [queries, queries + keys] if self.by_groups else count, axis=axis)
        rows = array.reshape((config.n_head, count, config.head_size, *array.shape[1:]))  # (3*H*D, ..) -> (H, 3, D, ..)
        return [rows[:, number] for number in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """Matrices of all experts of a block as transformers holds them in memory, and files have them in rare cases: one array (E, rows, columns).

    Args:
        whole: name of the array in the module of the experts.
        module: name of the experts' list in that module.
        members: names of an expert's layers in files, whose rows lie one after another.
    """

    whole: str
    module: str
    members: tuple[str, ...]

    def joined(self, state: Arrays) -> Arrays:
        """Return the arrays with those of each block's experts replaced by one."""
        pattern = re.compile(rf"(.*\.){re.escape(self.module)}\.(\d+)\.{re.escape(self.members[0])}\.weight")
        matches = [match for name in state if (match := pattern.fullmatch(name))]
        taken, wholes = set[str](), Arrays()
        for path in dict.fromkeys(match[1] for match in matches):
            experts = sorted(int(match[2]) for match in matches if match[1] == path)
            names = [[f"{path}{self.module}.{expert}.{member}.weight" for member in self.members] for expert in experts]
            wholes[path + self.whole] = np.stack([np.concatenate([state[name] for name in of_expert]) for of_expert in names])
            taken.update(name for of_expert in names for name in of_expert)
        return {**{name: array for name, array in state.items() if name not in taken}, **wholes}

    def pieces_of(self, name: str, array: npt.NDArray[Any]) -> Arrays:
        """Return name in files -> view of the array, for each matrix of each expert.

        Raises:
            DataError: the array has another number of axes, or rows that cannot be divided among the members.
        """
        count = len(self.members)
        if array.ndim != 3 or array.shape[1] % count:
            raise DataError(
                f"{name} must be (experts, rows, columns) with rows that are a multiple of {count}, got shape {array.shape}",
                "use the config it was trained with",
            )
        rows, path = array.shape[1] // count, name.removesuffix(self.whole) + self.module
        return {
            f"{path}.{expert}.{member}.weight": array[expert, number * rows : (number + 1) * rows]
            for expert in range(array.shape[0])
            for number, member in enumerate(self.members)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of a family's weights in its files.

    Args:
        modules: attribute of a module in `transformer` or `blocks` -> name in the files.
        encoder_modules: attributes with another name in an encoder.
        prefix: prefix of all names in the files except those in `outside`.
        outside: our name of a parameter or module -> name in the files, without the prefix.
        joined: layers that are one matrix in the files.
        stacked: arrays with the matrices of all experts; read, and never written.
        aliases: name in the files -> another name of the same array in the files; written, and ignored when read.
        spare: aliases that other files have with values of their own, which nothing reads.
        older: end of a name in older files -> end of the name today.
        dropped: ends of names in older files whose values are computed from the config.
        unused: beginnings of names that belong to other uses of the model; ignored.
        head: name of the head in the files; an alias of `embedding` if the head is tied.
        embedding: name of the token embedding in the files.
    """

    modules: Mapping[str, str]
    prefix: str
    embedding: str
    encoder_modules: Mapping[str, str] = field(default_factory=dict)
    head: str = "lm_head.weight"
    outside: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[Joined, ...] = ()
    stacked: tuple[Stacked, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    spare: tuple[str, ...] = ()
    older: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def to_hf(self, arrays: Mapping[str, npt.NDArray[Any]], config: Any) -> Arrays:
        """Translate arrays under our names to the state dict of transformers' model.

        Args:
            arrays: name of `Module.named_parameters` -> array, without a tied head.
            config: the model's config.
        """
        state: Arrays = {}
        for name, array in arrays.items():
            path, kind = name.rpartition(".")[::2]
            join = next((join for join in self.joined if path.endswith(tuple(f".{member}" for member in join.members))), None)
            if join is None:
                state[self._theirs(name)] = array
                continue
            module, member = path.rpartition(".")[::2]
            if member == join.members[0]:
                pieces = [arrays[f"{module}.{member}.{kind}"] for member in join.members]
                state[self._theirs(f"{module}.{join.whole}.{kind}")] = join.whole_of(pieces, config)
        for alias, name in self._aliases(config).items():
            state[alias] = state[name]
        return state

    def to_module(self, arrays: Mapping[str, npt.NDArray[Any]], config: Any) -> Arrays:
        """Translate arrays as `to_hf` does, but to the state dict of a module in memory, with one array for all experts of a block."""
        state = self.to_hf(arrays, config)
        if not self.stacked:
            return state
        for whole in self.stacked:
            state = whole.joined(state)
        return {self._in_module(name): array for name, array in state.items()}

    def from_hf(self, state: Mapping[str, npt.NDArray[Any]], config: Any, *, has_head: bool = True) -> Arrays:
        """Translate a state dict of transformers' model, or of its part under the prefix alone, to arrays under our names.

        Args:
            has_head: False for the state dict of a model with another head, which may lack ours.

        Raises:
            DataError: a joined weight is not divisible, or an untied head is missing.
        """
        arrays: Arrays = {}
        aliases = self._aliases(config)
        given = self.apart({self.today(name): array for name, array in state.items()})
        for alias, theirs in aliases.items():
            if alias in given and theirs not in given:
                given[theirs] = given[alias]
        for theirs, array in given.items():
            if theirs in aliases or theirs.endswith(self.dropped) or theirs.startswith(self.unused):
                continue
            name = self._ours(theirs)
            path, kind = name.rpartition(".")[::2]
            join = next((join for join in self.joined if path.endswith(f".{join.whole}")), None)
            if join is None:
                arrays[name] = array
                continue
            for member, piece in zip(join.members, join.pieces_of(array, theirs, config), strict=True):
                arrays[f"{path.rpartition('.')[0]}.{member}.{kind}"] = piece
        if has_head and not config.ties_head and _HEAD not in arrays:
            raise DataError(f"the weights lack {self.head}, which an untied head needs", "set tie_word_embeddings to true or use whole weights")
        return arrays

    def apart(self, state: Arrays) -> Arrays:
        """Return the arrays, under today's names, with those of all experts replaced by one for each matrix.

        Raises:
            DataError: an array of all experts has the wrong number of axes or rows, or a matrix of it is there twice.
        """
        apart: Arrays = {}
        for name, array in state.items():
            whole = next((each for each in self.stacked if name.endswith(f".{each.whole}")), None)
            pieces = {name: array} if whole is None else whole.pieces_of(name, array)
            if twice := [piece for piece in pieces if piece in apart or (whole is not None and piece in state)]:
                raise DataError(f"{name} and {twice[0]} are the same weight", "remove the one that is wrong")
            apart.update(pieces)
        return apart

    def today(self, name: str) -> str:
        """Return a name in files as transformers writes it today: with the prefix, which some files lack, and with `older` ends replaced."""
        for old, new in self.older.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
                break
        outside = (self.head, *self.outside.values(), *self.aliases, *self.unused)
        return name if name.startswith((self.prefix, *outside)) else self.prefix + name

    def rows_out(self, module: str, pieces: list[npt.NDArray[Any]], config: Any) -> npt.NDArray[Any]:
        """Join arrays (N, ..) of our layers that are one module in the files, with rows in the order of the module's output features."""
        join = next((join for join in self.joined if module.endswith(f".{join.whole}")), None)
        return join.whole_of(pieces, config) if join is not None and join.by_head else np.concatenate(pieces)

    def array_of(self, module: str) -> tuple[str, int] | None:
        """Return the array of all experts that has the matrix of a module of the files in transformers' module, and the number of the expert.

        Returns:
            None for a module that is not a layer of an expert.
        """
        for whole in self.stacked:
            match = re.fullmatch(rf"(.*\.){re.escape(whole.module)}\.(\d+)\.({'|'.join(map(re.escape, whole.members))})", module)
            if match is not None:
                return self._in_module(match[1] + whole.whole), int(match[2])
        return None

    def _in_module(self, name: str) -> str:
        """Return a name in files as transformers' module has it, for which `older` has the rules."""
        old, new = next(((old, new) for old, new in self.older.items() if name.endswith(new)), ("", ""))
        return name.removesuffix(new) + old

    def _aliases(self, config: Any) -> dict[str, str]:
        return {**self.aliases, **({self.head: self.embedding} if config.ties_head else {})}

    def _theirs(self, name: str) -> str:
        if name == _HEAD:
            return self.head
        for ours, theirs in self.outside.items():
            if name == ours or name.startswith(f"{ours}."):
                return theirs + name[len(ours) :]
        return self.prefix + name

    def _ours(self, name: str) -> str:
        if name == self.head:
            return _HEAD
        for ours, theirs in self.outside.items():
            if name == theirs or name.startswith(f"{theirs}."):
                return ours + name[len(theirs) :]
        return name.removeprefix(self.prefix)
