"""What a step uses, looked at anew in every step and put together by how it is kept.

Looks go column by column (`map` over all weights, then over all gradients ...), which takes a fraction of the
time of a loop over parameters. Whatever does not fit the kernels is made to fit first, or refused by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_not
from types import NoneType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfstep.distributed import first_element, local_of, shard_groups
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.gradients import cpu as cpus_
from halfstep.kernels import codes as L
from halfstep.optim import entries, hand_edits, rounding, shards, storage
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.shards import PLAIN

Group = dict[str, Any]
Place = tuple[int, int]
_grads, _dtypes = attrgetter("grad"), attrgetter("dtype")


def name_of(group: Mapping[str, Any], place: Place) -> str:
    """How errors call a parameter."""
    names = group.get("param_names")
    return repr(names[place[1]]) if names else f"parameter {place[1]} of group {place[0]}"


@dataclass
class Members:
    """The parameters of a group that have a gradient: theirs, and this rank's parts of both."""

    number: int
    group: Group
    params: list[Tensor]
    places: Sequence[int]
    weights: list[Tensor]
    grads: list[Tensor]
    """In the memory order of the weights, of dtypes that the kernels read."""
    looks: Looks

    def pick(self, indices: Sequence[int]) -> Members:
        """Some of them."""
        params, weights, grads = (
            [column[i] for i in indices] for column in (self.params, self.weights, self.grads)
        )
        places, looks = [self.places[i] for i in indices], self.looks.pick(indices)
        return Members(self.number, self.group, params, places, weights, grads, looks)


class Looks:
    """Sizes, strides and devices of a column of weights, which those of other columns are compared with."""

    def __init__(
        self, sizes: list[torch.Size], strides: list[tuple[Any, bool]] | None, devices: list[int]
    ) -> None:
        self.sizes, self.strides, self.devices = sizes, strides, devices

    @classmethod
    def of(cls, weights: Sequence[Tensor]) -> Looks:
        """Look at the weights; UnsupportedError where one does not fill its memory."""
        strides = None
        if not all(map(Tensor.is_contiguous, weights)):
            for weight in weights:
                storage.check_dense(weight)
            strides = [(weight.stride(), weight.is_contiguous()) for weight in weights]
        return cls(list(map(Tensor.size, weights)), strides, list(map(Tensor.get_device, weights)))

    def pick(self, indices: Sequence[int]) -> Looks:
        """Those of some of the weights."""
        strides = None if self.strides is None else [self.strides[i] for i in indices]
        return Looks([self.sizes[i] for i in indices], strides, [self.devices[i] for i in indices])

    def fit(self, column: Sequence[Any]) -> bool:
        """Whether a column of plain tensors has the weights' sizes, laid out and placed as they are."""
        if list(map(Tensor.size, column)) != self.sizes:
            return False
        if list(map(Tensor.get_device, column)) != self.devices:
            return False
        try:
            if self.strides is None:
                return all(map(Tensor.is_contiguous, column))
            return all(
                t.stride() == stride or (contiguous and t.is_contiguous())
                for t, (stride, contiguous) in zip(column, self.strides)
            )
        except RuntimeError:  # layouts without strides
            return False


def members_of(groups: Sequence[Group]) -> list[Members]:
    """The parameters that have a gradient, by group.

    Raises:
        UnsupportedError: a parameter or gradient that is not dense or not of floating numbers. ConfigError:
            a gradient of another shape or device than its parameter's, as after `p.data = ...`.
    """
    found = [_members(number, group, group["params"]) for number, group in enumerate(groups)]
    return [members for members in found if members.params]


def member(p: Tensor, groups: Sequence[Group]) -> list[Members]:
    """`members_of` for one parameter."""
    place = find(p, groups)
    group = groups[place[0]]
    members = _members(place[0], group, [p])
    members.places = [place[1]] * len(members.params)
    return [members] if members.params else []


def find(p: Tensor, groups: Sequence[Group]) -> Place:
    """The number of p's group and its number within; ConfigError where it is in none."""
    for number, group in enumerate(groups):
        ids = list(map(id, group["params"]))
        if id(p) in ids:
            return number, ids.index(id(p))
    raise ConfigError(f"a tensor of shape {list(p.shape)} is not a parameter of this optimizer")


def _members(number: int, group: Group, among: Sequence[Tensor]) -> Members:
    params, places = list(among), cast("Sequence[int]", range(len(among)))
    grads: list[Any] = list(map(_grads, params))
    kinds = set(map(type, grads))
    if NoneType in kinds:
        places = [i for i, grad in enumerate(grads) if grad is not None]
        params, grads = [params[i] for i in places], [grads[i] for i in places]
    weights = _locals(params)
    looks = Looks.of(weights)
    grads = _locals(grads)
    if not _are_read(grads, looks):
        grads = [
            dense_grad(weight, grad, name_of(group, (number, place)))
            for weight, grad, place in zip(weights, grads, places)
        ]
    return Members(number, group, params, places, weights, grads, looks)


