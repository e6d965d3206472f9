"""What a step uses, looked at anew in every step and put together by how it is kept.

Looks go column by column (`map` over all weights, gradients or moments), which takes a fraction of the time
of a loop over parameters. Whatever does not fit the kernels is made to fit first, or refused by name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.distributed import first_element, local_of, shard_groups
from halfstep.distributed.reduce import groups_of_shards
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.gradients import cpu as cpus_
from halfstep.kernels import codes as L
from halfstep.optim import arguments, entries, hand_edits, rounding, shards, storage
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.shards import PLAIN

Group = dict[str, Any]
Place = tuple[int, int]
_grads, _dtypes = attrgetter("grad"), attrgetter("dtype")
WEIGHT, EXTRA, GRAD, STATES, EXPONENTS, WIDTH, STEP, KEY, LINES = 0, 1, 2, 3, 5, 7, 8, 9, 10
"""Lines of a table: addresses (of two states and their exponents too), length of a row, random key."""
ABSENT = 16  # in place of an address: aligned, and not 0


class Column(NamedTuple):
    """Tensors side by side, and what a step needs to know of them, read one after another."""

    tensors: list[Tensor]
    addresses: list[int]
    dtypes: list[torch.dtype]
    elements: list[int]
    devices: list[int]
    strides: list[tuple[int, ...] | None] | None
    """Of those that are not contiguous; None where all are."""

    def pick(self, indices: Sequence[int]) -> Column:
        """Some of them."""
        picked: list[Any] = [line and [line[i] for i in indices] for line in self]
        return Column(*picked)


LAYOUT = slice(3, None)
"""How many elements, devices and strides of a column."""


def column_of(tensors: list[Tensor]) -> Column:
    """Look at dense tensors; RuntimeError where one is not."""
    strides = None
    if not all(map(Tensor.is_contiguous, tensors)):
        strides = [None if t.is_contiguous() else t.stride() for t in tensors]
    addresses, dtypes = list(map(Tensor.data_ptr, tensors)), list(map(_dtypes, tensors))
    return Column(
        tensors,
        addresses,
        dtypes,
        list(map(Tensor.numel, tensors)),
        list(map(Tensor.get_device, tensors)),
        strides,
    )


def _column(tensors: list[Any]) -> Column | None:
    """A column of tensors that a user gave; None where one is not plain or not dense."""
    try:
        return column_of(tensors) if PLAIN.issuperset(map(type, tensors)) else None
    except RuntimeError:
        return None


def gradients_of(groups: Sequence[Group]) -> list[Tensor]:
    """The gradients as the kernels read them, for who needs nothing else; raises as `bundles_of` does."""
    given = [grad for group in groups for grad in map(_grads, group["params"]) if grad is not None]
    column = _column(given)
    if column is not None and column.strides is None and _are_read(column):
        return given
    found: list[Tensor] = []
    for number, group in enumerate(groups):
        for place, p in enumerate(group["params"]):
            if p.grad is not None:
                weight, grad = _locals([p, p.grad])
                found.append(dense_grad(weight, grad, arguments.name_of(group, (number, place))))
    return found


def _locals(tensors: list[Tensor]) -> list[Tensor]:
    """This rank's parts."""
    return [t if type(t) in PLAIN else storage.local_tensor(local_of(t)) for t in tensors]


def _are_read(grads: Column) -> bool:
    """Whether the kernels read their dtypes, and as they are."""
    return cpus_.GRADS.keys() >= set(grads.dtypes) and not any(map(Tensor.is_neg, grads.tensors))


def dense_grad(weight: Tensor, grad: Tensor, name: str) -> Tensor:
    """The gradient in the weight's memory order and a dtype that the kernels read.

    Raises:
        UnsupportedError: a gradient that is not dense or not of floating numbers. ConfigError: one of another
            shape or device than the weight's.
    """
    if grad.layout is not torch.strided:
        raise UnsupportedError(f"halfstep.optim takes dense gradients, not {grad.layout}: use torch.optim")
    if grad.shape != weight.shape or grad.device != weight.device:
        raise ConfigError(
            f"the gradient of {name} has shape {list(grad.shape)} on {grad.device}, the parameter "
            f"{list(weight.shape)} on {weight.device}: call zero_grad() where you replace a parameter's data"
        )
    if not grad.dtype.is_floating_point:
        raise UnsupportedError(f"the gradient of {name} is {grad.dtype}, expected floating numbers")
    grad = grad.detach().resolve_neg()
    if not (weight.is_contiguous() and grad.is_contiguous()) and grad.stride() != weight.stride():
        grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
    return grad if grad.dtype in cpus_.GRADS else grad.to(torch.float32)


# ---- bundles ----------------------------------------------------------------------------------------------


