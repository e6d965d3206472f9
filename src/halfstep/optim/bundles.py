"""The tensors of a step, collected in every step and grouped by how they are stored.

Looks go column by column (`map` over all weights, gradients or moments), which takes a fraction of the time
of a loop over parameters. Whatever does not fit the kernels is made to fit first, or refused by name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from types import NoneType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from halfstep.distributed import first_element, local_of
from halfstep.distributed.reduce import groups_of_shards
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.kernels import codes as L
from halfstep.kernels.cpu.run import GRADS
from halfstep.optim import arguments, entries, shards, storage
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.shards import PLAIN

Group = dict[str, Any]
Place = tuple[int, int]
_grads, _dtypes, _index = attrgetter("grad"), attrgetter("dtype"), Tensor.get_device
WEIGHT, EXTRA, GRAD, STATES, STEP, KEY, WIDTH, EXPONENTS, LINES = 0, 1, 2, 3, 5, 6, 7, 8, 10
"""Lines of a table: addresses (of two states and their exponents too), random key, length of a row."""
Columns = tuple[Sequence[int], list[Tensor], list[Tensor], list[Tensor]]
"""Parameters of a group: their places, themselves, and this rank's parts of them and of their gradients."""
ABSENT = 16  # in place of an address: aligned, and not 0


def _locals(tensors: list[Tensor]) -> list[Tensor]:
    """Return this rank's parts."""
    return [t if type(t) in PLAIN else storage.local_tensor(local_of(t)) for t in tensors]


