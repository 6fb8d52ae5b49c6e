"""Muon for the matrices of hidden layers, AdamW for everything else.

A matrix is what transformers and its files have as one: the (C, 3C) weight of queries, keys and values of GPT-2 is one matrix, although three layers
have it here; Llama has three matrices. Neither pieces nor tiles change the update, which sees the whole matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tiles import TileTensor
from tiles.ops import muon as muon_ops
from tiles.ops import optimizer as optimizer_ops

from ..errors import UsageError
from ..nn.layers import Adapter, Linear
from ..nn.module import Module, Parameter
from .optimizers import Group, Optimizer, Options, Tiles, decay_groups


class MatrixPiece(NamedTuple):
    """Place of a parameter in a matrix.

    Args:
        matrix: name of the matrix.
        number: number of the piece.
        axis: axis along which the pieces are concatenated.
    """

    matrix: str
    number: int = 0
    axis: int = 0


RATES_OF_ADAMW: Final = muon_ops.NewtonSchulz(adjust_lr_fn="match_rms_adamw")
"""Options with which learning rates and weight decays that suit AdamW suit Muon, too."""


class Muon(Optimizer):
    """Muon (Jordan et al., 2024), like ``torch.optim.Muon`` in fp32, for groups with `newton_schulz`; AdamW for the other groups.

    Args:
        groups: groups of parameters, for example those of `muon_groups`.
        lr: learning rate until `prepare` is given another.
        pieces: piece of a matrix that a parameter of Muon is, by name; others are matrices by themselves (`hidden_matrices`).
        momentum: decay of the average gradient of matrices.
        smallest_norm: smallest norm by which an average gradient is divided; eps of torch.optim.Muon.
        betas, eps: those of AdamW.
        max_norm: largest norm of the whole gradient, which is scaled down to it; 0 disables clipping.
        tiles_of, on_cpu: the same as for `Optimizer`.

    Raises:
        UsageError: no group has a matrix for Muon, such a group has another parameter, or a number is out of range.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        lr: float = 1e-3,
        *,
        pieces: Mapping[str, MatrixPiece] | None = None,
        momentum: float = 0.95,
        smallest_norm: float = 1e-7,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_norm: float = 0.0,
        tiles_of: Tiles | None = None,
        on_cpu: bool = False,
    ) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum must be at least 0 and below 1, got {momentum:g}", "use 0.95")
        if not all(0 <= beta < 1 for beta in betas) or eps < 0:
            raise UsageError(f"betas must be at least 0 and below 1 and eps 0 or more, got {betas} and {eps:g}", "use (0.9, 0.999) and 1e-8")
        matrices = [p for group in groups if group.newton_schulz is not None for p in group.parameters if p.trainable]
        if not matrices:
            raise UsageError("Muon needs a matrix of a hidden layer that is learnt, got none", "use AdamW, for example --optimizer adamw")
        if other := next((p for p in matrices if len(p.shape) != 2), None):
            raise UsageError(f"Muon updates matrices, got {other.name} of shape {other.shape}", "leave its group to AdamW")
        self._pieces = {p.name: (pieces or {}).get(p.name, MatrixPiece(p.name)) for p in matrices}
        self._counts = Counter(piece.matrix for piece in self._pieces.values())
        self._waiting: dict[str, dict[int, tuple[optimizer_ops.Update, TileTensor]]] = {}  # matrix -> updates of some of its pieces, by number
        self._of_muon = Options(lr, 0.0, momentum, 0.0, smallest_norm)
        super().__init__(groups, Options(lr, 0.0, *betas, eps), ("momentum", "m", "v"), max_norm=max_norm, tiles_of=tiles_of, on_cpu=on_cpu)

    @property
    def whole(self) -> Mapping[str, str]:
        """Parameters that are updated as a whole, each with the name of its matrix."""
        return {name: piece.matrix for name, piece in self._pieces.items()}

    def take_gradients(self) -> list[tuple[Parameter, TileTensor, Group]]:
        """Return what `Optimizer.take_gradients` returns.

        Raises:
            UsageError: no parameter has a gradient, or some pieces of a matrix lack theirs.
        """
        present = Counter(self._pieces[p.name].matrix for p in self._parameters() if p.name in self._pieces and p.gradient is not None)
        if matrix := next((matrix for matrix, count in present.items() if count < self._counts[matrix]), None):
            raise UsageError(
                f"Muon updates whole matrices, got gradients of {present[matrix]} of the {self._counts[matrix]} pieces of {matrix}",
                "freeze all of them, or create the optimizer after freezing some",
            )
        return super().take_gradients()

    def _new_state(self, parameter: Parameter, kind: str) -> TileTensor | None:
        if kind != "master" and (kind == "momentum") != (parameter.name in self._pieces):
            return None
        return super()._new_state(parameter, kind)

    def _options_of(self, group: Group) -> Options:
        if group.newton_schulz is None:
            return super()._options_of(group)
        return self._of_muon._replace(lr=self.options.lr, weight_decay=group.weight_decay)

    def _emit(self, update: optimizer_ops.Update, state: Mapping[str, TileTensor], group: Group) -> None:
        if group.newton_schulz is None:
            optimizer_ops.adamw(update, state["m"], state["v"])
            return
        matrix, number, axis = self._pieces[update.param.name]
        pieces = self._waiting.setdefault(matrix, {})
        pieces[number] = update, state["momentum"]
        if len(pieces) == self._counts[matrix]:
            del self._waiting[matrix]
            updates, buffers = zip(*(pieces[number] for number in sorted(pieces)), strict=True)
            muon_ops.muon(updates, buffers, group.newton_schulz, axis)


def hidden_matrices(model: Module) -> dict[str, MatrixPiece]:
    """Return the learnt matrices of hidden layers by name: weights of `Linear` layers and of adapters; not those of embeddings and the head.

    Layers that the files of the model's family store as one matrix, such as queries, keys and values of GPT-2, are pieces of it.
    """
    inner = {id(p) for _, module in model.named_modules() if isinstance(module, Linear | Adapter) for _, p in module.members()}
    names = getattr(getattr(model, "config", None), "names", None)
    pieces = {}
    for name, parameter in model.named_parameters().items():
        if id(parameter) not in inner or not parameter.trainable or len(parameter.shape) != 2:
            continue
        pieces[name] = MatrixPiece(name)
        module, _, layer = name.removesuffix(".weight").rpartition(".")
        for join in names.joined if names is not None and name.endswith(".weight") else ():
            if layer in join.members:
                pieces[name] = MatrixPiece(f"{module}.{join.whole}.weight", join.members.index(layer), join.axis)
    return pieces


def muon_groups(model: Module, weight_decay: float, newton_schulz: muon_ops.NewtonSchulz = RATES_OF_ADAMW) -> list[Group]:
    """Return the groups of a model for `Muon`: those of `decay_groups`, the matrices of hidden layers apart."""
    names, groups = hidden_matrices(model), []
    for group in decay_groups(model, weight_decay):
        inner = [p for p in group.parameters if p.name in names]
        others = [p for p in group.parameters if p.name not in names]
        groups += [replace(group, parameters=inner, newton_schulz=newton_schulz)] if inner else []
        groups += [replace(group, parameters=others)] if others else []
    return groups
