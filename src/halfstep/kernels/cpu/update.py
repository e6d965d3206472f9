# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportUnknownLambdaType=false
"""CPU kernels: the one-pass update of a run of elements, equal to reference.py.

By explicit vectors (`vectors.py`) where they know the formats; else, and for what they leave, by a loop over
elements. Both take 64 at a time, a panel of random bits. Nothing is prefetched: processors do that for such
streams by themselves, and asking for later lines took up to a quarter longer. No fast-math in the update:
reassociation and fused multiply-add would break equality with the reference.
"""

from typing import Any

from numba import types
from numba.extending import overload

from halfstep.kernels import codes as L
from halfstep.kernels.cpu.algorithms import ALGORITHMS
from halfstep.kernels.cpu.bits import (
    F32,
    I8,
    I16,
    I32,
    I64,
    INNER,
    MASK,
    WEYL,
    Value,
    always_inline,
    bits_of,
    compiled,
    constant,
    emitted,
    exponent_for,
    float_of,
    load,
    loop,
    most,
    read_signed,
    read_unsigned,
    store,
    widest_vectors,
    word_of,
)
from halfstep.kernels.cpu.streams import (
    GRAD_IN,
    STATE_IN,
    STATE_OUT,
    WEIGHT_IN,
    WEIGHT_OUT,
    first_of,
    fp32_out,
    get,
    moments_of,
    put,
    widths,
)
from halfstep.kernels.cpu.vectors import fits, panel

# ---- the update -----------------------------------------------------------------------------------------


def core(algorithm, weight, grad, state, first, last, w, x, g, m, v, s, exponents, key, place):
    """The update of elements first..last of those that start at the five addresses.

    `place` is where random bits have the first of all, `key` that of the parameter. 8-bit states are read
    under the blocks' exponents[0:2] and written under exponents[2:4]. Returns whether a weight left its
    master's range. The first four are literals.
    """
    raise TypeError("only compiled code may call this")


@overload(core, prefer_literal=True, jit_options=INNER)
def _core_of(algorithm, weight, grad, state, first, last, w, x, g, m, v, s, exponents, key, place):
    kind = tuple(code.literal_value for code in (algorithm, weight, grad, state))
    return in_vectors(kind) if fits(*kind[1:]) else in_loops(kind)


def element(kind: tuple[int, ...]) -> Any:
    """What emits the update of one element of a kind: of five streams, and whether it left its range.

    Each is read only where it is needed: the fewer values are alive, the more elements LLVM takes by turns.
    """
    algorithm, weight, grad, state = kind
    wide, moments = widths(*kind), moments_of(algorithm)
    m_in, m_out = (STATE_IN[state][0], STATE_OUT[state][0]) if moments > 0 else (first_of, fp32_out)
    v_in, v_out = (STATE_IN[state][1], STATE_OUT[state][1]) if moments > 1 else (first_of, fp32_out)

    def emit(i, streams, s, exponents, random, key):
        def read(stream: int) -> Any:
            return get(wide[stream], streams[stream], i)

        def write(stream: int, new: Any) -> None:
            put(wide[stream], streams[stream], i, new)

        g = GRAD_IN[grad](read(2)) * s[0]
        m, v = m_in(read(3), exponents[0]), v_in(read(4), exponents[1])
        change, m, v = ALGORITHMS[algorithm](lambda: WEIGHT_IN[weight](read(0), read(1)), g, m, v, s)
        write(3, m_out(m, exponents[2], random))
        write(4, v_out(v, exponents[3], random))
        h, x, bad = WEIGHT_OUT[weight](change(), random, key)
        write(0, h)
        write(1, x)
        return bad

    return emit


def in_loops(kind: tuple[int, ...], whole: bool = True) -> Any:
    """`core` as the compiler makes vectors of it; only with `whole` it makes some of a whole panel."""
    one = element(kind)

    @emitted(types.int32)
    def within(j, count, w, x, g, m, v, s, exponents, key, place):
        at = place + j
        word, lane = word_of(at >> L.PANEL.bit_length() - 1, key), (at & L.PANEL - 1).to(I32) * WEYL

        def step(i, lane, bad):
            return lane + WEYL, bad | one(i, (w, x, g, m, v), s, exponents, lane ^ word, key)

        return loop(j, j + count, (lane, lane ^ lane), step)[1]

    def run(algorithm, weight, grad, state, first, last, w, x, g, m, v, s, exponents, key, place):
        widest_vectors()
        bad, j = 0, first
        while j < last:
            count = L.PANEL - (place + j) % L.PANEL
            if whole and count == L.PANEL and last - j >= L.PANEL:
                bad |= within(j, L.PANEL, w, x, g, m, v, s, exponents, key, place)
            else:
                count = min(last - j, count)
                bad |= within(j, count, w, x, g, m, v, s, exponents, key, place)
            j += count
        return bad

    run.__qualname__ = "loops_" + "_".join(map(str, kind))
    return run


