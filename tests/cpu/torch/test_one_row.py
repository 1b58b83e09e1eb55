"""Products of one row under inductor's tuning: whole for us, then taken apart as inductor does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional
from torch._subclasses import FakeTensorMode  # noqa: E402

from cpu.torch.decoder import graph_of  # noqa: E402
from crossfuse.torch import Backend, fuse_graph, inductor, reports  # noqa: E402

pytestmark = pytest.mark.cpu

D, H = 64, 128
TUNED = "max-autotune-no-cudagraphs"
#: Those that inductor was called with.
settings: list[dict[str, bool]] = []


class Stopped(Exception):
    """Inductor would compile for a GPU now."""


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """What inductor is given, in words."""
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import joint_graph

    seen: list[list[str]] = []
    settings.clear()

    def inner(graph: Any, *_: Any, **known: Any) -> Any:
        seen.append(words(graph))
        names = ("shape_padding", "combo_kernels")
        settings.append({each: getattr(torch._inductor.config, each) for each in names})
        raise Stopped

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_fx, "compile_fx_inner", inner)
    # It asks this build of torch for random numbers of a GPU, for patterns that are not needed.
    monkeypatch.setattr(joint_graph, "lazy_init", lambda *_: None)
    torch.compiler.reset()
    yield seen
    torch.compiler.reset()


def words(module: Any) -> list[str]:
    """Nodes by their positions: what a graph and its branches compute, whatever its names are."""
    nodes = list(module.graph.nodes)
    at = {node: f"%{position}" for position, node in enumerate(nodes)}
    found = []
    for node in nodes:
        target = node.target if node.op == "call_function" else node.op
        given = torch.fx.node.map_arg((node.args, node.kwargs), at.__getitem__)
        made = node.meta.get("val") if node.op != "output" else None
        strides = made.stride() if isinstance(made, torch.Tensor) else ()
        found.append(f"{target} {given} {made} {strides}")
        if node.op == "get_attr":
            found += words(getattr(module, node.target))
    return found


def theirs(module: Any, inputs: Any) -> Any:
    """Inductor without us."""
    from torch._inductor import compile_fx, list_mode_options

    inner, patches = compile_fx.compile_fx_inner, list_mode_options(TUNED)
    return compile_fx.compile_fx(module, inputs, inner_compile=inner, config_patches=patches)


OURS = Backend(
    cpu="build",
    target="nvidia-h100",
    always=True,
    mode=TUNED,
    products=False,  # chains alone
)


def trace(function: Any, *shapes: tuple[int, ...], backend: Any = OURS, **options: Any) -> None:
    """Compile for a GPU that is not there, up to what inductor is given."""
    torch.compiler.reset()
    with FakeTensorMode(), torch.no_grad():
        given = [torch.empty(each, device="cuda", dtype=torch.bfloat16) for each in shapes]
        with pytest.raises(Exception, match="Stopped"):
            torch.compile(function, backend=backend, **options)(*given)


def layer(x: Any, w: Any, gate: Any, up: Any, down: Any, head: Any) -> Any:
    h = F.rms_norm(x, (D,), w)
    return (x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)) @ head


LAYER = ((1, D), (D,), (H, D), (H, D), (D, H), (D, D))


@pytest.mark.slow
def test_a_gated_ffn_of_one_row_is_fused(
    graphs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worked_out, whole = [], fuse_graph.fuse_graph
    monkeypatch.setattr(
        fuse_graph, "fuse_graph", lambda *given: worked_out.append(1) or whole(*given)
    )
    for _ in range(2):  # the second time from the cache
        trace(layer, *LAYER)
        assert reports()[-1].fused == ("crossfuse_gated_ffn",)
    assert worked_out == [1] and graphs[0] == graphs[1]
    calls = [each.split()[0] for each in graphs[0]]
    assert calls.count("crossfuse.run.default") == 1 and "aten.mm.default" not in calls
    assert calls.count("aten.sum.dim_IntList") == 1  # the head, which is no part of a chain


def products(x: Any, w: Any, g: Any, b: Any, s: Any) -> tuple[Any, ...]:
    y = x + F.linear(F.silu(F.linear(x, g)), g)
    return (
        F.rms_norm(y @ g, (D,), w),
        torch.addmm(w, y, g, beta=0.5),  # inductor leaves it
        (y @ g).half(),  # casts that its passes merge
        torch.bmm(y.expand(2, 1, D), b),
        (x @ g) @ w.unsqueeze(1),
        y.t() @ x,
        torch.addmm(w, x.t(), y),
        torch.cond(s.sum() > 0, lambda z: z @ g, lambda z: z - 1, (y,)),
        g @ g,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_not_fused_is_taken_apart_as_inductor_does(
    graphs: list[list[str]], monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    monkeypatch.setattr(Backend, "fuse", lambda *_, **__: None)
    shapes = ((1, D), (D,), (D, D), (2, D, D), (7, D))
    for backend in (theirs, OURS):
        trace(products, *shapes, backend=backend, dynamic=dynamic)
    assert graphs[0] == graphs[1]
    assert sum("aten.sum" in each for each in graphs[0]) > 6


def mixed(x: Any, g: Any) -> tuple[Any, Any]:
    return F.relu(x @ g), x.cos()


@pytest.mark.parametrize(
    ("rows", "function", "shares"),
    [
        (4, mixed, True),
        (128, mixed, True),
        (129, mixed, False),
        (1, lambda x, g: (mixed(x, g), g.view(-1, 1) @ x.sum().view(1, 1)), True),
        (4, lambda x, g: F.dropout(x, 0.5, True) @ g, False),
        (4, lambda x, g: (x.sin(), g.cos()), False),
    ],
    ids=["few rows", "the most", "more", "beside an outer product", "drawn", "no product"],
)
def test_kernels_share_launches_where_products_have_few_rows(
    graphs: list[list[str]], rows: int, function: Any, shares: bool
) -> None:
    plain = Backend(cpu="build", target="nvidia-h200")
    trace(function, (rows, D), (D, D), backend=plain)
    assert settings == [{"shape_padding": True, "combo_kernels": shares}]


def test_attention_of_a_library_draws_no_numbers_in_a_kernel_of_inductor() -> None:
    aten = torch.ops.aten
    assert inductor._draws(aten.bernoulli.p) and not inductor._draws(aten.mm.default)
    attention = aten._scaled_dot_product_cudnn_attention.default
    assert torch.Tag.nondeterministic_seeded in attention.tags
    assert not inductor._draws(attention)


def test_products_are_not_padded_before_they_are_seen(
    graphs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether inductor pads four rows depends on what it times: then a graph is another one."""
    from torch._inductor import config

    seen, fuse = [], Backend.fuse

    def watched(self: Any, *given: Any, **how: Any) -> Any:
        seen.append(config.shape_padding)
        return fuse(self, *given, **how)

    monkeypatch.setattr(Backend, "fuse", watched)
    plain = Backend(cpu="build", target="nvidia-h200")
    trace(mixed, (4, D), (D, D), backend=plain)
    with config.patch(shape_padding=False):
        trace(mixed, (4, D), (D, D), backend=plain)
    assert seen == [False, False]
    assert [each["shape_padding"] for each in settings] == [True, False]


