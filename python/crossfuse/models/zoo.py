"""Construction of a spec's module, with random weights and inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.models.spec import Convolutions, ModelSpec, Widths
from crossfuse.models.transformer import Transformer
from crossfuse.workload.spec import refused

# The zoo's models as classes of the package ``transformers``, of the same extents.
#
# They are what people run: the same formulas, written by others. Weights are random, and nothing is
# downloaded.


class Layers(nn.Module):
    """Adapter of a ``transformers`` model that takes rows (``inputs_embeds``) and gives rows.

    `mlps` are its feed-forward networks; `options` go to every call.
    """

    def __init__(self, model: nn.Module, mlps: list[nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.options, self._mlps = model, options, [mlps]

    @property
    def mlps(self) -> list[nn.Module]:
        """The feed-forward networks, first layer first."""
        return self._mlps[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the model to rows [batch, tokens, hidden]."""
        result: torch.Tensor = self.model(inputs_embeds=x, **self.options).last_hidden_state
        return result


def from_transformers(spec: ModelSpec) -> nn.Module:
    """Make a model with random weights from the classes of ``transformers``.

    It takes and gives rows, without a cache: other specs raise `WorkloadRefused`, a missing package
    `EnvironmentRefused`.
    """
    widths = spec.widths
    if spec.head or spec.cache or not isinstance(widths, Widths) or widths.family not in _MAKE:
        families = ", ".join(_MAKE)
        limit = f"rows in and out, no cache, and families {families}"
        raise refused("models", str(spec), "source=transformers", limit, "leave source out")
    try:
        import transformers
    except ImportError:
        raise refuse(
            EnvironmentRefused,
            "models",
            "transformers",
            found="no such package",
            limit="transformers 5 or later for source=transformers",
            instead="run pip install transformers, or leave source out",
        ) from None
    return _MAKE[widths.family](transformers, widths, spec)


def _llama(transformers: Any, widths: Widths, spec: ModelSpec) -> Layers:
    config = transformers.LlamaConfig(
        **_common(widths, spec),
        num_key_value_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": widths.theta},
        attn_implementation="sdpa",
    )
    model = transformers.LlamaModel(config)
    return Layers(model, [each.mlp for each in model.layers], {"use_cache": False})


def _bert(transformers: Any, widths: Widths, spec: ModelSpec) -> Layers:
    config = transformers.BertConfig(**_common(widths, spec), attn_implementation="sdpa")
    model = transformers.BertModel(config, add_pooling_layer=False)
    layers = model.encoder.layer
    # Its classes store the two products in two modules.
    mlps: list[nn.Module] = [nn.Sequential(e.intermediate, e.output.dense) for e in layers]
    return Layers(model, mlps, {})


def _gpt2(transformers: Any, widths: Widths, spec: ModelSpec) -> Layers:
    config = transformers.GPT2Config(
        n_embd=widths.hidden,
        n_layer=spec.layers,
        n_head=widths.heads,
        n_inner=widths.intermediate,
        vocab_size=widths.vocabulary,
        n_positions=max(1024, spec.tokens),
        attn_implementation="sdpa",
    )
    model = transformers.GPT2Model(config)
    return Layers(model, [each.mlp for each in model.h], {"use_cache": False})


def _common(widths: Widths, spec: ModelSpec) -> dict[str, Any]:
    return {
        "hidden_size": widths.hidden,
        "intermediate_size": widths.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": widths.heads,
        "vocab_size": widths.vocabulary,
        "max_position_embeddings": max(512, spec.tokens),
    }


_MAKE = {"llama": _llama, "bert": _bert, "gpt2": _gpt2}


# Modules of specs.

# A residual network of bottleneck blocks, NCHW, with its norms in evaluation mode.


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with norms between them, and a residual."""

    def __init__(self, outside: int, inside: int, given: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(given, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU()),
            nn.Conv2d(inside, inside, 3, padding=1, bias=False),
            *(nn.BatchNorm2d(inside), nn.ReLU()),
            *(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        same = given == outside
        self.skip = nn.Identity() if same else nn.Conv2d(given, outside, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to [batch, given, height, width]."""
        return torch.relu(self.path(x) + self.skip(x))


class ResNet(nn.Module):
    """Stages of blocks, halved between; with a head, logits of the mean over pixels."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        widths = spec.widths
        assert isinstance(widths, Convolutions)
        given, stages = widths.channels[0], []
        for number, inside in enumerate(widths.channels):
            blocks: list[nn.Module] = [nn.MaxPool2d(2)] if number else []
            for _ in range(spec.layers):
                blocks.append(Bottleneck(4 * inside, inside, given))
                given = 4 * inside
            stages.append(nn.Sequential(*blocks))
        self.stem = nn.Conv2d(3, widths.channels[0], 3, padding=1, bias=False)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(given, widths.classes) if spec.head else None

    @property
    def mlps(self) -> list[nn.Module]:
        """Empty, since convolutional networks have no feed-forward ones."""
        return []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to images [batch, 3, side, side]."""
        x = self.stages(self.stem(x))
        return x if self.head is None else self.head(x.mean((2, 3)))


