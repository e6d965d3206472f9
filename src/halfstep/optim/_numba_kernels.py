# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false
"""CPU kernels: the one-pass update and the gradient measurement as Numba loops, equal to reference.py.

Each kernel walks a table of addresses, so that one call serves a whole model. Loops run over slices that
start at zero, because LLVM leaves loops with offset indices scalar. No fast-math in the update:
reassociation and fused multiply-add would break equality with the reference.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from halfstep.optim import _layout as L

f32, i32, i16, u8, u32 = np.float32, np.int32, np.int16, np.uint8, np.uint32
FLUSH = 4096  # gradients whose squares are added in fp32 before float64 takes over
MASK = i32(0x7FFFFFFF)
INF_BITS = i32(0x7F800000)


@intrinsic
def bits_of(typingctx, x):
    """The 32 bits of a float32, as int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):
    """The float32 whose 32 bits are given as int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def at(typingctx, address):
    """An address as an untyped pointer."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), codegen


def compiled(signature: str | None = None, **more: Any) -> Any:
    """njit as every kernel here wants it; without the disk cache where no directory can be written."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", **more}
    given = () if signature is None else (signature,)

    def decorate(function: Any) -> Any:
        try:
            return njit(*given, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return njit(*given, **options)(function)

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
    h = i32(i32(b + i32(0x8000)) >> i32(16))
    return i16(i32(b >> i32(16)) | i32(0x7FC0)) if i32(b & MASK) > INF_BITS else i16(h)


@compiled()
def bf16_random(x, noise):
    b = bits_of(x)
    h = i32(i32(b + i32(noise & u32(0xFFFF))) >> i32(16))
    return i16(i32(b >> i32(16)) | i32(0x40)) if i32(b & MASK) >= INF_BITS else i16(h)


@compiled()
def join_bf16(h, lo):
    high = i32(i32(h) << i32(16))
    both = i32(high + i32(lo))
    return float_of(high if i32(both ^ high) < i32(0) else both)


@compiled()
def residual_bf16(x, h):
    b = bits_of(x)
    low = i32(b - i32(i32(h) << i32(16)))
    return i16(i32(0)) if i32(b & MASK) > INF_BITS else i16(low)


@compiled()
def from_fp16(h):
    sign = i32(i32(i32(h) & i32(0x8000)) << i32(16))
    magnitude = i32(i32(h) & i32(0x7FFF))
    shift = i32(0x70000000) if magnitude >= i32(0x7C00) else i32(0x38000000)
    normal = i32(i32(magnitude << i32(13)) + shift)
    tiny = bits_of(f32(f32(magnitude) * f32(2.0**-24)))
    return float_of(i32(sign | (tiny if magnitude < i32(0x400) else normal)))


@compiled()
def fp16_even(x):
    b = bits_of(x)
    a = i32(b & MASK)
    odd = i32(i32(a >> i32(13)) & i32(1))
    normal = i32(i32(i32(a - i32(0x38000000)) + i32(0xFFF) + odd) >> i32(13))
    normal = i32(0x7C00) if a >= i32(0x477FF000) else normal
    tiny = i32(bits_of(f32(float_of(a) + f32(0.5))) - i32(0x3F000000))
    h = tiny if a < i32(0x38800000) else normal
    h = i32(0x7E00) if a > INF_BITS else h
    return i16(i32(h | i32(i32(b >> i32(16)) & i32(0x8000))))


@compiled()
def join_fp16(h, lo):
    sign = i32(i32(i32(h) & i32(0x8000)) << i32(16))
    magnitude = i32(i32(h) & i32(0x7FFF))
    base = bits_of(from_fp16(i16(magnitude)))
    low = i32(0) if magnitude >= i32(0x7C00) else i32(lo)
    pattern = i32(base + low)
    below = bits_of(f32(float_of(base) + f32(f32(low) * f32(2.0**-40))))
    zero = bits_of(f32(f32(i32(low & i32(0xFFFF))) * f32(2.0**-40)))
    below = zero if magnitude == i32(0) else below
    return float_of(i32(sign | (below if magnitude < i32(0x100) else pattern)))


@compiled()
def residual_fp16(x, h):
    a = i32(bits_of(x) & MASK)
    magnitude = i32(i32(h) & i32(0x7FFF))
    base = bits_of(from_fp16(i16(magnitude)))
    pattern = i32(a - base)
    units = f32(f32(float_of(a) - float_of(base)) * f32(2.0**40))
    below = i32(f32(units + f32(12582912.0)) - f32(12582912.0))
    top = i32(32768) if magnitude == i32(0) else i32(32767)
    below = top if below > top else below
    low = below if magnitude < i32(0x100) else pattern
    return i16(i32(0)) if magnitude >= i32(0x7C00) else i16(low)


# ---- random bits ----------------------------------------------------------------------------------------


@compiled()
def mix(x):
    """Half of a hash: enough for dither, since the counter starts from a full hash of (seed, step, name)."""
    x = u32(u32(x ^ u32(x >> u32(16))) * u32(0x7FEB352D))
    return u32(x ^ u32(x >> u32(15)))


# ---- 8-bit states ---------------------------------------------------------------------------------------


def moments_of(algorithm: int) -> int:
    """How many state tensors the algorithm keeps."""
    return 0 if algorithm == L.SGD else 2 if algorithm in (L.ADAMW, L.ADAM) else 1


@compiled()
def read_signed(code, exponent):
    """A signed code, E4M3 of the magnitude plus the smallest normal: 0 is zero, spacing is even near it."""
    least = i32(i32(exponent - i32(15)) << i32(23))
    magnitude = i32(i32(i32(code & i32(127)) << i32(20)) + least)
    sign = i32(i32(code & i32(128)) << i32(24))
    return float_of(i32(bits_of(f32(float_of(magnitude) - float_of(least))) | sign))


@compiled()
def read_unsigned(code, exponent):
    """An E5M3 code; the smallest, 0, is 2^-31 of the block's top and not zero."""
    return float_of(i32(i32(code + i32(i32(exponent - i32(31)) << i32(3))) << i32(20)))


