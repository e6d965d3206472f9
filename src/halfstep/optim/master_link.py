"""What ties an optimizer's masters to the model's weights: pairs, hooks, widening and writing back.

At rest each weight is its master, rounded. Where it is not, one of the two was set by hand, and `Link.sync`
makes them agree. A link keeps no optimizer alive, so that an optimizer's hooks may own it without a cycle.
"""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.devices import capturing
from halfstep.distributed import local_of
from halfstep.errors import CheckpointError, ConfigError, UnsupportedError
from halfstep.kernels.cpu.run import GRADS, WorkItems, kernels, run_ranges
from halfstep.kernels.cuda import launch as gpus_
from halfstep.names import fqn, named_parameters
from halfstep.optim import checkpoints
from halfstep.optim.backends import triton as cuda
from halfstep.optim.loading import HooksOfHolder, MasterHolder
from halfstep.policy.levels import LOW_DTYPES as LOW
from halfstep.torch_private import foreach_add_, foreach_copy_, foreach_norm
from halfstep.trees import accumulate_in_fp32, map_floats, parameters_of

T = TypeVar("T", bound=Tensor)
OWNERS = WeakTensorKeyDictionary()
"""Which record a 16-bit weight belongs to: weight -> weak reference to its `Link`."""


# torch drops an optimizer's hooks when it is copied, so the copy would silently never update the model.
_NO_COPY = (
    "an optimizer with MasterWeights cannot be copied or pickled: build a new one and load its state_dict(), "
    "which holds the masters"
)


class Master(nn.Parameter):
    """An fp32 parameter whose gradient is that of its 16-bit weight, widened when first read.

    Changes through `.data` are counted as all others are: that is how its weight knows of them.
    """

    _source: Tensor
    _owner: "weakref.ref[Link]"
    _name: str | None
    _seen: tuple[int, torch.dtype]
    """When it and its weight last agreed: the changes of it that torch had counted, the weight's dtype."""

    def mark_synced(self) -> None:
        """Note that it and its weight are in sync."""
        self._seen = self._version, self._source.dtype

    def write(self) -> None:
        """Round it into its weight: nearest, ties to even, as torch casts."""
        self._source.copy_(self)
        self.mark_synced()

    @property
    def data(self) -> Tensor:
        """Return the values, without gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        cast(Any, Tensor.data).__set__(self, value)
        increment_version(self)

    @property
    def grad(self) -> Tensor | None:
        """Return the gradient shared with the weight, in fp32."""
        grad = self._source.grad
        if grad is not None and grad.dtype in LOW and (owner := self._owner()) is not None:
            return owner.widen_gradient(self._source)
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._source.grad = value

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._source.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Master":
        raise UnsupportedError(_NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(_NO_COPY)


def weight_of(parameter: Tensor) -> Tensor:
    """Return the model's weight behind a master; any other parameter as it is."""
    return cast(Master, parameter)._source if issubclass(type(parameter), Master) else parameter


class ModelHooks(HooksOfHolder):
    """Module hooks: before a model runs or is saved, its weights are what was set through the groups."""

    def __call__(self, module: nn.Module, *about: Any) -> None:
        """Round what was set through the optimizer's groups into the weights."""
        if (link := self.holder()) is not None and not torch.compiler.is_compiling():
            link.push()


def _is_free(weight: Tensor) -> bool:
    owner = OWNERS.get(weight)
    return owner is None or owner() is None


def _addresses(master: Master) -> tuple[int, int] | None:
    """Return where its weight and it begin, if a kernel can walk them side by side."""
    w = master._source
    plain = w.is_contiguous() and master.is_contiguous()
    dense = plain or (w.stride() == master.stride() and w.is_contiguous(memory_format=torch.channels_last))
    beginnings = w.data_ptr(), master.data_ptr()
    return beginnings if w.dtype in LOW and dense and all(beginnings) else None


