"""What the program of a whole module is kept under.

A key only has to lead to a program that is likely the right one: torch's guards, which are part of
the program, look at the module and its inputs at each call. So values that guards see may be left
out here; what no guard sees, such as releases and settings, must not.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from crossfuse._compat import installed_version
from crossfuse.cache.keys import content_key
from crossfuse.hardware import Device
from crossfuse.torch.words import Untold, argument_words, environment, value_words

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def module_key(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    named: Mapping[str, Any],
    target: Device,
    options: Sequence[Any],
) -> str:
    """What the program of a module for some inputs is kept under.

    Parameters
    ----------
    module : torch.nn.Module
        Its classes, plain attributes, and its parameters' and buffers' shapes, strides, types and
        devices count, their values do not.
    inputs, named : Sequence[Any], Mapping[str, Any]
        What it is called with.
    target : Device
        What kernels are for.
    options : Sequence[Any]
        All that the backend was told, by ``repr``.

    Returns
    -------
    str
        The key.

    Raises
    ------
    Untold
        If an input has no words, a module has hooks, or inductor was given passes of somebody else.
    EnvironmentRefused
        Without nvcc, whose release is part of it.
    """
    words = [*_module_words(module), _told(inputs), _told(dict(named))]
    return content_key(
        target, "ahead", *environment(), *_torch_words(), *map(repr, options), "\n".join(words)
    )


def _module_words(module: torch.nn.Module) -> Iterator[str]:
    first: dict[int, str] = {}
    for name, each in module.named_modules(remove_duplicate=False):
        if each._forward_hooks or each._forward_pre_hooks:
            raise Untold("it has hooks")
        kind = type(each)
        yield f"{name}: {kind.__module__}.{kind.__qualname__} {_plain(each)}"
        tensors = (*each._parameters.items(), *each._buffers.items())
        for own, value in tensors:
            if value is not None:
                # Weights that are one tensor may be computed with as one.
                same = first.setdefault(id(value), f"{name}.{own}")
                yield f"{name}.{own}: {same} {value_words(value)} {value.requires_grad}"


def _plain(module: torch.nn.Module) -> str:
    values = {key: each for key, each in vars(module).items() if isinstance(each, _PLAIN)}
    return repr(sorted(values.items()))


def _told(value: Any) -> str:
    """Inputs in words."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_told(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__qualname__}[{', '.join(map(_told, value))}]"
    if isinstance(value, torch.Tensor):
        return f"{value_words(value)} {value.requires_grad} {value.is_inference()}"
    return value_words(value)


def _torch_words() -> tuple[str, ...]:
    """Releases and settings that torch's compilers look at, beside its own release."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    modes = (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        [(each, torch.is_autocast_enabled(each)) for each in ("cpu", "cuda")],
        [(each, torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")],
        *_cuda_words(),
    )
    python = (sys.version, platform.platform(), torch.backends.cpu.get_cpu_capability())
    settings = map(_settings, (dynamo, functorch, inductor))
    return (*settings, repr(modes), repr(python), str(installed_version("triton")))


def _settings(config: Any) -> str:
    """All settings of a part of torch; passes of somebody else's have no words."""
    found = sorted(config.get_config_copy().items())
    return "\n".join(
        f"{name}: {sorted(map(repr, each)) if isinstance(each, set) else argument_words(each)}"
        for name, each in found
    )


def _cuda_words() -> tuple[Any, ...]:
    """The GPU, and settings of its libraries."""
    matmul = torch.backends.cuda.matmul
    settings = (
        # The older of these two names refuses to say what was set by the other.
        matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.version.cuda,
    )
    if not torch.cuda.is_available():
        return settings
    found = torch.cuda.get_device_properties()
    gpu = (found.name, found.major, found.minor, found.multi_processor_count, found.total_memory)
    return (*settings, *gpu, torch.cuda.current_device())
