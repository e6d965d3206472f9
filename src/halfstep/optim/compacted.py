"""Any optimizer that treats each parameter by itself, with 16-bit weights and small states.

Between steps states of a parameter's own shape are kept in the state's dtype, the weight as everywhere in
`hs.optim`. In a step the optimizer's own `step` runs on fp32 copies of one bucket of parameters at a time, in
a new instance each time: what it knows must stand in `state` and `param_groups`. A trial finds out first.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from halfstep.distributed import local_of
from halfstep.errors import CheckpointError, MasterRangeError, UnsupportedError
from halfstep.gradients.decision import Decision
from halfstep.gradients.stats import AnyStats
from halfstep.kernels import codes as L
from halfstep.optim import algorithms, arguments, backends, checkpoints, entries, rounding, split, storage
from halfstep.optim.algorithms import Algorithm, Number
from halfstep.optim.backends.reference import factor_of
from halfstep.optim.base import OnePassOptimizer
from halfstep.optim.bundles import Group, Place, TensorGroup
from halfstep.optim.trial import COUNT, OURS, Kind, check_kind, run_alone

BUCKET = 1 << 22
"""Elements that are widened at a time: 16 MB each for weights, gradients and every state of their shape."""
_NO_STATES = replace(algorithms.SGD, name="none of ours", code=L.NO_KERNEL)


def compact(
    kind: Kind,
    params: Any,
    *,
    master: str | None = "exact",
    state_dtype: str | torch.dtype = "fp32",
    clip_norm: float | None = None,
    skip_nonfinite: bool = False,
    accumulate: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Compact:
    """Return an optimizer with the numbers of `kind`, for 16-bit weights with masters and small states.

    With fp32 states it does, bit for bit, what `kind` does to fp32 weights. A step holds fp32 copies of
    4 million parameters at a time, or of the largest one. Methods of `kind` that are none of
    `torch.optim.Optimizer`'s, such as `train()` and `eval()`, run in the same way.

    Args:
        kind: an optimizer class that takes `(params, **options)`: of torch.optim or any other package.
        params: parameters or parameter groups; a group may have its own `master` and `state_dtype`.
        master: as of every optimizer here: "exact", "fp32", "stochastic" or None.
        state_dtype: of states with their parameter's shape: "fp32", "bf16" or "8bit". Others are left alone.
        clip_norm: clip the gradients of a bare `step()` to this total norm, over all groups; None does not.
        skip_nonfinite: True takes no step where a gradient is inf or NaN.
        accumulate: "fp32" adds up the gradients of micro-batches in fp32; None in the weights' own dtype.
        seed: keys all random rounding.
        options: those of `kind`, such as lr=1e-3.

    Raises:
        UnsupportedError: an optimizer that needs a closure, whose update of a parameter depends on others,
            or that keeps more than `state` and `param_groups` from step to step, as a trial of some steps on
            small tensors shows; and sharded parameters.

    >>> import torch
    >>> import halfstep as hs
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> optimizer = hs.optim.compact(torch.optim.NAdam, model.parameters(), lr=1e-3, state_dtype="8bit")
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model.weight])[:2]
    ['exp_avg_codes', 'exp_avg_exponents']
    """
    keeping = {"master": master, "state_dtype": state_dtype, "clip_norm": clip_norm}
    return Compact(
        kind, params, options, skip_nonfinite=skip_nonfinite, accumulate=accumulate, seed=seed, **keeping
    )


class Compact(OnePassOptimizer):
    """What `hs.optim.compact` returns; its docstring says what the arguments mean."""

    def __init__(self, kind: Kind, params: Any, options: Group, **keeping: Any) -> None:
        self.compacts, self._options = kind, options
        if not isinstance(params, Tensor):
            params = [_with_list(g) if isinstance(g, dict) else g for g in params]
        self._found = check_kind(kind, options, params)
        super().__init__(params, {**self._found.defaults, COUNT: 0}, **keeping)

    def __getstate__(self) -> Group:
        own = ("compacts", "_options", "_found")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and callable(getattr(self.__dict__.get("compacts"), name, None)):
            return partial(self._run, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """No algorithm of ours, whose states are none; UnsupportedError for sharded parameters."""
        for p in group["params"]:
            if local_of(p) is not p:
                raise UnsupportedError(
                    f"compact({self.compacts.__name__}) steps whole parameters, and one of shape "
                    f"{list(p.shape)} is sharded: take an optimizer of hs.optim, or DDP"
                )
        return _NO_STATES

    def _check_group(self, group: Group) -> None:
        arguments.check_group(group, ours=False)
        self.algorithm(group)

    # ---- the step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _apply(
        self, groups: Sequence[TensorGroup], decision: Decision, measures: bool = False
    ) -> AnyStats | None:
        stats = self._stats_of(groups, decision.inv_scale) if measures else None
        if decision.skip is not False and bool(decision.skip):
            return stats
        parts: list[list[_Part]] = [[] for _ in self.param_groups]
        for bundle in groups:
            bundle.collect()
            names, on_host = self._names(bundle.number), bundle.device.type == "cpu"
            factor = factor_of(decision, bundle.number, bundle.device, on_host)
            for place, p, weight, grad in zip(bundle.places, bundle.params, bundle.weights, bundle.grads):
                parts[bundle.number].append(_Part(p, weight, names[place], grad, factor))
        left_range = [self._run_group(number, own, "step") for number, own in enumerate(parts)]
        if any(left_range):
            raise MasterRangeError(backends.RANGE)
        return stats

    @torch.no_grad()
    def _run(self, method: str, *args: Any) -> None:
        """Run a method of the optimizer's on all parameters."""
        for number, group in enumerate(self.param_groups):
            parts = [_Part(p, p, name) for p, name in zip(group["params"], self._names(number))]
            self._run_group(number, parts, method, *args)

    def _names(self, number: int) -> Sequence[str]:
        """Return the names of a group's parameters by which random bits know them."""
        group = self.param_groups[number]
        return group.get("param_names") or [f"{number}.{place}" for place in range(len(group["params"]))]

    def _run_group(self, number: int, parts: Sequence[_Part], method: str, *args: Any) -> bool:
        """Run a method on one bucket after the other, each with the options that the group has before.

        Returns whether a weight left the range of its master.
        """
        group = self.param_groups[number]
        options = {key: value for key, value in group.items() if key not in OURS}
        run = partial(run_alone, self.compacts, self._options, options, method=method, args=args)
        done = [self._run_bucket(group, bucket, run) for bucket in _buckets_of(parts)]
        for key, value in done[0][0].items():
            old = group.get(key)
            if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
                old.copy_(value)  # somebody may hold it, as a learning rate
            else:
                group[key] = value
        group[COUNT] += 1
        return any(flag for _, flags in done for flag in map(bool, flags))

    def _run_bucket(self, group: Group, bucket: Sequence[_Part], run: Any) -> tuple[Group, list[Tensor]]:
        """Run on fp32 copies; return the group's options afterwards, and flags of weights out of range."""
        values = [self._widen(group, part) for part in bucket]
        states = [dict(_read(self.state.get(part.p, {}), part, self._found.narrow)) for part in bucket]
        options, values, states = run(values, [part.wide_grad() for part in bucket], states)
        flags = [self._write(group, *row) for row in zip(bucket, values, states)]
        return options, [flag for flag in flags if flag is not None]

    def _widen(self, group: Group, part: _Part) -> Tensor:
        """Return the fp32 value of a weight, in the memory of what is fp32 already."""
        weight, entry = part.weight.detach(), cast("Group", self.state.setdefault(part.p, {}))
        kind = arguments.kind_of(weight.dtype, group["master"])
        entries.normalize_master(entry, weight, kind, None)
        if kind in storage.EXACT:
            return split.join(weight, entry["lacking"])
        if kind not in storage.WITH_MASTER:
            return weight.to(torch.float32)
        for low, wide in split.parts(weight, entry["master"]):
            wide.copy_(storage.read_weight(kind, low, wide))  # where the weight was set by hand
        return entry["master"]

    def _write(self, group: Group, part: _Part, value: Tensor, state: Group) -> Tensor | None:
        """Keep a weight and its states; return the flag of a weight out of range where there may be one."""
        weight, entry = part.weight.detach(), cast("Group", self.state[part.p])
        masters = {key: entry[key] for key in storage.MASTER_KEYS if key in entry}
        count = group[COUNT] + 1
        entry.clear()
        entry.update(masters)
        for key in list(state):
            rounding_key = rounding.key_of(zlib.crc32(f"{self.seed}:{part.name}:{key}".encode()), count)
            entry.update(_keep(key, state.pop(key), weight, self._kind_of(key, weight, group), rounding_key))
        if not entry:
            del self.state[part.p]
        kind = arguments.kind_of(weight.dtype, group["master"])
        value = value if value.stride() == weight.stride() else _laid_out(value, weight)
        if kind in storage.EXACT:
            return split.split(value, weight, entry["lacking"])
        if kind == L.BF16_STOCHASTIC:
            key = rounding.key_of(zlib.crc32(f"{self.seed}:{part.name}".encode()), count)
            _round(storage.flat(value), weight, key, rounding.round_random)
        elif kind == L.BF16_MASTER:
            weight.copy_(split.round_away(value))
        elif value.data_ptr() != weight.data_ptr():
            weight.copy_(value)
        if kind in storage.WITH_MASTER and value is not entry["master"]:
            entry["master"].copy_(value)
        return None

    def _kind_of(self, key: str, weight: Tensor, group: Group) -> int:
        """Return the format of a state: what the group says, but fp32 for copies of weights."""
        return arguments.state_kind_of(weight, "fp32" if key in self._found.copies else group["state_dtype"])

    def bytes_of_bucket(self) -> int:
        """Return the most bytes that the fp32 copies of a bucket take, once there are states."""
        parts = [_Part(p, p, "") for p, _, _ in self._places()]
        most = max(sum(part.p.numel() for part in bucket) for bucket in _buckets_of(parts))
        entries = [(part, self.state.get(part.p, {})) for part in parts]
        widened = [sum(v is not e.get(key) for key, v in _read(e, part, ())) for part, e in entries]
        return 4 * most * (2 + max(widened, default=0))

    # ---- entries of the state -----------------------------------------------------------------------

    def _normalize_entry(self, p: Tensor, group: Group, place: Place, value: Tensor | None) -> None:
        """Make the master alone: states come with the first step."""
        arguments.check_storage(group)
        entry = cast("Group", self.state.setdefault(p, {}))
        with torch.inference_mode(False), torch.no_grad():
            entries.normalize_master(entry, p, arguments.kind_of(p.dtype, group["master"]), value)
        if not entry:
            del self.state[p]

    def _restore(
        self,
        name: str,
        saved: Mapping[str, Any],
        weight: Tensor,
        group: Group,
        present: Callable[[], Tensor] | None = None,
        dry: bool = False,
    ) -> checkpoints.Restored:
        ours = {key: value for key, value in saved.items() if key in checkpoints.OF_MASTERS}
        entry, new_weight = super()._restore(name, ours, weight, group, present, dry)
        entry.pop("step", None)
        kind, part = arguments.state_kind_of(weight, group["state_dtype"]), _Part(weight, weight, name)
        rest = {key: value for key, value in saved.items() if key not in ours}
        for key, value in rest.items():
            if key.endswith(storage.CODES) and value.shape != weight.shape:
                raise CheckpointError(
                    f"the saved {key} of {name} has shape {list(value.shape)}, the parameter "
                    f"{list(weight.shape)}"
                )
        if dry:
            return entry, new_weight
        as_kept = {key: value for key, value in rest.items() if _is_kept_so(key, value, weight, kind)}
        entry.update({key: _own(value, weight) for key, value in as_kept.items()})
        others = {key: value for key, value in rest.items() if key not in as_kept}
        for key, value in _read(others, part, self._found.narrow):
            entry.update(_keep(key, _own(value, weight), weight, self._kind_of(key, weight, group), None))
        return entry, new_weight