class Bundle:
    """Parameters of a group with gradients, on one device, kept alike: a kernel updates them in one call.

    It lives for one step and keeps what it looked at alive. Weights, gradients (in the weights' memory order,
    of a dtype that kernels read) and states are this rank's parts of them.
    """

    def __init__(
        self,
        group: Group,
        number: int,
        places: Sequence[int],
        params: list[Tensor],
        weights: Column,
        grads: Column,
        algorithm: Algorithm,
    ) -> None:
        self.group, self.number, self.places, self.params = group, number, places, params
        self.weights, self.grads, self.algorithm, weight = weights, grads, algorithm, weights.tensors[0]
        self.elements = tuple(weights.elements)
        """How many each weight has here."""
        self.kind = arguments.kind_of(weight.dtype, group["master"])
        self.state_kind = L.STATE_FP32
        if algorithm.states:
            self.state_kind = arguments.state_kind_of(weight, group["state_dtype"])
        blocks = self.state_kind == L.STATE_8BIT
        self.widths = tuple(map(storage.width_of, weights.tensors)) if blocks else None
        """Of the rows that blocks of 8-bit states do not cross."""
        kept = "lacking" if self.kind in storage.EXACT else None
        self.extra_key = "master" if self.kind in storage.WITH_MASTER else kept
        """The name of what a weight has besides its 16 bits."""
        self.states: dict[str, list[Tensor]] = {}
        """This rank's tensors of the states, by their name in `optimizer.state`."""
        self._lines, self._addresses = [WEIGHT, GRAD], [*weights.addresses, *grads.addresses]
        self._lacking: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return self.weights.tensors[0].device

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of all gradients."""
        return self.grads.dtypes[0]

    @property
    def set_of_groups(self) -> Any:
        """The process groups over which the parameters are split."""
        return shard_groups(self.params[0])

    @property
    def rounds_randomly(self) -> bool:
        """Whether a step needs random bits."""
        return self.state_kind != L.STATE_FP32 or self.kind == L.BF16_STOCHASTIC

    def complete(self, state: Any) -> None:
        """Find the states, made or made to fit where they do not; ConfigError for what cannot fit."""
        try:
            held = list(map(state.__getitem__, self.params))
        except KeyError:
            held = [state.setdefault(p, {}) for p in self.params]
        if not self._found(held):
            with torch.inference_mode(False), torch.no_grad():
                rows = zip(self.params, self.weights.tensors, held, self.places)
                for p, weight, entry, place in rows:
                    name = arguments.name_of(self.group, (self.number, place))
                    with shards.local_entry(entry, p) as own:
                        entries.settle(own, weight, self.algorithm, self.kind, self.state_kind, name)
            if not self._found(held):
                raise ConfigError(
                    f"the states of {len(held)} parameters of group {self.number} hold other than "
                    "dense torch.Tensors: clear their entries of optimizer.state to start anew"
                )
        if self.extra_key == "lacking":
            self._lacking = list(map(itemgetter("lacking"), held))
            hand_edits.take(self.params, self._lacking, held, self.device)

    def _found(self, held: Sequence[Mapping[str, Any]]) -> bool:
        """Look at the states; false where one is missing or does not fit."""
        if self.extra_key is None and any("lacking" in entry or "master" in entry for entry in held):
            return False
        if self.widths and any(key in entry for entry in held for key in self.algorithm.states):
            return False
        count, wanted = len(held), self._wanted()
        try:
            shown = [list(map(itemgetter(key), held)) for key in wanted]
        except KeyError:
            return False
        if not PLAIN.issuperset(map(type, self.params)):
            placements = [getattr(p, "placements", None) for p in self.params]
            if any([getattr(t, "placements", None) for t in own] != placements for own in shown[:-1]):
                return False
            shown[:-1] = [list(map(local_of, own)) for own in shown[:-1]]  # all but the counts of steps
        column = _column(list(chain.from_iterable(shown)))
        dtypes = list(chain.from_iterable([dtype] * count for _, dtype in wanted.values()))
        if column is None or column.dtypes != dtypes or column[LAYOUT] != self._layout(len(wanted)):
            return False
        self.states = dict(zip(wanted, shown))
        self._lines += [line for line, _ in wanted.values()]
        self._addresses += column.addresses
        return True

    def _wanted(self) -> dict[str, tuple[int, torch.dtype]]:
        """What the state of each parameter holds: line of the table and dtype by name."""
        states, stored = self.algorithm.states, storage.STORED[self.state_kind]
        codes = storage.CODES if self.widths else ""
        wanted = {key + codes: (STATES + i, stored) for i, key in enumerate(states)}
        if self.extra_key is not None:
            wanted[self.extra_key] = (EXTRA, torch.float32 if self.extra_key == "master" else torch.int16)
        if self.widths:
            wanted |= {key + "_exponents": (EXPONENTS + i, torch.uint8) for i, key in enumerate(states)}
        return wanted | {"step": (STEP, torch.float32)}

    def _layout(self, keys: int) -> tuple[Any, ...]:
        """Elements, devices and strides of the states, of so many names, side by side."""
        weights, count = self.weights, len(self.params)
        blocks = len(self.algorithm.states) if self.widths else 0
        alike = keys - blocks - 1
        exponents = [math.prod(storage.exponents_shape(w)) for w in weights.tensors] if blocks else []
        elements = [*weights.elements * alike, *exponents * blocks, *[1] * count]
        strides = None
        if weights.strides and alike:
            strides = [*weights.strides * alike, *[None] * (count * (blocks + 1))]
        return elements, weights.devices * keys, strides

    # ---- for kernels ------------------------------------------------------------------------------------

    def table(self) -> Any:
        """Where everything lies: int64 numbers, a column for each parameter, with the lines named above."""
        count = len(self.params)
        table = np.full((LINES, count), ABSENT, np.int64)
        table[self._lines] = np.array(self._addresses, np.int64).reshape(-1, count)
        if self.widths:
            table[WIDTH] = self.widths
        if 0 in self._addresses:
            self._check_memory(table.min(0).tolist())
        return table

    def _check_memory(self, addresses: Sequence[int]) -> None:
        for address, count, place in zip(addresses, self.elements, self.places):
            if address == 0 and count:
                name = arguments.name_of(self.group, (self.number, place))
                raise ConfigError(
                    f"{name}, its gradient or a state has no memory (on the meta device, or its storage was "
                    "freed): give it values before the step"
                )

    def base_keys(self, seed: int) -> list[int]:
        """What keys the random bits of each parameter, by its name or place."""
        names = self.group.get("param_names")
        known = [names[i] if names else f"{self.number}.{i}" for i in self.places]
        return [zlib.crc32(f"{seed}:{name}".encode()) for name in known]

    def key_shifts(self) -> list[int]:
        """What is added to the random keys: bits count from the start of a whole tensor that is cut up."""
        return [((first_element(p) or 0) * rounding.WEYL) & rounding.WORD for p in self.params]

    def slots(self) -> list[storage.Slot]:
        """Each parameter by itself, for plain torch."""
        states = [self.states[storage.held_as(key, self.state_kind)] for key in self.algorithm.states]
        exponents = [self.states[key + "_exponents"] for key in self.algorithm.states] if self.widths else []
        extra = None if self.extra_key is None else self.states[self.extra_key]
        return [
            storage.Slot(
                kind=self.kind,
                state_kind=self.state_kind,
                width=storage.width_of(weight),
                weight=storage.flat(weight),
                grad=storage.flat(grad),
                extra=None if extra is None else storage.flat(extra[i]),
                states=[storage.flat(column[i]) for column in states],
                exponents=[column[i] for column in exponents],
            )
            for i, (weight, grad) in enumerate(zip(self.weights.tensors, self.grads.tensors))
        ]

    def count_versions(self) -> None:
        """Tell autograd that a kernel changed the weights and, so that both counts stay equal, their bits."""
        increment_version(self.params)
        increment_version(self._lacking)


def bundles_of(
    groups: Sequence[Group],
    algorithm_of: Callable[[Mapping[str, Any]], Algorithm],
    only: Tensor | None = None,
) -> list[Bundle]:
    """The parameters that have a gradient, those that are kept alike together, in the order of groups.

    Partial gradients of DTensors are added up first.

    Raises:
        UnsupportedError: a parameter or gradient that is not dense or not of floating numbers. ConfigError:
            a gradient of another shape or device than its parameter's, as after `p.data = ...`.
    """
    found: list[Bundle] = []
    for number, group in enumerate(groups):
        params: list[Tensor] = list(group["params"])
        places: Sequence[int] = range(len(params))
        if only is not None:
            places = [i for i, p in enumerate(params) if p is only]
        elif not PLAIN.issuperset(map(type, params)):
            shards.add_partial_sums(params)
        if only is not None or NoneType in set(map(type, map(_grads, params))):
            places = [i for i in places if params[i].grad is not None]
            params = [params[i] for i in places]
        if params:
            arguments.check_storage(group)
            found += _bundles(group, number, places, params, algorithm_of(group))
    return found


def _bundles(
    group: Group, number: int, places: Sequence[int], params: list[Tensor], algorithm: Algorithm
) -> list[Bundle]:
    plain, given = PLAIN.issuperset(map(type, params)), list(map(_grads, params))
    weights = column_of(params if plain else _locals(params))
    if weights.strides is not None:
        for weight in weights.tensors:
            storage.check_dense(weight)
    grads = _column(given if plain else _locals(given))
    if grads is None or grads[LAYOUT] != weights[LAYOUT] or not _are_read(grads):
        named = (arguments.name_of(group, (number, place)) for place in places)
        grads = column_of(list(map(dense_grad, weights.tensors, _locals(given), named)))
    keys: list[list[Any]] = [weights.dtypes, grads.dtypes, weights.devices]
    if group["state_dtype"] == "8bit":
        keys.append([arguments.state_kind_of(weight, "8bit") for weight in weights.tensors])
    if not plain:
        shards.check_blocks(group, params)
        keys.append(groups_of_shards(params))
    if all(key.count(key[0]) == len(key) for key in keys):
        return [Bundle(group, number, places, params, weights, grads, algorithm)]
    own = list(zip(*keys))
    parts = [[i for i, key in enumerate(own) if key == one] for one in dict.fromkeys(own)]
    return [
        Bundle(
            group,
            number,
            [places[i] for i in part],
            [params[i] for i in part],
            weights.pick(part),
            grads.pick(part),
            algorithm,
        )
        for part in parts
    ]