def _locals(tensors: list[Tensor]) -> list[Tensor]:
    if PLAIN.issuperset(map(type, tensors)):
        return tensors
    return [storage.local_tensor(local_of(t)) for t in tensors]


def _are_read(grads: Sequence[Tensor], looks: Looks) -> bool:
    """Whether the kernels can read the gradients where they are."""
    return (
        PLAIN.issuperset(map(type, grads))
        and looks.fit(grads)
        and cpus_.GRADS.keys() >= set(map(_dtypes, grads))
        and not any(map(Tensor.is_neg, grads))
    )


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
    """Parameters of one group, on one device, whose weights, gradients and states are kept in one way.

    A kernel updates them in one call. It lives for one step and keeps what it looked at alive.
    """

    def __init__(self, members: Members, algorithm: Algorithm, state_kind: int, set_of_groups: Any) -> None:
        self.members, self.algorithm, self.group = members, algorithm, members.group
        self.params, self.weights, self.grads = members.params, members.weights, members.grads
        self.device = self.weights[0].device
        self.grad_dtype = self.grads[0].dtype
        self.kind = storage.kind_of(self.weights[0].dtype, self.group["master"])
        self.state_kind = state_kind if algorithm.states else L.STATE_FP32
        self.set_of_groups = set_of_groups
        """The process groups over which the parameters are split."""
        blocks = self.state_kind == L.STATE_8BIT
        self.widths = tuple(map(storage.width_of, self.weights)) if blocks else None
        """Of the rows that blocks of 8-bit states do not cross."""
        self.columns: dict[str, list[Tensor]] = {}
        """This rank's tensors of the states, by their name in `optimizer.state`."""
        self._lacking: list[Tensor] = []
        self.sharded = self.weights is not self.params and any(map(is_not, self.weights, self.params))

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
                for p, weight, entry, place in zip(self.params, self.weights, held, self.members.places):
                    name = name_of(self.group, (self.members.number, place))
                    with shards.local_entry(entry, p) as own:
                        entries.settle(own, weight, self.algorithm, self.kind, self.state_kind, name)
            if not self._found(held):
                raise ConfigError(
                    f"the states of {len(held)} parameters of group {self.members.number} hold other than "
                    "dense torch.Tensors: clear their entries of optimizer.state to start anew"
                )
        if self.kind in storage.EXACT:
            self._lacking = [entry["lacking"] for entry in held]
            hand_edits.take(self.params, self._lacking, held, self.device)

    def _found(self, held: Sequence[Mapping[str, Any]]) -> bool:
        """Look at the states; false where one is missing or does not fit."""
        extra, looks = self.extra_key, self.members.looks
        stored = storage.STORED[self.state_kind]
        wanted = [(key, stored) for key in self.algorithm.states]
        if extra is not None:
            wanted.append((extra, torch.float32 if extra == "master" else torch.int16))
        elif any("lacking" in entry or "master" in entry for entry in held):
            return False
        self.columns = {}
        for key, dtype in wanted:
            column = self._column(key, held)
            if column is None or not looks.fit(column) or set(map(_dtypes, column)) != {dtype}:
                return False
        return self._found_exponents(held) and self._found_steps(held)

    def _column(self, key: str, held: Sequence[Mapping[str, Any]]) -> list[Tensor] | None:
        shown = [entry.get(key) for entry in held]
        found = cast("list[Tensor]", shown)
        if self.sharded:
            if not all(isinstance(t, Tensor) for t in shown) or not all(
                map(shards.placed_alike, shown, self.params)
            ):
                return None
            found = list(map(local_of, found))
        if not PLAIN.issuperset(map(type, found)):
            return None
        self.columns[key] = found
        return found

    def _found_exponents(self, held: Sequence[Mapping[str, Any]]) -> bool:
        if self.widths is None:
            return True
        shapes = [storage.exponents_shape(weight) for weight in self.weights]
        devices = self.members.looks.devices
        for key in self.algorithm.states:
            column = self._column(key + "_exponents", held)
            if column is None:
                return False
            if set(map(_dtypes, column)) != {torch.uint8} or not all(map(Tensor.is_contiguous, column)):
                return False
            if list(map(Tensor.size, column)) != shapes or list(map(Tensor.get_device, column)) != devices:
                return False
        return True

    def _found_steps(self, held: Sequence[Mapping[str, Any]]) -> bool:
        steps = [entry.get("step") for entry in held]
        if not PLAIN.issuperset(map(type, steps)):
            return False
        found = cast("list[Tensor]", steps)
        if set(map(_dtypes, found)) != {torch.float32} or set(map(Tensor.dim, found)) != {0}:
            return False
        self.columns["step"] = found
        return list(map(Tensor.get_device, found)) == self.members.looks.devices

    # ---- for kernels ------------------------------------------------------------------------------------

    @property
    def elements(self) -> tuple[int, ...]:
        """How many each weight has."""
        return tuple(map(Tensor.numel, self.weights))

    def addresses(self) -> Any:
        """Where everything lies, an int64 array with a line for each parameter.

        Columns: weight, master or lacking bits, gradient, two states, their exponents, the length of a row.
        """
        states, extra, count = self.algorithm.states, self.extra_key, len(self.weights)
        exponents = [key + "_exponents" for key in states] if self.widths else []
        named = [self.columns[key] for key in (*states, *exponents)]
        places = [*range(3, 3 + len(states)), *range(5, 5 + len(exponents))]
        lines: list[Any] = [[0] * count] * 8
        lines[0], lines[2] = (list(map(Tensor.data_ptr, own)) for own in (self.weights, self.grads))
        lines[1] = lines[1] if extra is None else list(map(Tensor.data_ptr, self.columns[extra]))
        for place, column in zip(places, named):
            lines[place] = list(map(Tensor.data_ptr, column))
        lines[7] = self.widths or [1] * count
        for place in (0, 2, *places, *([] if extra is None else [1])):
            if 0 in lines[place]:
                self._check_memory(lines[place])
        return np.ascontiguousarray(np.array(lines, np.int64).T)

    def _check_memory(self, addresses: Sequence[int]) -> None:
        for address, count, place in zip(addresses, self.elements, self.members.places):
            if address == 0 and count:
                name = name_of(self.group, (self.members.number, place))
                raise ConfigError(
                    f"{name}, its gradient or a state has no memory (on the meta device, or its storage was "
                    "freed): give it values before the step"
                )

    def step_addresses(self) -> Any:
        """Where the step counts lie, an int64 array."""
        return np.array(list(map(Tensor.data_ptr, self.columns["step"])), np.int64)

    def base_keys(self, seed: int) -> list[int]:
        """What keys the random bits of each parameter, by its name or place."""
        names = self.group.get("param_names")
        places = self.members.places
        known = [names[i] if names else f"{self.members.number}.{i}" for i in places]
        return [zlib.crc32(f"{seed}:{name}".encode()) for name in known]

    def key_shifts(self) -> list[int]:
        """What is added to the random keys of shards: bits count from the start of the whole tensor."""
        return [
            0 if p is weight else ((first_element(p) or 0) * rounding.WEYL) & rounding.WORD
            for p, weight in zip(self.params, self.weights)
        ]

    def slots(self) -> list[storage.Slot]:
        """Each parameter by itself, for plain torch."""
        states = [self.columns[key] for key in self.algorithm.states]
        exponents = [self.columns[key + "_exponents"] for key in self.algorithm.states] if self.widths else []
        extra = self.extra_key
        return [
            storage.Slot(
                kind=self.kind,
                state_kind=self.state_kind,
                width=storage.width_of(weight),
                weight=storage.flat(weight),
                extra=None if extra is None else storage.flat(self.columns[extra][i]),
                states=[storage.flat(column[i]) for column in states],
                exponents=[column[i] for column in exponents],
            )
            for i, weight in enumerate(self.weights)
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
        asked = one.group["state_dtype"]
        kinds: list[int] | None = None
        if asked == "8bit":
            kinds = [storage.state_kind_of(weight, asked) for weight in one.weights]
        sets = None
        if one.weights is not one.params:
            shards.check_blocks(one.group, one.params)
            sets = list(map(shard_groups, one.params))
        algorithm = algorithm_of(one.group)
        first = storage.STATE_DTYPES[asked] if kinds is None else kinds[0]
        if (
            _is_alike(one)
            and (kinds is None or len(set(kinds)) == 1)
            and (sets is None or len(set(sets)) == 1)
        ):
            found.append(Bundle(one, algorithm, first, () if sets is None else sets[0]))
            continue
        columns = [map(_dtypes, one.weights), map(_dtypes, one.grads), one.looks.devices]
        keys = list(zip(*columns, *(column for column in (kinds, sets) if column is not None)))
        for key in dict.fromkeys(keys):
            chosen = [i for i, own in enumerate(keys) if own == key]
            state_kind = first if kinds is None else kinds[chosen[0]]
            found.append(
                Bundle(one.pick(chosen), algorithm, state_kind, () if sets is None else sets[chosen[0]])
            )
    return found


def _is_alike(members: Members) -> bool:
    """Whether weights are of one dtype and on one device, and gradients of one dtype."""
    dtypes = (set(map(_dtypes, column)) for column in (members.weights, members.grads))
    return all(len(kinds) == 1 for kinds in (*dtypes, set(members.looks.devices)))
