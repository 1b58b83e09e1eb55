"""The packaged cascades at sizes that a test can compute."""

from __future__ import annotations

from crossfuse.workload import cascades
from crossfuse.workload.cascade_spec import CascadeSpec

SMALL = {
    "R1": "R1:batch=2,heads=2,q_len=9,kv_len=9,head_dim=4",
    "R2": "R2:batch=2,heads=2,q_len=5,kv_len=8,head_dim=8",
    "R3": "R3:batch=2,heads=4,kv_heads=2,kv_len=24,head_dim=8",
    "R4": "R4:batch=2,q_heads=3,kv_len=17,latent_dim=6,rope_dim=2",
    "R5": "R5:tokens=5,hidden=8,experts=16,top_k=3",
    "R6": "R6:tokens=5,K=32,N=6",
    "R7": "R7:rows=5,cols=33",
    "R8": "R8:rows=5,cols=33",
    "R9": "R9:tokens=5,K=32,N=6",
    "R10": "R10:rows=5,cols=33",
    "R11": "R11:rows=5,cols=33",
    "R12": "R12:bodies=5,points=33",
    "R13": "R13:rows=5,cols=33",
    "R14": "R14:rows=5,cols=33",
}


def small(name: str, dtype: str = "") -> CascadeSpec:
    """A packaged cascade, made small."""
    text = SMALL[name] + (f",dtype={dtype}" if dtype else "")
    return cascades.resolve(text)
