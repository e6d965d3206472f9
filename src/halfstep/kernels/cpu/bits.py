# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
"""What the CPU kernels are made of: bits and memory as Numba intrinsics, 16-bit formats, codes, random bits.

Scalar functions that LLVM inlines and vectorises; each equals its counterpart in split.py or rounding.py.
"""

import sys
from time import perf_counter
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from halfstep.kernels import codes as L

f32, i32, i16, u8, u32 = np.float32, np.int32, np.int16, np.uint8, np.uint32
MASK = i32(0x7FFFFFFF)
INF_BITS = i32(0x7F800000)


def bitcast(given: Any, wanted: Any, llvm: Any) -> Any:
    """An intrinsic: the bits of a value of one type as a value of another, `llvm` in LLVM's words."""

    @intrinsic
    def cast(typingctx, x):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm)

        return wanted(given), codegen

    return cast


bits_of = bitcast(types.float32, types.int32, ir.IntType(32))
float_of = bitcast(types.int32, types.float32, ir.FloatType())
double_of = bitcast(types.int64, types.float64, ir.DoubleType())


@intrinsic
def widest_vectors(typingctx):
    """Compile the calling function on its own, for 512 bits where the processor has them; LLVM takes 256.

    Its stack begins at a cache line: it spills whole vectors, which took up to 60 % longer where the length
    of the environment left each of them in two lines.
    """

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        builder.function.attributes.alignstack = 64
        set.add(
            builder.function.attributes, '"prefer-vector-width"="512"'
        )  # llvmlite knows no such attribute
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def always_inline(typingctx):
    """Compile the calling function into its callers, however long it is: a call keeps a loop scalar."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("alwaysinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def pick(typingctx, condition, x, y):
    """`x` where the condition holds, else `y`; both are computed, since a branch may keep loops scalar."""

    def codegen(context, builder, signature, args):
        return builder.select(args[0], args[1], args[2])

    return x(types.boolean, x, x), codegen


@intrinsic
def at(typingctx, address):
    """An address as an untyped pointer."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), codegen


def prefetcher(count: int, ahead: int, *widths: int) -> Any:
    """An intrinsic: ask for the lines of `count` elements from j + `ahead` on; no harm where none are."""

    @intrinsic
    def prefetch(typingctx, w, x, g, m, v, j):
        def codegen(context, builder, signature, args):
            byte, word, long = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
            kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            name = "llvm.prefetch.p0"
            call = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
            read, nearest, data = word(0), word(3), word(1)
            for address, width in zip(args, widths):
                first = builder.add(address, builder.mul(long(width), args[5]))
                for q in range(ahead * width, (ahead + count) * width, 64):
                    line = builder.inttoptr(builder.add(first, long(q)), byte)
                    builder.call(call, [line, read, nearest, data])

        return types.void(*[types.int64] * 6), codegen

    return prefetch


