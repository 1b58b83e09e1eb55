# %% [markdown]
# # 8. Cascaded reductions: from softmax's formula to flash attention, and your own
#
# Softmax is two reductions over a row, of which the second needs the first:
#
# ```
# m = max x          s = sum exp(x - m)          out = exp(x - m) / s
# ```
#
# A chain of reductions like this is a *cascade*. As written, each is a pass over the row. One pass
# is enough (online softmax, Milakov and Gimelshein 2018; flash attention stands on it): keep `m`
# and `s` of what was seen so far, and correct `s` by `exp(m_old - m_new)` when the maximum moves.
# Crossfuse derives such corrections, proves them, and makes the kernel.

# %%
import matplotlib.pyplot as plt
import numpy as np
import sympy
from support import hopper, recorded, refused
from tvm import te, tirx

import crossfuse
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.algebra.explain import explain
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.run import merge_tree, stream, two_pass
from crossfuse.cascade.spec import Cascade, Monoid, Stage
from crossfuse.lower.extract import lower
from crossfuse.planner.cascade.plan import plan_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.families.registry import read_tiles
from crossfuse.schedule.rules.stream import schedule_stream

# %% [markdown]
# ## The formula
#
# A cascade is a value: stages with a monoid (how they combine) and a term in sympy.

# %%
x, v = sympy.symbols("x v", real=True)
m, s, o = sympy.symbols("m s o", real=True)
maximum, total = Monoid("max"), Monoid("sum")

softmax = Cascade(
    stages=(Stage("m", maximum, x), Stage("s", total, sympy.exp(x - m))),
    elements=(x,),
    results={"log_sum": m + sympy.log(s)},
    rows={"out": sympy.exp(x - m) / s},
)
derived = derive(softmax)
print(explain(derived))

# %% [markdown]
# Read the derivation:
#
# - **pair**: the term is `exp(x) * exp(-m)`, one factor of the element and one of the earlier
#   result, and a product distributes over a sum;
# - **rescaled by**: `exp(x)` alone would overflow, so that the state is kept relative to the
#   maximum so far;
# - **update** is the flash-attention step, `s' = s exp(m - m~) + sum exp(x - m~)`;
# - **merge** says how the states of two pieces of a row combine: of two threads, or two CTAs;
# - `m~` stands in for the maximum where nothing but -oo was seen. More on that below.
#
# ## Two passes and one
#
# Three executors run it in numpy: as defined, as a stream in tiles, and in segments that are
# merged.

# %%
rng = np.random.default_rng(0)
data = {"x": rng.normal(0, 3, (4, 1000))}
defined = two_pass(softmax, data)
streamed = stream(derived, data, tile=64)
merged = merge_tree(derived, data, segments=[250] * 4)
for name, found in (("stream", streamed), ("merge of 4", merged)):
    print(name, "differs by", abs(found["out"] - defined["out"]).max())

# %% [markdown]
# What the correction does: the state of a row, tile by tile. Whenever `m` steps up, `s` is scaled
# down.

# %%
row = data["x"][:1]
ends = range(20, 1001, 20)
so_far = [stream(derived, {"x": row[:, :end]}, tile=20) for end in ends]
figure, (upper, lower_ax) = plt.subplots(2, 1, figsize=(6, 3), sharex=True)
upper.step(ends, [each["m"][0] for each in so_far], where="post")
upper.set_ylabel("m")
lower_ax.step(ends, [each["s"][0] for each in so_far], where="post", color="C1")
lower_ax.set(ylabel="s", xlabel="elements seen")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Errors of one pass
#
# Does one pass cost digits? On softmax (left) the corrections cost none. But the stream adds tile
# after tile to one running sum, while numpy's two passes add pairwise, so that its error grows with
# the number of tiles. Merging shortens the sums: that is what threads and CTAs of a kernel do.
#
# A variance (right) is the hard case. The textbook's single pass subtracts two large numbers,
# `mean(x^2) - mean(x)^2`, and loses everything once the mean is far from 0. The derived pass moves
# with the mean instead, as Welford's does, and stays with the two passes.

# %%
mean, n = sympy.Symbol("mean", real=True), sympy.Symbol("n", positive=True)
moments = (Stage("mean", total, x / n), Stage("var", total, (x - mean) ** 2 / n))
variance = Cascade(moments, (x,), (n,), length=n)
moving = derive(variance)