def _refresh_by_kernel(masters: Sequence[Master]) -> list[Master]:
    """Give masters on a GPU the values of changed weights, reading nothing back; return the others."""
    rows: dict[tuple[torch.device, torch.dtype, bool], list[tuple[int, int, int]]] = {}
    rest: list[Master] = []
    for m in masters:
        w = m._source
        runs = w.is_cuda and w.device == m.device and w.dtype == m._seen[1] and not gpus_.why_not(w.device)
        beginnings = _addresses(m) if runs and not capturing(w.device) else None
        if beginnings is None:
            rest.append(m)
            continue
        aligned = all(at % cuda.WIDE == 0 for at in beginnings)
        rows.setdefault((w.device, w.dtype, aligned), []).append((w.numel(), *beginnings))
    for (device, dtype, aligned), mine in rows.items():
        items = WorkItems(tuple(size for size, _, _ in mine)).items
        table = cuda.upload([at for _, of_weight, of_master in mine for at in (of_master, of_weight)], device)
        gpus_.launch(
            gpus_.kernels().refresh, device, len(items), table, cuda.upload(items.ravel(), device),
            KIND=GRADS[dtype], ALIGNED=aligned, TILE=cuda.TILE,
        )  # fmt: skip
    return rest


def _differing(masters: Sequence[Master]) -> list[Master]:
    """Return all masters whose weights are not their rounding, by value, and some whose weights are."""
    has_kernels = kernels(needed=False) is not None
    changed_masters: list[Master] = []
    rest: list[Master] = []
    rows: dict[torch.dtype, list[tuple[Master, int, int, int]]] = {}
    for m in masters:
        w = m._source
        beginnings = _addresses(m) if has_kernels and w.is_cpu and m.is_cpu else None
        if beginnings is not None:
            rows.setdefault(w.dtype, []).append((m, w.numel(), *beginnings))
        else:
            rest.append(m)
    for dtype, dtype_rows in rows.items():
        of_kind, sizes, *addresses = zip(*dtype_rows)
        work, table = WorkItems(sizes), np.array(addresses, np.int64).T.copy()
        flags = np.empty(len(work.sizes), np.bool_)
        run_ranges(kernels(needed=False).comparer(GRADS[dtype]), work.sizes, work.items, table, flags)
        changed_masters += [of_kind[i] for i in set(work.items[flags, 0].tolist())]
    return changed_masters + rest if rest and _differ(rest) else changed_masters


def _differ(masters: Sequence[Master]) -> bool:
    """Whether any of the weights is not its master, rounded: one value is read from an accelerator."""
    weights = [m._source for m in masters]
    if capturing(weights[0].device):
        return False
    sums = list[Tensor]()
    for some in split_bounded(masters):
        distances = [torch.empty_like(m._source) for m in some]
        foreach_copy_(distances, some)
        foreach_add_(distances, [m._source for m in some], alpha=-1)
        sums += (d.to(weights[0].device) for d in foreach_norm(distances, 1))
    return bool(torch.stack(sums).any())


def split_bounded(tensors: Iterable[T]) -> Iterator[list[T]]:
    """Yield the tensors in lists of so many elements as one call widens, or of one larger tensor."""
    some: list[T] = []
    size = 0
    for t in tensors:
        if some and size + t.numel() > _AT_ONCE:
            yield some
            some, size = [], 0
        some.append(t)
        size += t.numel()
    if some:
        yield some


