"""How long a step of decoding takes: a model of transformers with a static cache, way by way.

    python scripts/decode_steps.py --sequences 1,16 --ways crossfuse,compile,max-autotune,eager

The model has the sizes of one that is known (``--model``) and random weights; half of the cache is
filled. A step is one token of each sequence through all layers and the head, captured in a CUDA
graph: weights are read from memory, as there are more of them than fit into L2. Each way and number
of sequences is a process of its own. Printed are for each

    us        median of the replays, and the least
    floor     microseconds in which memory delivers weights and the filled part of the cache
    error     largest difference of logits from float64, and that of eager in the same type
    tokens    whether the best token of each sequence is that of float64, where the best two differ
              by more than twice the error
    kernels   time of kernels by kind, in a replay under torch's profiler (``--out``: by name too)

Without a GPU, ``--device cpu --layers 1 --narrower 8`` shows that a step is right.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from own_process import found_apart

WAYS = ("crossfuse", "compile", "max-autotune", "eager")
#: Sizes of models as transformers' configuration names them.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
}
#: Sizes that a narrower model divides.
_DIVIDED = {
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
}
#: Kinds of kernels by parts of their names, the first that fits.
KINDS = {
    "ours": ("crossfuse",),
    "attention": ("attention", "sdpa", "flash", "fmha"),
    "library products": ("nvjet", "gemm", "cublas", "cutlass", "splitK"),
    "other kernels": ("",),
}


def main() -> None:
    """Print a line for each way and number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS), help="which, with commas")
    parser.add_argument("--sequences", default="1", help="numbers of sequences, with commas")
    parser.add_argument("--cache", type=int, default=1024, help="positions, half of them filled")
    parser.add_argument("--model", choices=list(MODELS), default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, help="those of the model if left out")
    parser.add_argument("--narrower", type=int, default=1, help="divides the model's sizes")
    parser.add_argument("--experts", default="batched_mm", help="how transformers multiplies them")
    parser.add_argument("--replays", type=int, default=40)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each line")
    parser.add_argument("--out", type=Path, help="JSON lines to append to")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "SEQUENCES"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measured(given.child[0], int(given.child[1]), given)))
        return
    for sequences in given.sequences.split(","):
        for way in given.ways.split(","):
            row = {"way": way, "sequences": int(sequences), **_apart(way, sequences, given)}
            print(_text(row), flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def _apart(way: str, sequences: str, given: argparse.Namespace) -> dict[str, Any]:
    """A line, from a process of its own."""
    options = ("cache", "model", "layers", "narrower", "experts", "replays", "device")
    chosen = {each: getattr(given, each) for each in options if getattr(given, each) is not None}
    named = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    return found_apart([__file__, *named, "--child", way, sequences], given.timeout)


def _text(row: dict[str, Any]) -> str:
    head = f"{row['sequences']:3} x {row['way']:12}"
    if "error" in row:
        return f"{head} {row['error']}"
    time = f"{row['us']:8.0f} us (least {row['least']:.0f})" if "us" in row else "not timed"
    error = f"off by {row['off']:.2e} (eager {row['eager_off']:.2e})"
    kinds = ", ".join(f"{name} {us:.0f}" for name, us in row.get("kernels", {}).items())
    fused = Counter(each.rstrip("0123456789") for each in row.get("fused", ()))
    kinds = ", ".join([kinds, *(f"{count} x {name}" for name, count in fused.items())])
    return f"{head} {time}, floor {row['floor']:.0f}; {error}, tokens {row['tokens']}; {kinds}"


class Step:
    """A model with a cache that is filled to one half, and its next step."""

    def __init__(self, sequences: int, given: argparse.Namespace) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        sizes = {"model_type": "llama", **MODELS[given.model]}
        for each in _DIVIDED & sizes.keys():
            sizes[each] = max(1, sizes[each] // given.narrower)
        sizes["num_hidden_layers"] = given.layers or sizes["num_hidden_layers"]
        self.config = AutoConfig.for_model(**sizes, max_position_embeddings=given.cache)
        with torch.device(given.device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        self.model = model.eval()
        self.length, self.given = given.cache, given
        self.filled = given.cache // 2
        shape = (sequences, self.filled + 1)
        self.tokens = torch.randint(self.config.vocab_size, shape, device=given.device)

    def cached(self) -> Any:
        """A cache that has the first half of the tokens; values as the model's type has them."""
        import torch
        from transformers import StaticCache

        cache = StaticCache(config=self.config, max_cache_len=self.length)
        places = torch.arange(self.filled, device=self.given.device)
        if self._routers:
            exact = next(self.model.parameters()).dtype == torch.float64
            self.model.set_experts_implementation("eager" if exact else "grouped_mm")
        with torch.no_grad():
            self.model(input_ids=self.tokens[:, :-1], past_key_values=cache, cache_position=places)
        return cache

    def run(self, cache: Any) -> Callable[[], Any]:
        """The step after that, whose logits it returns."""
        import torch

        token = self.tokens[:, -1:].contiguous()
        place = torch.tensor([self.filled], device=self.given.device)
        if self._routers:
            # As `generate` does behind the prefill.
            self.model.set_experts_implementation(self.given.experts)

        def step() -> Any:
            made = self.model(input_ids=token, past_key_values=cache, cache_position=place)
            return made.logits

        return step

    @property
    def _routers(self) -> list[Any]:
        """Modules that choose experts, if there are any."""
        return [each for each in self.model.modules() if type(each).__name__.endswith("Router")]

    @property
    def _experts(self) -> list[Any]:
        """Modules of the weights of all experts."""
        return [each for each in self.model.modules() if type(each).__name__.endswith("Experts")]

    @cached_property
    def touched(self) -> float:
        """Share of the experts whose weights the step reads."""
        found: list[Any] = []
        hooks = [
            each.register_forward_hook(lambda _module, _given, made: found.append(made[-1]))
            for each in self._routers
        ]
        self.run(self.cached())()
        for each in hooks:
            each.remove()
        of_step = found[-len(hooks) :] if hooks else []
        return sum(each.unique().numel() for each in of_step) / (
            max(1, len(of_step)) * getattr(self.config, "num_experts", 1)
        )

    @property
    def floor(self) -> float:
        """Microseconds in which memory delivers what a step reads."""
        from crossfuse.hardware import device, find_gpus
        from crossfuse.planner.cost.rates import rates_of

        config, item = self.config, 2
        # Of an embedding that is no head, a step reads a row for each sequence.
        held = self.model.get_input_embeddings().weight
        experts = {id(one): each for each in self._experts for one in each.parameters()}
        read = [one for one in self.model.parameters() if one is not held]
        head = self.model.get_output_embeddings().weight
        shares = [self.touched if id(one) in experts else 1.0 for one in read]
        count = sum(share * one.numel() for share, one in zip(shares, read, strict=True))
        weights = (count + (head is held) * held.numel()) * item
        heads = config.num_key_value_heads * config.head_dim
        keys = 2 * self.tokens.shape[0] * self.filled * heads * config.num_hidden_layers * item
        target = device() if find_gpus() else device("nvidia-h200")
        return (weights + keys) / rates_of(target).measured.hbm_read


def measured(way: str, sequences: int, given: argparse.Namespace) -> dict[str, Any]:
    """What is printed of a way."""
    import torch

    step = Step(sequences, given)
    plain = step.run(step.cached())
    with torch.no_grad():
        eager = plain().double().cpu()
        run = compiled(way, step.run(step.cached()), given.device)
        # Later calls are of later positions: the cache counts.
        logits = run().double().cpu()
        found: dict[str, Any] = {"floor": step.floor}
        if given.device == "cuda":
            found |= timed(run, given.replays)
        del run
        step.model = step.model.double()
        exact = step.run(step.cached())().cpu()
    off, eager_off = ((each - exact).abs().max().item() for each in (logits, eager))
    best = exact[:, -1].topk(2)
    sure = best.values[:, 0] - best.values[:, 1] > 2 * max(off, eager_off)
    same = logits[:, -1].argmax(-1) == best.indices[:, 0]
    found |= {"off": off, "eager_off": eager_off, "tokens": bool(same[sure].all())}
    if way == "crossfuse":
        from crossfuse.torch import reports

        found["fused"] = list(reports()[-1].fused)
    return found


def compiled(way: str, step: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The step by one of the ways; kernels for a GPU are functions of the CPU without one."""
    import torch

    from crossfuse.torch import Backend

    if way == "eager":
        return step
    if way == "crossfuse":
        here = {} if device == "cuda" else {"cpu": "llvm", "target": "nvidia-h200"}
        return torch.compile(step, backend=Backend(**here), dynamic=False)
    mode = "max-autotune-no-cudagraphs" if way == "max-autotune" else None
    return torch.compile(step, mode=mode, dynamic=False)


def timed(run: Callable[[], Any], replays: int) -> dict[str, Any]:
    """Times of a CUDA graph of the step, and of its kernels."""
    import torch

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [1000 * start.elapsed_time(end) for start, end in events]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for each in profile.events():
        name = str(each.name)
        kind = next(k for k, parts in KINDS.items() if any(part in name for part in parts))
        kernels[kind] += each.device_time_total
        names[name[:72]] += each.device_time_total
        calls[name[:72]] += 1
    return {
        "us": statistics.median(times),
        "least": min(times),
        "kernels": dict(kernels),
        "names": {name: [calls[name], us] for name, us in names.most_common(16)},
    }


if __name__ == "__main__":
    main()