def error(found, exact):
    """The largest error of any row, over the largest value of that row."""
    found, exact = (each.reshape(len(each), -1) for each in (found, exact))
    return (abs(found - exact).max(1) / abs(exact).max(1)).max()


lengths, by_length = [2**k for k in range(6, 17, 2)], []
for length in lengths:
    narrow = {"x": rng.normal(0, 3, (16, length)).astype("float32")}
    exact = two_pass(softmax, {"x": narrow["x"].astype("float64")})["out"]
    ways = (
        two_pass(softmax, narrow),
        stream(derived, narrow, tile=64),
        merge_tree(derived, narrow, segments=[length // 16] * 16),
    )
    by_length.append([error(each["out"], exact) for each in ways])

offsets, by_offset = [10**k for k in range(6)], []
noise = rng.normal(0, 1, (16, 4096))
for offset in offsets:
    values = (noise + offset).astype("float32")
    exact = values.astype("float64").var(1)
    ways = (
        two_pass(variance, {"x": values})["var"],
        stream(moving, {"x": values}, tile=64)["var"],
        (values * values).mean(1) - values.mean(1) ** 2,
    )
    by_offset.append([error(each, exact) for each in ways])

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
left.plot(lengths, by_length, "o-", label=["two passes", "one pass", "16 CTAs, merged"])
left.set(xscale="log", yscale="log", xlabel="columns", ylabel="error over the largest value")
left.set(title="softmax", ylim=(1e-8, 1e-5))
right.plot(offsets, by_offset, "o-", label=["two passes", "one pass", "mean(x²) - mean(x)²"])
right.set(xscale="log", yscale="log", xlabel="mean over deviation", ylabel="relative error")
right.set_title("variance")
for ax in (left, right):
    ax.legend(fontsize=8)
figure.suptitle("float32 on the CPU against float64, 16 rows, the worst of them", fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Flash attention
#
# One more stage: the weighted sum of values. Nothing else has to be said; `o` is corrected as `s`
# is.

# %%
attention = Cascade(
    stages=(
        Stage("m", maximum, x),
        Stage("s", total, sympy.exp(x - m)),
        Stage("o", total, sympy.exp(x - m) * v),
    ),
    elements=(x, v),
    results={"out": o / s},
)
flash = derive(attention)
print("State" + explain(flash).split("State")[1])

# %% [markdown]
# ## Empty rows, and NaN
#
# A row that is masked throughout has only -oo. Then `exp(x - m)` is `exp(-oo + oo)`, NaN, in many
# a hand-written kernel. The stand-in `m~` is 0 there, and 1 stands in for a sum of 0: the result
# is 0.

# %%
masked = {"x": np.full((2, 100), -np.inf), "v": rng.normal(size=(2, 100))}
masked["x"][1, 40:] = 1.0
print("stream:", stream(flash, masked, tile=16)["out"])
with np.errstate(invalid="ignore"):
    weights = np.exp(masked["x"] - masked["x"].max(axis=1, keepdims=True))
    print("numpy: ", (weights * masked["v"]).sum(1) / weights.sum(1))

# %% [markdown]
# ## Your own cascade
#
# You need not write formulas: a function that you wrote for its own sake is searched for cascades.
# Here, for each row, the mean of `x` weighted by `softmax(x)`, which is nobody's standard
# operator:


# %%
def soft_mean(rows, length):
    X = te.placeholder((rows, length), "float32", name="X")
    k, n, p = (te.reduce_axis((0, length), name) for name in "knp")
    top = te.compute((rows,), lambda i: te.max(X[i, k], axis=k), name="top")
    weight = te.compute((rows,), lambda i: te.sum(te.exp(X[i, n] - top[i]), axis=n), name="weight")
    mean = te.compute(
        (rows,), lambda i: te.sum(te.exp(X[i, p] - top[i]) * X[i, p], axis=p), name="mean"
    )
    Y = te.compute((rows,), lambda i: mean[i] / weight[i], name="Y")
    return te.create_prim_func([X, Y])


function = soft_mean(8, 1024)
(site,) = detect(function)
derivation = derive(site.cascade)
print(explain(derivation).split("Merge")[0])

# %% [markdown]
# From here it is a kernel. The planner chooses tiles, `streaming` writes the loop, a rule binds
# threads:

# %%
found = plan_cascade(cascade_shape(site, derivation), only=("stream",))
print("planned:", found.tiles, f"{found.microseconds:.1f} us estimated")


def kernel(**changes):
    """The streaming kernel with the planned tiles, some of them changed."""
    tiles = read_tiles("stream", {**found.tiles, **changes})
    return schedule_stream(streaming(site, derivation, tiles), tiles)


inputs = {"X": rng.normal(0, 3, (8, 1024)).astype("float32")}
wide = inputs["X"].astype("float64")
weights = np.exp(wide - wide.max(1, keepdims=True))
expected = (weights * wide).sum(1) / weights.sum(1)

alone = kernel(threads=64, cluster=1)
sequential = crossfuse.run_sequential(alone, inputs)
sequential.raise_if_wrong()
emulated = crossfuse.emulate_cuda(lower(alone).image, inputs)
emulated.raise_if_wrong()
print("LLVM differs by", abs(sequential.outputs["Y"] - expected).max())
print("CUDA differs by", abs(emulated.outputs["Y"] - expected).max())

# %% [markdown]
# `crossfuse.compile(function)` does all of this in one call.
#
# ## Over a cluster
#
# Few and long rows leave multiprocessors idle. Then the axis is cut into segments, a CTA each, and
# states merge through DSM: the `merge` of the derivation is what the CTAs compute.

# %%
clustered = kernel(rows=1, threads=64, cluster=4)
print(clustered.cluster_layout().picture())
emulated = crossfuse.emulate_cuda(lower(clustered).image, inputs)
emulated.raise_if_wrong()
print("cluster of 4 differs by", abs(emulated.outputs["Y"] - expected).max())

# %% [markdown]
# ## What was measured

# %%
names = {"R7": "softmax", "R8": "cross entropy", "R10": "layer norm", "R12": "inertia"}
results, where = recorded("cascades-h100.json")
attended, _ = recorded("attention-h100.json")
for each in results["comparisons"] + attended["comparisons"]:
    label = names.get(each["workload"], "causal attention")
    best = f"{each['best']:7.1f} us {each['baseline']}"
    print(f"{each['workload']:4}{label:17}{each['ours']:7.1f} us    best other: {best}")
print(where)
if hopper():
    print("here: crossfuse bench R7 R8 R10 --variants ours,eager,compile")

# %% [markdown]
# ## Refusals, and what to do
#
# Not every chain of reductions streams. A mean absolute deviation couples each element with the
# mean inside the magnitude, and no finite sum of products is equal to that:

# %%
with refused("which couples x with mean"):
    derive(
        Cascade(
            (Stage("mean", total, x / n), Stage("d", total, sympy.Abs(x - mean))),
            (x,),
            (n,),
            length=n,
        )
    )

# %% [markdown]
# With the square instead of the magnitude (that is the variance) it streams, by sums of lower
# moments. With the magnitude it has to be cut: into two kernels, or into two loops over a row that
# is kept on chip.
#
# ## Exercises
#
# 1. Take the maximum of `x * d` where `d` may be negative.
# 2. Take a softmax of a softmax's result, in one cascade.
# 3. Write a function whose second reduction reads the first one's result at *another* row.

# %%
d = sympy.Symbol("d", real=True)
with refused("cascade-sign"):
    derive(Cascade((Stage("d", total, x), Stage("e", maximum, x * d)), (x,)))

# %%
inner = sympy.exp(x - m) / s
with refused("cascade-separable"):
    derive(
        Cascade(
            (
                Stage("m", maximum, x),
                Stage("s", total, sympy.exp(x - m)),
                Stage("t", total, sympy.exp(inner)),
            ),
            (x,),
        )
    )


# %%
def halved(rows, length):
    X = te.placeholder((rows, length), "float32", name="X")
    k, n = (te.reduce_axis((0, length), name) for name in "kn")
    top = te.compute((rows,), lambda i: te.max(X[i, k], axis=k), name="top")
    Y = te.compute(
        (rows,), lambda i: te.sum(te.exp(X[i, n] - top[tirx.floordiv(i, 2)]), axis=n), name="Y"
    )
    return te.create_prim_func([X, Y])


with refused("found a result read at another row"):
    detect(halved(8, 64))

# %% [markdown]
# ## Next
#
# [Tutorial 9](09_models.py): how cascades and chains are found in a whole model.
# [Cascades](../docs/cascades.md) has the algebra, [tiles](../docs/cascade-tiles.md) how attention
# gets to tensor cores.
