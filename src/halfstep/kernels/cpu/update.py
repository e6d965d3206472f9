# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
"""CPU kernels: the one-pass update of a run of elements, equal to reference.py.

By explicit vectors (`vectors.py`) where they know the formats; else by Numba loops over pairs, 32 elements at
a time: whole cache lines of every stream are then read and written at once, and 16-bit values are unpacked by
a shift and a mask. Both prefetch. What is left over is done singly. No fast-math in the update: reassociation
and fused multiply-add would break equality with the reference.
"""

from functools import cache
from typing import Any

from halfstep.kernels import codes as L
from halfstep.kernels.cpu.algorithms import advance
from halfstep.kernels.cpu.bits import (
    MASK,
    WEYL,
    always_inline,
    bits_of,
    compiled,
    exponent_for,
    f32,
    float_of,
    from_bf16,
    from_fp16,
    i16,
    i32,
    peek_i16,
    peek_i32,
    peek_u8,
    poke_u8,
    prefetch,
    read_signed,
    read_unsigned,
    u8,
    u32,
    widest_vectors,
    word_of,
)
from halfstep.kernels.cpu.streams import (
    GET,
    GRAD_IN,
    PAIR,
    PUT,
    PUT_PAIR,
    STATE_IN,
    STATE_OUT,
    WEIGHT_IN,
    WEIGHT_OUT,
    first_of,
    fp32_out,
    moments_of,
    widths,
)
from halfstep.kernels.cpu.vectors import fits, panel

# ---- the update -----------------------------------------------------------------------------------------


@compiled()
def read_grad(grad, g16, g32, i):
    if grad == L.BF16:
        return from_bf16(g16[i])
    if grad == L.FP16:
        return from_fp16(g16[i])
    return g32[i]


@cache
def element(algorithm: int, weight: int, grad: int, state: int) -> Any:
    """The update of one element, from what its streams hold to what they shall hold, and the range flag."""
    weight_in, weight_out, grad_in = WEIGHT_IN[weight], WEIGHT_OUT[weight], GRAD_IN[grad]
    moments = moments_of(algorithm)
    m_in, v_in = STATE_IN[state][0], STATE_IN[state][1] if moments > 1 else first_of
    m_out, v_out = STATE_OUT[state][0], STATE_OUT[state][1] if moments > 1 else fp32_out
    if moments == 0:
        m_in, m_out = first_of, fp32_out
    move = advance(algorithm)

    def one(h, x, g, m, v, s, exponents, random, key):
        always_inline()
        w, m, v = move(
            weight_in(h, x), grad_in(g) * s[0], m_in(m, exponents[0]), v_in(v, exponents[1]), s
        )  # fmt: skip
        h, x, bad = weight_out(w, random, key)
        return h, x, m_out(m, exponents[2], random), v_out(v, exponents[3], random), bad

    return compiled(name=f"one_{algorithm}_{weight}_{grad}_{state}")(one)


AHEAD = 256  # elements between the one worked on and the one asked for from memory
PAIRS = 16  # pairs at a time: a cache line of 16-bit values


@cache
def asker(*wide: int) -> Any:
    """Prefetch the five streams' lines of so many elements that come `AHEAD` later."""
    count, w_, x_, g_, m_, v_ = wide

    def ask(w, x, g, m, v, j):
        for q in range(0, count * w_, 64):
            prefetch(w + w_ * (j + AHEAD) + q)
        for q in range(0, count * x_, 64):
            prefetch(x + x_ * (j + AHEAD) + q)
        for q in range(0, count * g_, 64):
            prefetch(g + g_ * (j + AHEAD) + q)
        for q in range(0, count * m_, 64):
            prefetch(m + m_ * (j + AHEAD) + q)
        for q in range(0, count * v_, 64):
            prefetch(v + v_ * (j + AHEAD) + q)

    return compiled(name=f"ask_{wide}")(ask)


