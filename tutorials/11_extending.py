# %% [markdown]
# # 11. A primitive, a rule, a cost term of your own
#
# Crossfuse is an extension of TVM, and can be extended in turn, from your own file, without a fork:
#
# | you write | hook | what follows by itself |
# | --- | --- | --- |
# | a primitive | `add_primitive` | traces, replay, databases, both checkers |
# | a rule | a function, or MetaSchedule's `PyScheduleRule` | search spaces, bundles, tuning |
# | a cost term | `Rates.own` | plans, explanations, rankings |
#
# This page adds one of each. They belong together: a tile of a matrix product that is read from
# memory once for a cluster instead of once for each of its CTAs.

# %%
import json
from dataclasses import replace

import matplotlib.pyplot as plt
import tvm
from support import kernel_text, refused
from tvm.ir.utils import derived_object

import crossfuse
from crossfuse.emulate.cuda import remove_cluster_barrier
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import device, tvm_target
from crossfuse.lower.extract import lower
from crossfuse.meta_schedule.builder import import_intrinsics
from crossfuse.meta_schedule.candidate import Candidate, candidate_of, schedule_candidate
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.cost.terms import OwnTerm
from crossfuse.schedule.install import add_primitive
from crossfuse.workload import parse, prim_func, random_inputs, reference

spec = parse("gemm:M=64,K=128,N=64,dtype=float32")
function = prim_func(spec)

# %% [markdown]
# ## A primitive
#
# CTAs side by side make different columns of the same rows: each reads the same tile of A. On four
# CTAs of a cluster, let each read a quarter of it, and pass it to the others through DSM. With what
# there is, that is: a copy of the operand (`cache_read`), whose slices go round (`dsm_shuffle`).
#
# Two things make a good primitive:
#
# - it is composed of *recorded* instructions, so that its trace replays where nobody knows it;
# - it refuses what it cannot do *before* it changes anything, with the five facts of `refuse`:
#   rule, place, what was found, the limit, and what to do instead.


# %%
@add_primitive
def cluster_share(sch, block, operand, ctas, slices):
    """Read an operand once for a cluster: a slice a CTA, passed round a ring.

    Before, with A the operand::

        for c in range(4):               # <- ctas: columns of C
            for s in range(4):           # <- slices of the sum
                for k:  C[i, j] += A[i, s * 32 + k] * B[...]         A: read by every c

    After::

        for c in cluster(4):  for i, k:  S[c, i, k] = A[i, c * 32 + k]       S: shared.dsm
        for c in cluster(4):
            for s in range(4):
                T[i, k] = S[(s + c) % 4, i, k]
                for k:  C[i, j] += T[i, k] * B[...]

    Returns the block that reads the operand, and the block that takes slices.
    """
    found = [int(sch.get(each).extent) for each in (ctas, slices)]
    if found[0] != found[1]:
        raise refuse(
            ScheduleRefused,
            "cluster_share",
            f"loops '{sch.get(ctas).loop_var.name}' and '{sch.get(slices).loop_var.name}'",
            found=f"{found[0]} CTAs and {found[1]} slices of the sum",
            limit="one slice a CTA",
            instead=f"split the reduction loop into {found[0]} slices",
        )

    def steps(sch):
        sch.cluster_bind(ctas)
        read = sch.cache_read(block, operand, "shared")
        return read, sch.dsm_shuffle(read, block, operand, slices)

    steps(sch.copy())  # if a step refuses, the schedule is still as it was
    return steps(sch)


# %% [markdown]
# It is a method of `Schedule` now, and `cluster_layout` knows what it made:


# %%
def tiled(sch, ctas, slices):
    """Tiles of 16 x 16, `ctas` of them side by side."""
    block = sch.get_sblock("gemm0")
    i, j, k = sch.get_loops(block)
    i0, i1 = sch.split(i, [None, 16])
    j0, c, j1 = sch.split(j, [None, ctas, 16])
    s, k1 = sch.split(k, [slices, None])
    sch.reorder(i0, j0, c, i1, j1, s, k1)
    sch.bind(i0, "blockIdx.y")
    sch.bind(j0, "blockIdx.x")
    return block, c, s


