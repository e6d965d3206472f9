"""What a step uses, looked at anew in every step and put together by how it is kept.

Looks go column by column (`map` over all weights, gradients or moments), which takes a fraction of the time
of a loop over parameters. Whatever does not fit the kernels is made to fit first, or refused by name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.distributed import first_element, local_of, shard_groups
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


@dataclass
class Column:
    """Tensors side by side, and what a step needs to know of them, read one after another."""

    tensors: list[Tensor]
    addresses: list[int]
    elements: list[int]
    dtypes: list[torch.dtype]
    devices: list[int]
    strides: list[tuple[int, ...] | None] | None
    """Of those that are not contiguous; None where all are."""

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Column:
        """Look at dense tensors; RuntimeError where one is not."""
        strides = None
        if not all(map(Tensor.is_contiguous, tensors)):
            strides = [None if t.is_contiguous() else t.stride() for t in tensors]
        return cls(
            tensors,
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.numel, tensors)),
            list(map(_dtypes, tensors)),
            list(map(Tensor.get_device, tensors)),
            strides,
        )

    def pick(self, indices: Sequence[int]) -> Column:
        """Some of them."""
        return Column(
            [self.tensors[i] for i in indices],
            [self.addresses[i] for i in indices],
            [self.elements[i] for i in indices],
            [self.dtypes[i] for i in indices],
            [self.devices[i] for i in indices],
            self.strides and [self.strides[i] for i in indices],
        )

    def lies_as(self, other: Column) -> bool:
        """Whether all have as many elements as the other's, on the same devices, laid out alike."""
        return (
            self.elements == other.elements
            and self.devices == other.devices
            and self.strides == other.strides
        )


def _column(tensors: list[Any]) -> Column | None:
    """A column of tensors that a user gave; None where one is not plain or not dense."""
    try:
        return Column.of(tensors) if PLAIN.issuperset(map(type, tensors)) else None
    except RuntimeError:
        return None


@dataclass
class Members:
    """The parameters of a group that have a gradient: theirs, and this rank's parts of both."""

    number: int
    group: Group
    params: list[Tensor]
    places: Sequence[int]
    weights: Column
    grads: Column
    """In the memory order of the weights, of dtypes that the kernels read."""

    def pick(self, indices: Sequence[int]) -> Members:
        """Some of them."""
        params, places = [self.params[i] for i in indices], [self.places[i] for i in indices]
        columns = self.weights.pick(indices), self.grads.pick(indices)
        return Members(self.number, self.group, params, places, *columns)


def members_of(groups: Sequence[Group], only: Tensor | None = None) -> list[Members]:
    """The parameters that have a gradient, by group; partial gradients of DTensors are added up first.

    Raises:
        UnsupportedError: a parameter or gradient that is not dense or not of floating numbers. ConfigError:
            a gradient of another shape or device than its parameter's, as after `p.data = ...`.
    """
    found: list[Members] = []
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
            found.append(_members(number, group, params, places))
    return found


def gradients_of(groups: Sequence[Group]) -> list[Tensor]:
    """The gradients as the kernels read them, for who needs nothing else; raises as `members_of` does."""
    given = [grad for group in groups for grad in map(_grads, group["params"]) if grad is not None]
    column = _column(given)
    if column is None or column.strides is not None or not _are_read(column):
        return [grad for members in members_of(groups) for grad in members.grads.tensors]
    return given


def _members(number: int, group: Group, params: list[Tensor], places: Sequence[int]) -> Members:
    plain, given = PLAIN.issuperset(map(type, params)), list(map(_grads, params))
    weights = Column.of(params if plain else _locals(params))
    if weights.strides is not None:
        for weight in weights.tensors:
            storage.check_dense(weight)
    grads = _column(given if plain else _locals(given))
    if grads is None or not grads.lies_as(weights) or not _are_read(grads):
        named = (arguments.name_of(group, (number, place)) for place in places)
        grads = Column.of(list(map(dense_grad, weights.tensors, _locals(given), named)))
    return Members(number, group, params, places, weights, grads)


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


