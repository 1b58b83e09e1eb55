"""Models as text, and the extents of published ones.

```
model:llama-3.2-1b,layers=2,tokens=16
model:llama-3-8b,layers=1,tokens=1,cache=1024,head=true
model:gpt2-small,layers=2,tokens=8,reduce=12,part=mlp
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from crossfuse.workload.dtypes import float_type
from crossfuse.workload.spec import one_of, read_extent, read_flag, refused
from crossfuse.workload.suites import pairs

# Extents of published models.


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


# Specs.

#: What the text of a model begins with.
KIND = "model"
#: What is run of it.
PARTS = ("whole", "mlp")
#: Where its modules come from: written here, or classes of the package ``transformers``.
SOURCES = ("torch", "transformers")


@dataclass(frozen=True)
class ModelSpec:
    """A network of random weights to be run."""

    #: A key of `crossfuse.models.spec.MODELS`.
    name: str
    #: Layers, or blocks of each stage of a ResNet; 0 for the published number.
    layers: int = 0
    #: New tokens of each sequence; of a ResNet, pixels of a side.
    tokens: int = 16
    #: Sequences, or images.
    batch: int = 1
    #: Earlier tokens of each sequence, whose keys and values are inputs; decoders alone.
    cache: int = 0
    #: Of weights and activations.
    dtype: str = "bfloat16"
    #: Whether it begins with token ids and ends with logits of the last token; else it takes and
    #: gives what is between layers.
    head: bool = False
    #: Divisor of widths, heads and vocabulary, for machines without a GPU.
    reduce: int = 1
    #: One of `PARTS`: ``"mlp"`` is the feed-forward networks alone, one after another.
    part: str = "whole"
    #: One of `SOURCES`.
    source: str = "torch"

    def __post_init__(self) -> None:
        one_of(f"{KIND}:name", self.name, tuple(MODELS))
        one_of(f"{KIND}:part", self.part, PARTS)
        one_of(f"{KIND}:source", self.source, SOURCES)
        object.__setattr__(self, "dtype", float_type(self.dtype).name)
        for key in ("tokens", "batch", "reduce"):
            if getattr(self, key) < 1:
                raise self._refused(key, "a positive integer", f"write {key}=1, say")
        object.__setattr__(self, "layers", self.layers or MODELS[self.name].layers)
        if self.cache and self.full.family not in ("llama", "gpt2"):
            raise self._refused("cache", "0, since it has no cache", "leave cache out")
        if self.part == "mlp" and isinstance(self.full, Convolutions):
            raise self._refused("part", "whole, since it has no such networks", "leave part out")
        self.widths  # noqa: B018 -- refuses what does not divide

    @property
    def full(self) -> Widths | Convolutions:
        """The model's published extents."""
        return MODELS[self.name]

    @property
    def widths(self) -> Widths | Convolutions:
        """Extents as run; `WorkloadRefused` if they are no multiples of `reduce`."""
        try:
            return self.full.reduced(self.reduce)
        except ValueError as error:
            limit = "a divisor of heads, widths and vocabulary"
            raise self._refused("reduce", limit, str(error)) from None

    @property
    def rows(self) -> int:
        """Rows of each matrix product of a layer."""
        return self.batch * self.tokens

    def _refused(self, key: str, limit: str, instead: str) -> Exception:
        where = f"{KIND}:{self.name}:{key}"
        return refused("workload-model", where, getattr(self, key), limit, instead)

    def __str__(self) -> str:
        plain = {each.name: each.default for each in fields(self)}
        given = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        kept = {k: each for k, each in given.items() if each != plain[k] or k == "tokens"}
        words = [f"{key}={str(value).lower()}" for key, value in kept.items()]
        return f"{KIND}:{self.name}," + ",".join(words)


def names_one(text: str) -> bool:
    """Whether a text is meant to be a model."""
    return text.strip().partition(":")[0].strip() == KIND


def parse(text: str) -> ModelSpec:
    """Read a model from ``model:name,key=value,...``, so that ``parse(str(spec)) == spec``.

    Unknown models, keys and values raise `WorkloadRefused`, with the closest known name.
    """
    kind, _, body = text.strip().partition(":")
    one_of("kind", kind.strip(), (KIND,))
    name, _, rest = body.partition(",")
    one_of(f"{KIND}:name", name.strip(), tuple(MODELS))
    known = {each.name: each.type for each in fields(ModelSpec)[1:]}
    values: dict[str, Any] = {}
    for key, word in pairs(f"{KIND}:{name.strip()}", rest, tuple(known)).items():
        if known[key] == "int":
            values[key] = read_extent(KIND, key, word)
        elif known[key] == "bool":
            values[key] = read_flag(KIND, key, word)
        else:
            values[key] = word
    return ModelSpec(name.strip(), **values)