@compiled()
def write_signed(value, exponent, random):
    b = bits_of(value)
    least = i32(i32(exponent - i32(15)) << i32(23))
    raised = bits_of(f32(float_of(i32(b & MASK)) + float_of(least)))
    dither = i32(i32(random & u32(0xFFFF)) << i32(4))
    code = min(i32(i32(i32(raised - least) + dither) >> i32(20)), i32(127))
    return u8(i32(code | i32(i32(b >> i32(24)) & i32(128))))


@compiled()
def write_unsigned(value, exponent, random):
    magnitude = i32(bits_of(value) & MASK)
    dither = i32(random >> u32(16))
    offset = i32(i32(exponent - i32(31)) << i32(3))
    code = i32(i32(i32(magnitude + i32(dither << i32(4))) >> i32(20)) - offset)
    return u8(min(max(code, i32(0)), i32(255)))


@compiled()
def exponent_for(bound):
    """The block exponent under which values up to `bound` fit, rounding up included."""
    return max(i32(L.LEAST_TOP), i32(i32(i32(bits_of(bound) >> i32(20)) + i32(1)) >> i32(3)))


@compiled("int32(uint8[::1],int32)")
def largest_code(codes, mask):
    top = i32(0)
    for i in range(codes.shape[0]):
        top = max(top, i32(i32(codes[i]) & mask))
    return top


# ---- the update -----------------------------------------------------------------------------------------


@compiled()
def read_grad(grad, g16, g32, i):
    if grad == L.BF16:
        return from_bf16(g16[i])
    if grad == L.FP16:
        return from_fp16(g16[i])
    return g32[i]


@compiled()
def read_weight(weight, w16, x16, w32, i):
    if weight == L.PLAIN or weight == L.BF16_MASTER or weight == L.FP16_MASTER:
        return w32[i]
    if weight == L.BF16_EXACT:
        return join_bf16(w16[i], x16[i])
    if weight == L.FP16_EXACT:
        return join_fp16(w16[i], x16[i])
    if weight == L.FP16_NONE:
        return from_fp16(w16[i])
    return from_bf16(w16[i])


