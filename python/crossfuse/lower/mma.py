"""Products of one warp (PTX ISA, ``mma.m16n8k16``) of operands as they lie in memory.

Which elements of the reduction a lane holds is free, as long as both operands agree: a lane loads
16 bytes, eight neighbours of a row, and they are its elements of two instructions.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir

#: Types of operands, as PTX names them.
TYPES = {"bfloat16": "bf16", "float16": "f16"}
#: The elements of 16 bytes are those of two instructions, four for each: which of the reduction
#: they are is the same in both operands.
_VECTORS = """\
__device__ __forceinline__ void crossfuse_multiply_{name}(
    float* sums, const void* even, const void* odd, const void* rows) {{
  const uint4 a = *(const uint4*)even, b = *(const uint4*)odd, x = *(const uint4*)rows;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
      "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.x), "r"(b.x), "r"(a.y), "r"(b.y), "r"(x.x), "r"(x.y));
  asm("mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
      "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.z), "r"(b.z), "r"(a.w), "r"(b.w), "r"(x.z), "r"(x.w));
}}
"""


def multiply_vectors(dtype: str, sums: Any, even: Any, odd: Any, rows: Any) -> Any:
    """Call that adds products of two columns' 16 bytes and those of each of eight rows.

    All are addresses of registers: of four float32, and of 16 bytes each.
    """
    name = TYPES[dtype]
    source = _VECTORS.format(name=name)
    return ir.cuda_func_call(
        f"crossfuse_multiply_{name}", sums, even, odd, rows, source_code=source
    )


#: Neighbours of a row stand in one word, and an instruction takes neighbours down a column: words
#: of two rows are dealt out anew.
_DOWN = """\
__device__ __forceinline__ void crossfuse_multiply_down_{name}(
    float* sums, const void* vectors, unsigned low, unsigned high) {{
  const unsigned* words = (const unsigned*)vectors;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {{
    const unsigned a = words[i], b = words[4 + i], c = words[8 + i], d = words[12 + i];
    float* sum = sums + {stride} * i;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a & 0xffffu | b << 16), "r"(a >> 16 | b & 0xffff0000u),
          "r"(c & 0xffffu | d << 16), "r"(c >> 16 | d & 0xffff0000u), "r"(low), "r"(high));
  }}
}}
"""


def multiply_down(dtype: str, sums: Any, vectors: Any, right: tuple[Any, Any], stride: int) -> Any:
    """Call that adds products down the columns of 16 rows, of which a lane has 16 bytes of four.

    These make four instructions, of 16 columns each; their sums are `stride` registers apart. The
    right operand are both words of a lane.
    """
    name = TYPES[dtype]
    source = _DOWN.format(name=name, stride=stride)
    call = f"crossfuse_multiply_down_{name}"
    return ir.cuda_func_call(call, sums, vectors, *right, source_code=source)


_TRANSPOSE = """\
__device__ __forceinline__ unsigned crossfuse_transpose(unsigned word) {
  unsigned transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}
"""


def transpose(word: Any) -> Any:
    """The lane's word of a transposed 8 x 8 matrix of 16 bits, of which it has another."""
    return ir.cuda_func_call(
        "crossfuse_transpose", word, source_code=_TRANSPOSE, return_type="uint32"
    )


_LOAD = """\
__device__ __forceinline__ void crossfuse_load_vector(void* to, const void* from, bool inside) {
  *(uint4*)to = inside ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
}
"""


def load_vector(to: Any, at: Any, inside: Any) -> Any:
    """Call that loads 16 bytes of memory into registers; zeros unless `inside`."""
    return ir.cuda_func_call("crossfuse_load_vector", to, at, inside, source_code=_LOAD)
