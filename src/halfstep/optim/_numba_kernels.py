# pyright: basic
"""CPU kernels: the one-pass update and the gradient measurement as Numba loops, equal to reference.py bit for bit.

Each kernel walks a table of addresses, so that one call serves a whole model. Loops run over slices that
start at zero, because LLVM leaves loops with offset indices scalar; no fast-math anywhere, because
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
PANEL = 2048  # elements staged in fp32 scratch at a time: m and v of a panel stay in the first-level cache
LANES = 64
MASK = i32(0x7FFFFFFF)
INF_BITS = i32(0x7F800000)
ADDRESS_TABLE = "void(int64,int64,int64[:,::1],int64[:,::1],float32[:,::1],uint32[::1])"


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


def compiled(signature: str | None = None) -> Any:
    """njit as every kernel here wants it; without the disk cache where no directory can be written."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

    def decorate(function: Any) -> Any:
        try:
            return njit(signature, cache=True, **options)(function) if signature else njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return njit(signature, **options)(function) if signature else njit(**options)(function)

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
    high = i32(h)
    low = i32(lo)
    magnitude = i32(high & i32(0x7FFF))
    stale = ((magnitude == i32(0)) & (low < i32(0))) | ((magnitude == i32(0x7F80)) & (low > i32(0)))
    low = i32(0) if stale else low
    return float_of(i32(i32(high << i32(16)) + low))


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
def noise(index, key):
    """32 random bits of (index, key): Wellons' lowbias32 finaliser over a Weyl sequence."""
    x = u32(u32(u32(index) * u32(0x9E3779B1)) + key)
    x = u32(u32(x ^ u32(x >> u32(16))) * u32(0x7FEB352D))
    x = u32(u32(x ^ u32(x >> u32(15))) * u32(0x846CA68B))
    return u32(x ^ u32(x >> u32(16)))


# ---- the update -----------------------------------------------------------------------------------------


@cache
def core(algorithm: int, weight: int, grad: int) -> Any:
    """The elementwise update of one slice, moments in fp32: algorithm, weight and grad are _layout codes."""
    signature = (
        "void(int16[::1],int16[::1],float32[::1],int16[::1],float32[::1],float32[::1],float32[::1],"
        "float32[::1],uint32,int64,int64[::1])"
    )

    def update(w16, x16, w32, g16, g32, m_state, v_state, s, key, start, status):
        bad = i32(0)
        factor, decay = s[0], s[1]
        c2, c3, c4, c5, c6, c7 = s[2], s[3], s[4], s[5], s[6], s[7]
        for i in range(w16.shape[0]):
            if grad == L.BF16:
                g = from_bf16(g16[i])
            elif grad == L.FP16:
                g = from_fp16(g16[i])
            else:
                g = g32[i]
            g = g * factor

            if weight == L.PLAIN or weight == L.BF16_MASTER or weight == L.FP16_MASTER:
                w = w32[i]
            elif weight == L.BF16_EXACT:
                w = join_bf16(w16[i], x16[i])
            elif weight == L.FP16_EXACT:
                w = join_fp16(w16[i], x16[i])
            elif weight == L.FP16_NONE:
                w = from_fp16(w16[i])
            else:
                w = from_bf16(w16[i])

            if algorithm == L.ADAMW or algorithm == L.ADAM:
                if algorithm == L.ADAMW:
                    w = w * decay
                else:
                    g = g + decay * w
                m = m_state[i]
                m = m + (g - m) * c2
                v = v_state[i] * c3 + (g * g) * c4
                change = c7 * (m / (f32(math.sqrt(v)) * c5 + c6))
                m_state[i] = m
                v_state[i] = v
            elif algorithm == L.LION:
                w = w * decay
                m = m_state[i]
                u = m * c2 + g * c3
                positive = c6 if u > f32(0) else f32(0)
                change = -c6 if u < f32(0) else positive
                m_state[i] = m * c4 + g * c5
            else:
                g = g + decay * w
                if algorithm == L.SGD:
                    change = c4 * g
                else:
                    m = m_state[i] * c2 + g * c3
                    m_state[i] = m
                    if algorithm == L.SGD_NESTEROV:
                        change = c4 * (g + m * c5)
                    else:
                        change = c4 * m

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
                w16[i] = bf16_random(w, noise(u32(start + i), key))
        if bad != i32(0):
            status[0] = 1

    return compiled(signature)(update)


# ---- compressed states ----------------------------------------------------------------------------------


@compiled("void(int16[::1],float32[::1])")
def read_bf16_state(stored, out):
    for i in range(stored.shape[0]):
        out[i] = from_bf16(stored[i])