def memory(kind: Any, llvm: Any) -> tuple[Any, Any]:
    """Intrinsics `peek(address, i)` and `poke(address, i, value)`: the i-th value of a type at an address."""
    align = min(2, kind.bitwidth // 8)  # a view may start at any 16-bit value

    def place(builder: Any, args: Any) -> Any:
        return builder.gep(builder.inttoptr(args[0], llvm.as_pointer()), [args[1]], inbounds=True)

    @intrinsic
    def peek(typingctx, address, i):
        def codegen(context, builder, signature, args):
            return builder.load(place(builder, args), align=align)

        return kind(types.int64, types.int64), codegen

    @intrinsic
    def poke(typingctx, address, i, value):
        def codegen(context, builder, signature, args):
            builder.store(args[2], place(builder, args), align=align)

        return types.void(types.int64, types.int64, kind), codegen

    return peek, poke


peek_f32, poke_f32 = memory(types.float32, ir.FloatType())
peek_i32, poke_i32 = memory(types.int32, ir.IntType(32))
peek_i16, poke_i16 = memory(types.int16, ir.IntType(16))
peek_u16, poke_u16 = memory(types.uint16, ir.IntType(16))
peek_u8, poke_u8 = memory(types.uint8, ir.IntType(8))


OPTIONS = {"nogil": True, "error_model": "numpy"}
PATIENCE = 2.0
"""Seconds of compiling without a word: who waits longer is told what for."""


def compiled(signature: str | None = None, name: str = "", **more: Any) -> Any:
    """njit as every kernel here wants it; with a signature, kept on disk where that can be.

    What a function closes over belongs into its `name`. Numba tells functions apart by name and by a number
    that every process counts from 0, so that code from disk would call whatever function of its name, number
    and types came first; and two processes that write to the files of one name may mix them up.
    """
    options: dict[str, Any] = {**OPTIONS, **more}

    def decorate(function: Any) -> Any:
        assert name or not function.__closure__, f"{function.__qualname__} closes over its variant"
        function.__qualname__ = name or function.__qualname__
        if (
            signature is None
        ):  # only kernels call it: what Python and C would call it by takes time to compile
            return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
        begun, kept = perf_counter(), "the next run finds it on disk"
        try:
            kernel = njit(signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            kernel = njit(signature, **options)(function)
            kept = "there is no folder to keep it in, which NUMBA_CACHE_DIR names"
        if (took := perf_counter() - begun) > PATIENCE and not kernel.stats.cache_hits:
            print(f"halfstep: compiled a kernel in {took:.0f} s; {kept}", file=sys.stderr, flush=True)
        return kernel

    return decorate


# ---- 16-bit formats -------------------------------------------------------------------------------------


@compiled()
def from_bf16(h):
    return float_of(i32(i32(h) << i32(16)))


@compiled()
def bf16_even(x):
    b = bits_of(x)
    odd = i32(i32(b >> i32(16)) & i32(1))
    h = i32(i32(b + i32(0x7FFF) + odd) >> i32(16))
    return i16(i32(b >> i32(16)) | i32(0x40)) if i32(b & MASK) > INF_BITS else i16(h)


@compiled()
def bf16_away(x):
    b = bits_of(x)
    up = i32(b | i32(0x7FC00000)) if x != x else i32(b + i32(0x8000))
    return i16(i32(up >> i32(16)))


@compiled()
def bf16_random(x, noise):
    """Of the result of an operation: a NaN is quiet then, and stays one without its lower half."""
    b = bits_of(x)
    up = i32(noise & u32(0xFFFF)) if i32(b & MASK) < INF_BITS else i32(0)
    return i16(i32(i32(b + up) >> i32(16)))


@compiled()
def join_bf16(h, lo):
    high = i32(i32(h) << i32(16))
    both = i32(high + i32(lo))
    return float_of(high if i32(both ^ high) < i32(0) else both)


@compiled()
def lacking_bf16(x, h):
    b = bits_of(x)
    low = i32(b - i32(i32(h) << i32(16)))
    return i16(i32(0)) if x != x else i16(low)


@compiled()
def from_fp16(h):
    sign = i32(i32(i32(h) & i32(0x8000)) << i32(16))
    magnitude = i32(i32(h) & i32(0x7FFF))
    shift = pick(magnitude >= i32(0x7C00), i32(0x70000000), i32(0x38000000))
    normal = i32(i32(magnitude << i32(13)) + shift)
    tiny = bits_of(f32(f32(magnitude) * f32(2.0**-24)))
    return float_of(i32(sign | pick(magnitude < i32(0x400), tiny, normal)))


@compiled()
def fp16_even(x):
    b = bits_of(x)
    a = i32(b & MASK)
    odd = i32(i32(a >> i32(13)) & i32(1))
    normal = i32(i32(i32(a - i32(0x38000000)) + i32(0xFFF) + odd) >> i32(13))
    normal = pick(a >= i32(0x477FF000), i32(0x7C00), normal)
    tiny = i32(bits_of(f32(float_of(a) + f32(0.5))) - i32(0x3F000000))
    h = pick(a < i32(0x38800000), tiny, normal)
    h = pick(a > INF_BITS, i32(0x7E00), h)
    return i16(i32(h | i32(i32(b >> i32(16)) & i32(0x8000))))


@compiled()
def join_fp16(h, lo):
    sign = i32(i32(i32(h) & i32(0x8000)) << i32(16))
    magnitude = i32(i32(h) & i32(0x7FFF))
    base = bits_of(from_fp16(i16(magnitude)))
    low = pick(magnitude >= i32(0x7C00), i32(0), i32(lo))
    most = pick(magnitude > i32(0x200), i32(1 << 13), i32(1 << 14))
    most = pick(magnitude > i32(0x400), i32(1 << 12), most)
    far = pick(low < i32(0), i32(-low), low) > most
    pattern = i32(base + pick((magnitude > i32(0x100)) & far, i32(0), low))
    below = bits_of(f32(float_of(base) + f32(f32(low) * f32(2.0**-40))))
    units = i32(low & i32(0xFFFF))
    zero = bits_of(f32(f32(pick(units > i32(0x8000), i32(0), units)) * f32(2.0**-40)))
    below = pick(magnitude == i32(0), zero, below)
    return float_of(i32(sign | pick(magnitude < i32(0x100), below, pattern)))


@compiled()
def lacking_fp16(x, h):
    a = i32(bits_of(x) & MASK)
    magnitude = i32(i32(h) & i32(0x7FFF))
    base = bits_of(from_fp16(i16(magnitude)))
    pattern = i32(a - base)
    units = f32(f32(float_of(a) - float_of(base)) * f32(2.0**40))
    below = i32(f32(units + f32(12582912.0)) - f32(12582912.0))
    top = pick(magnitude == i32(0), i32(32768), i32(32767))
    below = pick(below > top, top, below)
    low = pick(magnitude < i32(0x100), below, pattern)
    return i16(pick(magnitude >= i32(0x7C00), i32(0), low))


# ---- random bits ----------------------------------------------------------------------------------------


WEYL, MIX = 0x9E3779B1, 0x7FEB352D


@compiled()
def mix(x):
    """Half of a hash: enough for dither where a whole one has made the counter."""
    x = u32(u32(x ^ u32(x >> u32(16))) * u32(MIX))
    return u32(x ^ u32(x >> u32(15)))


@compiled()
def word_of(panel, key):
    """The hashed word of a panel of random bits; an element's are it, exclusive or WEYL times its lane."""
    x = u32(u32(u32(panel) * u32(WEYL)) + key)
    x = u32(u32(x ^ u32(x >> u32(16))) * u32(MIX))
    x = u32(u32(x ^ u32(x >> u32(15))) * u32(0x846CA68B))
    return u32(x ^ u32(x >> u32(16)))


# ---- 8-bit states ---------------------------------------------------------------------------------------


@compiled()
def read_signed(code, exponent):
    """A signed code, E4M3 of the magnitude plus the smallest normal: 0 is zero, spacing is even near it."""
    sign = i32(i32(code & i32(128)) << i32(24))
    least = i32(i32(i32(exponent - i32(15)) << i32(23)) | sign)
    return f32(float_of(i32(i32(i32(code & i32(127)) << i32(20)) + least)) - float_of(least))


@compiled()
def read_unsigned(code, exponent):
    """An E5M3 code; the smallest, 0, is 2^-31 of the block's largest and not zero."""
    return float_of(i32(i32(code + i32(i32(exponent - i32(31)) << i32(3))) << i32(20)))


@compiled()
def nan_to_inf(value):
    return pick(value != value, INF_BITS, bits_of(value))


@compiled()
def write_signed(value, exponent, random):
    b = nan_to_inf(value)
    least = i32(i32(exponent - i32(15)) << i32(23))
    raised = bits_of(f32(float_of(i32(b & MASK)) + float_of(least)))
    dither = i32(i32(random & u32(0xFFFF)) << i32(4))
    code = min(i32(i32(i32(raised - least) + dither) >> i32(20)), i32(127))
    return u8(i32(code | i32(i32(b >> i32(24)) & i32(128))))


@compiled()
def write_unsigned(value, exponent, random):
    magnitude = i32(nan_to_inf(value) & MASK)
    dither = i32(random >> u32(16))
    offset = i32(i32(exponent - i32(31)) << i32(3))
    code = i32(i32(i32(magnitude + i32(dither << i32(4))) >> i32(20)) - offset)
    return u8(min(max(code, i32(0)), i32(255)))


@compiled()
def exponent_for(bound):
    """The block exponent under which values up to `bound` fit, rounding up included."""
    exponent = i32(i32(i32(bits_of(bound) >> i32(20)) + i32(1)) >> i32(3))
    return max(i32(L.LEAST_EXPONENT), min(exponent, i32(255)))
