# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
"""CPU kernels: the one-pass update of a run of elements, equal to reference.py.

By explicit vectors (`vectors.py`) where they know the formats; else, and for what they leave, by a loop over
elements. Both take 64 at a time, a panel of random bits, and prefetch later ones. No fast-math in the update:
reassociation and fused multiply-add would break equality with the reference.
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
    i16,
    i32,
    peek_i16,
    peek_i32,
    peek_u8,
    poke_u8,
    prefetcher,
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
    PUT,
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


AHEAD = 256  # elements between the one worked on and the one asked for from memory


@cache
def core(algorithm: int, weight: int, grad: int, state: int) -> Any:
    """The update of elements first..last of those that start at the five addresses.

    `place` is where random bits have the first of all, `key` that of the parameter. 8-bit states are read
    under the blocks' exponents[0:2] and written under exponents[2:4]. Returns whether a weight left its
    master's range.
    """
    kind = algorithm, weight, grad, state
    return in_vectors(kind) if fits(weight, grad, state) else in_loops(kind)


def in_loops(kind: tuple[int, int, int, int], whole: bool = True) -> Any:
    """`core` as the compiler makes vectors of it; only with `whole` it makes some of a whole panel."""
    algorithm, weight, grad, state = kind
    wide, moments, move = widths(*kind), moments_of(algorithm), advance(algorithm)
    prefetch, name = prefetcher(L.PANEL, AHEAD, *wide), "_".join(map(str, kind))
    get_w, get_x, get_g, get_m, get_v = (GET[n] for n in wide)
    set_w, set_x, _, set_m, set_v = (PUT[n] for n in wide)
    weight_in, weight_out, grad_in = WEIGHT_IN[weight], WEIGHT_OUT[weight], GRAD_IN[grad]
    m_in, m_out = (STATE_IN[state][0], STATE_OUT[state][0]) if moments > 0 else (first_of, fp32_out)
    v_in, v_out = (STATE_IN[state][1], STATE_OUT[state][1]) if moments > 1 else (first_of, fp32_out)

    def within(j, count, w, x, g, m, v, s, exponents, key, place):
        always_inline()
        bad = i32(0)
        word, lane = word_of((place + j) // L.PANEL, key), u32(u32((place + j) % L.PANEL) * u32(WEYL))
        for i in range(j, j + count):
            h, x0, g0, m0, v0 = get_w(w, i), get_x(x, i), get_g(g, i), get_m(m, i), get_v(v, i)
            w0, m0, v0 = move(
                weight_in(h, x0), grad_in(g0) * s[0], m_in(m0, exponents[0]), v_in(v0, exponents[1]), s
            )  # fmt: skip
            random = u32(lane ^ word)
            h, x0, bad0 = weight_out(w0, random, key)
            m0, v0 = m_out(m0, exponents[2], random), v_out(v0, exponents[3], random)
            set_w(w, i, h)
            set_x(x, i, x0)
            set_m(m, i, m0)
            set_v(v, i, v0)
            lane, bad = u32(lane + u32(WEYL)), i32(bad | bad0)
        return bad

    within = compiled(name=f"within_{name}")(within)

    def run(first, last, w, x, g, m, v, s, exponents, key, place):
        widest_vectors()
        bad, j = i32(0), first
        while j < last:
            count = min(last - j, L.PANEL - (place + j) % L.PANEL)
            if whole and count == L.PANEL:
                prefetch(w, x, g, m, v, j)
                bad = i32(bad | within(j, L.PANEL, w, x, g, m, v, s, exponents, key, place))
            else:
                bad = i32(bad | within(j, count, w, x, g, m, v, s, exponents, key, place))
            j += count
        return bad

    return compiled(name=f"loops_{name}")(run)


def in_vectors(kind: tuple[int, int, int, int]) -> Any:
    """`core` by whole panels; those that are not whole, or have results that are not finite, by loops."""
    one, others, wide = panel(*kind), in_loops(kind, whole=False), widths(*kind)
    prefetch, name = prefetcher(L.PANEL, AHEAD, *wide), "_".join(map(str, kind))
    w_, x_, g_, m_, v_ = wide
    inlined = kind[3] == L.STATE_8BIT  # it is called for each block, too seldom to set up scalars anew

    def run(first, last, w, x, g, m, v, s, exponents, key, place):
        if inlined:
            always_inline()
        else:
            widest_vectors()
        bad, j = i32(0), first
        while j < last:
            done = L.PANEL if (place + j) % L.PANEL == 0 else 0
            while done == L.PANEL and j <= last - L.PANEL:
                prefetch(w, x, g, m, v, j)
                word = word_of((place + j) // L.PANEL, key)
                done = one(
                    w + w_ * j, x + x_ * j, g + g_ * j, m + m_ * j, v + v_ * j, s, exponents, word, key
                )
                j += done
            if j < last:
                end = min(last, j + L.PANEL - (place + j) % L.PANEL)
                bad = i32(bad | others(j, end, w, x, g, m, v, s, exponents, key, place))
                j = end
        return bad

    return compiled(name=f"vectors_{name}")(run)


# ---- exponents of 8-bit blocks --------------------------------------------------------------------------


@compiled()
def largest_code(a, n, mask):
    top = u8(0)
    for i in range(n):
        top = max(top, u8(peek_u8(a, i) & mask))
    return i32(top)


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
    moments = moments_of(algorithm)
    adam_like = algorithm in (L.ADAMW, L.ADAM)
    bound = adam_bound if adam_like else lion_bound if algorithm == L.LION else momentum_bound

    def found(m, v, m_exponents, v_exponents, b, n, g, s):
        always_inline()
        m_old = i32(peek_u8(m_exponents, b))
        m_new = exponent_for(bound(read_signed(largest_code(m, n, u8(127)), m_old), g, s))
        poke_u8(m_exponents, b, u8(m_new))
        v_old = v_new = i32(0)
        if moments > 1:
            v_old = i32(peek_u8(v_exponents, b))
            v_new = exponent_for(read_unsigned(largest_code(v, n, u8(255)), v_old) * s[3] + (g * g) * s[4])
            poke_u8(v_exponents, b, u8(v_new))
        return m_old, v_old, m_new, v_new

    return compiled(name=f"exponents_{algorithm}")(found)