def _dense_grad(weight: Tensor, grad: Tensor, name: str) -> Tensor:
    """Return the gradient in the weight's memory order and a dtype that the kernels read.

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
    grad = grad.detach().resolve_neg().as_subclass(Tensor)
    if not (weight.is_contiguous() and grad.is_contiguous()) and grad.stride() != weight.stride():
        grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
    return grad if grad.dtype in GRADS else grad.to(torch.float32)


# ---- bundles ----------------------------------------------------------------------------------------------


class TensorGroup:
    """Parameters with gradients of one group and device, stored alike: a kernel updates them in one call.

    It lives for one step and keeps what it looked at alive. Weights, gradients (in the weights' memory order,
    of a dtype that kernels read) and states are this rank's parts of them.
    """

    def __init__(self, group: Group, number: int, algorithm: Algorithm, columns: Columns) -> None:
        self.group, self.number, self.algorithm = group, number, algorithm
        self.places, self.params, self.weights, self.grads = columns
        weight = self.weights[0]
        self.device, self._index = weight.device, weight.get_device()
        self.grad_dtype = self.grads[0].dtype
        self.kind = arguments.kind_of(weight.dtype, group["master"])
        self.state_kind = L.STATE_FP32
        if algorithm.states:
            self.state_kind = arguments.state_kind_of(weight, group["state_dtype"])
        self.rounds_randomly = self.state_kind != L.STATE_FP32 or self.kind == L.BF16_STOCHASTIC
        """Whether a step needs random bits."""
        blocks = self.state_kind == L.STATE_8BIT
        self.widths = tuple(map(storage.width_of, self.weights)) if blocks else None
        """Of the rows that blocks of 8-bit states do not cross."""
        lacking_key = "lacking" if self.kind in storage.EXACT else None
        self.extra_key = "master" if self.kind in storage.WITH_MASTER else lacking_key
        """The name of what a weight has besides its 16 bits."""
        self.states: dict[str, list[Tensor]] = {}
        """This rank's tensors of the states, by their name in `optimizer.state`."""
        self.elements: tuple[int, ...] = ()
        """How many each weight has here."""
        self.complete = False
        """Whether the states were collected as well."""
        self.work: Any = None
        """What a backend made of it, to use again in this step."""

    def collect(self, state: Any = None, makes: bool = True) -> TensorGroup:
        """Collect weights, gradients and, given an optimizer's `state`, states; return itself.

        What is missing or does not fit the kernels is made to; unless it `makes` states, none are collected
        where one is not there. UnsupportedError and ConfigError for what cannot fit.
        """
        state_entries: list[Group] | None = None
        self.complete, self.work = state is not None, None
        if not makes:
            if self._try_collect(list(map(state.get, self.params, repeat({})))):
                return self
            self.complete = False
        elif state is not None:
            try:
                state_entries = list(map(state.__getitem__, self.params))
            except KeyError:  # a plain dict in place of torch's
                state_entries = [state.setdefault(p, {}) for p in self.params]
        if not self._try_collect(state_entries):
            self._normalize(state_entries or [])
            if not self._try_collect(state_entries):
                raise ConfigError(
                    f"the states of {len(self.params)} parameters of group {self.number} hold other than "
                    "dense torch.Tensors: clear their entries of optimizer.state to start anew"
                )
        return self

    def _normalize(self, state_entries: Sequence[Group]) -> None:
        names = [arguments.name_of(self.group, (self.number, place)) for place in self.places]
        for weight in self.weights:
            storage.check_dense(weight)
        with torch.inference_mode(False), torch.no_grad():
            self.grads = list(map(_dense_grad, self.weights, _locals(self.grads), names))
            self.grad_dtype = self.grads[0].dtype
            for p, weight, entry, name in zip(self.params, self.weights, state_entries, names):
                with shards.local_entry(entry, p) as local_state:
                    entries.normalize_entry(
                        local_state, weight, self.algorithm, self.kind, self.state_kind, name
                    )

    def _try_collect(self, state_entries: Sequence[Group] | None) -> bool:
        """Collect everything, column by column; return whether nothing is missing or misplaced."""
        formats = {} if state_entries is None else self._state_dtypes()
        states = {} if state_entries is None else self._states_in(state_entries, formats)
        if states is None or self.grad_dtype not in GRADS or any(map(Tensor.is_neg, self.grads)):
            return False
        count, counted = len(self.params), bool(states)
        columns = [self.weights, self.grads, *states.values()]  # the last is of counts of steps
        tensors = list(chain(*columns))
        others, dtypes = tensors[count:], [dtype for _, dtype in formats.values()]
        if not PLAIN.issuperset(map(type, others)) or not {self._index}.issuperset(map(_index, others)):
            return False
        try:
            contiguous = all(map(Tensor.is_contiguous, tensors[:-count] if counted else tensors))
            addresses = [list(map(Tensor.data_ptr, column)) for column in columns]
        except RuntimeError:  # sparse
            return False
        elements = list(map(Tensor.numel, tensors))
        blocks = len(self.algorithm.states) if self.widths and counted else 0
        alike = 2 + len(states) - blocks - counted  # columns
        exponents = [math.prod(storage.exponents_shape(w)) for w in self.weights] if blocks else []
        if (
            elements != [*elements[:count] * alike, *exponents * blocks, *[1] * count * counted]
            or list(map(_dtypes, others[count:])) != list(chain(*map(repeat, dtypes, repeat(count))))
            or not (contiguous or _in_order(tensors, count, alike))
        ):
            return False
        self.states, self.elements = states, tuple(elements[:count])
        self._lines = dict(zip((WEIGHT, GRAD, *(line for line, _ in formats.values())), addresses))
        if self.widths:
            self._lines[WIDTH] = list(self.widths)
        return True

    def _states_in(
        self, state_entries: Sequence[Group], keys: Iterable[str]
    ) -> dict[str, list[Tensor]] | None:
        """Return this rank's tensors of the states; None where one is missing, too many or misplaced."""
        strange: set[str] = set(self.algorithm.states if self.widths else ())
        if self.extra_key is None:
            strange.update(storage.MASTER_KEYS)
        if strange and not all(map(strange.isdisjoint, state_entries)):
            return None
        try:
            states = {key: list(map(itemgetter(key), state_entries)) for key in keys}
        except KeyError:
            return None
        if not PLAIN.issuperset(map(type, self.params)):
            for key in states.keys() - {"step"}:
                if not all(map(shards.is_placed_as, states[key], self.params)):
                    return None
                states[key] = list(map(local_of, states[key]))
        return states

    def _state_dtypes(self) -> dict[str, tuple[int, torch.dtype]]:
        """Return what the state of each parameter holds: line of the table and dtype by name."""
        states, stored = self.algorithm.states, storage.STORED[self.state_kind]
        codes = storage.CODES if self.widths else ""
        formats = {key + codes: (STATES + i, stored) for i, key in enumerate(states)}
        if self.extra_key is not None:
            formats[self.extra_key] = (EXTRA, torch.float32 if self.extra_key == "master" else torch.int16)
        if self.widths:
            formats |= {key + storage.EXPONENTS: (EXPONENTS + i, torch.uint8) for i, key in enumerate(states)}
        formats["step"] = (STEP, torch.float32)
        return formats

    def is_current(self) -> bool:
        """Return whether the parameters have the gradients still that were collected."""
        now = list(map(_grads, self.params))
        return all(map(is_, self.grads, now if self.weights is self.params else _locals(now)))

    # ---- for all that run it ----------------------------------------------------------------------------

    def table(self, lines: int | None = None) -> Any:
        """Return the address table: int64 numbers, a column for each parameter, with the lines named above.

        The first `lines` of them; None: as many as a kernel of a CPU reads.
        """
        if lines is None:
            lines = LINES if self.widths else WIDTH if self.rounds_randomly else KEY
        absent = [ABSENT] * len(self.params)
        numbers = list(chain.from_iterable(map(self._lines.get, range(lines), repeat(absent))))
        table = np.array(numbers, np.int64).reshape(lines, -1)
        for least, count, place in zip(table.min(0), self.elements, self.places) if 0 in numbers else ():
            if least == 0 and count:
                name = arguments.name_of(self.group, (self.number, place))
                raise ConfigError(
                    f"{name}, its gradient or a state has no memory (on the meta device, or its storage was "
                    "freed): give it values before the step"
                )
        return table

    def base_keys(self, seed: int) -> list[int]:
        """Return the key of each parameter's random bits, by its name or place."""
        names = self.group.get("param_names")
        key_names = [names[i] if names else f"{self.number}.{i}" for i in self.places]
        return [zlib.crc32(f"{seed}:{name}".encode()) for name in key_names]

    def origins(self) -> list[int]:
        """Return how much of a whole tensor lies before each part: random bits count from its start."""
        return [first_element(p) or 0 for p in self.params]

    def slots(self) -> list[storage.Slot]:
        """Yield each parameter by itself, for plain torch."""
        states = [self.states[storage.name_of_moment(key, self.state_kind)] for key in self.algorithm.states]
        exponents = [self.states[key + "_exponents"] for key in self.algorithm.states] if self.widths else []
        extra = None if self.extra_key is None else self.states[self.extra_key]
        return [
            storage.Slot(
                param=param,
                kind=self.kind,
                state_kind=self.state_kind,
                width=storage.width_of(weight),
                weight=storage.flat(weight),
                grad=storage.flat(grad),
                extra=None if extra is None else storage.flat(extra[i]),
                states=[storage.flat(column[i]) for column in states],
                exponents=[column[i] for column in exponents],
            )
            for i, (param, weight, grad) in enumerate(zip(self.params, self.weights, self.grads))
        ]


