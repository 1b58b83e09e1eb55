"""Programs of whole modules: none that is of another time is taken.

That another process takes them is tested beside its other starts, in ``test_second_start``.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

nn, fx = torch.nn, torch.fx

from crossfuse import cache  # noqa: E402
from crossfuse.cache import kept  # noqa: E402
from crossfuse.errors import ArtefactRefused  # noqa: E402
from crossfuse.hardware import device  # noqa: E402
from crossfuse.torch import (  # noqa: E402
    Ahead,
    Backend,
    compile_ahead,
    inductor,
    inductor_artifact,
)
from crossfuse.torch.graph_cache import Untold  # noqa: E402
from crossfuse.torch.module_key import module_key, word  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("fresh_caches"),
    pytest.mark.skipif(
        not hasattr(torch.compiler, "load_compiled_function"), reason="torch writes no programs"
    ),
]
H100 = device("nvidia-h100")
BUILD = Backend(always=True, cpu="build")


#: A model, and what it reads from another file; inductor writes no kernels for these operators.
MODEL = """
import torch
from torch import nn
import {name}_parts as parts
from {name}_parts import ACT

POWER = 2


class Model(nn.Module):
    def __init__(self, act=torch.linalg.inv):
        super().__init__()
        self.layer, self.act, self.wide = nn.Linear(8, 8, bias=False).double(), act, True

    def forward(self, x, *, more=None):
        y = ACT(self.act(self.layer(x)))
        y = y if more is None else y @ more
        return parts.last(torch.matrix_power(y, POWER) if self.wide else y)
"""
PARTS = """
import torch

ACT = torch.linalg.inv


