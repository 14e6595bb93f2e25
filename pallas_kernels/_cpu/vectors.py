"""Loops over vectors whose sums stay in registers, which numba's own loops can't express: LLVM instructions, emitted.

Every multiply-add and the order of every sum is spelled out, and nothing is left to the compiler's discretion: which
copy of a function runs, inlined or not, fresh or from the cache, changes no bit.

A vector has as many float32 as a register of this machine. A tile is ROWS by VECTORS of them: as many sums as the
registers hold beside a line of the matrix and one broadcast number. Addresses and strides are in bytes.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils

from pallas_kernels._cpu import call_frame
from pallas_kernels._cpu.call_frame import intrinsic

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
CACHE_LINE = 64  # bytes
BITS = {"float32": 32, "bfloat16": 16}  # of the dtypes that kernels read; they compute in float32


def why_not() -> str | None:
    """Why there can be no kernels here, or None."""
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return "NUMBA_DISABLE_JIT is set"
    if _IS_X86 and not _has("fma"):
        return "this machine has no fused multiply-add"
    return None


def _has(feature: str) -> bool:
    """Whether what numba compiles for has it."""
    chosen: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]  # NUMBA_CPU_FEATURES
    if chosen is not None:
        return f"+{feature}" in chosen.split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature))


def _registers() -> tuple[int, int, int]:
    """float32 of a vector, and rows and vectors of a tile, on what numba compiles for."""
    if _IS_X86:
        return (16, 6, 4) if _has("avx512f") else (8, 4, 3)  # of 32 registers, and of 16
    return 4, 6, 4  # 32 registers of 128 bits


_IS_X86 = platform.machine() in ("x86_64", "AMD64")
LANES, ROWS, VECTORS = _registers()
TILE_COLUMNS = LANES * VECTORS


def tile_product(num_rows: int, num_vectors: int, bits: int) -> Any:
    """A numba function (y, y_stride, x, x_stride, w, w_stride, num_terms, ahead) that adds x w to y.

    y [num_rows, num_vectors * LANES] and x [num_rows, num_terms] are float32; w [num_terms, num_vectors * LANES] is
    float32, or bfloat16 with `bits` 16. A sum takes its terms one after the other, whatever the tile, each with a fused
    multiply-add, and is then added to y: the same for one row and for many, and many short sums round less than a long
    one. What lies `ahead` bytes behind each line of w is fetched into the cache.
    """
    vector = ir.VectorType(_F32, LANES)
    width = bits // 8

    @intrinsic
    def product(typing_context, y, y_stride, x, x_stride, w, w_stride, num_terms, ahead):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            y, y_stride, x, x_stride, w, w_stride, num_terms, ahead = arguments

            lines, rows = (
                [builder.add(address, builder.mul(stride, _I64(row))) for row in range(num_rows)]
                for address, stride in ((y, y_stride), (x, x_stride))
            )
            places = [[builder.add(line, _I64(4 * LANES * v)) for v in range(num_vectors)] for line in lines]
            zero = ir.Constant(vector, [0.0] * LANES)
            before = builder.block
            loop, done = builder.append_basic_block("terms"), builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed(">", num_terms, _I64(0)), loop, done)
            builder.position_at_end(loop)
            term, line_of_w = builder.phi(_I64), builder.phi(_I64)
            sums = [[builder.phi(vector) for _ in range(num_vectors)] for _ in range(num_rows)]
            loaded = [
                _widened(builder, builder.add(line_of_w, _I64(width * LANES * v)), vector, bits)
                for v in range(num_vectors)
            ]
            for offset in range(0, width * LANES * num_vectors, CACHE_LINE):
                _prefetch(builder, builder.add(builder.add(line_of_w, ahead), _I64(offset)))
            new = []
            for row in range(num_rows):
                number = builder.load(
                    builder.inttoptr(builder.add(rows[row], builder.shl(term, _I64(2))), _F32.as_pointer())
                )
                factor = _broadcast(builder, number, vector)
                new.append([_fma(builder, factor, w, s) for w, s in zip(loaded, sums[row], strict=True)])
            following = builder.add(term, _I64(1))
            for phi, first, later in (
                (term, _I64(0), following),
                (line_of_w, w, builder.add(line_of_w, w_stride)),
                *((s, zero, n) for ss, nn in zip(sums, new, strict=True) for s, n in zip(ss, nn, strict=True)),
            ):
                phi.add_incoming(first, before)
                phi.add_incoming(later, loop)
            builder.cbranch(builder.icmp_signed("<", following, num_terms), loop, done)
            builder.position_at_end(done)
            for row in range(num_rows):
                for v in range(num_vectors):
                    total = builder.phi(vector)
                    total.add_incoming(zero, before)
                    total.add_incoming(new[row][v], loop)
                    new[row][v] = total
            for row in range(num_rows):
                for v in range(num_vectors):
                    total = builder.fadd(_load(builder, places[row][v], vector), new[row][v])
                    builder.store(total, builder.inttoptr(places[row][v], vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    @njit
    @call_frame.named(num_rows, num_vectors, bits)
    def function(y, y_stride, x, x_stride, w, w_stride, num_terms, ahead):  # type: ignore[no-untyped-def]
        product(y, y_stride, x, x_stride, w, w_stride, num_terms, ahead)

    return function


@functools.cache
def product(bits: int) -> Any:
    """A numba function (num_rows, num_columns, y, ...), the rest as `tile_product` has it, for any number of rows and a
    multiple of LANES columns: y [num_rows, num_columns] += x w, a column of tiles after the other.

    What lies `ahead` is meant for each tile but the last of a line, and `last_ahead`, the last argument, for that.
    """
    names = {"_wide": _any_rows(VECTORS, bits), "_narrow": _any_rows(1, bits), "_width": bits // 8}
    return call_frame.link(f"pagedjax_tiles_{bits}", types.void(*[types.int64] * 11), _tiles, **names)


# `product` gives a copy of `_tiles` these.
_wide: Any = None
_narrow: Any = None
_width: int = 0


def _tiles(  # type: ignore[no-untyped-def]
    num_rows, num_columns, y, y_stride, x, x_stride, w, w_stride, num_terms, ahead, last_ahead
):
    column = 0
    while column + TILE_COLUMNS <= num_columns:
        here = ahead if column + TILE_COLUMNS < num_columns else last_ahead
        _wide(num_rows, y + 4 * column, y_stride, x, x_stride, w + _width * column, w_stride, num_terms, here)
        column += TILE_COLUMNS
    while column < num_columns:
        here = ahead if column + LANES < num_columns else last_ahead
        _narrow(num_rows, y + 4 * column, y_stride, x, x_stride, w + _width * column, w_stride, num_terms, here)
        column += LANES


def _any_rows(num_vectors: int, bits: int) -> Any:
    """`tile_product` for any number of rows, given in front: tiles of ROWS, and one of the rest."""
    whole = tile_product(ROWS, num_vectors, bits)
    one, two, three = (tile_product(rows, num_vectors, bits) for rows in (1, 2, 3))
    four, five = (tile_product(rows, num_vectors, bits) for rows in (4, 5)) if ROWS > 4 else (whole, whole)

    @njit
    @call_frame.named(num_vectors, bits)
    def function(num_rows, y, y_stride, x, x_stride, w, w_stride, num_terms, ahead):  # type: ignore[no-untyped-def]
        row = 0
        while row + ROWS <= num_rows:
            whole(y + row * y_stride, y_stride, x + row * x_stride, x_stride, w, w_stride, num_terms, ahead)
            row += ROWS
        y, x, left = y + row * y_stride, x + row * x_stride, num_rows - row
        if left == 1:
            one(y, y_stride, x, x_stride, w, w_stride, num_terms, ahead)
        elif left == 2:
            two(y, y_stride, x, x_stride, w, w_stride, num_terms, ahead)
        elif left == 3:
            three(y, y_stride, x, x_stride, w, w_stride, num_terms, ahead)
        elif left == 4:
            four(y, y_stride, x, x_stride, w, w_stride, num_terms, ahead)
        elif left == 5:
            five(y, y_stride, x, x_stride, w, w_stride, num_terms, ahead)

    return function


def dot(size: int, bits: int) -> Any:
    """A numba function of the addresses of x, `size` float32, and y, as many of `bits` 32 or 16: their product.

    LANES sums, each of every LANES-th term, which a tree adds up.
    """
    vector, width = ir.VectorType(_F32, LANES), bits // 8

    @intrinsic
    def product(typing_context, x, y):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            total = ir.Constant(vector, [0.0] * LANES)
            for start in range(0, size, LANES):
                here = _load(builder, builder.add(arguments[0], _I64(4 * start)), vector)
                there = _widened(builder, builder.add(arguments[1], _I64(width * start)), vector, bits)
                total = _fma(builder, here, there, total)
            return _sum(builder, total)

        return types.float32(types.int64, types.int64), generate

    return product


def line_maximum(size: int) -> Any:
    """A numba function of the address of `size` float32: the largest, leaving NaN out."""
    vector = ir.VectorType(_F32, LANES)

    @intrinsic
    def maximum(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            found = ir.Constant(vector, [float("-inf")] * LANES)
            for start in range(0, size, LANES):
                here = _load(builder, builder.add(arguments[0], _I64(4 * start)), vector)
                found = builder.select(builder.fcmp_ordered(">", here, found), here, found)
            kind = ir.FunctionType(_F32, [vector])
            reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
            return builder.call(reduce, [found])

        return types.float32(types.int64), generate

    return maximum


def line_exp(size: int) -> Any:
    """A numba function of the address of `size` float32, and an offset not below any of them: puts exp(x - offset) in
    their place, and gives the sum. Below exp(-87) it is 0; NaN stays.

    Cephes' expf (Moshier), whose polynomial this is.
    """
    vector, integers = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
    least = -87.0

    @intrinsic
    def exponential(typing_context, address, offset):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            def number(x: float) -> Any:
                return ir.Constant(vector, [x] * LANES)

            def exp(x: Any) -> Any:
                bounded = builder.select(builder.fcmp_ordered(">", x, number(least)), x, number(least))
                kind = ir.FunctionType(vector, [vector])
                floor = cgutils.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
                power = builder.call(floor, [_fma(builder, bounded, number(1.44269504088896341), number(0.5))])
                rest = _fma(builder, power, number(-0.693359375), bounded)
                rest = _fma(builder, power, number(2.12194440e-4), rest)
                y = number(1.9875691500e-4)
                for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
                    y = _fma(builder, y, rest, number(term))
                y = _fma(builder, builder.fmul(y, rest), rest, builder.fadd(rest, number(1.0)))
                bits = builder.add(builder.fptosi(power, integers), ir.Constant(integers, [127] * LANES))
                scale = builder.bitcast(builder.shl(bits, ir.Constant(integers, [23] * LANES)), vector)
                y = builder.select(builder.fcmp_ordered(">", x, number(least)), builder.fmul(y, scale), number(0.0))
                return builder.select(builder.fcmp_unordered("uno", x, x), x, y)

            total, shift = number(0.0), _broadcast(builder, arguments[1], vector)
            for start in range(0, size, LANES):
                place = builder.inttoptr(builder.add(arguments[0], _I64(4 * start)), vector.as_pointer())
                y = exp(builder.fsub(builder.load(place, align=4), shift))
                builder.store(y, place, align=4)
                total = builder.fadd(total, y)
            return _sum(builder, total)

        return types.float32(types.int64, types.float32), generate

    return exponential


def prefetch(num_bytes: int) -> Any:
    """A numba function of an address, which fetches what lies there into the cache."""

    @intrinsic
    def fetch(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            for offset in range(0, num_bytes, CACHE_LINE):
                _prefetch(builder, builder.add(arguments[0], _I64(offset)))
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return fetch


@intrinsic
def float_of_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """The float32 that an int32 holds the bits of."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.int32), generate


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(z.type, [z.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [x, y, z])


def _sum(builder: Any, x: Any) -> Any:
    """The sum of a vector: halves are added until there is one number, so always in the same order."""
    while x.type.count > 1:
        half = x.type.count // 2
        nothing = ir.Constant(x.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(x, nothing, ir.Constant(ir.VectorType(_I32, half), list(lanes)))
            for lanes in (range(half), range(half, 2 * half))
        )
        x = builder.fadd(low, high)
    return builder.extract_element(x, _I32(0))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _widened(builder: Any, address: Any, vector: Any, bits: int) -> Any:
    """A vector of float32, or of bfloat16, which are the upper halves of them."""
    if bits == 32:
        return _load(builder, address, vector)
    integers = ir.VectorType(_I32, LANES)
    wide = builder.zext(_load(builder, address, ir.VectorType(ir.IntType(16), LANES)), integers)
    return builder.bitcast(builder.shl(wide, ir.Constant(integers, [16] * LANES)), vector)


def _broadcast(builder: Any, number: Any, vector: Any) -> Any:
    nothing = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(nothing, number, _I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _prefetch(builder: Any, address: Any) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for_reading, second_level, data = _I32(0), _I32(2), _I32(1)
    builder.call(prefetch, [builder.inttoptr(address, byte), for_reading, second_level, data])