def tensor_groups_of(
    groups: Sequence[Group],
    algorithm_of: Callable[[Mapping[str, Any]], Algorithm],
    only: Tensor | None = None,
) -> list[TensorGroup]:
    """Group the parameters that have a gradient by how they are stored, in the order of groups.

    Partial gradients of DTensors are added up first.

    Raises:
        UnsupportedError: a parameter or gradient that is not dense or not of floating numbers. ConfigError:
            a gradient of another shape or device than its parameter's, as after `p.data = ...`.
    """
    bundles: list[TensorGroup] = []
    for number, group in enumerate(groups):
        params: list[Tensor] = group["params"]
        plain = PLAIN.issuperset(map(type, params))
        if not plain:
            shards.add_partial_sums(params)
        places, grads = range(len(params)), list(map(_grads, params))
        if only is not None or NoneType in set(map(type, grads)):
            places = [i for i in places if grads[i] is not None and (only is None or params[i] is only)]
            params, grads = [params[i] for i in places], [grads[i] for i in places]
        if params:
            arguments.check_storage(group)
            weights, grads = (params, grads) if plain else (_locals(params), _locals(grads))
            bundles += _tensor_groups(group, number, algorithm_of(group), (places, params, weights, grads))
    return bundles


def _tensor_groups(group: Group, number: int, algorithm: Algorithm, columns: Columns) -> list[TensorGroup]:
    _, params, weights, grads = columns
    keys: list[list[Any]] = [[*map(_dtypes, weights)], [*map(_dtypes, grads)], [*map(_index, weights)]]
    if group["state_dtype"] == "8bit":
        keys.append([arguments.state_kind_of(weight, "8bit") for weight in weights])
    if weights is not params:
        shards.check_blocks(group, params)
        keys.append(groups_of_shards(params))
    if max(map(len, map(set, keys))) == 1:
        return [TensorGroup(group, number, algorithm, columns)]
    weight_keys, bundles = list(zip(*keys)), list[TensorGroup]()
    for part_key in dict.fromkeys(weight_keys):
        part = [i for i, key in enumerate(weight_keys) if key == part_key]
        places, *tensors = ([column[i] for i in part] for column in columns)
        bundles.append(TensorGroup(group, number, algorithm, cast("Columns", (places, *tensors))))
    return bundles


def _in_order(tensors: Sequence[Tensor], count: int, alike: int) -> bool:
    """Whether columns that are `alike` have the memory order of the first, which has no gaps."""
    for weight in tensors[:count]:
        storage.check_dense(weight)
    strides = [None if t.is_contiguous() else t.stride() for t in tensors]
    return strides == [*strides[:count] * alike, *[None] * (len(tensors) - alike * count)]
