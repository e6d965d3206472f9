# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false
"""CPU kernels: the one-pass update and the gradient measurement as Numba loops, equal to reference.py.

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


# ---- 8-bit states ---------------------------------------------------------------------------------------


def moments_of(algorithm: int) -> int:
    """How many state tensors the algorithm keeps."""
    return 0 if algorithm == L.SGD else 2 if algorithm in (L.ADAMW, L.ADAM) else 1


@compiled()
def read_signed(stored, exponent):
    """A signed E4M3 code with subnormals, its block's top exponent field given."""
    code = i32(stored)
    magnitude = i32(code & i32(127))
    unit = float_of(i32(i32(exponent - i32(17)) << i32(23)))
    small = bits_of(f32(f32(magnitude) * unit))
    large = i32(i32(magnitude + i32(i32(exponent - i32(15)) << i32(3))) << i32(20))
    sign = i32(i32(code & i32(128)) << i32(24))
    return float_of(i32((small if magnitude < i32(8) else large) | sign))


@compiled()
def read_unsigned(stored, exponent):
    """An E5M3 code without subnormals; code 0 is zero."""
    code = i32(stored)
    large = i32(i32(code + i32(i32(exponent - i32(31)) << i32(3))) << i32(20))
    return float_of(i32(0) if code == i32(0) else large)