def in_vectors(kind: tuple[int, ...]) -> Any:
    """`core` by whole panels; those that are not whole, or have results that are not finite, by loops."""
    one, wide, name = panel(*kind), widths(*kind), "_".join(map(str, kind))
    others = compiled(name=f"rest_{name}")(in_loops(kind, False))
    hashed = emitted(types.uint32)(word_of)
    w_, x_, g_, m_, v_ = wide
    inlined = kind[3] == L.STATE_8BIT  # it is called for each block, too seldom to set up scalars anew

    def run(algorithm, weight, grad, state, first, last, w, x, g, m, v, s, exponents, key, place):
        if inlined:
            always_inline()
        else:
            widest_vectors()
        bad, j = 0, first
        while j < last:
            done = L.PANEL if (place + j) % L.PANEL == 0 else 0
            while done == L.PANEL and j <= last - L.PANEL:
                word = hashed((place + j) // L.PANEL, key)
                done = one(
                    w + w_ * j, x + x_ * j, g + g_ * j, m + m_ * j, v + v_ * j, s, exponents, word, key
                )
                j += done
            if j < last:
                end = min(last, j + L.PANEL - (place + j) % L.PANEL)
                bad |= others(algorithm, weight, grad, state, j, end, w, x, g, m, v, s, exponents, key, place)
                j = end
        return bad

    run.__qualname__ = f"vectors_{name}"
    return run


# ---- exponents of 8-bit blocks --------------------------------------------------------------------------


def largest(n: Value, kind: Any, value_of: Any) -> Value:
    """The largest of n values of a type."""
    zero = Value(n.b, I64(0))
    return loop(zero, n, [Value(n.b, kind(0))], lambda i, top: [most(value_of(i), top)])[0]


def largest_entering(kind: tuple[int, ...], w, x, g, n, s) -> Value:
    """The largest magnitude of what enters the states in a slice: gradients, with L2 decay where used."""
    algorithm, weight, grad, _ = kind
    wide_w, wide_x, wide_g, _, _ = widths(*kind)
    grad_in = GRAD_IN[grad]
    if algorithm in (L.ADAMW, L.LION):
        bits, mask = (I32, MASK) if grad == L.FP32 else (I16, 0x7FFF)
        top = largest(n, bits, lambda i: load(bits, g, i) & mask)
        return float_of(bits_of((float_of(top) if grad == L.FP32 else grad_in(top)) * s[0]) & MASK)

    def value_of(i):
        weight_now = WEIGHT_IN[weight](get(wide_w, w, i), get(wide_x, x, i))
        return bits_of(grad_in(get(wide_g, g, i)) * s[0] + s[1] * weight_now) & MASK

    return float_of(largest(n, I32, value_of))


def bound_of(algorithm: int, old, g, s) -> Value:
    """The most that the first state can become."""
    if algorithm in (L.ADAMW, L.ADAM):
        return old * (Value(g.b, constant(F32, 1)) - s[2]) + g * s[2]
    return old * s[4] + g * s[5] if algorithm == L.LION else old * s[2] + g * s[3]


@emitted(types.UniTuple(types.int32, 4), literals=4)
def block_exponents(kind: tuple[int, ...], w, x, g, m, v, rows, b, n, s) -> list[Value]:
    """Block `b`'s exponents, old and new, of both states; how large a state gets follows from its average."""
    entering = largest_entering(kind, w, x, g, n, s)

    def found(a, exponents, mask, bound):
        old = load(I8, exponents, b).to(I32)
        new = exponent_for(bound(largest(n, I8, lambda i: load(I8, a, i) & mask).to(I32), old))
        store(new.to(I8), exponents, b)
        return old, new

    m_old, m_new = found(
        m, rows[0], 127, lambda code, old: bound_of(kind[0], read_signed(code, old), entering, s)
    )
    v_old = v_new = Value(b.b, I32(0))
    if moments_of(kind[0]) > 1:
        square = entering * entering
        v_old, v_new = found(
            v, rows[1], 255, lambda code, old: read_unsigned(code, old) * s[3] + square * s[4]
        )
    return [m_old, v_old, m_new, v_new]