@pytest.mark.parametrize(
    ("rows", "k", "n", "pads"),
    [
        (4, 3, 5, False),
        (999, 3, 8, True),
        (999, 8, 3, True),
        (999, 8, 16, True),
        (1000, 8, 16, False),
    ],
)
def test_what_is_left_of_more_rows_is_padded_as_ever(
    monkeypatch: pytest.MonkeyPatch, rows: int, k: int, n: int, pads: bool
) -> None:
    """Inductor's passes run again where one of them may pad: of extents that are no 16 bytes."""
    again: list[Any] = []
    monkeypatch.setattr(inductor, "_joint_passes", lambda graph: again.append(graph) or graph)
    given = [torch.empty(each, dtype=torch.bfloat16) for each in ((rows, k), (k, n))]
    graph = graph_of(lambda x, w: x @ w, given)
    assert inductor.take_apart(graph, {"shape_padding": True}) is graph
    assert again == [graph] * pads
    assert inductor.take_apart(graph, {}) is graph and again == [graph] * pads


def test_a_graph_that_inductor_refuses_so_is_compiled_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import compile_fx, config
    from torch._inductor.exc import InductorError
    from torch._inductor.fx_passes import joint_graph

    tried: list[tuple[bool, list[str]]] = []

    def inner(graph: Any, *_: Any, **known: Any) -> Any:
        tried.append((config.combo_kernels, words(graph)))
        if config.combo_kernels:
            graph.graph.erase_node(next(iter(reversed(graph.graph.nodes))))
            raise InductorError(RuntimeError("constexpr"), None)
        raise Stopped

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_fx, "compile_fx_inner", inner)
    monkeypatch.setattr(joint_graph, "lazy_init", lambda *_: None)
    trace(mixed, (4, D), (D, D), backend=Backend(cpu="build", target="nvidia-h200"))
    assert [each for each, _ in tried] == [True, False]
    assert tried[0][1] == tried[1][1]
    assert "inductor compiles each kernel alone: sharing launches" in caplog.text


