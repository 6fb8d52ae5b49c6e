"""Backward passes of the user, hooks of the first call, weights by two names, checkpoints, control flow (C1, C2, C10, C11, P13, P14)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.eager_twin import LINE, Batch, Case, Cases, Program, Run, adamw, at, check, plain_sgd, rows
from support.small_modules import Net, module_of, program_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

CASES = Cases()


class Again(torch.autograd.Function):
    """Runs a block under no_grad, and again with gradients in the backward pass, which fills `.grad` of the block's parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        """The block's result."""
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient of x."""
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Tiles(torch.autograd.Function):
    """A layer over pieces of its input, one after the other; the backward pass computes each again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        """The block's results side by side."""
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([block(piece) for piece in x.chunk(4)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient of x, piece by piece."""
        made = []
        for piece, part in zip(ctx.saved_tensors[0].chunk(4), gradient.chunk(4), strict=True):
            piece = piece.detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(ctx.block(piece), part)
            made.append(piece.grad)
        return torch.cat(made), None


class Reversible(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1), whose backward pass computes the inputs from the results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: nn.Module, g: nn.Module) -> torch.Tensor:
        """Both halves."""
        ctx.f, ctx.g = f, g
        first, second = x.chunk(2, 1)
        with torch.no_grad():
            first = first + f(second)
            second = second + g(first)
        y = torch.cat([first, second], 1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient of x."""
        first, second = ctx.saved_tensors[0].chunk(2, 1)
        of_first, of_second = gradient.chunk(2, 1)
        with torch.enable_grad():
            first = first.detach().requires_grad_()
            made = ctx.g(first)
            made.backward(of_second)
        with torch.no_grad():
            second = second - made
            of_first = of_first + first.grad
        with torch.enable_grad():
            second = second.detach().requires_grad_()
            made = ctx.f(second)
            made.backward(of_first)
        return torch.cat([of_first, of_second + second.grad], 1), None, None


def _block(size: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(size, size), nn.Tanh())


@CASES.add(optimizer=plain_sgd)
def c1_block_that_runs_again() -> Program:
    """Linear, a block that the backward pass runs again, Linear."""
    return program_of(lambda self, x: self.b(Again.apply(self.a(x), self.block)), block=_block())


@CASES.add(optimizer=adamw, minibatches=2, max_grad_norm=0.1)
def c1_block_that_runs_again_in_minibatches() -> Program:
    """The same in two minibatches, clipped."""
    return c1_block_that_runs_again()


@CASES.add(optimizer=plain_sgd)
def c1_block_that_is_used_directly_too() -> Program:
    """A block with a gradient that flows back, and one that its second use adds."""
    return program_of(lambda self, x: self.b(Again.apply(self.block(self.a(x)), self.block)), block=_block())


@CASES.add(optimizer=plain_sgd)
def c1_tiled_layer() -> Program:
    """A layer over tiles of its input: each adds to the same gradients."""
    return program_of(lambda self, x: self.b(Tiles.apply(self.a(x), self.block)), block=_block())


@CASES.add()
def c1_reversible_sequence() -> Program:
    """Two reversible blocks."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for f, g in zip(self.f, self.g, strict=True):
            y = Reversible.apply(y, f, g)
        return self.b(y)

    return program_of(forward, f=nn.ModuleList([_block(6), _block(6)]), g=nn.ModuleList([_block(6), _block(6)]))


def _tokens() -> list[Batch]:
    return [{"input_ids": torch.randint(0, 20, (2, 16), generator=torch.Generator().manual_seed(i))} for i in range(3)]


@CASES.add(batches=_tokens, ignore="reverse_attention|attention_seed|feed_forward_seed")
def c1_reformer() -> Program:
    """Reformer with local attention, whose reversible layers differentiate by themselves; its dropout is off."""
    hf = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "feed_forward_size": 16,
        "num_attention_heads": 2,
        "attention_head_size": 8,
        "vocab_size": 20,
        "axial_pos_embds": False,
    }
    dry = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0, "local_attn_chunk_length": 4, "max_position_embeddings": 16}
    config = hf.ReformerConfig(attn_layers=["local", "local"], is_decoder=True, eos_token_id=1, pad_token_id=0, use_cache=False, **sizes, **dry)
    return Program(hf.ReformerModel(config), lambda found, batch: found.last_hidden_state.square().mean() + found.last_hidden_state[..., 0].mean())


def _installs(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not self.ready:
        self.a.register_forward_hook(lambda module, args, y: y * 0.5)
        self.ready = True
    return self.b(torch.tanh(self.a(x)))


@CASES.add(batches=rows(8, 4, 2))
def c2_hook_of_the_first_call() -> Program:
    """A hook that the first call installs, and three shapes."""
    return program_of(_installs, ready=False)


@CASES.add(
    batches=rows(8, 8, 4),
    before=[
        at(1, lambda run: run.note(run.evaluate(x=torch.ones(8, 12, dtype=torch.float64)))),
        at(3, lambda run: run.note(run.predict(x=torch.ones(3, 12, dtype=torch.float64)))),
        at(5, lambda run: run.note(run.predict(x=torch.ones(2, 12, dtype=torch.float64)))),
    ],
)
def c2_hook_before_evaluation() -> Program:
    """The same with evaluations and predictions between the steps."""
    return program_of(_installs, ready=False)


@CASES.add(batches=rows(8, 4, 2))
def c2_tables_that_forward_fills() -> Program:
    """A list, a dictionary and a set that the first call fills, while a flag says so."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.factors.append(0.5)
            self.by_name["shift"] = len(self.by_name) + 1.0
            self.names.add(len(self.names))
            self.ready = True
        return self.b(torch.tanh(self.a(x))) * sum(self.factors) + self.by_name["shift"] * len(self.names)

    return program_of(forward, ready=False, factors=[], by_name={}, names=set())


@CASES.add(
    batches=lambda: [{"input_ids": torch.randint(0, 20, (2, count), generator=torch.Generator().manual_seed(count))} for count in (8, 6, 4)],
    ignore="config|_is_hooked|_output_capturing",
)
def c2_bert_with_hidden_states() -> Program:
    """BERT with `output_hidden_states`, a weighted sum of them as loss, and three shapes."""
    hf = pytest.importorskip("transformers")
    config = hf.BertConfig(
        **{
            "vocab_size": 20,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "max_position_embeddings": 8,
        },
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "output_hidden_states": True},
    )

    def loss(found: Any, batch: Batch) -> torch.Tensor:
        return sum(state[..., :5].square().mean() / (i + 1) + state[..., 0].mean() for i, state in enumerate(found.hidden_states))

    return Program(hf.BertModel(config, add_pooling_layer=False), loss)


@CASES.add()
def c10_list_of_weights() -> Program:
    """`self.ws = [self.a.weight]`, for a penalty in forward."""
    module = module_of(lambda self, x: self.b(torch.tanh(self.a(x))) + sum(weight.square().sum() for weight in self.ws) * 0.01)
    module.ws = [module.a.weight]  # type: ignore[assignment, union-attr]
    return Program(module)


@CASES.add()
def c10_list_in_the_loss() -> Program:
    """A loss that closes over the parameters."""
    module = Net()
    penalised = [parameter for name, parameter in module.named_parameters() if name.endswith("weight")]
    return Program(module, lambda y, batch: y.square().mean() + 0.01 * sum(weight.abs().sum() for weight in penalised))


def _scale(place: Callable[[nn.Module], Any]) -> nn.Module:
    module = module_of(lambda self, x: Net.forward(self, x) * self.held[0].exp())
    module.logit_scale = nn.Parameter(torch.tensor(0.3))
    module.held = place(module)
    return module


@CASES.add()
def c10_parameter_of_one_element_in_a_list() -> Program:
    """`logit_scale`, a number, kept in a list too."""
    return Program(_scale(lambda module: [module.logit_scale]))


@CASES.add()
def c10_parameter_of_one_element_in_a_closure() -> Program:
    """A gate of one element that the loss closes over."""
    module = Net()
    gate = module.gate = nn.Parameter(torch.ones(1))
    return Program(module, lambda y, batch: (y * gate).square().mean() + gate.square().sum())


@CASES.add(allowed="equal refused", words=LINE)
def c11_generator_seeded_in_forward() -> Program:
    """A generator that forward makes and seeds: the same numbers in each step."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(8, 12, generator=torch.Generator().manual_seed(3), dtype=x.dtype) < 0.5
        return self.b(torch.tanh(self.a(x)) * mask)

    return program_of(forward)


def _leave_gradients(run: Run) -> None:
    run.module(torch.ones(8, 12, dtype=torch.float64)).square().mean().backward()


@CASES.add(allowed="refused", words=r"grad.*zero_grad|zero_grad.*grad", setup=[_leave_gradients])
def c11_gradients_from_before() -> Program:
    """Gradients in `.grad` from before the session are refused, with the way to clear them."""
    return Program(Net())


@CASES.add()
def p13_reentrant_checkpoint() -> Program:
    """`checkpoint(use_reentrant=True)`."""
    return program_of(lambda self, x: self.b(checkpoint(self.block, self.a(x), use_reentrant=True)), block=_block())


@CASES.add(minibatches=2)
def p13_reentrant_checkpoint_of_two_blocks() -> Program:
    """`checkpoint_sequential(use_reentrant=True)`."""
    return program_of(
        lambda self, x: self.b(checkpoint_sequential(self.blocks, 2, self.a(x), use_reentrant=True)), blocks=nn.Sequential(_block(), _block())
    )


@CASES.add(setup=[lambda run: run.module.gradient_checkpointing_enable({"use_reentrant": True})], batches=_tokens)
def p13_gradient_checkpointing_of_transformers() -> Program:
    """`gradient_checkpointing_enable` with the re-entrant kind."""
    hf = pytest.importorskip("transformers")
    dry = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
    config = hf.GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **dry)
    return Program(hf.GPT2Model(config), lambda found, batch: found.last_hidden_state[..., :5].square().mean())


def _cond(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    y = torch.cond(y.sum() > self.bound, torch.tanh, torch.sigmoid, (y,))
    return self.b(y)


@CASES.add()
def p14_cond_on_a_prediction() -> Program:
    """`torch.cond` whose branch the values of each batch decide."""
    return program_of(_cond, bound=0.0)


@CASES.add()
def p14_cond_on_a_python_value() -> Program:
    """`torch.cond` whose predicate is a bool."""
    return program_of(lambda self, x: self.b(torch.cond(x.shape[0] > 4, torch.tanh, torch.sigmoid, (self.a(x),))))


@CASES.add(allowed="equal refused", words=LINE)
def p14_while_loop() -> Program:
    """`while_loop` over a constant count, outside autograd."""
    from torch._higher_order_ops.while_loop import while_loop

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            _, factor = while_loop(lambda i, f: i < 3, lambda i, f: (i + 1, f * 0.9), (torch.tensor(0), torch.ones(4, dtype=x.dtype)))
        return Net.forward(self, x) * factor

    return program_of(forward)


@CASES.add(allowed="equal refused", words=LINE)
def p14_scan() -> Program:
    """`scan`, a recurrence along the first axis."""
    from torch._higher_order_ops.scan import scan

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        _, states = scan(lambda carry, row: (carry * 0.5 + row, carry * 0.5 + row.tanh()), torch.zeros_like(y[0]), y)
        return self.b(states)

    return program_of(forward)


@CASES.add(allowed="equal refused", words=LINE)
def p14_map() -> Program:
    """`map` of a function along the first axis."""
    from torch._higher_order_ops.map import map as map_

    return program_of(lambda self, x: self.b(map_(lambda row: functional.tanh(row) * row, self.a(x))))


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_eagers(case: Case) -> None:
    """Losses, gradients, weights and what the module keeps are those of eager PyTorch."""
    check(case)