class Bundle(Members):
    """Members on one device, whose weights, gradients and states are kept in one way.

    A kernel updates them in one call. It lives for one step and keeps what it looked at alive.
    """

    def __init__(self, members: Members, algorithm: Algorithm) -> None:
        super().__init__(**vars(members))
        self.algorithm, weight = algorithm, self.weights.tensors[0]
        self.kind = arguments.kind_of(weight.dtype, self.group["master"])
        self.state_kind = L.STATE_FP32
        if algorithm.states:
            self.state_kind = arguments.state_kind_of(weight, self.group["state_dtype"])
        blocks = self.state_kind == L.STATE_8BIT
        self.widths = tuple(map(storage.width_of, self.weights.tensors)) if blocks else None
        """Of the rows that blocks of 8-bit states do not cross."""
        self.columns: dict[str, Column] = {}
        """This rank's tensors of the states, by their name in `optimizer.state`."""
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
    def elements(self) -> tuple[int, ...]:
        """How many each weight has here."""
        return tuple(self.weights.elements)

    @property
    def set_of_groups(self) -> Any:
        """The process groups over which the parameters are split."""
        return shard_groups(self.params[0])

    @property
    def extra_key(self) -> str | None:
        """The name of what a weight has besides its 16 bits."""
        if self.kind in storage.WITH_MASTER:
            return "master"
        return "lacking" if self.kind in storage.EXACT else None

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
        if self.kind in storage.EXACT:
            self._lacking = list(map(itemgetter("lacking"), held))
            hand_edits.take(self.params, self._lacking, held, self.device)

    def _found(self, held: Sequence[Mapping[str, Any]]) -> bool:
        """Look at the states; false where one is missing or does not fit."""
        if self.extra_key is None and any("lacking" in entry or "master" in entry for entry in held):
            return False
        sharded = not PLAIN.issuperset(map(type, self.params))
        placements = [getattr(p, "placements", None) for p in self.params] if sharded else []
        for key, (dtype, elements, strides) in self._wanted().items():
            try:
                shown = list(map(itemgetter(key), held))
            except KeyError:
                return False
            if sharded and key != "step":
                if [getattr(t, "placements", None) for t in shown] != placements:
                    return False
                shown = list(map(local_of, shown))
            column = _column(shown)
            if column is None or column.dtypes.count(dtype) < len(held) or column.elements != elements:
                return False
            if column.devices != self.weights.devices or column.strides != strides:
                return False
            self.columns[key] = column
        return True

    def _wanted(self) -> dict[str, tuple[torch.dtype, Any, Any]]:
        """What the state of each parameter holds: dtype, how many elements and strides by name."""
        states, lie = self.algorithm.states, (self.weights.elements, self.weights.strides)
        wanted = dict.fromkeys(states, (storage.STORED[self.state_kind], *lie))
        if self.extra_key is not None:
            wanted[self.extra_key] = (torch.float32 if self.extra_key == "master" else torch.int16, *lie)
        if self.widths:
            shapes = [math.prod(storage.exponents_shape(weight)) for weight in self.weights.tensors]
            wanted |= {key + "_exponents": (torch.uint8, shapes, None) for key in states}
        return wanted | {"step": (torch.float32, [1] * len(self.params), None)}

    # ---- for kernels ------------------------------------------------------------------------------------

    def table(self) -> Any:
        """Where everything lies: int64 numbers, a column for each parameter, with the lines named above."""
        count = len(self.params)
        absent: Sequence[int] = [ABSENT] * count
        lines: list[Sequence[int]] = [absent] * LINES
        lines[WEIGHT], lines[GRAD] = self.weights.addresses, self.grads.addresses
        lines[STEP] = self.columns["step"].addresses
        if self.extra_key is not None:
            lines[EXTRA] = self.columns[self.extra_key].addresses
        for i, key in enumerate(self.algorithm.states):
            lines[STATES + i] = self.columns[key].addresses
            if self.widths:
                lines[EXPONENTS + i] = self.columns[key + "_exponents"].addresses
        if self.widths:
            lines[WIDTH] = self.widths
        table = np.fromiter(chain.from_iterable(lines), np.int64, LINES * count).reshape(LINES, count)
        if not table.all():
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
        states = [self.columns[key].tensors for key in self.algorithm.states]
        keys = [key + "_exponents" for key in self.algorithm.states] if self.widths else []
        exponents = [self.columns[key].tensors for key in keys]
        extra = self.extra_key
        return [
            storage.Slot(
                kind=self.kind,
                state_kind=self.state_kind,
                width=storage.width_of(weight),
                weight=storage.flat(weight),
                extra=None if extra is None else storage.flat(self.columns[extra].tensors[i]),
                states=[storage.flat(column[i]) for column in states],
                exponents=[column[i] for column in exponents],
            )
            for i, weight in enumerate(self.weights.tensors)
        ]

    def count_versions(self) -> None:
        """Tell autograd that a kernel changed the weights and, so that both counts stay equal, their bits."""
        increment_version(self.params)
        increment_version(self._lacking)


def bundles_of(
    members: Sequence[Members], algorithm_of: Callable[[Mapping[str, Any]], Algorithm]
) -> list[Bundle]:
    """The members, those that are kept alike together, in the order of groups and of their first."""
    found: list[Bundle] = []
    for one in members:
        columns: list[list[Any]] = [one.weights.dtypes, one.grads.dtypes, one.weights.devices]
        if one.group["state_dtype"] == "8bit":
            columns.append([arguments.state_kind_of(weight, "8bit") for weight in one.weights.tensors])
        if one.weights.tensors is not one.params:
            shards.check_blocks(one.group, one.params)
            columns.append(list(map(shard_groups, one.params)))
        parts = [one]
        if any(column.count(column[0]) < len(column) for column in columns):
            keys = list(zip(*columns))
            parts = [one.pick([i for i, own in enumerate(keys) if own == key]) for key in dict.fromkeys(keys)]
        found += [Bundle(part, algorithm_of(one.group)) for part in parts]
    return found
