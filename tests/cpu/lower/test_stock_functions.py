"""Functions without our marks lower to exactly what stock TVM makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, te, tirx
from tvm.s_tir import dlight
from tvm.tirx.build import codegen_build, split_host_device_mods
from tvm.tirx.compilation_pipeline import PIPELINE_MAP

from cpu.lower.support import kernels_in
from crossfuse import _tvm as ir
from crossfuse.hardware import tvm_target
from crossfuse.lower.extract import lower
from crossfuse.lower.pipeline import cluster_passes, host_passes, make_pipeline
from crossfuse.schedule.rules.threads import schedule_split_k
from crossfuse.workload import parse, prim_func

CUDA = tvm_target("nvidia-h100")
LLVM = tvm.target.Target("llvm")


def stock() -> Any:
    """TVM's own pipeline factory."""
    return PIPELINE_MAP["s_tir"].crossfuse_wraps


def product(m: int = 64, n: int = 64, k: int = 64, dtype: str = "float16") -> Any:
    a, b = te.placeholder((m, k), dtype, "A"), te.placeholder((n, k), dtype, "B")
    r = te.reduce_axis((0, k), "r")
    return te.create_prim_func(
        [a, b, te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[j, r], axis=r), name="C")]
    )


def row_reduction(rows: int = 8, columns: int = 512) -> Any:
    a = te.placeholder((rows, columns), "float32", "A")
    r = te.reduce_axis((0, columns), "r")
    return te.create_prim_func(
        [a, te.compute((rows,), lambda i: te.sum(a[i, r], axis=r), name="C")]
    )


def staged_product(*, pipeline: bool = False, double_buffer: bool = False) -> Any:
    """A product with operands staged in shared memory, vectorised copies, unrolled depth."""
    sch = ir.Schedule(product())
    block = sch.get_sblock("C")
    i, j, r = sch.get_loops(block)
    by, ty, i = sch.split(i, [None, 8, 2])
    bx, tx, j = sch.split(j, [None, 8, 2])
    ro, ri = sch.split(r, [None, 16])
    sch.reorder(by, bx, ty, tx, ro, ri, i, j)
    for loop, tag in ((by, "blockIdx.y"), (bx, "blockIdx.x"), (ty, "threadIdx.y")):
        sch.bind(loop, tag)
    sch.bind(tx, "threadIdx.x")
    out = sch.cache_write(block, 0, "local")
    sch.reverse_compute_at(out, tx)
    for index in (0, 1):
        stage = sch.cache_read(block, index, "shared")
        sch.compute_at(stage, ro)
        fused = sch.fuse(*sch.get_loops(stage)[-2:])
        _, y, x, v = sch.split(fused, [None, 8, 8, 4])
        sch.bind(y, "threadIdx.y")
        sch.bind(x, "threadIdx.x")
        sch.vectorize(v)
        if double_buffer:
            sch.annotate(stage, "double_buffer_scope", 0)
    sch.unroll(ri)
    sch.decompose_reduction(block, ro)
    if pipeline:
        sch.annotate(ro, "software_pipeline_stage", [0, 0, 1])
        sch.annotate(ro, "software_pipeline_order", [0, 1, 2])
    return sch.mod["main"]


def thread_reduction(threads: int) -> Any:
    sch = ir.Schedule(row_reduction())
    i, r = sch.get_loops(sch.get_sblock("C"))
    sch.bind(i, "blockIdx.x")
    _, t = sch.split(r, [None, threads])
    sch.bind(t, "threadIdx.x")
    return sch.mod["main"]


def by_dlight(func: Any) -> Any:
    rules = (
        dlight.gpu.Matmul(),
        dlight.gpu.GEMV(),
        dlight.gpu.Reduction(),
        dlight.gpu.GeneralReduction(),
        dlight.gpu.Fallback(),
    )
    with CUDA:
        return dlight.ApplyDefaultSchedule(*rules)(ir.IRModule({"main": func}))["main"]


def softmax() -> Any:
    a = te.placeholder((16, 256), "float32", "A")
    return te.create_prim_func([a, tvm.topi.nn.softmax(a)])


def vectorised_copy() -> Any:
    a = te.placeholder((64, 64), "float16", "A")
    func = te.create_prim_func([a, te.compute((64, 64), lambda i, j: a[j, i] + a[i, j], name="C")])
    sch = ir.Schedule(func)
    i, j = sch.get_loops(sch.get_sblock("C"))
    _, v = sch.split(j, [None, 8])
    sch.vectorize(v)
    sch.parallel(i)
    return sch.mod["main"]


