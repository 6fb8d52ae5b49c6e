"""Public reports about views, operations in place and layouts of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from .eager_twin import Batch, Program, rows
from .torch_reports import EITHER, PYTORCH, pair, report


def alias_by_data(y: torch.Tensor) -> torch.Tensor:
    """Replace the data of a tensor that has a view."""
    view = y[:]
    y.data = torch.ones_like(y)
    return view * 2 + y


def alias_by_set(y: torch.Tensor) -> torch.Tensor:
    """Give a tensor without gradient another storage."""
    copy = y.detach().clone()
    view = copy[:]
    copy.set_(torch.ones_like(copy).untyped_storage(), 0, copy.shape, copy.stride())
    return y * view + copy


@report(PYTORCH, 94773, "views of a tensor whose `.data` is replaced", allowed=EITHER)
def data_replaced_under_a_view() -> Program:
    """A view keeps the old data."""
    return pair(lambda self, x: self.second(alias_by_data(torch.tanh(self.first(x)))))


@report(PYTORCH, 94773, "views of a tensor after `set_`", allowed=EITHER)
def storage_replaced_under_a_view() -> Program:
    """A view keeps the old storage."""
    return pair(lambda self, x: self.second(alias_by_set(torch.tanh(self.first(x)))))


@report(PYTORCH, 198102, "in place through a view by `unfold` with gaps")
def gapped_unfold_in_place() -> Program:
    """Each fifth column is doubled through a view; the others stay."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * 1
        view = y.unfold(1, 1, 5)
        view.add_(view.clone())
        return self.second(torch.tanh(y))

    return pair(way)


@report(PYTORCH, 104463, "in place through `diagonal`")
def diagonal_in_place() -> Program:
    """The diagonal of an activation is raised through a view."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * 1
        y.diagonal().add_(1.0)
        return self.second(torch.tanh(y))

    return pair(way)


def images(*formats: torch.memory_format) -> list[Batch]:
    """Batches of images in these formats."""
    made = [torch.randn(4, 5, 2, 6, generator=torch.Generator().manual_seed(3 + i)) for i in range(len(formats))]
    return [{"x": image.to(memory_format=each)} for image, each in zip(made, formats, strict=True)]


@report(
    PYTORCH,
    174963,
    "`as_strided` of a tensor in channels-last format",
    allowed=EITHER,
    batches=lambda: images(torch.contiguous_format, torch.contiguous_format, torch.channels_last),
)
def strides_of_the_input_change() -> Program:
    """Each third batch has other strides, and the forward pass reads memory in its order."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(torch.as_strided(torch.roll(x, 1, 0), (20, 12), (12, 1))))))


@report(PYTORCH, 177631, "input changed in place after a padding of nothing")
def input_changed_after_padding() -> Program:
    """A padded copy must not follow its source."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(x, (0, 0))
        x[0] = 1
        return self.second(torch.sort(padded)[0]) + self.second(self.first(x))

    return pair(way)


def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention with an expanded mask over rows."""
    y = self.first(x).view(1, x.shape[0], 3, 4).transpose(1, 2)
    keep = (torch.arange(x.shape[0]) < x.shape[0] - 2).expand(1, 3, x.shape[0], x.shape[0])
    z = functional.scaled_dot_product_attention(y, y, y, attn_mask=keep)
    return self.second(z.transpose(1, 2).reshape(x.shape))


@report(PYTORCH, 109607, "attention with a mask that is not contiguous")
def attention_with_an_expanded_mask() -> Program:
    """The mask is expanded over heads and queries."""
    return pair(attend)


@report(PYTORCH, 148545, "attention in the second of two shapes", batches=rows(8, 5, 8, 11))
def attention_in_changing_shapes() -> Program:
    """The number of positions changes between steps."""
    return pair(attend)


@report(PYTORCH, 179931, "rows but the first wrong after pooling, flattening and summing", batches=lambda: images(*[torch.contiguous_format] * 2))
def pooled_and_summed() -> Program:
    """Adaptive pooling, then a sum along rows."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x.reshape(20, 12)))
        pooled = functional.adaptive_avg_pool2d(y.view(4, 5, 3, 4), (3, 2)).flatten(1).sum(1)
        return self.second(y).view(4, -1) * pooled[:, None]

    return pair(way)


@report(PYTORCH, 158643, "ReLU in place after an activation that is read again")
def relu_in_place_read_again() -> Program:
    """The activation is read after the ReLU has changed it."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * 1
        z = functional.relu(y, inplace=True)
        return self.second(y + 0.5 * z)

    return pair(way)


@report(PYTORCH, 195422, "change in place through a dropout that is off")
def in_place_through_no_dropout() -> Program:
    """A dropout that is off returns its input itself, which is then doubled in place."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * 1
        z = functional.dropout(y, 0.5, training=False)
        z += z
        return self.second(torch.tanh(y))

    return pair(way)


@report(PYTORCH, 152425, "assignment to one element of an expanded tensor", allowed=EITHER)
def assignment_to_an_expanded_tensor() -> Program:
    """All elements of an expanded tensor are one: an assignment changes all of them."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().mean().expand(4)
        scale[-1] = 3
        return self.second(torch.tanh(self.first(x))) * scale

    return pair(way)


@report(PYTORCH, 97130, "tensors that share storage, changed in a nested function")
def shared_storage_in_a_nested_function() -> Program:
    """An inner function writes through one of three names of a storage."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * 1
        other, part = y.reshape(y.shape), y[0:2]

        def change() -> None:
            other[0] = 2

        change()
        return self.second(torch.tanh(part))

    return pair(way)


@report(PYTORCH, 93823, "`masked_fill` with a mask of fewer columns")
def masked_fill_of_rows() -> Program:
    """Rows are filled by a mask of one column."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x)).masked_fill(x[:, :1] > 0, 0.0)))


@report(
    PYTORCH,
    172693,
    "tensor with other strides taken as contiguous",
    allowed=EITHER,
    batches=lambda: images(torch.contiguous_format, torch.contiguous_format, torch.channels_last),
)
def contiguity_decides() -> Program:
    """The result is doubled where the input is not contiguous."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x.reshape(20, 12)))) * (1 if x.is_contiguous() else 2))
