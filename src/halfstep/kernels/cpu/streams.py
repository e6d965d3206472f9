# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
"""How the CPU kernels read and write weights, gradients and states, one element at a time."""

from typing import Any

from halfstep.kernels import codes as L
from halfstep.kernels.cpu.bits import (
    F32,
    I8,
    I16,
    I32,
    INF_BITS,
    MASK,
    WEYL,
    bf16_away,
    bf16_even,
    bf16_random,
    bits_of,
    fp16_even,
    from_bf16,
    from_fp16,
    join_bf16,
    join_fp16,
    lacking_bf16,
    lacking_fp16,
    load,
    mix,
    pick,
    read_signed,
    read_unsigned,
    store,
    write_signed,
    write_unsigned,
)


def moments_of(algorithm: int) -> int:
    """How many state tensors the algorithm keeps."""
    return 0 if algorithm == L.SGD else 2 if algorithm in (L.ADAMW, L.ADAM) else 1


# ---- streams: what a weight, gradient or state is read from and written to -------------------------------

# A stream of width 4 holds fp32, of width 2 the bits of 16-bit values, of width 1 codes; width 0: no stream.


def get(width: int, a, i) -> Any:
    if width == 1:
        return load(I8, a, i).to(I32)
    return load(F32 if width == 4 else I16, a, i) if width else None


def put(width: int, a, i, x) -> None:
    if width:
        store(x, a, i)


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


def as_it_is(raw):
    return raw


def first_of(h, x):
    return h


def bf16_master_in(h, x):
    """The master, unless the weight was changed from outside: then the weight."""
    return pick(bf16_away(x).equals(h), x, from_bf16(h))


def fp16_master_in(h, x):
    return pick(fp16_even(x).equals(h), x, from_fp16(h))


def bf16_alone(h, x):
    return from_bf16(h)


def fp16_alone(h, x):
    return from_fp16(h)


def plain_out(w, random, key):
    return w, None, 0


def bf16_exact_out(w, random, key):
    h = bf16_away(w)
    return h, lacking_bf16(w, h), 0


def bf16_master_out(w, random, key):
    return bf16_away(w), w, 0


def bf16_none_out(w, random, key):
    return bf16_even(w), None, 0


def bf16_stochastic_out(w, random, key):
    return bf16_random(w, mix(random * WEYL + key)), None, 0


def fp16_exact_out(w, random, key):
    h = fp16_even(w)
    over = (h & 0x7FFF).equals(0x7C00) & ((bits_of(w) & MASK) < INF_BITS)
    return pick(over, h - 1, h), pick(over, 0, lacking_fp16(w, h)), pick(over, 1, 0)


def fp16_master_out(w, random, key):
    return fp16_even(w), w, 0


def fp16_none_out(w, random, key):
    return fp16_even(w), None, 0


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


def fp32_out(value, exponent, random):
    return value


def first_bf16_out(value, exponent, random):
    return bf16_random(value, random)


def second_bf16_out(value, exponent, random):
    return bf16_random(value, random.down(16))


STATE_IN = ((first_of, first_of), (bf16_alone, bf16_alone), (read_signed, read_unsigned))
STATE_OUT = ((fp32_out, fp32_out), (first_bf16_out, second_bf16_out), (write_signed, write_unsigned))