class _Part(NamedTuple):
    """A parameter in a step: itself, its weight as a plain tensor, its name, and its gradient."""

    p: Tensor
    weight: Tensor
    name: str
    grad: Tensor | None = None
    factor: Number = 1.0

    def wide_grad(self) -> Tensor | None:
        """Return an fp32 copy of the gradient, multiplied by its factor."""
        return None if self.grad is None else self.grad.to(torch.float32, copy=True).mul_(self.factor)


def _buckets_of(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yield parts of at most BUCKET elements together, or one larger one; an empty bucket where none are."""
    bucket, size = list[_Part](), 0
    for part in parts:
        size += part.weight.numel()
        if bucket and size > BUCKET:
            yield bucket
            bucket, size = [], part.weight.numel()
        bucket.append(part)
    yield bucket


def _read(entry: Mapping[str, Any], part: _Part, narrow: Container[str]) -> Iterator[tuple[str, Any]]:
    """Yield states as the optimizer knows them: of the parameter's shape in fp32, save `narrow` ones."""
    for stored, value in entry.items():
        key, index = storage.moment_of(stored)
        if key != stored and not stored.endswith(storage.EXPONENTS):
            exponents = entry.get(stored.removesuffix(storage.CODES) + storage.EXPONENTS)
            entries.check_moment(key, value, part.weight, part.name)
            entries.check_exponents(key, exponents, value, part.name)
            yield key, _laid_out(_decode(value, cast("Tensor", exponents), index == 0), part.weight)
        elif key == stored and key not in storage.MASTER_KEYS:
            ours = _is_moment(value, part.weight, torch.bfloat16) and key not in narrow
            yield key, value.to(torch.float32) if ours else value


def _is_moment(value: Any, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a state of this dtype has a number for each of several elements of a parameter."""
    is_one = isinstance(value, Tensor) and value.shape == weight.shape and value.dtype == dtype
    return is_one and value.numel() > 1


def _is_kept_so(key: str, value: Any, weight: Tensor, state_kind: int) -> bool:
    """Whether a saved state is in the format that states have here, whose bits then stay."""
    if state_kind == L.STATE_8BIT:
        return key.endswith((storage.CODES, storage.EXPONENTS))
    return state_kind == L.STATE_BF16 and _is_moment(value, weight, torch.bfloat16)


def _own(value: Any, weight: Tensor) -> Any:
    """Return a copy of a saved state on the weight's device; single numbers stay where they are."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.to(weight.device if value.dim() else value.device, copy=True)
    return _laid_out(value, weight) if value.shape == weight.shape else value


def _laid_out(value: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor in the order of memory that the weight has."""
    if value.stride() == weight.stride():
        return value
    return torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _keep(key: str, value: Any, weight: Tensor, state_kind: int, random_key: rounding.Int | None) -> Group:
    """Return a state as an entry keeps it: rounded at random by this key, or to nearest where it is None."""
    if state_kind == L.STATE_FP32 or not _is_moment(value, weight, torch.float32):
        return {key: value}
    values, width = storage.flat(_laid_out(value, weight)), storage.width_of(weight)
    kept = torch.empty_like(weight, dtype=storage.STORED[state_kind])
    if state_kind == L.STATE_BF16:
        _round(values, kept, random_key, rounding.round_random)
        return {key: kept}
    signed = key in storage.SIGNED or (not values.is_meta and bool(values.amin() < 0))
    fields = list[Tensor]()

    def encode(part: Tensor, random: Tensor) -> Tensor:
        exponents = rounding.exponents_for(rounding.peaks(part, width))
        fields.append(exponents.to(torch.uint8))
        return rounding.encode(part, exponents, random, signed, width)

    _round(values, kept, random_key, encode, width)
    name = storage.name_of_codes(key, signed)
    return {name + storage.CODES: kept, name + storage.EXPONENTS: torch.cat(fields)}


def _round(
    values: Tensor,
    target: Tensor,
    key: rounding.Int | None,
    function: Callable[[Tensor, Tensor], Tensor],
    width: int | None = None,
) -> None:
    """Write what `function` makes of flat values and random bits, a bounded number of rows at a time."""
    out = storage.flat(target)
    for some in _parts_of(values, width or 1):
        part = values[some]
        if key is None:
            random = torch.full_like(part, rounding.HALF, dtype=torch.int64)
        else:
            random = rounding.random_bits(len(part), key, part.device, -some.start, width)
        out[some] = function(part, random)


def _decode(codes: Tensor, exponents: Tensor, signed: bool) -> Tensor:
    """Return a state in fp32 by its codes, a bounded number of rows at a time."""
    wide, width = torch.empty_like(codes, dtype=torch.float32), storage.width_of(codes)
    source, out = storage.flat(codes), storage.flat(wide)
    for some in _parts_of(source, width):
        fields = exponents[some.start // width : some.stop // width]
        out[some] = rounding.decode(source[some], fields, signed, width)
    return wide


def _parts_of(values: Tensor, width: int) -> Iterator[slice]:
    """Yield slices of flat values, whole rows of this width."""
    most = storage.JOINED_ON_CPU if values.is_cpu else storage.JOINED >> 4
    most = max(1, most // width) * width
    yield from (slice(at, min(at + most, len(values))) for at in range(0, len(values), most))


def _with_list(group: Group) -> Group:
    params = group["params"]
    return {**group, "params": params if isinstance(params, Tensor) else list(params)}
