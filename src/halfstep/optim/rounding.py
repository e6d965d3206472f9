"""Random rounding without a generator, and the block-wise 8-bit code of optimizer states.

Random bits are a hash of (key, index), the key one of (seed, step, parameter): replicas and resumed runs
agree and torch's generators are not touched. 8-bit states share one exponent a block of 128: first moments
are signed E4M3 with subnormals, second moments unsigned E5M3 in which nothing but zero becomes zero
(a second moment flushed to zero would turn its parameter's next step into m / eps). Rounding is random and
unbiased, because a second moment that moves by 0.1 % a step would never move under rounding to nearest.
Plain torch, for every device; the compiled kernels equal it bit for bit.
"""

import torch
from torch import Tensor

from halfstep.optim._layout import BLOCK

WORD = 0xFFFFFFFF
MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000
Int = int | Tensor


def mix(x: Int) -> Int:
    """Wellons' lowbias32: a bijection of 32-bit words under which close inputs land far apart."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def key_of(base: int, step: Int) -> Int:
    """The 32-bit key of one parameter (`base`) at one step."""
    return mix((mix(step & WORD) + base) & WORD)


def noise(count: int, key: Int, device: torch.device) -> Tensor:
    """32 random bits for each of the elements 0..count-1, as int64."""
    index = torch.arange(count, device=device, dtype=torch.int64)
    bits = mix((index * 0x9E3779B1 + key) & WORD)
    assert isinstance(bits, Tensor)
    return bits


def hash_again(random: Tensor, key: Int) -> Tensor:
    """More random bits out of random bits, for a second use at the same element."""
    bits = mix((random * 0x9E3779B1 + key) & WORD)
    assert isinstance(bits, Tensor)
    return bits


def round_random(values: Tensor, random: Tensor) -> Tensor:
    """fp32 to bf16, up with the probability of the distance; `random` holds 16 random bits an element."""
    bits = values.view(torch.int32)
    up = (bits + (random & 0xFFFF).to(torch.int32)) >> 16
    kept = (bits >> 16) | torch.where((bits & MAGNITUDE) > INF, 0x40, 0)
    return torch.where((bits & MAGNITUDE) >= INF, kept, up).to(torch.int16).view(torch.bfloat16)


def blocks_of(count: int) -> int:
    """Blocks that `count` elements take."""
    return -(-count // BLOCK)


def _per_element(exponents: Tensor, count: int) -> Tensor:
    return exponents.to(torch.int32).repeat_interleave(BLOCK)[:count]


def _top_exponents(size: Tensor) -> Tensor:
    """Per block, the exponent field under which rounding up the largest magnitude still fits the code."""
    padded = torch.nn.functional.pad(size, (0, -size.numel() % BLOCK))
    top = padded.view(-1, BLOCK).amax(1)
    return (((top >> 20) + 1) >> 3).clamp_min(32)


def encode_signed(values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Flat fp32 to (uint8 codes, uint8 block exponents), E4M3; `random`: 16 random bits an element."""
    bits = values.view(torch.int32)
    size = bits & MAGNITUDE
    exponents = _top_exponents(size)
    top = _per_element(exponents, values.numel())
    random = (random & 0xFFFF).to(torch.int32)
    scaled = size.view(torch.float32) * ((271 - top) << 23).view(torch.float32)
    small = (scaled + random.to(torch.float32) * 2.0**-16).clamp(max=16.0).nan_to_num(16.0).to(torch.int32)
    large = ((size + (random << 4)) >> 20) - ((top - 15) << 3)
    code = torch.where(scaled < 8, small, large).clamp_max(127)
    return (code | ((bits >> 24) & 128)).to(torch.uint8), exponents.to(torch.uint8)


def decode_signed(codes: Tensor, exponents: Tensor) -> Tensor:
    """The fp32 values of `encode_signed`'s codes."""
    top = _per_element(exponents, codes.numel())
    code = codes.to(torch.int32)
    size = code & 127
    small = (size.to(torch.float32) * ((top - 17) << 23).view(torch.float32)).view(torch.int32)
    large = (size + ((top - 15) << 3)) << 20
    return (torch.where(size < 8, small, large) | ((code & 128) << 24)).view(torch.float32)


def encode_unsigned(values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Flat non-negative fp32 to (uint8 codes, uint8 block exponents), E5M3; only zero becomes zero."""
    size = values.view(torch.int32) & MAGNITUDE
    exponents = _top_exponents(size)
    top = _per_element(exponents, values.numel())
    random = (random & 0xFFFF).to(torch.int32)
    code = (((size + (random << 4)) >> 20) - ((top - 31) << 3)).clamp(1, 255)
    return code.masked_fill(size == 0, 0).to(torch.uint8), exponents.to(torch.uint8)


def decode_unsigned(codes: Tensor, exponents: Tensor) -> Tensor:
    """The fp32 values of `encode_unsigned`'s codes."""
    top = _per_element(exponents, codes.numel())
    code = codes.to(torch.int32)
    return ((code + ((top - 31) << 3)) << 20).masked_fill(code == 0, 0).view(torch.float32)