@compiled("void(float32[::1],int16[::1],uint32,int64,int64)")
def write_bf16_state(values, stored, key, start, shift):
    for i in range(stored.shape[0]):
        stored[i] = bf16_random(values[i], u32(noise(u32(start + i), key) >> u32(shift)))


@compiled("void(uint8[::1],int32,float32[::1])")
def read_signed(codes, exponent, out):
    """One block of signed E4M3 codes with subnormals, the block's top exponent field given."""
    offset = i32(i32(exponent - i32(15)) << i32(3))
    unit = float_of(i32(i32(exponent - i32(17)) << i32(23)))
    for i in range(codes.shape[0]):
        code = i32(codes[i])
        magnitude = i32(code & i32(127))
        small = bits_of(f32(f32(magnitude) * unit))
        large = i32(i32(magnitude + offset) << i32(20))
        sign = i32(i32(code & i32(128)) << i32(24))
        out[i] = float_of(i32((small if magnitude < i32(8) else large) | sign))


@compiled("void(uint8[::1],int32,float32[::1])")
def read_unsigned(codes, exponent, out):
    """One block of E5M3 codes without subnormals; code 0 is zero."""
    offset = i32(i32(exponent - i32(31)) << i32(3))
    for i in range(codes.shape[0]):
        code = i32(codes[i])
        out[i] = float_of(i32(0) if code == i32(0) else i32(i32(code + offset) << i32(20)))


@compiled("int32(float32[::1])")
def top_exponent(values):
    """The exponent field under which rounding up the largest magnitude still fits the code."""
    top = i32(0)
    for i in range(values.shape[0]):
        top = max(top, i32(bits_of(values[i]) & MASK))
    return max(i32(32), i32(i32(i32(top >> i32(20)) + i32(1)) >> i32(3)))


@compiled("int32(float32[::1],uint8[::1],uint32,int64)")
def write_signed(values, codes, key, start):
    exponent = top_exponent(values)
    offset = i32(i32(exponent - i32(15)) << i32(3))
    per_unit = float_of(i32(i32(i32(271) - exponent) << i32(23)))
    for i in range(codes.shape[0]):
        b = bits_of(values[i])
        magnitude = i32(b & MASK)
        dither = i32(noise(u32(start + i), key) & u32(0xFFFF))
        scaled = f32(float_of(magnitude) * per_unit)
        small = i32(f32(scaled + f32(f32(dither) * f32(2.0**-16))))
        large = i32(i32(i32(magnitude + i32(dither << i32(4))) >> i32(20)) - offset)
        code = small if scaled < f32(8.0) else large
        code = i32(127) if code > i32(127) else code
        codes[i] = u8(i32(code | i32(i32(b >> i32(24)) & i32(128))))
    return exponent


@compiled("int32(float32[::1],uint8[::1],uint32,int64)")
def write_unsigned(values, codes, key, start):
    exponent = top_exponent(values)
    offset = i32(i32(exponent - i32(31)) << i32(3))
    for i in range(codes.shape[0]):
        magnitude = i32(bits_of(values[i]) & MASK)
        dither = i32(noise(u32(start + i), key) >> u32(16))
        code = i32(i32(i32(magnitude + i32(dither << i32(4))) >> i32(20)) - offset)
        code = i32(1) if code < i32(1) else code
        code = i32(255) if code > i32(255) else code
        codes[i] = u8(i32(0) if magnitude == i32(0) else code)
    return exponent


# ---- whole models ---------------------------------------------------------------------------------------


@cache
def updater(algorithm: int, weight: int, grad: int) -> Any:
    """The update of work items first..last: items (parameter, start, count), one address row a parameter."""
    update = core(algorithm, weight, grad)
    moments = 0 if algorithm == L.SGD else 2 if algorithm in (L.ADAMW, L.ADAM) else 1
    wide = 4 if weight == L.PLAIN else 2
    wide_g = 4 if grad == L.FP32 else 2
    master = 0 if weight == L.PLAIN else 1

    def run(first, last, items, table, scalars, keys, state, status):
        m_panel = np.empty(PANEL, np.float32)
        v_panel = np.empty(PANEL, np.float32)
        for k in range(first, last):
            p, start, count = items[k, 0], items[k, 1], items[k, 2]
            panel = count if state == L.STATE_FP32 else PANEL
            for j in range(start, start + count, panel):
                n = min(panel, start + count - j)
                w16 = carray(at(table[p, 0] + wide * j), n, np.int16)
                x16 = carray(at(table[p, 1] + 2 * j), n, np.int16)
                w32 = carray(at(table[p, master] + 4 * j), n, np.float32)
                g16 = carray(at(table[p, 2] + wide_g * j), n, np.int16)
                g32 = carray(at(table[p, 2] + wide_g * j), n, np.float32)
                if state == L.STATE_FP32:
                    m = carray(at(table[p, 3] + 4 * j), n, np.float32)
                    v = carray(at(table[p, 4] + 4 * j), n, np.float32)
                else:
                    m, v = m_panel[:n], v_panel[:n]
                    read_states(moments, state, table[p], j, m, v)
                update(w16, x16, w32, g16, g32, m, v, scalars[p], keys[p], j, status)
                if state != L.STATE_FP32:
                    write_states(moments, state, table[p], j, m, v, keys[p])

    signature = "void(int64,int64,int64[:,::1],int64[:,::1],float32[:,::1],uint32[::1],int64,int64[::1])"
    return compiled(signature)(run)