def last(x):
    return x @ x.mT
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Any:
    """The model above, from files of its own."""
    name = f"ahead_{abs(hash(request.node.name))}"
    for suffix, text in (("", MODEL), ("_parts", PARTS)):
        (tmp_path / f"{name}{suffix}.py").write_text(text.format(name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(name)
    for each in (name, f"{name}_parts"):
        sys.modules.pop(each, None)


def square() -> Any:
    return torch.eye(8).double() + torch.rand(8, 8) / 16


def _ahead(module: Any, x: Any, **named: Any) -> Ahead:
    """The module compiled ahead, whose results are tested."""
    torch.compiler.reset()
    with torch.inference_mode():
        made = compile_ahead(module, (x,), named)
        assert torch.allclose(made(x, **named), module(x, **named), atol=1e-5)
    return made


@pytest.mark.slow
def test_a_program_of_another_time_is_not_taken(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = model.Model().eval(), square()
    assert not _ahead(module, x).found
    assert _ahead(module, square()).found
    assert _ahead(model.Model().eval(), x).found  # of other weights

    def renewed() -> bool:
        return not _ahead(model.Model().eval(), x).found and _ahead(model.Model().eval(), x).found

    # What no guard of torch sees in another process: functions of the same name, or of another.
    model.ACT = torch.matrix_exp
    assert renewed()
    model.parts.last = lambda x: x.mT @ x
    assert renewed()
    assert not _ahead(model.Model(torch.matrix_exp).eval(), x).found
    model.POWER = 3  # a guard that torch writes
    assert renewed()
    (path,) = tmp_path.glob("ahead_*[0-9].py")
    path.write_text(path.read_text() + "# edited\n")
    assert renewed()
    with monkeypatch.context() as patch:
        patch.setattr(inductor_artifact, "package_hash", lambda: "edited")
        assert renewed()
    assert renewed()
    for each in kept():
        each.path.write_bytes(each.path.read_bytes()[:-1])
    assert renewed()


def test_calls_that_guards_refuse_are_compiled_as_usual(model: Any) -> None:
    module, x = model.Model().eval(), square()
    _ahead(module, x)
    made = _ahead(module, x)
    assert made.found and "usual" not in vars(made)
    with torch.inference_mode():

        def right(*given: Any, **named: Any) -> bool:
            return bool(torch.allclose(made(*given, **named), module(*given, **named), atol=1e-5))

        model.POWER = 3
        assert right(x) and "usual" in vars(made)
        module.wide = False
        assert right(x)
        assert right(torch.stack([x, x])) and right(x, more=x)
        with pytest.raises(TypeError):
            made(x, x, x)
    named = {"more": x}
    assert not _ahead(OfList(), [x, x]).reason
    module = model.Model().eval()
    assert not _ahead(module, x, **named).found and _ahead(module, x, **named).found


class OfList(nn.Module):
    def forward(self, given: list[Any]) -> Any:
        return given[0] @ given[1]


class Breaking(nn.Module):
    def forward(self, x: Any) -> Any:
        torch._dynamo.graph_break()
        return x + 1


def _hooked() -> Any:
    module = nn.ReLU()
    module.register_forward_pre_hook(lambda module, given: None)
    return module


@pytest.mark.parametrize(
    ("make", "given", "reason"),
    [
        (_hooked, (torch.ones(2),), "it has hooks"),
        (Breaking, (torch.ones(2),), "Unsupported: "),
        (nn.ReLU, (), "its inputs are on 0 devices"),
        (nn.ReLU, (torch.eye(2).to_sparse(),), "a part of it has no words"),
    ],
)
def test_why_a_module_is_compiled_at_its_first_call(
    make: Callable[[], Any], given: tuple[Any, ...], reason: str
) -> None:
    with pytest.warns(UserWarning, match=f"compiles a module at its first call: {reason}"):
        made = compile_ahead(make(), given)
    assert made.reason.startswith(reason) and not made.found
    assert [each for each in kept() if each.kind == "ahead"] == []


def test_what_a_program_is_kept_under(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 8)
    tied = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    tied[1].weight = tied[0].weight
    find = partial(module_key, named={}, target=H100, options=())
    plain = find(nn.Linear(8, 8), (x,))
    assert plain == find(nn.Linear(8, 8), (x + 1,))
    found = [
        plain,
        find(nn.Linear(8, 8).half(), (x,)),
        find(nn.Linear(8, 8, bias=False), (x,)),
        find(nn.Linear(8, 8), (torch.zeros(5, 8),)),
        find(nn.Linear(8, 8), ([x],)),
        find(nn.Linear(8, 8), (x,), named={"y": x}),
        find(nn.Linear(8, 8), (x,), options=(BUILD,)),
        find(nn.Linear(8, 8), (x,), target=device("nvidia-h200")),
        find(nn.Linear(8, 8).requires_grad_(False), (x,)),
        find(nn.Linear(8, 8).eval(), (x,)),
        find(tied, (x,)),
        find(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), (x,)),
    ]
    with torch.inference_mode():
        found.append(find(nn.Linear(8, 8), (x,)))
    with torch._inductor.config.patch(max_autotune=True):
        found.append(find(nn.Linear(8, 8), (x,)))
    for module, name, value in (
        (torch, "__version__", "2.0"),
        (cache, "package_hash", lambda: "edited"),
        (torch.cuda, "is_available", lambda: True),
        (sys, "version", "3.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            gpu = type("Gpu", (), dict.fromkeys(GPU, 1))
            patch.setattr(torch.cuda, "get_device_properties", gpu)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            found.append(find(nn.Linear(8, 8), (x,)))
    assert len(set(found)) == len(found)
    passes = torch._inductor.config.patch(post_grad_custom_pre_pass=print)
    with passes, pytest.raises(Untold):
        find(nn.Linear(8, 8), (x,))


GPU = ("name", "major", "minor", "multi_processor_count", "total_memory")


def test_functions_in_words() -> None:
    def held(value: Any) -> Any:
        return lambda x: x + value

    assert word(held(1)) == word(held(1)) != word(held(2))
    assert word(lambda x, y=1: x) != word(lambda x, y=2: x)
    assert word(torch.relu).endswith("relu") and word(nn.Linear).endswith(
        "nn.modules.linear.Linear"
    )
    assert word(sys) == "module sys"
    for value in (held(object()), object(), partial(print)):
        with pytest.raises(Untold):
            word(value)


def test_what_torch_cannot_write_is_refused() -> None:
    write = inductor_artifact.SavedProgram.serialize_compile_artifacts
    for rest, called, found in (
        (None, ("k",), "the kernel 'k', which this process alone has"),
        (None, (), "a graph that torch's cache of AOTAutograd does not take"),
    ):
        with pytest.raises(ArtefactRefused) as error:
            write(inductor_artifact.SavedProgram(rest, (), called))
        assert error.value.refusal.found == found
    read = inductor_artifact.SavedProgram.deserialize_compile_artifacts
    with pytest.raises(ArtefactRefused, match="limit: another, those that compiled it"):
        read(pickle.dumps(("another", [], {}, b"")))


def test_dynamo_itself_keeps_none_of_our_programs() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    x = torch.zeros(2)
    next(iter(graph.nodes)).meta["example_value"] = x
    module = fx.GraphModule(nn.Module(), graph)
    assert inductor._program(module, (x,), BUILD, {}) is not None
    with torch._dynamo.config.patch(caching_precompile=True):
        assert inductor._program(module, (x,), BUILD, {}) is None