@compiled("void(float32[::1],int32[::1],uint8[::1])")
def top_exponents(values, tops, stored):
    """Per block, the exponent field under which rounding up the largest magnitude still fits the code."""
    n = values.shape[0]
    for start in range(0, n, L.BLOCK):
        block = values[start : min(n, start + L.BLOCK)]
        top = i32(0)
        for i in range(block.shape[0]):
            top = max(top, i32(bits_of(block[i]) & MASK))
        exponent = max(i32(32), i32(i32(i32(top >> i32(20)) + i32(1)) >> i32(3)))
        stored[start // L.BLOCK] = u8(exponent)
        tops[start : min(n, start + L.BLOCK)] = exponent


@compiled("void(uint8[::1],int32[::1])")
def expand(stored, tops):
    """The block exponents, once for each element."""
    n = tops.shape[0]
    for start in range(0, n, L.BLOCK):
        tops[start : min(n, start + L.BLOCK)] = i32(stored[start // L.BLOCK])


@compiled("void(float32[::1],uint8[::1],int32[::1],uint32[::1])")
def write_signed(values, codes, tops, dither):
    for i in range(codes.shape[0]):
        b = bits_of(values[i])
        magnitude = i32(b & MASK)
        random = i32(dither[i] & u32(0xFFFF))
        scaled = f32(float_of(magnitude) * float_of(i32(i32(i32(271) - tops[i]) << i32(23))))
        small = i32(f32(scaled + f32(f32(random) * f32(2.0**-16))))
        offset = i32(i32(tops[i] - i32(15)) << i32(3))
        large = i32(i32(i32(magnitude + i32(random << i32(4))) >> i32(20)) - offset)
        code = small if scaled < f32(8.0) else large
        code = i32(127) if code > i32(127) else code
        codes[i] = u8(i32(code | i32(i32(b >> i32(24)) & i32(128))))


@compiled("void(float32[::1],uint8[::1],int32[::1],uint32[::1])")
def write_unsigned(values, codes, tops, dither):
    for i in range(codes.shape[0]):
        magnitude = i32(bits_of(values[i]) & MASK)
        random = i32(dither[i] >> u32(16))
        offset = i32(i32(tops[i] - i32(31)) << i32(3))
        code = i32(i32(i32(magnitude + i32(random << i32(4))) >> i32(20)) - offset)
        code = i32(1) if code < i32(1) else code
        code = i32(255) if code > i32(255) else code
        codes[i] = u8(i32(0) if magnitude == i32(0) else code)


# ---- the update -----------------------------------------------------------------------------------------


@cache
def core(algorithm: int, weight: int, grad: int, state: int) -> Any:
    """The elementwise update of one slice; the four arguments are _layout codes.

    8-bit states are read here, under the exponents in `m_top` and `v_top`; their new values go to `m32` and
    `v32`, with the random bits for encoding them in `dither`, because a block must be complete first.
    """
    signature = (
        "void(int16[::1],int16[::1],float32[::1],int16[::1],float32[::1],float32[::1],float32[::1],"
        "int16[::1],int16[::1],uint8[::1],uint8[::1],int32[::1],int32[::1],uint32[::1],"
        "float32[::1],uint32,int64,int64[::1])"
    )

    moments = moments_of(algorithm)

    def update(
        w16, x16, w32, g16, g32, m32, v32, m16, v16, m8, v8, m_top, v_top, dither, s, key, start, status
    ):
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

            m = f32(0)
            v = f32(0)
            if moments > 0:
                if state == L.STATE_FP32:
                    m = m32[i]
                elif state == L.STATE_BF16:
                    m = from_bf16(m16[i])
                else:
                    m = read_signed(m8[i], m_top[i])
            if moments > 1:
                if state == L.STATE_FP32:
                    v = v32[i]
                elif state == L.STATE_BF16:
                    v = from_bf16(v16[i])
                else:
                    v = read_unsigned(v8[i], v_top[i])

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
                    if algorithm == L.SGD_NESTEROV:
                        change = c4 * (g + m * c5)
                    else:
                        change = c4 * m

            random = u32(0)
            if state != L.STATE_FP32 or weight == L.BF16_STOCHASTIC:
                random = noise(u32(start + i), key)
            if state == L.STATE_BF16:
                if moments > 0:
                    m16[i] = bf16_random(m, random)
                if moments > 1:
                    v16[i] = bf16_random(v, u32(random >> u32(16)))
            else:
                if moments > 0:
                    m32[i] = m
                if moments > 1:
                    v32[i] = v
                if state == L.STATE_8BIT:
                    dither[i] = random

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
                w16[i] = bf16_random(w, noise(random, key))
        if bad != i32(0):
            status[0] = 1

    return compiled(signature)(update)


# ---- whole models ---------------------------------------------------------------------------------------


@cache
def updater(algorithm: int, weight: int, grad: int, state: int) -> Any:
    """The update of work items first..last: items (parameter, start, count), one address row a parameter.

    Columns of the address table: weight, master or lacking bits, gradient, first and second state, and the
    block exponents of these two.
    """
    update = core(algorithm, weight, grad, state)
    moments = moments_of(algorithm)
    wide_w = 4 if weight == L.PLAIN else 2
    wide_g = 4 if grad == L.FP32 else 2
    wide_s = (4, 2, 1)[state]
    master = 0 if weight == L.PLAIN else 1
    panel = PANEL if state == L.STATE_8BIT else 1 << 30

    def run(first, last, items, table, scalars, keys, status):
        m_panel, v_panel = np.empty(PANEL, np.float32), np.empty(PANEL, np.float32)
        m_tops, v_tops = np.empty(PANEL, np.int32), np.empty(PANEL, np.int32)
        dithers = np.empty(PANEL, np.uint32)
        for k in range(first, last):
            p, start, count = items[k, 0], items[k, 1], items[k, 2]
            for j in range(start, start + count, panel):
                n = min(panel, start + count - j)
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
                blocks = (n + L.BLOCK - 1) // L.BLOCK
                m_exp = carray(at(table[p, 5] + j // L.BLOCK), blocks, np.uint8)
                v_exp = carray(at(table[p, 6] + j // L.BLOCK), blocks, np.uint8)
                m_top, v_top, dither = m_tops[:n], v_tops[:n], dithers[:n]
                if state == L.STATE_8BIT:
                    m32, v32 = m_panel[:n], v_panel[:n]
                    if moments > 0:
                        expand(m_exp, m_top)
                    if moments > 1:
                        expand(v_exp, v_top)
                update(
                    w16, x16, w32, g16, g32, m32, v32, m16, v16, m8, v8, m_top, v_top, dither,
                    scalars[p], keys[p], j, status,
                )  # fmt: skip
                if state == L.STATE_8BIT:
                    if moments > 0:
                        top_exponents(m32, m_top, m_exp)
                        write_signed(m32, m8, m_top, dither)
                    if moments > 1:
                        top_exponents(v32, v_top, v_exp)
                        write_unsigned(v32, v8, v_top, dither)

    signature = "void(int64,int64,int64[:,::1],int64[:,::1],float32[:,::1],uint32[::1],int64[::1])"
    return compiled(signature)(run)


@cache
def measurer(grad: int) -> Any:
    """Sum of squares (float64) and largest magnitude of each work item; NaN and inf show in the latter."""
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
                    x = (
                        from_bf16(row16[j])
                        if grad == L.BF16
                        else from_fp16(row16[j])
                        if grad == L.FP16
                        else row32[j]
                    )
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
