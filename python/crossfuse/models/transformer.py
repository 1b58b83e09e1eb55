"""Decoders and encoders of the zoo: Llama, GPT-2, BERT, a Qwen-style mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from crossfuse.models.spec import ModelSpec, Widths

# Attention of the zoo, with keys and values of earlier tokens as inputs.

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


# Feed-forward networks of the zoo.


class Gated(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the feed-forward network of Llama and its kind."""

    def __init__(self, hidden: int, inside: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inside, bias=False)
        self.up = nn.Linear(hidden, inside, bias=False)
        self.down = nn.Linear(inside, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to rows of `hidden` elements."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    """``contract(act(expand(x)))`` with biases, the feed-forward network of BERT and GPT-2."""

    def __init__(
        self, hidden: int, inside: int, act: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(hidden, inside), nn.Linear(inside, hidden)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to rows of `hidden` elements."""
        return self.contract(self.act(self.expand(x)))


class Experts(nn.Module):
    """A shared gated network beside routed ones, as in Qwen's mixtures of experts.

    Every expert computes every token, and the router's weights choose: shapes are then fixed, as a
    captured graph needs them, at the cost of the products of experts that are not chosen. `shared`
    and `inside` are the widths inside the shared network and inside one expert.
    """

    def __init__(self, hidden: int, shared: int, inside: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.shared_gate = nn.Linear(hidden, 1, bias=False)
        self.shared = Gated(hidden, shared)
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * inside))
        self.down = nn.Parameter(torch.empty(experts, inside, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the mixture to [batch, tokens, hidden]."""
        rows = x.reshape(-1, x.shape[-1])
        chance = torch.softmax(self.router(rows), dim=-1)
        best, place = torch.topk(chance, self.top_k, dim=-1)
        weight = torch.zeros_like(chance).scatter(1, place, best)
        given = rows.expand(self.down.shape[0], *rows.shape)
        gate, up = torch.bmm(given, self.gate_up).chunk(2, dim=-1)
        each = torch.bmm(functional.silu(gate) * up, self.down)
        routed = (each * weight.t().unsqueeze(-1)).sum(0)
        shared = torch.sigmoid(self.shared_gate(rows)) * self.shared(rows)
        return (routed + shared).view(x.shape)


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual.

    `norms` belong to the two in this order: in front of each with `norm_first`, else behind its
    residual.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        norm_first: bool,
    ) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm_first = attention, mlp, norm_first
        self.attention_norm, self.mlp_norm = norms

    def forward(
        self, x: torch.Tensor, rotate: nn.Module | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """Apply the layer to [batch, tokens, hidden]; the result has the same shape."""
        if self.norm_first:
            x = x + self.attention(self.attention_norm(x), rotate, cache)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, rotate, cache))
        return self.mlp_norm(x + self.mlp(x))


class Transformer(nn.Module):
    """Layers of one family; with a head, token ids go in and logits of the last token come out."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        widths = spec.widths
        assert isinstance(widths, Widths)
        self.layers = nn.ModuleList(LAYERS[widths.family](widths) for _ in range(spec.layers))
        self.rotate = Rotation(widths, spec.cache, spec.tokens) if widths.theta else None
        self.embed = nn.Embedding(widths.vocabulary, widths.hidden) if spec.head else None
        if spec.head and self.rotate is None:
            self.places = nn.Parameter(torch.empty(spec.tokens, widths.hidden))
        self.norm = _norm(widths) if widths.family != "bert" else nn.Identity()

    @property
    def mlps(self) -> list[nn.Module]:
        """The feed-forward networks, first layer first."""
        return [each.mlp for each in self.layers]

    def forward(self, x: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        """Apply the model to ids [batch, tokens] or rows [batch, tokens, hidden].

        `cache` holds keys and values of earlier tokens, layer by layer.
        """
        if self.embed is not None:
            x = self.embed(x)
            x = x if self.rotate is not None else x + self.places
        for number, layer in enumerate(self.layers):
            past = (cache[2 * number], cache[2 * number + 1]) if cache else None
            x = layer(x, self.rotate, past)
        x = self.norm(x)
        # Weights of the embedding are those of the logits too.
        return x if self.embed is None else functional.linear(x[:, -1], self.embed.weight)


def _norm(widths: Widths) -> nn.Module:
    if widths.theta:
        return nn.RMSNorm(widths.hidden, eps=1e-5)
    return nn.LayerNorm(widths.hidden, eps=1e-5)


def _llama(widths: Widths) -> Layer:
    attention = Attention(widths, bias=False, causal=True)
    mlp = Gated(widths.hidden, widths.intermediate)
    return Layer(attention, mlp, (_norm(widths), _norm(widths)), norm_first=True)


def _qwen_moe(widths: Widths) -> Layer:
    attention = Attention(widths, bias=True, causal=True, out_bias=False)
    extents = (widths.hidden, widths.intermediate, widths.expert, widths.experts, widths.top_k)
    return Layer(attention, Experts(*extents), (_norm(widths), _norm(widths)), norm_first=True)


def _gpt2(widths: Widths) -> Layer:
    attention = Attention(widths, bias=True, causal=True)
    act = partial(functional.gelu, approximate="tanh")
    mlp = Plain(widths.hidden, widths.intermediate, act)
    return Layer(attention, mlp, (_norm(widths), _norm(widths)), norm_first=True)


def _bert(widths: Widths) -> Layer:
    attention = Attention(widths, bias=True, causal=False)
    mlp = Plain(widths.hidden, widths.intermediate, functional.gelu)
    return Layer(attention, mlp, (_norm(widths), _norm(widths)), norm_first=False)


#: Layers by family.
LAYERS = {"llama": _llama, "gpt2": _gpt2, "bert": _bert, "qwen-moe": _qwen_moe}