class Link(MasterHolder):
    """The pairs of one optimizer, in its order, and the hooks that keep them together."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: Sequence[nn.Module],
        names: Mapping[Tensor, str],
        initial: Mapping[Tensor, Tensor],
        wide: bool = False,
    ) -> None:
        self.wide = wide
        """Whether backward makes fp32 gradients, so that micro-batches add up in fp32."""
        self.pairs: dict[Tensor, Master] = {}
        """Weights with their masters."""
        self._optimizer = weakref.ref(optimizer)
        self._models = [weakref.ref(model) for model in models]
        self._given = names
        self._together: list[dict[str, Any]] = []
        """Groups whose option `foreach` is set for the step that is under way."""
        self._parts: _Parts | None = None
        """Where a step takes its gradients a part at a time."""
        self.adopt(initial)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer. It outlives this link, which its hooks own."""
        return cast(torch.optim.Optimizer, self._optimizer())

    def adopt(self, initial: Mapping[Tensor, Tensor] | None = None) -> None:
        """Give each 16-bit parameter in the groups that has no master one, in its place, with its state.

        A frozen one gets it where `initial` has its value, and else when it is to train.
        """
        initial = {} if initial is None else initial
        newcomers = list(self._newcomers(initial))
        if not newcomers:
            return
        names, state = self._names_by_weight(), self.optimizer.state
        for _, _, weight in newcomers:
            self._check(weight, names)
        for params, index, weight in newcomers:
            initial_value = initial.get(weight)
            value = (
                weight.float() if initial_value is None else initial_value.to(weight.device, torch.float32)
            )
            master = Master(value.detach(), requires_grad=weight.requires_grad)
            master._source, master._owner, master._name = weight, weakref.ref(self), names.get(weight)
            master.mark_synced()
            # It carries an fp32 gradient from now on; torch makes 16-bit ones in backward, unless told.
            if self.wide:
                accumulate_in_fp32(weight)
            else:
                weight.grad_dtype = None
            params[index] = master
            if weight in state:
                state[master] = map_floats(lambda t: t.float() if t.dtype in LOW else t, state.pop(weight))
            OWNERS[weight] = weakref.ref(self)
            self.pairs[weight] = master

    def _newcomers(self, initial: Mapping[Tensor, Tensor]) -> Iterator[tuple[list[Tensor], int, Tensor]]:
        for group in self.optimizer.param_groups:
            for index, p in enumerate(group["params"]):
                dtype = p.dtype
                if dtype is torch.float32 or dtype is torch.float64 or dtype.is_complex:
                    continue
                if p.requires_grad or (p in initial and _is_free(p)):
                    yield group["params"], index, p

    def _names_by_weight(self) -> dict[Tensor, str]:
        names = dict(self._given)
        models = [model for ref in self._models if (model := ref()) is not None]
        for index, model in enumerate(models):
            prefix = f"{index}." if len(models) > 1 else ""
            names.update({p: prefix + name for name, p in named_parameters(model).items()})
        return names

    def _check(self, weight: Tensor, names: Mapping[Tensor, str]) -> None:
        what = (
            f"parameter {names[weight]!r}"
            if weight in names
            else f"a parameter of shape {list(weight.shape)}"
        )
        if weight.dtype not in LOW:
            raise UnsupportedError(
                f"{what} is {weight.dtype}; masters are kept for float16 and bfloat16 weights"
            )
        if local_of(weight) is not weight:
            raise UnsupportedError(
                f"{what} is a 16-bit shard, for which no master can be kept beside it. Shard the fp32 model: "
                "at O2 its shards are the masters, and MixedPrecisionPolicy(param_dtype=...) gathers them in "
                "16 bits; or train 16-bit shards by an optimizer of hs.optim"
            )
        if weight.is_meta or isinstance(weight, nn.UninitializedParameter):
            raise UnsupportedError(f"{what} has no values yet (meta or lazy); materialise the model first")
        if self._models and not self.pairs and weight not in names:
            raise ConfigError(f"{what} in the optimizer is not a parameter of the model that was given")
        if not _is_free(weight):
            raise ConfigError(f"{what} already has a master in another optimizer; revert() that one first")

    def names(self) -> list[str]:
        """Return a name for each master: fully qualified, of `param_names`, or `group.position`."""
        place_names: dict[int, str] = {}
        for g, group in enumerate(self.optimizer.param_groups):
            group_names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                place_names[id(p)] = fqn(group_names[i]) if group_names else f"{g}.{i}"
        return [m._name or place_names[id(m)] for m in self.pairs.values()]

    @torch.no_grad()
    def widen(self) -> None:
        """Make every 16-bit gradient fp32, where the weight holds it, so that both sides see one tensor."""
        low = (w for w in self.pairs if w.grad is not None and w.grad.dtype in LOW)
        for some in split_bounded(low):  # these gradients alone are there twice, in 16 bits and in fp32
            _widen(some)

    def widen_gradient(self, weight: Tensor) -> Tensor:
        """Return the fp32 gradient of a weight that has a 16-bit one."""
        if self._parts is not None:
            return self._parts.gradient(weight)
        self.widen()
        return cast(Tensor, weight.grad)

    def is_large(self) -> bool:
        """Whether all gradients of masters are dense and in 16 bits, and more than one call widens."""
        total = 0
        for w in self.pairs:
            if (g := w.grad) is not None:
                if g.dtype not in LOW or g.is_sparse:
                    return False
                total += g.numel()
        return total > _AT_ONCE

    @contextmanager
    def in_parts(self, change: Callable[[list[Tensor]], None]) -> Generator[None]:
        """Within, a step of one of torch's optimizers reads fp32 copies of the gradients, as `change` leaves
        them, a bounded number at a time; the gradients stay as they are.

        torch's optimizers go from group to group, so the step finds groups of so many parameters.
        """
        groups, self._parts = self.optimizer.param_groups, _Parts(change)
        try:
            yield
        finally:
            self.optimizer.param_groups, self._parts = groups, None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the weights: nearest, ties to even, as torch casts."""
        if self.pairs:
            foreach_copy_(list(self.pairs), list(self.pairs.values()))
        for master in self.pairs.values():
            master.mark_synced()

    def sync(self, only: AnySet[Tensor] | None = None) -> None:
        """Make weights and masters agree, whichever of a pair was set by hand since they last did."""
        self.adopt()
        self.push()
        self.pull(only)

    @torch.no_grad()
    def push(self) -> None:
        """Round those masters into their weights that were changed through the optimizer's groups."""
        for master in self.pairs.values():
            if master._version != master._seen[0]:
                master.write()

    @torch.no_grad()
    def pull(self, only: AnySet[Tensor] | None = None) -> None:
        """Give masters the values of weights that are not their rounding; the other elements keep theirs."""
        masters = [m for w, m in self.pairs.items() if only is None or w in only]
        moved = False
        for m in masters:
            w = m._source
            moved = moved or m.device != w.device
            if w.shape != m.shape:
                raise UnsupportedError(
                    f"a parameter has shape {list(w.shape)}, its master {list(m.shape)}: it was "
                    "given another size after prepare(); call revert(), change the model and prepare again, "
                    "or train by an optimizer of hs.optim, which follows"
                )
        if moved:
            self._move()
        for m in _differing(_refresh_by_kernel(masters)):
            w, stored = m._source, m._seen[1]
            low = m.to(stored).to(w.dtype)  # of a weight that was only made wider, every element is this
            m.copy_(torch.where(low == w, m, w.to(torch.float32)))
            if w.dtype != stored:
                w.copy_(m)
        for m in masters:
            m.mark_synced()

    def _move(self) -> None:
        """Bring masters and their states to the weights' device, to which the model was moved."""
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            counts_there = bool(group.get("fused") or group.get("capturable"))
            for m in (p for p in group["params"] if isinstance(p, Master) and p.device != p._source.device):
                device = m._source.device
                cast(Any, Tensor.data).__set__(m, m.detach().to(device))  # its values are the same
                for key, value in state.get(m, {}).items():
                    if isinstance(value, Tensor) and (value.dim() or counts_there):
                        state[m][key] = value.to(device)

    def masters(self, only: AnySet[Tensor] | None = None) -> dict[Tensor, Tensor]:
        """Return the masters by weight, of `only` some: the very tensors, detached."""
        self.sync(only)
        return {w: m.detach() for w, m in self.pairs.items() if only is None or w in only}

    @torch.no_grad()
    def seed_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set masters to `values` by weight, and round these into the weights."""
        for w, value in values.items():
            if (master := self.pairs.get(w)) is not None:
                master.copy_(value)
                master.write()

    def match_saved(self, state: Mapping[str, Tensor]) -> dict[Tensor, Tensor]:
        """Return the saved masters by weight; CheckpointError where names or shapes do not fit.

        A frozen weight that was saved without one keeps its own.
        """
        if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
            raise CheckpointError(f"saved masters are tensors by name, got {state!r:.60}")
        weights = dict(zip(self.names(), self.pairs))
        names = [name for name, w in weights.items() if w.requires_grad or name in state]
        if set(names) != set(state):
            names = list(weights) if len(weights) == len(state) else names
            by_place = all(map(_is_place, names)) or all(map(_is_place, state))
            if not (by_place and len(names) == len(state)):
                missing, extra = sorted(set(names) - set(state))[:5], sorted(set(state) - set(names))[:5]
                raise CheckpointError(
                    f"the saved masters are of other parameters: missing {missing}, unexpected {extra}"
                )
            state = dict(zip(names, state.values()))
        for name, value in state.items():
            if value.shape != weights[name].shape:
                raise CheckpointError(
                    f"the saved master of {name!r} has shape {list(value.shape)}, the parameter has "
                    f"{list(weights[name].shape)}"
                )
        return {weights[name]: value for name, value in state.items()}

    @torch.no_grad()
    def release(self) -> None:
        """Give groups, state and gradients back to the weights."""
        self.push()
        self.pull()
        self.write_back()
        optimizer, mine = self.optimizer, {m: w for w, m in self.pairs.items()}
        for group in optimizer.param_groups:
            group["params"][:] = [mine.get(p, p) for p in group["params"]]
        for master, weight in mine.items():
            if master in optimizer.state:
                optimizer.state[weight] = narrow_state(optimizer.state.pop(master), weight.dtype)
            weight.grad_dtype = None
            # grad_dtype stays None (any): torch cannot give the default back, and a fixed one would outlast
            # a cast.
            weight.grad = None if weight.grad is None else weight.grad.to(weight.dtype)
            OWNERS.pop(weight, None)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Sync masters before a step (a pre-hook)."""
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "an optimizer with MasterWeights cannot be compiled; compile the model only"
            )
        self.sync()
        if self._parts is None:
            self.widen()
        else:
            optimizer.param_groups = self._parts.split(optimizer.param_groups)
        for group in optimizer.param_groups:  # torch chooses so for parameters of no class of their own
            is_default = group.get("foreach", False) is None and not group.get("fused")
            if is_default and all(p.is_cuda for p in group["params"]):
                group["foreach"] = True
                self._together.append(group)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Write masters back after a step (a post-hook); if a step breaks off, `push` does so."""
        while self._together:
            self._together.pop()["foreach"] = None
        self.write_back()

    def on_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Add the masters by name."""
        self.sync()
        masters = list(self.pairs.values())
        named = dict(zip(self.names(), (m.detach() for m in masters)))  # the tensors, as torch's states
        positions = {id(p): place for place, p in enumerate(parameters_of(optimizer))}
        places = [positions[id(master)] for master in masters if id(master) in positions]
        return {**state, checkpoints.MASTERS: named, checkpoints.PLACES: places}

    def read_saved_pairs(self, saved: Any) -> list[tuple[Tensor, Tensor]]:
        """Return masters with their saved values; CheckpointError where names or shapes do not fit."""
        names, saved_masters = self._names_by_weight(), saved if isinstance(saved, Mapping) else {}
        frozen = (p for p in parameters_of(self.optimizer) if p.dtype in LOW and not p.requires_grad)
        self.adopt({p: p.detach() for p in frozen if names.get(p) in saved_masters})
        return (
            [] if saved is None else [(self.pairs[w], value) for w, value in self.match_saved(saved).items()]
        )


