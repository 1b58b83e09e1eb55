"""Models as text.

```
model:llama-3.2-1b,layers=2,tokens=16
model:llama-3-8b,layers=1,tokens=1,cache=1024,head=true
model:gpt2-small,layers=2,tokens=8,reduce=12,part=mlp
```
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from crossfuse.models.widths import MODELS, Convolutions, Widths
from crossfuse.workload.dtypes import float_type
from crossfuse.workload.refusal import one_of, read_extent, read_flag, refused
from crossfuse.workload.suites import pairs

#: What the text of a model begins with.
KIND = "model"
#: What is run of it.
PARTS = ("whole", "mlp")
#: Where its modules come from: written here, or classes of the package ``transformers``.
SOURCES = ("torch", "transformers")


@dataclass(frozen=True)
class ModelSpec:
    """A network of random weights to be run."""

    #: A key of `crossfuse.models.widths.MODELS`.
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
