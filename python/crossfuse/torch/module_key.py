"""Cache keys of whole modules, and what torch's guards on their programs leave out.

A key only has to lead to a program that is likely the right one: torch's guards, which are part of
the program, look at the module and its inputs at each call. So values that guards see may be left
out here; what no guard sees, such as releases and settings, must not.
"""

from __future__ import annotations

import builtins
import enum
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from sys import modules
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch

from crossfuse._compat import installed_version
from crossfuse.cache import content_key
from crossfuse.hardware import Device
from crossfuse.torch.graph_cache import Untold, argument_words, environment, value_words

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def module_key(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    named: Mapping[str, Any],
    target: Device,
    options: Sequence[Any],
) -> str:
    """Cache key of the program of a module for some inputs.

    Of the module count its classes and plain attributes, and shapes, strides, types and devices of
    parameters and buffers, not their values; `options` count by ``repr``. `Untold` is raised if an
    input has no words, a module has hooks, or inductor was given a user's own passes; and
    `EnvironmentRefused` without nvcc, whose release is part of the key.
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
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_told(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__qualname__}[{', '.join(map(_told, value))}]"
    if isinstance(value, torch.Tensor):
        return f"{value_words(value)} {value.requires_grad} {value.is_inference()}"
    return value_words(value)


def _torch_words() -> tuple[str, ...]:
    """Releases and settings that torch's compilers read, beside torch's own release."""
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
    """Describe all settings of a part of torch; `Untold` is raised for a user's own passes."""
    found = sorted(config.get_config_copy().items())
    return "\n".join(
        f"{name}: {sorted(map(repr, each)) if isinstance(each, set) else argument_words(each)}"
        for name, each in found
    )


def _cuda_words() -> tuple[Any, ...]:
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


# Functions, classes and modules that a compiled program depends on, by name and content.
#
# Dynamo compares these by their address, which another process does not have, so torch leaves such
# guards out of what it writes. What they said is written here in words, and read again before the
# program is taken: that the same names lead to functions of the same code.

#: Guards of addresses, which torch does not write.
_ADDRESSES = frozenset(
    {
        "CLASS_MATCH",
        "CLOSURE_MATCH",
        "DICT_VERSION",
        "FUNCTION_MATCH",
        "ID_MATCH",
        "MODULE_MATCH",
        "NN_MODULE",
        "WEAKREF_ALIVE",
    }
)
_NAMED = (BuiltinFunctionType, MethodDescriptorType, type)


class Identities:
    """Guards on addresses, recorded in words while torch makes its guards.

    `seen` maps expressions, which Python evaluates on the module and its globals, to what they lead
    to, in words; `untold` lists those that lead to what has no words.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.seen: dict[str, str] = {}
        self.untold: list[str] = []
        self._module = module

    def keep(self, guards: Sequence[Any]) -> list[bool]:
        """Say for each guard whether torch can write it; the others are recorded."""
        return [self._written(each) for each in guards]

    def _written(self, guard: Any) -> bool:
        if not _ADDRESSES.intersection((guard.guard_type, *guard.derived_guard_types)):
            return True
        name = guard.orig_guard.name
        name = str(name() if callable(name) else name)
        try:
            self.seen[name] = word(guard.value)
            if self.seen[name] != _word_of(name, self._module):
                self.untold.append(name)
        except Untold:
            self.untold.append(name)
        return False


def unchanged(seen: dict[str, str], module: torch.nn.Module) -> bool:
    """Whether names still lead to what they led to when a program was compiled."""
    try:
        return all(_word_of(name, module) == told for name, told in seen.items())
    except Untold:
        return False


def sources(names: Sequence[str]) -> dict[str, str]:
    """Hashes of modules' files, by module; torch's own are those of its release.

    `Untold` is raised if a module has no file.
    """
    ours = sorted({each for each in names if each.partition(".")[0] != "torch"})
    return {each: _file_hash(each) for each in ours}


def _file_hash(name: str) -> str:
    try:
        module = modules.get(name) or import_module(name)
        return sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
    except (ImportError, AttributeError, OSError):
        raise Untold from None


class _Globals(dict[str, Any]):
    """The globals of a function, with the names that Dynamo adds to them."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("__builtins_dict__"):
            return vars(builtins)
        if name.startswith("__import_"):
            return import_module(name.removeprefix("__import_").replace("_dot_", "."))
        raise KeyError(name)


def _word_of(name: str, module: torch.nn.Module) -> str:
    """Describe what a name of Dynamo, such as ``L['self'].act``, leads to now."""
    known = {"G": _Globals(module.forward.__globals__), "L": {"self": module}}
    try:
        value = eval(name, known)  # written by torch, or by us into the user's own cache
    except Exception:  # whatever it is, there is no such thing now
        raise Untold from None
    return word(value)


def word(value: Any, above: tuple[Any, ...] = ()) -> str:
    """Describe a function, class, module or constant, alike in every process.

    `above` are the functions that hold it, the outermost first: one that refers to itself is
    described by its place there. `Untold` is raised for what has no words.
    """
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, FunctionType):
        return _function_word(value, above)
    if isinstance(value, CodeType):
        return _hash(_code(value))
    if isinstance(value, _NAMED):
        return f"{type(value).__name__} {value.__module__}.{value.__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(value)
    if isinstance(value, dict):
        return word([list(each) for each in value.items()], above)
    if isinstance(value, list | tuple):
        return f"[{', '.join(word(each, above) for each in value)}]"
    return argument_words(value)


def _function_word(value: FunctionType, above: tuple[Any, ...]) -> str:
    name = f"{value.__module__}.{value.__qualname__}"
    if name.startswith("torch."):
        return name
    if value in above:
        return f"that of place {above.index(value)}"
    above = (*above, value)
    try:
        held = [each.cell_contents for each in value.__closure__ or ()]
    except ValueError:  # a cell that is empty yet
        raise Untold from None
    words = [word(each, above) for each in (held, value.__defaults__, value.__kwdefaults__)]
    return f"{name} {_hash([_code(value.__code__), *words])}"


def _hash(words: Any) -> str:
    return sha256(repr(words).encode()).hexdigest()


def _code(code: CodeType) -> list[Any]:
    """What a function does, without the numbers of its lines."""
    constants = [_code(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    # A set among them is told in an order that differs from process to process.
    told = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in constants]
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, told]