@cache
def core(algorithm: int, weight: int, grad: int, state: int) -> Any:
    """The elementwise update of one slice; the four arguments are _layout codes.

    8-bit states are read under the block exponents `m_old` and `v_old` and written under `m_new`, `v_new`.
    """
    signature = (
        "void(int16[::1],int16[::1],float32[::1],int16[::1],float32[::1],float32[::1],float32[::1],"
        "int16[::1],int16[::1],uint8[::1],uint8[::1],int32,int32,int32,int32,"
        "float32[::1],uint32,int64,int64[::1])"
    )
    moments = moments_of(algorithm)
    random_used = (state != L.STATE_FP32 and moments > 0) or weight == L.BF16_STOCHASTIC

    def update(
        w16, x16, w32, g16, g32, m32, v32, m16, v16, m8, v8, m_old, v_old, m_new, v_new, s, key, start, status
    ):
        bad = i32(0)
        factor, decay = s[0], s[1]
        c2, c3, c4, c5, c6, c7 = s[2], s[3], s[4], s[5], s[6], s[7]
        counter = u32(u32(u32(start) * u32(0x9E3779B1)) + key)
        for i in range(w16.shape[0]):
            g = read_grad(grad, g16, g32, i) * factor
            w = read_weight(weight, w16, x16, w32, i)
            m = f32(0)
            v = f32(0)
            if moments > 0:
                if state == L.STATE_FP32:
                    m = m32[i]
                elif state == L.STATE_BF16:
                    m = from_bf16(m16[i])
                else:
                    m = read_signed(i32(m8[i]), m_old)
            if moments > 1:
                if state == L.STATE_FP32:
                    v = v32[i]
                elif state == L.STATE_BF16:
                    v = from_bf16(v16[i])
                else:
                    v = read_unsigned(i32(v8[i]), v_old)

            if algorithm == L.ADAMW or algorithm == L.ADAM:
                if algorithm == L.ADAMW:
                    w = w * decay
                else:
                    g = g + decay * w
                m = m + (g - m) * c2
                v = v * c3 + (g * g) * c4
                change = c7 * (m / (f32(math.sqrt(v)) * c5 + c6))
            elif algorithm == L.LION:
                w = w * decay
                u = m * c2 + g * c3
                positive = c6 if u > f32(0) else f32(0)
                change = -c6 if u < f32(0) else positive
                m = m * c4 + g * c5
            else:
                g = g + decay * w
                if algorithm == L.SGD:
                    change = c4 * g
                else:
                    m = m * c2 + g * c3
                    change = c4 * (g + m * c5) if algorithm == L.SGD_NESTEROV else c4 * m

            random = u32(0)
            if random_used:
                random = mix(counter)
                counter = u32(counter + u32(0x9E3779B1))
            if moments > 0:
                if state == L.STATE_FP32:
                    m32[i] = m
                elif state == L.STATE_BF16:
                    m16[i] = bf16_random(m, random)
                else:
                    m8[i] = write_signed(m, m_new, random)
            if moments > 1:
                if state == L.STATE_FP32:
                    v32[i] = v
                elif state == L.STATE_BF16:
                    v16[i] = bf16_random(v, u32(random >> u32(16)))
                else:
                    v8[i] = write_unsigned(v, v_new, random)

            w = w - change
            if weight == L.PLAIN or weight == L.BF16_MASTER or weight == L.FP16_MASTER:
                w32[i] = w
            if weight == L.BF16_EXACT:
                h = bf16_away(w)
                w16[i] = h
                x16[i] = residual_bf16(w, h)
            elif weight == L.BF16_MASTER:
                w16[i] = bf16_away(w)
            elif weight == L.FP16_EXACT:
                h = fp16_even(w)
                over = (i32(i32(h) & i32(0x7FFF)) == i32(0x7C00)) & (i32(bits_of(w) & MASK) < INF_BITS)
                bad |= i32(1) if over else i32(0)
                h = i16(i32(h) - i32(1)) if over else h
                w16[i] = h
                x16[i] = i16(i32(0)) if over else residual_fp16(w, h)
            elif weight == L.FP16_MASTER or weight == L.FP16_NONE:
                w16[i] = fp16_even(w)
            elif weight == L.BF16_NONE:
                w16[i] = bf16_even(w)
            elif weight == L.BF16_STOCHASTIC:
                w16[i] = bf16_random(w, mix(u32(u32(random * u32(0x9E3779B1)) + key)))
        if bad != i32(0):
            status[0] = 1

    return compiled(signature)(update)


@cache
def peak(algorithm: int, weight: int, grad: int) -> Any:
    """The largest magnitude of what enters the states in a slice: gradients, with L2 decay where used."""
    coupled = algorithm not in (L.ADAMW, L.LION)

    def largest(w16, x16, w32, g16, g32, s):
        top = i32(0)
        for i in range(w16.shape[0]):
            g = read_grad(grad, g16, g32, i)
            if coupled:
                g = g * s[0] + s[1] * read_weight(weight, w16, x16, w32, i)
            top = max(top, i32(bits_of(g) & MASK))
        return float_of(top) if coupled else float_of(i32(bits_of(f32(float_of(top) * s[0])) & MASK))

    signature = "float32(int16[::1],int16[::1],float32[::1],int16[::1],float32[::1],float32[::1])"
    return compiled(signature)(largest)


@compiled()
def no_peak(w16, x16, w32, g16, g32, s):
    return f32(0)


@compiled("float32(int64,float32,float32,float32[::1])")
def first_bound(algorithm, old, g, s):
    """How large a first moment can get: old peak and gradient peak through the algorithm's own average."""
    if algorithm == L.LION:
        return old * s[4] + g * s[5]
    if algorithm == L.ADAMW or algorithm == L.ADAM:
        return old * f32(f32(1) - s[2]) + g * s[2]
    return old * s[2] + g * s[3]