def kernels_of_inductor(module: Any) -> Any:
    """What inductor's code of kernels would be asked to write."""
    return SimpleNamespace(
        _enable_pdl_codegen=lambda: True, inside_reduction=False, GDC_WAIT="wait", body=module
    )


def test_kernels_of_inductor_wait_before_they_read() -> None:
    """Inductor's own rule waits only for the kernel before; ours may let others start earlier."""
    from torch._inductor.codegen.triton import TritonKernel

    name = "_handle_pdl_before_access"
    theirs = getattr(TritonKernel, name)
    lines: list[str] = []
    buffer = SimpleNamespace(writeline=lines.append)
    with inductor.waiting_first() as early:
        assert early
        getattr(TritonKernel, name)(kernels_of_inductor(None), buffer, "in_ptr0")
    assert lines == ["wait"]
    assert getattr(TritonKernel, name) is theirs


def test_a_torch_that_writes_them_elsewhere_writes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel

    monkeypatch.delattr(TritonKernel, "_handle_pdl_before_access")
    with config.patch({"triton.enable_pdl": True}), inductor.waiting_first() as early:
        assert not early and not config.triton.enable_pdl


def counting(a: Any, b: Any, c: Any, d: Any, x: Any) -> tuple[Any, Any]:
    made = x * a + x * b
    a.add_(1)
    b.add_(1)
    c.add_(1)
    d.add_(2)
    return made, c + 1


def test_positions_are_counted_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nothing else reads when they are counted, by the same step."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    seen: list[list[str]] = []

    def inner(graph: Any, given: Any, **known: Any) -> Any:
        inductor.count_together(graph)
        graph.graph.lint()
        seen.append([str(each.target) for each in graph.graph.nodes])
        return compile_fx_inner(graph, given, **known)

    def compiled(module: Any, given: Any) -> Any:
        return compile_fx(module, given, inner_compile=inner)

    torch.compiler.reset()
    ours, plain = (
        [*(torch.tensor(each) for each in (3, 4, 5, 6)), torch.arange(4.0)] for _ in range(2)
    )
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        found = torch.compile(counting, backend=compiled, dynamic=False)(*ours)
        due = counting(*plain)
    assert sum("_foreach_add" in each for each in seen[0]) == 1
    assert sum("getitem" in each for each in seen[0]) == 2
    for one, other in zip((*found, *ours), (*due, *plain), strict=True):
        assert torch.equal(one, other)
    torch.compiler.reset()
