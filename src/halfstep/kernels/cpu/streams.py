# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
"""How the CPU kernels read and write weights, gradients and states, one element at a time."""

from halfstep.kernels import codes as L
from halfstep.kernels.cpu.bits import (
    INF_BITS,
    MASK,
    WEYL,
    bf16_away,
    bf16_even,
    bf16_random,
    bits_of,
    compiled,
    fp16_even,
    from_bf16,
    from_fp16,
    i16,
    i32,
    join_bf16,
    join_fp16,
    lacking_bf16,
    lacking_fp16,
    mix,
    peek_f32,
    peek_i16,
    peek_u8,
    pick,
    poke_f32,
    poke_i16,
    poke_u8,
    read_signed,
    read_unsigned,
    u32,
    write_signed,
    write_unsigned,
)


def moments_of(algorithm: int) -> int:
    """How many state tensors the algorithm keeps."""
    return 0 if algorithm == L.SGD else 2 if algorithm in (L.ADAMW, L.ADAM) else 1


# ---- streams: what a weight, gradient or state is read from and written to -------------------------------

# A stream of width 4 holds fp32, of width 2 the bits of 16-bit values, of width 1 codes; width 0: no stream.


@compiled()
def get_1(a, i):
    return i32(peek_u8(a, i))


@compiled()
def get_0(a, i):
    return i16(0)


@compiled()
def put_0(a, i, x):
    pass


GET = {4: peek_f32, 2: peek_i16, 1: get_1, 0: get_0}
PUT = {4: poke_f32, 2: poke_i16, 1: poke_u8, 0: put_0}


def widths(algorithm: int, weight: int, grad: int, state: int) -> tuple[int, int, int, int, int]:
    """Widths of the streams: weight, master or lacking bits, gradient, first and second state."""
    extra = {L.BF16_EXACT: 2, L.FP16_EXACT: 2, L.BF16_MASTER: 4, L.FP16_MASTER: 4}.get(weight, 0)
    moments = moments_of(algorithm)
    wide = (4, 2, 1)[state]
    return (
        4 if weight == L.PLAIN else 2,
        extra,
        4 if grad == L.FP32 else 2,
        wide if moments > 0 else 0,
        wide if moments > 1 else 0,
    )


# ---- storage to fp32 and back -----------------------------------------------------------------------------


@compiled()
def as_it_is(raw):
    return raw


@compiled()
def first_of(h, x):
    return h


@compiled()
def bf16_master_in(h, x):
    """The master, unless the weight was changed from outside: then the weight."""
    return pick(bf16_away(x) == h, x, from_bf16(h))


@compiled()
def fp16_master_in(h, x):
    return pick(fp16_even(x) == h, x, from_fp16(h))


@compiled()
def bf16_alone(h, x):
    return from_bf16(h)


@compiled()
def fp16_alone(h, x):
    return from_fp16(h)


@compiled()
def plain_out(w, random, key):
    return w, i16(0), i32(0)


@compiled()
def bf16_exact_out(w, random, key):
    h = bf16_away(w)
    return h, lacking_bf16(w, h), i32(0)


@compiled()
def bf16_master_out(w, random, key):
    return bf16_away(w), w, i32(0)


@compiled()
def bf16_none_out(w, random, key):
    return bf16_even(w), i16(0), i32(0)


@compiled()
def bf16_stochastic_out(w, random, key):
    return bf16_random(w, mix(u32(u32(random * u32(WEYL)) + key))), i16(0), i32(0)


@compiled()
def fp16_exact_out(w, random, key):
    h = fp16_even(w)
    over = (i32(i32(h) & i32(0x7FFF)) == i32(0x7C00)) & (i32(bits_of(w) & MASK) < INF_BITS)
    kept = i16(pick(over, i32(i32(h) - i32(1)), i32(h)))
    return kept, i16(pick(over, i32(0), i32(lacking_fp16(w, h)))), pick(over, i32(1), i32(0))


@compiled()
def fp16_master_out(w, random, key):
    return fp16_even(w), w, i32(0)


@compiled()
def fp16_none_out(w, random, key):
    return fp16_even(w), i16(0), i32(0)


WEIGHT_IN = {
    L.PLAIN: first_of,
    L.BF16_EXACT: join_bf16,
    L.BF16_MASTER: bf16_master_in,
    L.BF16_NONE: bf16_alone,
    L.BF16_STOCHASTIC: bf16_alone,
    L.FP16_EXACT: join_fp16,
    L.FP16_MASTER: fp16_master_in,
    L.FP16_NONE: fp16_alone,
}
WEIGHT_OUT = {
    L.PLAIN: plain_out,
    L.BF16_EXACT: bf16_exact_out,
    L.BF16_MASTER: bf16_master_out,
    L.BF16_NONE: bf16_none_out,
    L.BF16_STOCHASTIC: bf16_stochastic_out,
    L.FP16_EXACT: fp16_exact_out,
    L.FP16_MASTER: fp16_master_out,
    L.FP16_NONE: fp16_none_out,
}
GRAD_IN = {L.BF16: from_bf16, L.FP16: from_fp16, L.FP32: as_it_is}


@compiled()
def fp32_out(value, exponent, random):
    return value


@compiled()
def first_bf16_out(value, exponent, random):
    return bf16_random(value, random)


@compiled()
def second_bf16_out(value, exponent, random):
    return bf16_random(value, u32(random >> u32(16)))


STATE_IN = ((first_of, first_of), (bf16_alone, bf16_alone), (read_signed, read_unsigned))
STATE_OUT = ((fp32_out, fp32_out), (first_bf16_out, second_bf16_out), (write_signed, write_unsigned))