sch = tvm.s_tir.Schedule(function)
block, ctas, slices = tiled(sch, 4, 4)
i1, j1 = sch.get_loops(block)[3:5]
sch.reorder(slices, i1, j1)
sch.cluster_share(block, 0, ctas, slices)
print(sch.cluster_layout().picture())

# %% [markdown]
# Odd tiles end in our refusal, and what the parts refuse comes from the parts:

# %%
sch = tvm.s_tir.Schedule(function)
block, ctas, slices = tiled(sch, 4, 8)
with refused("found 4 CTAs and 8 slices of the sum; limit: one slice a CTA"):
    sch.cluster_share(block, 0, ctas, slices)

# %%
sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=64,K=128,N=512,dtype=float32")))
block, ctas, slices = tiled(sch, 32, 32)
with refused("found extent 32; limit: 1 to 16 CTAs in a cluster"):
    sch.cluster_share(block, 0, ctas, slices)

# %% [markdown]
# ## A rule
#
# A rule is a function from a function to its schedule. This one schedules any product whose tiles
# divide, a thread for each element of a tile:


# %%
def schedule_shared(func, ctas=4):
    """A product whose left operand is read once for `ctas` CTAs."""
    sch = tvm.s_tir.Schedule(func)
    block, cluster, slices = tiled(sch, ctas, ctas)
    i1, j1 = sch.get_loops(block)[3:5]
    element = sch.fuse(i1, j1)
    sch.bind(element, "threadIdx.x")
    sch.set_scope(block, 0, "local")
    sch.reverse_compute_at(sch.get_sblock("out"), element)
    read, take = sch.cluster_share(block, 0, cluster, slices)
    for loops in (sch.get_loops(read)[-2:], sch.get_loops(take)[-3:]):
        _, thread = sch.split(sch.fuse(*loops), [None, 256])
        sch.bind(thread, "threadIdx.x")
    sch.decompose_reduction(block, slices)
    return sch


shared = schedule_shared(function)
image = lower(shared).image
print(kernel_text(image))

# %% [markdown]
# Nothing was said to the lowering: cluster barriers lie where slabs are passed. Both checkers work:

# %%
inputs = random_inputs(spec, seed=0)
expected = reference(spec, inputs)
for ctas in (1, 2, 4):
    sch = schedule_shared(function, ctas)
    for report in (
        crossfuse.run_sequential(sch, inputs),
        crossfuse.emulate_cuda(lower(sch).image, inputs),
    ):
        report.raise_if_wrong()
        print(f"{ctas} CTAs, largest difference: {abs(report.outputs['out'] - expected).max():.1e}")

with refused("no cluster barrier lies between"):
    crossfuse.emulate_cuda(remove_cluster_barrier(image, 0), inputs).raise_if_wrong()

# %% [markdown]
# ## The rule in a search
#
# MetaSchedule asks `ScheduleRule`s for designs. Wrapped as one, ours stands in a design space
# beside TVM's own (`crossfuse.meta_schedule.task.ScheduleKernels` is the project's); here it is
# alone:

# %%
import_intrinsics()  # what TVM would import at its own time, slowly
from tvm.s_tir import meta_schedule as ms


@derived_object
class ShareOperands(ms.schedule_rule.PyScheduleRule):
    """Designs of `schedule_shared`."""

    def _initialize_with_tune_context(self, context):
        """Nothing of the context matters."""

    def apply(self, sch, block):
        if sch.get(block).name_hint != "gemm0":
            return [sch]
        return [schedule_shared(sch.mod["main"], ctas) for ctas in (1, 2, 4)]

    def clone(self):
        return ShareOperands()


rules = {"sch_rules": [ShareOperands()], "postprocs": [], "mutator_probs": {}}
context = ms.TuneContext(
    mod=tvm.IRModule({"main": function}),
    target=tvm_target("nvidia-h100"),
    space_generator=ms.space_generator.PostOrderApply(**rules),
    task_name="shared",
    num_threads=1,
)
designs = context.generate_design_space()
for each in designs:
    launch = lower(each).image.launches[0]
    print(f"{len(each.trace.insts)} recorded steps, cluster {launch.cluster}")

# %% [markdown]
# To measure a design on a GPU elsewhere, make it a candidate of a bundle (tutorial 7). A candidate
# is text: the trace is in it, and nobody who reads it needs this page:

# %%
candidate = candidate_of(str(spec), shared)
text = json.dumps(candidate.to_json())
again = schedule_candidate(Candidate.from_json(json.loads(text), "a file"), device("nvidia-h100"))
assert lower(again).image.cuda == image.cuda
print(f"{len(text)} characters; replayed, it gives the same kernel")

# %% [markdown]
# ## A cost term
#
# The planner's terms were fitted to kernels in CUDA graphs. Suppose that yours are not in one: your
# service records an event behind each kernel, and you measured that this leaves a gap of 3 us. Then
# a plan of one kernel is worth more to you than the estimate knows. `OwnTerm` adds what you know to
# every family of chains and of cascades, and to not fusing, where the kernel is None. (Kernels come
# as arrays, thousands at a time; whatever you compute of their fields has to work on arrays.)

# %%
GAP = 3.0  # us, measured on your service


def gap(kernel, shape, device):
    """A gap behind each kernel; what is not fused has some more of them."""
    return GAP * (shape.separate if kernel is None else len(kernel.kernels(shape)))


h100 = rates_of(device("nvidia-h100"))
mine = replace(h100, own=(OwnTerm("gap", gap),))
WORKLOADS = ("G1", "G6:M=128", "G6:M=512", "R3:batch=1")
figure, ax = plt.subplots(figsize=(6, 3.2))
for at, name in enumerate(WORKLOADS):
    for offset, rates, colour in ((-0.2, h100, "C0"), (0.2, mine, "C1")):
        plan = crossfuse.plan(name, rates=rates)
        ax.barh(at + offset, plan.microseconds, 0.38, color=colour)
        ax.text(plan.microseconds, at + offset, f" {plan.family}", va="center", fontsize=8)
        print(f"{name:10} {plan.microseconds:6.2f} us {plan.family:10} {plan.terms.get('gap', 0)}")
ax.set_yticks(range(len(WORKLOADS)), WORKLOADS)
ax.invert_yaxis()
ax.set(xlabel="us, estimated", title="in a graph (blue), with gaps of 3 us (orange)")
figure.tight_layout()
plt.show()

# %% [markdown]
# G6 with 128 rows goes from two kernels to one that keeps the intermediate in L2, and with 512 rows
# fusing pays where it did not. R3 is a cascade, decoding with a long cache: its stream has one gap,
# the five kernels of not fusing five. `plan.explain()` lists the term behind the others, and what
# each other plan loses by it:

# %%
for each in plan.runners:
    print(f"{each.family:32} {each.microseconds:6.2f} us", each.loses.get("gap", 0.0))

# %% [markdown]
# A term cannot take the place of another one:

# %%
with refused("the name of a term of the estimate"):
    OwnTerm("hbm", gap)

# %% [markdown]
# ## Exercises
#
# 1. Name a primitive `split`.
# 2. Share the other operand, B: CTAs side by side read different columns of it. Is that refused?
# 3. Let the rule make tiles for K = 100 on 8 CTAs. Is an odd tile refused?

# %%
with refused("give the function another name"):

    @add_primitive
    def split(sch, loop):
        """TVM has one."""


# %%
sch = tvm.s_tir.Schedule(function)
block, ctas, slices = tiled(sch, 4, 4)
sch.reorder(slices, *sch.get_loops(block)[3:5])
sch.cluster_share(block, 1, ctas, slices)
print(sch.cluster_layout().picture().splitlines()[2])
report = crossfuse.run_sequential(sch, inputs)
report.raise_if_wrong()
print(f"largest difference: {abs(report.outputs['out'] - expected).max():.1e}")

# %% [markdown]
# It is not refused, and right, but look at the slab: all 64 columns, of which a CTA needs 16. Each
# takes four times as much as it would have read. That an operand must not depend on `ctas` is a
# check that is still missing above: write it.

# %%
with refused("found 8 slices of 100 columns for 8 CTAs; limit: one slice a CTA, all of one width"):
    schedule_shared(prim_func(parse("gemm:M=64,K=100,N=128,dtype=float32")), 8)

# %% [markdown]
# ## Next
#
# Take it into the project: [CONTRIBUTING](../CONTRIBUTING.md) says which tests a primitive, a rule
# or a pass needs. [Primitives](../docs/primitives.md) and [cost terms](../docs/cost.md) list what
# there is.
