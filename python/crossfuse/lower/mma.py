"""Products of one warp (PTX ISA, ``mma.m16n8k16``) of operands as they lie in memory.

Which elements of the reduction a lane holds is free, as long as both operands agree: a lane loads
16 bytes, eight neighbours of a row, and they are its elements of two instructions.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir

#: Types of operands, as PTX names them.
TYPES = {"bfloat16": "bf16", "float16": "f16"}
#: Sums of a thread in a fragment, of two columns and eight rows.
SUMS = 4


def _instruction(sums: str, first: int, operands: str, indent: str = "  ") -> str:
    """Statement that adds a fragment's products to the registers of `sums` from one on.

    It is a part of a template, whose `name` is that of the operands' type; these are four registers
    of the left fragment and two of the right one.
    """
    registers = ", ".join(f'"+f"({sums}[{first + each}])' for each in range(SUMS))
    lines = (
        'asm("mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "',
        '    "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"',
        f"    : {registers}",
        f"    : {operands});",
    )
    return "".join(f"{indent}{each}\n" for each in lines)


#: The elements of 16 bytes are those of two instructions, four for each: which of the reduction
#: they are is the same in both operands.
_VECTORS = (
    """\
__device__ __forceinline__ void crossfuse_multiply_{name}(
    float* sums, const void* even, const void* odd, const void* rows) {{
  const uint4 a = *(const uint4*)even, b = *(const uint4*)odd, x = *(const uint4*)rows;
"""
    + _instruction("sums", 0, '"r"(a.x), "r"(b.x), "r"(a.y), "r"(b.y), "r"(x.x), "r"(x.y)')
    + _instruction("sums", 0, '"r"(a.z), "r"(b.z), "r"(a.w), "r"(b.w), "r"(x.z), "r"(x.w)')
    + "}}\n"
)


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
_DEALT = """\
"r"(a & 0xffffu | b << 16), "r"(a >> 16 | b & 0xffff0000u),
          "r"(c & 0xffffu | d << 16), "r"(c >> 16 | d & 0xffff0000u), "r"(low), "r"(high)"""
_DOWN = (
    """\
__device__ __forceinline__ void crossfuse_multiply_down_{name}(
    float* sums, const void* vectors, unsigned low, unsigned high) {{
  const unsigned* words = (const unsigned*)vectors;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {{
    const unsigned a = words[i], b = words[4 + i], c = words[8 + i], d = words[12 + i];
    float* sum = sums + {stride} * i;
"""
    + _instruction("sum", 0, _DEALT, "    ")
    + "  }}\n}}\n"
)


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


#: A lane's eight elements are rows of both operands: element by element, the products that are due
#: stand on the diagonals, of the first eight rows in one fragment and of the others in the next.
#: Two instructions take the place of 16, and of 16 to convert elements.
_ADD_SQUARES = (
    """\
__device__ __forceinline__ void crossfuse_add_squares_{name}(float* sums, const void* vector) {{
  const uint4 x = *(const uint4*)vector;
"""
    + _instruction("sums", 0, '"r"(x.x), "r"(x.z), "r"(x.y), "r"(x.w), "r"(x.x), "r"(x.y)')
    + _instruction("sums", 4, '"r"(x.x), "r"(x.z), "r"(x.y), "r"(x.w), "r"(x.z), "r"(x.w)')
    + "}}\n"
)
#: Registers for sums of squares: those of two fragments.
SQUARES = 2 * SUMS


#: Of the lanes that share a row of both fragments one has the diagonals.
_SQUARES_OF_LANE = """\
__device__ __forceinline__ float crossfuse_squares_of_lane(const float* sums) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const float own = row & 1 ? sums[1] + sums[7] : sums[0] + sums[6];
  return lane % 4 == row / 2 ? own : 0.0f;
}
"""


def add_squares(dtype: str, sums: Any, vector: Any) -> Any:
    """Call that adds squares of a lane's 16 bytes to `SQUARES` registers; both are addresses."""
    name = TYPES[dtype]
    source = _ADD_SQUARES.format(name=name)
    return ir.cuda_func_call(f"crossfuse_add_squares_{name}", sums, vector, source_code=source)


def squares_of_lane(sums: Any) -> Any:
    """A lane's part of the sum of all squares, of the address of its `SQUARES` registers."""
    name = "crossfuse_squares_of_lane"
    return ir.cuda_func_call(name, sums, source_code=_SQUARES_OF_LANE, return_type="float32")