FUNCTIONS: dict[str, tuple[Callable[[], Any], Any]] = {
    "cpu product": (product, LLVM),
    "cpu vectorised": (vectorised_copy, LLVM),
    "cpu bfloat16": (lambda: product(dtype="bfloat16"), LLVM),
    "staged": (staged_product, CUDA),
    "software pipeline": (lambda: staged_product(pipeline=True), CUDA),
    "double buffer": (lambda: staged_product(double_buffer=True), CUDA),
    "reduction in a warp": (lambda: thread_reduction(32), CUDA),
    "reduction over warps": (lambda: thread_reduction(128), CUDA),
    "reduction in shared memory": (lambda: thread_reduction(48), CUDA),
    "dlight matmul": (lambda: by_dlight(product(256, 256, 256)), CUDA),
    "dlight gemv": (lambda: by_dlight(product(1, 256, 256)), CUDA),
    "dlight reduction": (lambda: by_dlight(row_reduction()), CUDA),
    "dlight softmax": (lambda: by_dlight(softmax()), CUDA),
    "fp8": (lambda: by_dlight(product(dtype="float8_e4m3fn")), CUDA),
}


def bound(func: Any, target: Any) -> Any:
    module = ir.IRModule({"main": func.with_attr("global_symbol", "main")})
    return ir.tirx.transform.BindTarget(target.with_host("llvm"))(module)


def ours(module: Any) -> Any:
    """The module after our pass list, as in a module that has a marked function too."""
    config = ir.tvm.transform.PassContext.current().config
    return ir.tvm.ir.transform.Sequential([*cluster_passes(config), *host_passes()])(module)


def sources(module: Any) -> str:
    """Generated text of the device functions of a lowered module; of the host's without."""
    host, devices = split_host_device_mods(module)
    _, finalize_host, finalize_device = stock()()
    if not devices:
        built = codegen_build(finalize_host()(host), LLVM)
        return without_addresses(str(built.inspect_source("ll")))
    return "".join(
        str(codegen_build(finalize_device()(each), target).inspect_source())
        for target, each in devices.items()
    )


def assert_same(got: Any, wanted: Any) -> None:
    # Storage legalisation leaves attributes of buffers behind that it has replaced: free variables.
    tvm.ir.assert_structural_equal(got, wanted, map_free_vars=True)


def without_addresses(text: str) -> str:
    """LLVM's text without the addresses of TVM's buffers, which name its alias classes."""
    return re.sub(r"0x[0-9a-f]{8,}", "0x", text)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_without_marks_lowers_as_in_stock_tvm(name: str) -> None:
    make, target = FUNCTIONS[name]
    wanted, got = stock()()[0](bound(make(), target)), ours(bound(make(), target))
    assert_same(got, wanted)
    assert sources(got) == sources(wanted)
    assert_same(make_pipeline(stock())[0](bound(make(), target)), wanted)


