"""Decoders and encoders of the zoo: Llama, GPT-2, BERT, a Qwen-style mixture of experts."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from crossfuse.models.attention import Attention, Cache, Rotation
from crossfuse.models.feed_forward import Experts, Gated, Plain
from crossfuse.models.spec import ModelSpec
from crossfuse.models.widths import Widths


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
