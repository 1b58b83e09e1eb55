"""Extents of published models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class Widths:
    """Extents of a transformer."""

    #: Which module computes it: ``llama``, ``gpt2``, ``bert``, ``qwen-moe``.
    family: str
    layers: int
    hidden: int
    heads: int
    #: Width inside the feed-forward networks.
    intermediate: int
    vocabulary: int
    #: Heads of keys and values; 0 for as many as there are heads.
    kv_heads: int = 0
    #: Experts of a layer, those that each token takes, and the width inside one; 0 without.
    experts: int = 0
    top_k: int = 0
    expert: int = 0
    #: Base of the rotary frequencies; 0 without.
    theta: float = 0.0

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def reduced(self, by: int) -> Widths:
        """The same model with all widths divided by `by`, but for the width of a head.

        At least one head of keys, and as many experts as a token takes, remain. Heads or widths
        that are no multiples raise `ValueError`.
        """
        for name in ("heads", "intermediate", "expert"):
            if getattr(self, name) % by:
                raise ValueError(f"its {name}, {getattr(self, name)}, are no multiple of it")
        return replace(
            self,
            hidden=self.hidden // by,
            heads=self.heads // by,
            intermediate=self.intermediate // by,
            vocabulary=max(1, self.vocabulary // by),
            kv_heads=max(1, self.kv_heads // by) if self.kv_heads else 0,
            experts=max(self.top_k, self.experts // by),
            expert=self.expert // by,
        )


@dataclass(frozen=True)
class Convolutions:
    """Extents of a residual network of convolutions."""

    #: Blocks of each stage.
    layers: int
    #: Of each stage, in the middle of a block; outside there are four times as many.
    channels: tuple[int, ...]
    #: Logits.
    classes: int
    #: Which module computes it.
    family: str = "resnet"

    def reduced(self, by: int) -> Convolutions:
        """The same network with channels divided by `by`; `ValueError` if they are no multiples."""
        if any(each % by for each in self.channels):
            raise ValueError(f"its channels, {self.channels}, are no multiples of it")
        return replace(self, channels=tuple(each // by for each in self.channels))


#: By name. Extents are those of the configurations that the models were published with.
MODELS: Mapping[str, Widths | Convolutions] = MappingProxyType(
    {
        "llama-3.2-1b": Widths("llama", 16, 2048, 32, 8192, 128256, kv_heads=8, theta=500000.0),
        "llama-3-8b": Widths("llama", 32, 4096, 32, 14336, 128256, kv_heads=8, theta=500000.0),
        "bert-base": Widths("bert", 12, 768, 12, 3072, 30522),
        "gpt2-small": Widths("gpt2", 12, 768, 12, 3072, 50257),
        "qwen-moe": Widths(
            *("qwen-moe", 24, 2048, 16, 5632, 151936),
            kv_heads=16,
            experts=60,
            top_k=4,
            expert=1408,
            theta=1000000.0,
        ),
        "resnet-small": Convolutions(2, (64, 128), 1000),
    }
)