@compiled("void(int64,int64,int64[::1],int64,float32[::1],float32[::1])")
def read_states(moments, state, row, j, m, v):
    n = m.shape[0]
    if state == L.STATE_BF16:
        if moments > 0:
            read_bf16_state(carray(at(row[3] + 2 * j), n, np.int16), m)
        if moments > 1:
            read_bf16_state(carray(at(row[4] + 2 * j), n, np.int16), v)
        return
    for b in range(0, n, L.BLOCK):
        size = min(L.BLOCK, n - b)
        block = (j + b) // L.BLOCK
        if moments > 0:
            exponents = carray(at(row[5] + block), 1, np.uint8)
            read_signed(carray(at(row[3] + j + b), size, np.uint8), i32(exponents[0]), m[b : b + size])
        if moments > 1:
            exponents = carray(at(row[6] + block), 1, np.uint8)
            read_unsigned(carray(at(row[4] + j + b), size, np.uint8), i32(exponents[0]), v[b : b + size])


@compiled("void(int64,int64,int64[::1],int64,float32[::1],float32[::1],uint32)")
def write_states(moments, state, row, j, m, v, key):
    n = m.shape[0]
    if state == L.STATE_BF16:
        if moments > 0:
            write_bf16_state(m, carray(at(row[3] + 2 * j), n, np.int16), key, j, 0)
        if moments > 1:
            write_bf16_state(v, carray(at(row[4] + 2 * j), n, np.int16), key, j, 16)
        return
    for b in range(0, n, L.BLOCK):
        size = min(L.BLOCK, n - b)
        block = (j + b) // L.BLOCK
        if moments > 0:
            codes = carray(at(row[3] + j + b), size, np.uint8)
            exponents = carray(at(row[5] + block), 1, np.uint8)
            exponents[0] = u8(write_signed(m[b : b + size], codes, key, j + b))
        if moments > 1:
            codes = carray(at(row[4] + j + b), size, np.uint8)
            exponents = carray(at(row[6] + block), 1, np.uint8)
            exponents[0] = u8(write_unsigned(v[b : b + size], codes, key, j + b))


@cache
def measurer(grad: int) -> Any:
    """Sum of squares (float64) and largest magnitude of each work item; a NaN or inf shows in the magnitude."""
    wide = 4 if grad == L.FP32 else 2

    def run(first, last, items, table, squares, peaks):
        lanes = np.empty(LANES, np.float64)
        for k in range(first, last):
            p, start, n = items[k, 0], items[k, 1], items[k, 2]
            g16 = carray(at(table[p, 2] + wide * start), n, np.int16)
            g32 = carray(at(table[p, 2] + wide * start), n, np.float32)
            lanes[:] = 0.0
            top = i32(0)
            for i in range(n // LANES):
                o = i * LANES
                row16, row32 = g16[o : o + LANES], g32[o : o + LANES]
                for j in range(LANES):
                    x = from_bf16(row16[j]) if grad == L.BF16 else from_fp16(row16[j]) if grad == L.FP16 else row32[j]
                    top = max(top, i32(bits_of(x) & MASK))
                    lanes[j] += np.float64(x) * np.float64(x)
            total = 0.0
            for i in range(n // LANES * LANES, n):
                x = from_bf16(g16[i]) if grad == L.BF16 else from_fp16(g16[i]) if grad == L.FP16 else g32[i]
                top = max(top, i32(bits_of(x) & MASK))
                total += np.float64(x) * np.float64(x)
            for j in range(LANES):
                total += lanes[j]
            squares[k] = total
            peaks[k] = float_of(top)

    return compiled("void(int64,int64,int64[:,::1],int64[:,::1],float64[::1],float32[::1])")(run)
