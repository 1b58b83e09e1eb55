"""Lower bounds of a model's memory traffic and arithmetic."""

from __future__ import annotations

from dataclasses import replace

from crossfuse.models.spec import ModelSpec


def cost(spec: ModelSpec) -> tuple[int, int]:
    """Compulsory bytes and operations of a model, found on tensors without memory.

    Bytes are those of every weight and input read once and the result written once; operations are
    those of matrix products and convolutions, as `torch.utils.flop_counter` counts them.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from crossfuse.models.zoo import build

    # Classes of transformers look at values, which tensors without memory have not.
    built = build(replace(spec, source="torch"), "meta")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        result = built.module(*built.inputs)
    tensors = [*built.module.parameters(), *built.inputs, result]
    return sum(each.numel() * each.element_size() for each in tensors), counter.get_total_flops()