_AT_ONCE = 1 << 24
"""Elements of gradients that one call widens: 64 MiB, or one tensor."""


def _widen(weights: Sequence[Tensor]) -> None:
    grads = [cast(Tensor, w.grad) for w in weights]
    rest = iter(_wide([g for g in grads if not g.is_sparse]))
    for w, grad in zip(weights, grads):
        w.grad = grad.to(torch.float32) if grad.is_sparse else next(rest)


def _wide(grads: Sequence[Tensor]) -> list[Tensor]:
    if all(g.is_cpu for g in grads):
        return [g.to(torch.float32) for g in grads]
    wide = [torch.empty_like(g, dtype=torch.float32) for g in grads]
    foreach_copy_(wide, grads)  # in few launches
    return wide


class _Parts:
    """The gradients of one step, of which a bounded part is there in fp32."""

    def __init__(self, change: Callable[[list[Tensor]], None]) -> None:
        self._change = change
        self._beside: dict[Tensor, list[Tensor]] = {}
        """Weights in the group of each."""
        self._wide: dict[Tensor, Tensor] = {}

    def split(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Yield the groups in parts."""
        parts = [{**group, "params": some} for group in groups for some in split_bounded(group["params"])]
        for part in parts:
            weights = [
                m._source for m in part["params"] if isinstance(m, Master) and m._source.grad is not None
            ]
            self._beside |= dict.fromkeys(weights, weights)
        return parts

    @torch.no_grad()
    def gradient(self, weight: Tensor) -> Tensor:
        """That of a weight, and of those beside it; the ones before are dropped first."""
        if weight not in self._wide:
            self._wide.clear()
            weights = self._beside[weight]
            wide = _wide([cast(Tensor, w.grad) for w in weights])
            self._change(wide)
            self._wide = dict(zip(weights, wide))
        return self._wide[weight]


def _is_place(name: str) -> bool:
    return all(part.isdigit() for part in name.split("."))


def narrow_state(state: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    """Return optimizer state with its floating tensors in `dtype`, as torch keeps them; `step` stays."""
    return {k: v if k == "step" else map_floats(lambda t: t.to(dtype), v) for k, v in state.items()}