@cache
def singles(algorithm: int, weight: int, grad: int, state: int) -> Any:
    """The update of elements first..last, one at a time, as `core` counts and places them."""
    one = element(algorithm, weight, grad, state)
    wide = widths(algorithm, weight, grad, state)
    get_w, get_x, get_g, get_m, get_v = (GET[n] for n in wide)
    set_w, set_x, _, set_m, set_v = (PUT[n] for n in wide)

    def run(first, last, w, x, g, m, v, s, exponents, key, place):
        widest_vectors()
        bad = i32(0)
        for i in range(first, last):
            h0, x0, g0, m0, v0 = get_w(w, i), get_x(x, i), get_g(g, i), get_m(m, i), get_v(v, i)
            at = place + i
            random = u32(u32(u32(at % L.PANEL) * u32(WEYL)) ^ word_of(at // L.PANEL, key))
            h0, x0, m0, v0, bad0 = one(h0, x0, g0, m0, v0, s, exponents, random, key)
            bad = i32(bad | bad0)
            set_w(w, i, h0)
            set_x(x, i, x0)
            set_m(m, i, m0)
            set_v(v, i, v0)
        return bad

    return compiled(name=f"singles_{algorithm}_{weight}_{grad}_{state}")(run)


@cache
def core(algorithm: int, weight: int, grad: int, state: int) -> Any:
    """The update of `n` elements that start at the five addresses: whole panels swiftly, others singly.

    `place` is where random bits have the first of them, `key` that of the parameter. 8-bit states are read
    under the blocks' exponents[0:2] and written under exponents[2:4]. Returns whether a weight left its
    master's range.
    """
    kind = algorithm, weight, grad, state
    name = "_".join(map(str, kind))
    if not {1, 2} & set(widths(*kind)):
        return fp32_core(f"core_{name}", element(*kind), widths(*kind))
    swiftly = in_vectors(name, kind) if fits(weight, grad, state) else in_pairs(name, kind)
    singly = singles(*kind)

    def run(n, w, x, g, m, v, s, exponents, key, place):
        bad, j, end = i32(0), 0, min(n, -place % L.PANEL)
        while j < n:
            if end > j:
                bad = i32(bad | singly(j, end, w, x, g, m, v, s, exponents, key, place))
            j, more = swiftly(end, n - L.PANEL, w, x, g, m, v, s, exponents, key, place)
            bad, end = i32(bad | more), min(n, j + L.PANEL - (place + j) % L.PANEL)
        return bad

    return compiled(name=f"core_{name}")(run)


def in_vectors(name: str, kind: tuple[int, int, int, int]) -> Any:
    """Panels that begin at elements first..last, up to one whose results are not all finite: its element."""
    one, wide = panel(*kind), widths(*kind)
    ask = asker(L.PANEL, *wide)
    w_, x_, g_, m_, v_ = wide

    def run(first, last, w, x, g, m, v, s, exponents, key, place):
        widest_vectors()
        j = first
        while j <= last:
            ask(w, x, g, m, v, j)
            word = word_of((place + j) // L.PANEL, key)
            done = one(w + w_ * j, x + x_ * j, g + g_ * j, m + m_ * j, v + v_ * j, s, exponents, word)
            j += done
            if done < L.PANEL:
                break
        return j, i32(0)

    return compiled(name=f"vectors_{name}")(run)


def in_pairs(name: str, kind: tuple[int, int, int, int]) -> Any:
    """Panels that begin at elements first..last: where they end, and whether a weight left its range."""
    one, wide = element(*kind), widths(*kind)
    ask = asker(2 * PAIRS, *wide)
    w_, x_, g_, m_, v_ = wide
    pair_w, pair_x, pair_g, pair_m, pair_v = (PAIR[n] for n in wide)
    put_w, put_x, _, put_m, put_v = (PUT_PAIR[n] for n in wide)

    def run(first, last, w, x, g, m, v, s, exponents, key, place):
        widest_vectors()
        bad = i32(0)
        count = max(last - first + L.PANEL, 0) // L.PANEL * L.PANEL
        w, x, g, m, v = w + w_ * first, x + x_ * first, g + g_ * first, m + m_ * first, v + v_ * first
        for j in range(0, count, 2 * PAIRS):
            at = place + first + j
            word, lane = word_of(at // L.PANEL, key), u32(u32(at % L.PANEL) * u32(WEYL))
            ask(w, x, g, m, v, j)
            for i in range(j // 2, j // 2 + PAIRS):
                h0, h1 = pair_w(w, i)
                x0, x1 = pair_x(x, i)
                g0, g1 = pair_g(g, i)
                m0, m1 = pair_m(m, i)
                v0, v1 = pair_v(v, i)
                h0, x0, m0, v0, bad0 = one(h0, x0, g0, m0, v0, s, exponents, u32(lane ^ word), key)
                lane = u32(lane + u32(WEYL))
                h1, x1, m1, v1, bad1 = one(h1, x1, g1, m1, v1, s, exponents, u32(lane ^ word), key)
                lane = u32(lane + u32(WEYL))
                bad = i32(bad | i32(bad0 | bad1))
                put_w(w, i, h0, h1)
                put_x(x, i, x0, x1)
                put_m(m, i, m0, m1)
                put_v(v, i, v0, v1)
        return first + count, bad

    return compiled(name=f"pairs_{name}")(run)


def fp32_core(name: str, one: Any, wide: tuple[int, ...]) -> Any:
    """`core` where every stream holds fp32: pairs would keep the compiler from whole vectors."""
    get_w, get_x, get_g, get_m, get_v = (GET[n] for n in wide)
    set_w, set_x, _, set_m, set_v = (PUT[n] for n in wide)

    def run(n, w, x, g, m, v, s, exponents, key, place):
        for i in range(n):
            h, x0, m0, v0, _ = one(
                get_w(w, i), get_x(x, i), get_g(g, i), get_m(m, i), get_v(v, i), s, exponents, u32(0), key
            )
            set_w(w, i, h)
            set_x(x, i, x0)
            set_m(m, i, m0)
            set_v(v, i, v0)
        return i32(0)

    return compiled(name=name)(run)


# ---- exponents of 8-bit blocks --------------------------------------------------------------------------


@cache
def largest_code(mask: int) -> Any:
    def largest(a, n):
        top = u8(0)
        for i in range(n):
            top = max(top, u8(peek_u8(a, i) & u8(mask)))
        return i32(top)

    return compiled(name=f"largest_{mask}")(largest)


@cache
def peak(algorithm: int, weight: int, grad: int) -> Any:
    """The largest magnitude of what enters the states in a slice: gradients, with L2 decay where used."""
    wide_w, wide_x, wide_g, _, _ = widths(algorithm, weight, grad, L.STATE_8BIT)
    get_w, get_x, get_g = GET[wide_w], GET[wide_x], GET[wide_g]
    weight_in, grad_in = WEIGHT_IN[weight], GRAD_IN[grad]

    def coupled(w, x, g, n, s):
        top = i32(0)
        for i in range(n):
            value = grad_in(get_g(g, i)) * s[0] + s[1] * weight_in(get_w(w, i), get_x(x, i))
            top = max(top, i32(bits_of(value) & MASK))
        return float_of(top)

    def narrow(w, x, g, n, s):
        top = i16(0)
        for i in range(n):
            top = max(top, i16(peek_i16(g, i) & i16(0x7FFF)))
        return float_of(i32(bits_of(f32(grad_in(top) * s[0])) & MASK))

    def plain(w, x, g, n, s):
        top = i32(0)
        for i in range(n):
            top = max(top, i32(peek_i32(g, i) & MASK))
        return float_of(i32(bits_of(f32(float_of(top) * s[0])) & MASK))

    chosen = coupled if algorithm not in (L.ADAMW, L.LION) else plain if grad == L.FP32 else narrow
    return compiled(name=f"peak_{algorithm}_{weight}_{grad}")(chosen)


@compiled()
def adam_bound(old, g, s):
    return old * f32(f32(1) - s[2]) + g * s[2]


@compiled()
def lion_bound(old, g, s):
    return old * s[4] + g * s[5]


@compiled()
def momentum_bound(old, g, s):
    return old * s[2] + g * s[3]


@cache
def block_exponents(algorithm: int) -> Any:
    """Block `b`'s exponents, old and new, of both states; how large a state gets follows from its average."""
    signed, unsigned = largest_code(127), largest_code(255)
    moments = moments_of(algorithm)
    adam_like = algorithm in (L.ADAMW, L.ADAM)
    bound = adam_bound if adam_like else lion_bound if algorithm == L.LION else momentum_bound

    def found(m, v, m_exponents, v_exponents, b, n, g, s):
        m_old = i32(peek_u8(m_exponents, b))
        m_new = exponent_for(bound(read_signed(signed(m, n), m_old), g, s))
        poke_u8(m_exponents, b, u8(m_new))
        v_old = v_new = i32(0)
        if moments > 1:
            v_old = i32(peek_u8(v_exponents, b))
            v_new = exponent_for(read_unsigned(unsigned(v, n), v_old) * s[3] + (g * g) * s[4])
            poke_u8(v_exponents, b, u8(v_new))
        return m_old, v_old, m_new, v_new

    return compiled(name=f"exponents_{algorithm}")(found)
