"""The peer of `training`: GPT-2 in plain PyTorch, written to be as quick as eager mode allows.

Fused q, k, v projection, scaled_dot_product_attention, GELU as one call, tied head, no dropout. It is a stronger peer than the transformers model,
whose gelu_new is six separate passes.

Letters: B sequences, T tokens, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm and around a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        x = x + self.out(o.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with a tied head; returns the mean loss."""

    def __init__(self, vocab: int, positions: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """(B, T), (B, T) -> ()."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # (B*T, C) @ (C, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
