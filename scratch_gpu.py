import sys, torch, numpy as np, tempfile, os, time
from crossfuse.workload import parse, prim_func, random_inputs, check
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.lower.extract import lower
from crossfuse.runtime import build_library, load
def bench(f,n=20):
    f(); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    s=torch.cuda.Stream()
    with torch.cuda.stream(s):
        f()
    torch.cuda.synchronize()
    with torch.cuda.graph(g):
        for _ in range(5): f()
    ts=[]
    for _ in range(n):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)*1000/5)
    return sorted(ts)[len(ts)//2]
def one(text, tiles=None):
    spec=parse(text)
    sch=schedule_tiled_gemm(prim_func(spec), tiles=tiles)
    l=lower(sch)
    t=time.time()
    a=build_library(l.image, tempfile.mkdtemp())
    k=load(a.library)
    big=spec.M*spec.N*spec.K>2**30
    td={"bfloat16":torch.bfloat16,"float16":torch.float16,"float8_e4m3fn":torch.float8_e4m3fn,"float32":torch.float32}
    A=torch.randn(spec.M,spec.K,device="cuda").to(td[spec.dtype]); 
    nk=spec.weights=="nk" if hasattr(spec,"weights") else True
    B=torch.randn(*( (spec.N,spec.K) if nk else (spec.K,spec.N)),device="cuda").to(td[spec.dtype])
    out=torch.full((spec.M,spec.N),float("nan"),device="cuda",dtype=td[spec.out])
    k(A,B,out); torch.cuda.synchronize()
    ref=(A.float().double() if not big else A.float())@((B.float().double() if not big else B.float()).T if nk else (B.float().double() if not big else B.float()))
    err=((out.double()-ref.double()).abs().max()/ref.double().abs().max()).item()
    outs=[]
    for _ in range(20):
        o=torch.empty_like(out); k(A,B,o); outs.append(o)
    torch.cuda.synchronize()
    same=all(torch.equal(o.view(torch.uint8),out.view(torch.uint8)) for o in outs)
    us=bench(lambda: k(A,B,out))
    base=float("nan")
    if spec.dtype in("bfloat16","float16") and spec.out==spec.dtype:
        Bt=B.T if nk else B
        base=bench(lambda: torch.matmul(A,Bt,out=out))
    tf=2*spec.M*spec.N*spec.K/us/1e6
    print(f"{text:75s} {str(tiles)[11:] if tiles else '':60s} err {err:.1e} same {same} {us:8.1f} us {tf:6.0f} TF/s cublas {base:8.1f} ratio {base/us:.3f}", flush=True)
if __name__=="__main__":
    import traceback
    for x in sys.argv[1:]:
        text,_,tl=x.partition("|")
        tiles=TensorTiles(**{kv.split("=")[0]:int(kv.split("=")[1]) for kv in tl.split(",")}) if tl else None
        try: one(text,tiles)
        except Exception as e: traceback.print_exc(limit=3); print(text, "FAIL", str(e)[:500], flush=True)
