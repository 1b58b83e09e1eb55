"""Attention of the zoo, with keys and values of earlier tokens as inputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from crossfuse.models.widths import Widths

#: Keys and values of earlier tokens, each [batch, heads of keys, tokens, width of a head].
Cache = tuple[torch.Tensor, torch.Tensor]


class Rotation(nn.Module):
    """Rotary position embedding, with its tables of angles computed in float32.

    Positions are `count` tokens from `first`, which is not 0 behind a cache.
    """

    def __init__(self, widths: Widths, first: int, count: int) -> None:
        super().__init__()
        depth = widths.head_dim
        exponents = torch.arange(0, depth, 2, dtype=torch.float32) / depth
        positions = torch.arange(first, first + count, dtype=torch.float32)
        angles = torch.outer(positions, widths.theta**-exponents).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate [batch, heads, tokens, width of a head]."""
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
        return x * self.cos.to(x.dtype) + turned * self.sin.to(x.dtype)


class Attention(nn.Module):
    """Attention between its projections, with grouped queries where there are fewer heads of keys.

    `out_bias` is of the last projection alone; None means as the others.
    """

    def __init__(
        self, widths: Widths, bias: bool, causal: bool, out_bias: bool | None = None
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = widths.heads, widths.kv_heads or widths.heads
        self.depth, self.causal = widths.head_dim, causal
        narrow = self.kv_heads * self.depth
        self.query = nn.Linear(widths.hidden, widths.hidden, bias=bias)
        self.key = nn.Linear(widths.hidden, narrow, bias=bias)
        self.value = nn.Linear(widths.hidden, narrow, bias=bias)
        out_bias = bias if out_bias is None else out_bias
        self.out = nn.Linear(widths.hidden, widths.hidden, bias=out_bias)

    def forward(
        self, x: torch.Tensor, rotate: nn.Module | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """Attend over [batch, tokens, hidden] and the cache; the result has the shape of `x`."""
        query = self._split(self.query(x), self.heads)
        key, value = (self._split(each(x), self.kv_heads) for each in (self.key, self.value))
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        if cache is not None:
            key, value = torch.cat((cache[0], key), 2), torch.cat((cache[1], value), 2)
        mask = self._mask(query.shape[2], key.shape[2], x.device) if cache is not None else None
        y = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=self.causal and cache is None,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def _mask(self, new: int, seen: int, device: torch.device) -> torch.Tensor | None:
        """Which tokens each new one attends to; None, for all, if it is the only one."""
        if new == 1 or not self.causal:
            return None
        return torch.ones(new, seen, dtype=torch.bool, device=device).tril(seen - new)

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.depth).transpose(1, 2)