@pytest.mark.parametrize(
    "config",
    [
        {"tirx.disable_vectorize": True},
        {"tirx.disable_storage_rewrite": True},
        {"tirx.disable_cse_tir": True},
        {"tirx.use_async_copy": True},
        {"tirx.s_tir.ldg32": True},
        {"tirx.instrument_bound_checkers": True},
        {"tirx.instrument_lwp": True},
    ],
    ids=lambda config: next(iter(config)),
)
def test_options_are_honoured(config: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    with tvm.transform.PassContext(config=config):
        assert names_of_stock(monkeypatch) == names_of_ours()
        if "tirx.instrument_lwp" in config:
            return  # numbers loops by a counter of the process
        wanted = stock()()[0](bound(staged_product(), CUDA))
        assert_same(ours(bound(staged_product(), CUDA)), wanted)


def test_pass_list_is_that_of_stock_tvm_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_of_stock(monkeypatch) == names_of_ours()
    mine = [each.info.name for each in cluster_passes({}) if is_ours(each.info.name)]
    assert mine == [
        "crossfuse.VerifyStructure",
        "crossfuse.NoteAttributes",
        "crossfuse.LowerMerges",
        "crossfuse.VerifyOwnership",
        "crossfuse.LowerCluster",
        "crossfuse.MultiplyByWarps",
        "crossfuse.AskAhead",
        "crossfuse.MeetRanks",
        "crossfuse.HideIndices",
        "crossfuse.ShowIndices",
        "crossfuse.LowerDsmAccess",
        "crossfuse.StorageRewriteElsewhere",
        "crossfuse.OrderLoads",
        "crossfuse.PackRegisters",
        "crossfuse.FastExponentials",
        "crossfuse.DistrustEqualIndices",
        "crossfuse.VerifyVectors",
        "crossfuse.DropMarkers",
        "crossfuse.SideBySide",
        "crossfuse.PlaceSharedMemory",
        "crossfuse.BoundRegisters",
        "crossfuse.LaunchClusters",
    ]


def is_ours(name: str) -> bool:
    return name.startswith("crossfuse.")


def names_of_ours() -> list[str]:
    """Names of TVM's passes in our list; ours around `StorageRewrite` counts as that pass."""
    config = ir.tvm.transform.PassContext.current().config
    names = [each.info.name for each in [*cluster_passes(config), *host_passes()]]
    instead = {"crossfuse.StorageRewriteElsewhere": "tirx.StorageRewrite"}
    return [name for name in (instead.get(each, each) for each in names) if not is_ours(name)]


def names_of_stock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the passes that TVM's own pipeline runs."""
    taken: list[str] = []

    def record(passes: list[Any]) -> Callable[[Any], Any]:
        taken.extend(each.info.name for each in passes)
        return lambda module: module

    with monkeypatch.context() as patch:
        patch.setattr(tvm.ir.transform, "Sequential", record)
        stock()()[0](ir.IRModule({}))
    assert taken
    return taken


def test_function_beside_a_marked_one_lowers_as_alone() -> None:
    plain = staged_product()
    marked = schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=32,dtype=float16")), cluster=4)
    marked_func = marked.mod["main"].with_attr("global_symbol", "marked")
    module = ir.IRModule({"main": plain.with_attr("global_symbol", "main"), "marked": marked_func})
    both = make_pipeline(stock())[0](ir.tirx.transform.BindTarget(CUDA)(module))
    alone = stock()()[0](bound(plain, CUDA))
    assert_same(both["main_kernel"], alone["main_kernel"])
    assert kernels_in(sources(alone)) in sources(both)
    text = kernels_in(lower(marked).image.cuda).replace("main_kernel", "marked_kernel")
    assert text in sources(both)


def test_maxima_of_marked_functions_keep_nan() -> None:
    """Those of functions beside them are TVM's own."""
    x = te.placeholder((64,), "float32", "X")
    bound_of = te.compute((64,), lambda i: tirx.max(x[i], tirx.const(0.0, "float32")), "Y")
    sch = ir.Schedule(te.create_prim_func([x, bound_of]))
    (loop,) = sch.get_loops(sch.get_sblock("Y"))
    sch.bind(loop, "threadIdx.x")
    spec = parse("gemm:M=16,K=64,N=32,dtype=float16,act=relu")
    marked = schedule_split_k(prim_func(spec), cluster=4).mod["main"]
    module = ir.IRModule(
        {
            "main": sch.mod["main"].with_attr("global_symbol", "main"),
            "marked": marked.with_attr("global_symbol", "marked"),
        }
    )
    both = make_pipeline(stock())[0](ir.tirx.transform.BindTarget(CUDA)(module))
    assert "T.crossfuse_maximum" in str(both["marked_kernel"])
    assert "T.crossfuse_maximum" not in str(both["main_kernel"])
    assert "crossfuse_maximum(" in sources(both)


def test_lower_takes_functions_without_clusters() -> None:
    image = lower(staged_product()).image
    assert image.cuda == sources(stock()()[0](bound(staged_product(), CUDA)))
    (launch,) = image.launches
    assert (launch.grid, launch.block, launch.cluster) == ((4, 4, 1), (8, 8, 1), (1, 1, 1))


def model() -> Any:
    """A small Relax model."""
    x = relax.Var("x", relax.TensorType((4, 32), "float32"))
    w = relax.Var("w", relax.TensorType((32, 16), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.softmax(relax.op.matmul(x, w)))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("target", [LLVM, CUDA], ids=["llvm", "cuda"])
def test_relax_model_builds_the_same_code(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for factory in (PIPELINE_MAP["s_tir"], stock()):
        monkeypatch.setitem(PIPELINE_MAP, "s_tir", factory)
        module = relax.transform.LegalizeOps()(model())
        if target is CUDA:
            rules = dlight.gpu.Matmul(), dlight.gpu.Fallback()
            with CUDA:
                module = dlight.ApplyDefaultSchedule(*rules)(module)
        texts.append(texts_of(relax.build(module, target=target).mod))
    assert texts[0] == texts[1]
    assert [kind for kind, _ in texts[0]] == (["llvm"] if target is LLVM else ["llvm", "cuda"])


def texts_of(module: Any) -> list[tuple[str, str]]:
    """Kind and text of each module that code was generated for."""
    found: list[tuple[str, str]] = []
    for each in module.imports:
        text = str(each.inspect_source("ll" if each.kind == "llvm" else ""))
        found.append((each.kind, without_addresses(text)))
        found += texts_of(each)
    return found