# ---- whole models ---------------------------------------------------------------------------------------


@cache
def updater(algorithm: int, weight: int, grad: int, state: int) -> Any:
    """The update of work items first..last: items (parameter, start, count), one address row a parameter.

    Columns of the address table: weight, master or lacking bits, gradient, first and second state, and the
    block exponents of these two.
    """
    update = core(algorithm, weight, grad, state)
    largest = peak(algorithm, weight, grad) if state == L.STATE_8BIT else no_peak
    moments = moments_of(algorithm)
    wide_w = 4 if weight == L.PLAIN else 2
    wide_g = 4 if grad == L.FP32 else 2
    wide_s = (4, 2, 1)[state]
    master = 0 if weight == L.PLAIN else 1
    stride = L.BLOCK if state == L.STATE_8BIT else 1 << 30

    def run(first, last, items, table, scalars, keys, status):
        for k in range(first, last):
            p, start, count = items[k, 0], items[k, 1], items[k, 2]
            s = scalars[p]
            for j in range(start, start + count, stride):
                n = min(stride, start + count - j)
                w16 = carray(at(table[p, 0] + wide_w * j), n, np.int16)
                x16 = carray(at(table[p, 1] + 2 * j), n, np.int16)
                w32 = carray(at(table[p, master] + 4 * j), n, np.float32)
                g16 = carray(at(table[p, 2] + wide_g * j), n, np.int16)
                g32 = carray(at(table[p, 2] + wide_g * j), n, np.float32)
                m32 = carray(at(table[p, 3] + wide_s * j), n, np.float32)
                v32 = carray(at(table[p, 4] + wide_s * j), n, np.float32)
                m16 = carray(at(table[p, 3] + wide_s * j), n, np.int16)
                v16 = carray(at(table[p, 4] + wide_s * j), n, np.int16)
                m8 = carray(at(table[p, 3] + wide_s * j), n, np.uint8)
                v8 = carray(at(table[p, 4] + wide_s * j), n, np.uint8)
                m_old = m_new = v_old = v_new = i32(0)
                if state == L.STATE_8BIT:
                    g = largest(w16, x16, w32, g16, g32, s)
                    m_exponent = carray(at(table[p, 5] + j // L.BLOCK), 1, np.uint8)
                    m_old = i32(m_exponent[0])
                    m = read_signed(largest_code(m8, i32(127)), m_old)
                    m_new = exponent_for(first_bound(algorithm, m, g, s))
                    m_exponent[0] = u8(m_new)
                    if moments > 1:
                        v_exponent = carray(at(table[p, 6] + j // L.BLOCK), 1, np.uint8)
                        v_old = i32(v_exponent[0])
                        v = read_unsigned(largest_code(v8, i32(255)), v_old)
                        v_new = exponent_for(v * s[3] + (g * g) * s[4])
                        v_exponent[0] = u8(v_new)
                update(
                    w16, x16, w32, g16, g32, m32, v32, m16, v16, m8, v8, m_old, v_old, m_new, v_new,
                    s, keys[p], j, status,
                )  # fmt: skip

    signature = "void(int64,int64,int64[:,::1],int64[:,::1],float32[:,::1],uint32[::1],int64[::1])"
    return compiled(signature)(run)


@cache
def measurer(grad: int, wide: bool) -> Any:
    """Sum of squares and largest magnitude of each work item; NaN and inf show in the latter.

    Squares are taken in fp32 and added up in float64 every `FLUSH` elements, or all in float64 where `wide`.
    The order within such a run is left to the compiler: it is the same at any number of threads.
    """
    size = 4 if grad == L.FP32 else 2
    kind = np.float64 if wide else np.float32

    def part(g16, g32):
        total = kind(0)
        top = i32(0)
        for i in range(g16.shape[0]):
            x = read_grad(grad, g16, g32, i)
            top = max(top, i32(bits_of(x) & MASK))
            total += kind(x) * kind(x)
        return np.float64(total), float_of(top)

    measure = compiled(fastmath={"reassoc"})(part)

    def run(first, last, items, table, squares, peaks):
        for k in range(first, last):
            p, start, count = items[k, 0], items[k, 1], items[k, 2]
            total = 0.0
            top = f32(0)
            for j in range(start, start + count, FLUSH):
                n = min(FLUSH, start + count - j)
                g16 = carray(at(table[p, 2] + size * j), n, np.int16)
                g32 = carray(at(table[p, 2] + size * j), n, np.float32)
                squared, peak = measure(g16, g32)
                total += squared
                top = float_of(max(bits_of(top), bits_of(peak)))
            squares[k] = total
            peaks[k] = top

    return compiled("void(int64,int64,int64[:,::1],int64[:,::1],float64[::1],float32[::1])")(run)
