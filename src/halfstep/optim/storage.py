"""How weights, masters and states are stored, read and written, as only this file and the kernels know.

A slot is what plain torch steps at once: flat views of the weight, master and states of one parameter, or
copies of several joined end to end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfstep.errors import UnsupportedError
from halfstep.kernels import codes as L
from halfstep.optim import rounding, split
from halfstep.torch_private import foreach_copy_, is_traceable_wrapper_subclass

STORED = {L.STATE_FP32: torch.float32, L.STATE_BF16: torch.bfloat16, L.STATE_8BIT: torch.uint8}
WITH_MASTER = (L.BF16_MASTER, L.FP16_MASTER)
EXACT = (L.BF16_EXACT, L.FP16_EXACT)
EXPONENTS = "_exponents"
"""Ends the names of what belongs to 8-bit moments: an exponent a block, rows first."""
CODES = "_codes"
"""Ends the names of 8-bit moments themselves: whoever cannot read codes must not find moments there."""
MASTER_KEYS = ("master", "lacking")
"""Under which an entry of the state holds what a weight has besides its 16 bits."""


def name_of_moment(key: str, state_kind: int) -> str:
    """Return the name of a moment in an entry of the state, the same in files."""
    return key + CODES if state_kind == L.STATE_8BIT else key


SIGNED = ("exp_avg", "momentum_buffer")
"""Moments that are signed by their name; others say so before the end of theirs."""
_SIGN = "_signed"


def name_of_codes(key: str, signed: bool) -> str:
    """Return what the names of 8-bit codes and exponents of a state begin with."""
    return key + _SIGN if signed and key not in SIGNED else key


def moment_of(stored: str) -> tuple[str, int]:
    """Return the name of a moment by that of its codes or exponents, and 0 for signed codes, else 1."""
    name = stored.removesuffix(CODES).removesuffix(EXPONENTS)
    key = name.removesuffix(_SIGN) if name != stored else name
    return key, 0 if key in SIGNED or key != name else 1


def local_tensor(t: Tensor) -> Tensor:
    """The tensor whose memory the kernels read and change for `t`, a parameter or gradient: `t` itself.

    UnsupportedError for one that has no memory of its own (DTensor and other wrappers).
    """
    if is_traceable_wrapper_subclass(t):
        raise UnsupportedError(
            f"hs.optim updates plain tensors, not a {type(t).__name__} of shape {list(t.shape)}: give it the "
            "local tensors, or use torch.optim"
        )
    return t


def flat(t: Tensor) -> Tensor:
    """The elements in memory order, as one dimension that shares storage; the memory must have no gaps."""
    t = t.detach()
    if t.is_contiguous() and not t.is_neg():
        return t.view(-1)
    check_dense(t)
    return t.as_strided((t.numel(),), (1,))


def check_dense(t: Tensor) -> None:
    """Raise UnsupportedError unless the elements fill their memory, as they are."""
    if t.is_neg():
        raise UnsupportedError(
            f"a parameter of shape {list(t.shape)} is a view that turns the sign of another tensor; give the "
            "optimizer what resolve_neg() returns"
        )
    if not t.is_contiguous() and torch.empty_like(t, device="meta").stride() != t.stride():
        raise UnsupportedError(
            f"a parameter of shape {list(t.shape)} and stride {list(t.stride())} is a slice of another "
            "tensor; give the optimizer contiguous parameters"
        )


def width_of(t: Tensor) -> int:
    """Elements of `t` under one index of its first dimension: what a row is to the blocks of 8-bit states.

    A vector, and a tensor whose memory does not go by its first dimension, is one row.
    """
    if t.dim() < 2:
        return max(t.numel(), 1)
    width = max(math.prod(t.shape[1:]), 1)
    return width if t.shape[0] < 2 or t.stride(0) == width else t.numel()


def exponents_shape(t: Tensor) -> tuple[int, int]:
    """Return rows and blocks a row of the exponents that belong to 8-bit states of `t`'s shape and layout."""
    width = width_of(t)
    return -(-t.numel() // width), rounding.blocks_of(width)


@dataclass(slots=True, eq=False)
class Slot:
    """Flat tensors of `param`; `width` is the length of the rows that 8-bit blocks do not cross."""

    param: Tensor
    kind: int
    state_kind: int
    width: int
    weight: Tensor
    grad: Tensor
    extra: Tensor | None
    states: list[Tensor]
    exponents: list[Tensor]

    @property
    def kept(self) -> list[Tensor]:
        """What a step changes: weight, what it has besides its 16 bits, states, their exponents."""
        extra = [] if self.extra is None else [self.extra]
        return [self.weight, *extra, *self.states, *self.exponents]


JOINED = 1 << 24
"""Elements that are joined at most: a launch over so many is bound by memory, and more would only take it."""
JOINED_ON_CPU = 1 << 16
"""The same on a CPU, where more would leave its caches."""


def runs_of(slots: Sequence[Slot]) -> list[list[int]]:
    """Numbers of the slots that are stepped together; where states are blocks of rows, rows of one width."""
    runs, latest, room = list[list[int]](), dict[int, list[int]](), dict[int, int]()
    most = JOINED_ON_CPU if slots[0].weight.is_cpu else JOINED
    for number, slot in enumerate(slots):
        width, size = slot.width if slot.exponents else 0, slot.weight.numel()
        if not size:
            continue
        if room.get(width, 0) < size:
            runs.append([])
            latest[width], room[width] = runs[-1], most
        latest[width].append(number)
        room[width] -= size
    return runs


def join(slots: Sequence[Slot]) -> Slot:
    """One slot of several: copies of their tensors, end to end."""
    if len(slots) == 1:
        return slots[0]
    tensors = iter([torch.cat(column) for column in zip(*(slot.kept for slot in slots))])
    first = slots[0]
    return replace(
        first,
        grad=torch.cat([slot.grad for slot in slots]),
        weight=next(tensors),
        extra=None if first.extra is None else next(tensors),
        states=[next(tensors) for _ in first.states],
        exponents=[next(tensors) for _ in first.exponents],
    )


def write(slots: Sequence[Slot], new_values: Sequence[Tensor]) -> None:
    """Store what the tensors of `join(slots).kept` became."""
    for column, values in zip(zip(*(slot.kept for slot in slots)), new_values, strict=True):
        foreach_copy_(column, values.split(list(map(len, column))))


def read_weight(kind: int, weight: Tensor, extra: Tensor | None) -> Tensor:
    """The fp32 value of a weight: its master where it has one, unless the weight was changed from outside."""
    if extra is None:
        return weight.to(torch.float32)
    if kind in EXACT:
        return split.join(weight, extra)
    low = split.round_away(extra) if kind == L.BF16_MASTER else extra.to(weight.dtype)
    return torch.where(low.view(torch.int16) == weight.view(torch.int16), extra, weight.to(torch.float32))


def store_weight(
    kind: int, value: Tensor, dtype: torch.dtype, random: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """fp32 `value` as it is kept: the weight in `dtype`, and what it has besides where it has a master.

    Also a 0-d bool tensor where a value might not fit (exact fp16), else None.
    """
    if kind in EXACT:
        half, lacking = torch.empty_like(value, dtype=dtype), torch.empty_like(value, dtype=torch.int16)
        out_of_range = split.split(value, half, lacking)
        return [half, lacking], out_of_range
    if kind == L.BF16_MASTER:
        return [split.round_away(value), value], None
    if kind == L.BF16_STOCHASTIC and random is not None:
        return [rounding.round_random(value, random)], None
    half = value.to(dtype)
    return [half, value] if kind in WITH_MASTER else [half], None


def read_state(slot: Slot, index: int) -> Tensor:
    """One state as flat fp32."""
    stored = slot.states[index]
    if slot.state_kind == L.STATE_8BIT:
        return rounding.decode(stored, slot.exponents[index], signed=index == 0, width=slot.width)
    return stored.to(torch.float32)


def store_state(
    slot: Slot, index: int, value: Tensor, random: Tensor | None, bounds: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a new state as it is kept, and the exponents of 8-bit ones.

    `random` holds 32 bits an element, `bounds` what no value of a block exceeds.
    """
    if slot.state_kind == L.STATE_FP32:
        return value, None
    assert random is not None
    random = random >> 16 if index else random
    if slot.state_kind == L.STATE_BF16:
        return rounding.round_random(value, random), None
    assert bounds is not None
    exponents = rounding.exponents_for(bounds)
    codes = rounding.encode(value, exponents, random, signed=index == 0, width=slot.width)
    return codes, exponents.to(torch.uint8)