@dataclass(frozen=True)
class Built:
    """A model with random weights, and the inputs that it is called with."""

    spec: ModelSpec
    #: In evaluation mode, without gradients.
    module: nn.Module
    #: Positional.
    inputs: tuple[torch.Tensor, ...]

    def exact(self) -> torch.Tensor:
        """The result in float64 with the same weights; the module is restored afterwards."""
        dtype = getattr(torch, self.spec.dtype)
        given = [each.double() if each.is_floating_point() else each for each in self.inputs]
        tables = {name: each.clone() for name, each in self.module.named_buffers()}
        try:
            with torch.no_grad():
                result: torch.Tensor = self.module.double()(*given)
        finally:
            # Every value of a narrow type is one of float64, so that nothing is lost on the way.
            self.module.to(dtype)
            for name, each in self.module.named_buffers():
                each.data = tables[name]
        return result


def build(spec: ModelSpec, device: str | torch.device = "cpu", seed: int = 0) -> Built:
    """Make a model with random weights, and inputs for it.

    Weights have a variance of one over the number of terms of a sum, so that every layer changes
    its input about as much as the residual does, and a mistake in one shows at the end. The device
    ``"meta"`` gives extents alone; equal seeds give equal values on one device. Specs of
    ``transformers`` raise `EnvironmentRefused` without that package.
    """
    with torch.device(device), _default(spec.dtype):
        module = _module(spec)
    generator = None
    if torch.device(device).type != "meta":
        generator = torch.Generator(device).manual_seed(seed)
        _fill(module, generator)
    module = module.eval().requires_grad_(False)
    return Built(spec, module, _inputs(spec, device, generator))


def _module(spec: ModelSpec) -> nn.Module:
    if spec.source == "transformers":
        from crossfuse.models.zoo import from_transformers

        module = from_transformers(spec)
    elif isinstance(spec.widths, Convolutions):
        module = ResNet(spec)
    else:
        module = Transformer(spec)
    return nn.Sequential(*module.mlps) if spec.part == "mlp" else module


def _inputs(
    spec: ModelSpec, device: str | torch.device, generator: torch.Generator | None
) -> tuple[torch.Tensor, ...]:
    dtype, widths = getattr(torch, spec.dtype), spec.widths
    options = {"device": device, "generator": generator}
    if isinstance(widths, Convolutions):
        return (torch.randn(spec.batch, 3, spec.tokens, spec.tokens, dtype=dtype, **options),)
    shape = (spec.batch, spec.tokens)
    if spec.part == "mlp":
        return (torch.randn(*shape, widths.hidden, dtype=dtype, **options),)
    past = (spec.batch, widths.kv_heads or widths.heads, spec.cache, widths.head_dim)
    cache = [
        torch.randn(*past, dtype=dtype, **options)
        for _ in range(2 * spec.layers if spec.cache else 0)
    ]
    if spec.head:
        return (torch.randint(widths.vocabulary, shape, **options), *cache)
    return (torch.randn(*shape, widths.hidden, dtype=dtype, **options), *cache)


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, each in module.named_parameters():
            if each.dim() < 2:
                centre = 1.0 if _is_norm(module, name) and name.endswith("weight") else 0.0
                each.normal_(centre, 0.1, generator=generator)
            else:
                # Stacked weights of experts are [expert, terms, results], others [results, terms].
                terms = each.shape[1] if each.dim() == 3 else each[0].numel()
                each.normal_(0, terms**-0.5, generator=generator)


def _is_norm(module: nn.Module, name: str) -> bool:
    owner = module.get_submodule(name.rpartition(".")[0])
    return "Norm" in type(owner).__name__


@contextmanager
def _default(dtype: str) -> Iterator[None]:
    """Let new tensors be of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Lower bounds of a model's memory traffic and arithmetic.


def cost(spec: ModelSpec) -> tuple[int, int]:
    """Compulsory bytes and operations of a model, found on tensors without memory.

    Bytes are those of every weight and input read once and the result written once; operations are
    those of matrix products and convolutions, as `torch.utils.flop_counter` counts them.
    """
    from torch.utils.flop_counter import FlopCounterMode

    # Classes of transformers look at values, which tensors without memory have not.
    built = build(replace(spec, source="torch"), "meta")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        result = built.module(*built.inputs)
    tensors = [*built.module.parameters(), *built.inputs, result]
    return sum(each.numel() * each.element_size() for each in tensors), counter.get_total_flops()
