"""The zoo's models as classes of the package ``transformers``, of the same extents.

They are what people run: the same formulas, written by others. Weights are random, and nothing is
downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.models.spec import ModelSpec
from crossfuse.models.widths import Widths
from crossfuse.workload.refusal import refused


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
