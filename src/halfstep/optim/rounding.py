"""Random rounding without a generator, and the block-wise 8-bit codes of optimizer states.

Random bits are a hashed word of (key, panel) under a fixed pattern of the panel's 64 elements, the key one of
(seed, step, parameter): replicas and resumed runs agree and torch's generators are not touched. In 8-bit
states up to 512 elements of a row share one exponent, so that a tensor may be cut between any two rows. First
moments are signed E4M3 with even spacing near zero.
Second moments are unsigned E5M3 whose smallest code is 2^-31 of the block's largest and not zero (a second
moment that became zero would turn its parameter's next step into m / eps). Rounding is random and unbiased,
because a second moment that moves by 0.1 % a step would never move under rounding to nearest. Plain torch,
for every device; the kernels equal it bit for bit.
"""

from typing import cast

import torch
from torch import Tensor

from halfstep.kernels.codes import BLOCK, LEAST_EXPONENT, PANEL

WORD = 0xFFFFFFFF
MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000
WEYL = 0x9E3779B1
HALF = 0x80008000
"""Random bits that are exactly one half: random rounding becomes rounding to nearest."""
Int = int | Tensor


def scramble(x: Int) -> Int:
    """Wellons' lowbias32: a bijection of 32-bit words under which close inputs land far apart."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def key_of(base: Int, step: Int) -> Int:
    """The 32-bit key of one parameter (`base`) at one step."""
    return scramble((scramble(step & WORD) + base) & WORD)


def dither(counter: Tensor) -> Tensor:
    """32 random bits of each counter: half of `scramble`, enough where that has made the counter."""
    counter = ((counter ^ (counter >> 16)) * 0x7FEB352D) & WORD
    return counter ^ (counter >> 15)


def place_of(element: Int, width: int | None) -> Int:
    """The number by which random bits know an element; in rows of `width` (8-bit states) blocks count whole.

    So every block begins with a panel of its own.
    """
    if width is None or width % BLOCK == 0:
        return element
    return element // width * (blocks_of(width) * BLOCK) + element % width


def random_bits(
    count: int, key: Int, device: torch.device, first: Int = 0, width: int | None = None
) -> Tensor:
    """32 random bits for each of `count` elements, as int64, which are numbered from `-first` on.

    A panel shares the hashed word of its number; exclusive or a multiple of each lane makes it one for each
    element, even over panels and steps. `key` and `first` are those of all elements or, as tensors,
    of each: joined tensors begin again. `width`: of the rows of 8-bit states.
    """
    whole_blocks = width is None or width % BLOCK == 0
    if isinstance(key, int) and isinstance(first, int) and first % PANEL == 0 and whole_blocks:
        # a word for each panel instead of each element, which takes an eighth of the time
        panels = torch.arange(-first // PANEL, -((first - count) // PANEL), device=device)
        lanes = (torch.arange(PANEL, device=device) * WEYL) & WORD
        words = cast(Tensor, scramble((panels * WEYL + key) & WORD))
        return (words[:, None] ^ lanes).view(-1)[:count]
    index = torch.arange(count, device=device, dtype=torch.int64)
    index = place_of(index if isinstance(first, int) and first == 0 else index - first, width)
    words = cast(Tensor, scramble((index // PANEL * WEYL + key) & WORD))
    return ((index % PANEL * WEYL) & WORD) ^ words


def again(random: Tensor, key: Int) -> Tensor:
    """More random bits out of random bits, for a second use at the same element."""
    return dither((random * WEYL + key) & WORD)


def round_random(values: Tensor, random: Tensor) -> Tensor:
    """fp32 to bf16, up with the probability of the distance; `random` holds 16 random bits an element."""
    bits = values.view(torch.int32)
    up = (bits + (random & 0xFFFF).to(torch.int32)) >> 16
    kept = (bits >> 16) | torch.where((bits & MAGNITUDE) > INF, 0x40, 0)
    return torch.where((bits & MAGNITUDE) >= INF, kept, up).to(torch.int16).view(torch.bfloat16)


def blocks_of(width: int) -> int:
    """Blocks that a row of `width` elements takes."""
    return -(-width // BLOCK)


def per_block(values: Tensor, width: int) -> Tensor:
    """Flat values in rows of `width` as (rows, blocks, BLOCK), the last block of each filled with zeros."""
    rows = values.view(-1, width)
    return torch.nn.functional.pad(rows, (0, -width % BLOCK)).view(len(rows), blocks_of(width), BLOCK)


def peaks(values: Tensor, width: int) -> Tensor:
    """The largest magnitude of each block of flat fp32 values in rows of `width`: (rows, blocks)."""
    return per_block(values.view(torch.int32) & MAGNITUDE, width).amax(2).view(torch.float32)


def exponents_for(bounds: Tensor) -> Tensor:
    """Per block, the exponent field under which values up to `bounds` fit, rounding up included."""
    return (((bounds.view(torch.int32) >> 20) + 1) >> 3).clamp(LEAST_EXPONENT, 255)


def _per_element(exponents: Tensor, width: int) -> Tensor:
    return exponents.repeat_interleave(BLOCK, 1)[:, :width].reshape(-1)


def _decode_signed(code: Tensor, exponent: Tensor) -> Tensor:
    sign = (code & 128) << 24
    least = ((exponent - 15) << 23) | sign
    return (((code & 127) << 20) + least).view(torch.float32) - least.view(torch.float32)


def _decode_unsigned(code: Tensor, exponent: Tensor) -> Tensor:
    return ((code + ((exponent - 31) << 3)) << 20).view(torch.float32)


def decode(codes: Tensor, exponents: Tensor, signed: bool, width: int) -> Tensor:
    """Flat uint8 codes in rows of `width` and their exponents (rows, blocks) to fp32."""
    exponent = _per_element(exponents.to(torch.int32), width)
    return (_decode_signed if signed else _decode_unsigned)(codes.to(torch.int32), exponent)


def code_peaks(codes: Tensor, exponents: Tensor, signed: bool, width: int) -> Tensor:
    """The largest magnitude of each block of flat codes in rows of `width`."""
    peak = per_block(codes.to(torch.int32) & (127 if signed else 255), width).amax(2)
    return (_decode_signed if signed else _decode_unsigned)(peak, exponents.to(torch.int32))


def encode(values: Tensor, exponents: Tensor, random: Tensor, signed: bool, width: int) -> Tensor:
    """Flat fp32 in rows of `width` to uint8 codes under int32 exponents; `random`: 16 random bits each.

    There is no code for NaN, and which of two an operation passes on is not defined: it becomes inf's.
    """
    bits = values.nan_to_num(torch.inf, torch.inf, -torch.inf).view(torch.int32)
    size = bits & MAGNITUDE
    exponent = _per_element(exponents, width)
    chance = (random & 0xFFFF).to(torch.int32) << 4
    if not signed:
        return (((size + chance) >> 20) - ((exponent - 31) << 3)).clamp(0, 255).to(torch.uint8)
    least = (exponent - 15) << 23
    raised = (size.view(torch.float32) + least.view(torch.float32)).view(torch.int32)
    code = ((raised - least + chance) >> 20).clamp_max(127)
    return (code | ((bits >> 24) & 128)).to(torch.uint8)
