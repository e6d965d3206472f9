"""What ties an optimizer's masters to the model's weights: pairs, hooks, widening and writing back.

At rest each weight is its master, rounded. Where it is not, one of the two was set by hand, and `Link.sync`
makes them agree. A link never refers to the optimizer, so that its hooks may own it without a cycle.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils import _foreach_utils
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.distributed import local_of
from halfstep.errors import CheckpointError, ConfigError, UnsupportedError
from halfstep.gradients.cpu import GRADS, WorkItems, kernels_if_any
from halfstep.gradients.stats import HostStats
from halfstep.gradients.widen import foreach_copy_, widen
from halfstep.kernels.pool import run_ranges
from halfstep.names import fqn, named_parameters
from halfstep.optim import saved_masters
from halfstep.policy.levels import LOW_DTYPES as LOW

foreach_sub_ = cast(Callable[[Sequence[Tensor], Sequence[Tensor]], None], vars(torch)["_foreach_sub_"])
foreach_norm = cast(Callable[[Sequence[Tensor], float], list[Tensor]], vars(torch)["_foreach_norm"])
foreach_mul_ = cast(Callable[[Sequence[Tensor], float | Tensor], None], vars(torch)["_foreach_mul_"])
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

    @property
    def data(self) -> Tensor:
        """The values, without gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        cast(Any, Tensor.data).__set__(self, value)
        increment_version(self)

    @property
    def grad(self) -> Tensor | None:
        """The gradient shared with the weight, in fp32."""
        grad = self._source.grad
        if grad is not None and grad.dtype in LOW:
            owner = self._owner()
            if owner is None:
                self._source.grad = grad.float()
            else:
                owner.widen()
            grad = self._source.grad
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
    """The model's weight behind a master; any other parameter as it is."""
    return cast(Master, parameter)._source if issubclass(type(parameter), Master) else parameter


def _choose_foreach_for(kind: type) -> None:
    # torch picks its foreach kernels by the exact type of a parameter; DTensor enters itself the same way.
    for module in (sys.modules["torch.optim.optimizer"], _foreach_utils):
        kinds = getattr(module, "_foreach_supported_types", None)
        if isinstance(kinds, list) and kind not in kinds:
            cast(list[type], kinds).append(kind)


_choose_foreach_for(Master)


def _master_of(weight: Tensor, value: Tensor, owner: "Link | None") -> Master:
    master = Master(value, requires_grad=weight.requires_grad)
    master._source = weight
    master._owner = weakref.ref(owner) if owner is not None else cast(Any, lambda: None)
    # The weight may carry an fp32 gradient from now on; torch makes 16-bit ones in backward, unless told to.
    weight.grad_dtype = torch.float32 if owner is not None and owner.wide else None
    return master


class ModelHooks:
    """Module hooks: an fp32 checkpoint loaded into 16-bit weights reaches the masters unrounded.

    Every module has them, since a part of a model can be loaded or saved alone. A copied or pickled model
    keeps empty ones, so that masters are never copied along with a model.
    """

    def __init__(self, link: "Link | None" = None) -> None:
        self._link: Callable[[], Link | None] = (lambda: None) if link is None else weakref.ref(link)

    def __call__(self, module: nn.Module, state: dict[str, Tensor], prefix: str, *about: Any) -> None:
        """Hand the checkpoint's values to the masters of this module's own parameters."""
        if (link := self._link()) is not None:
            link.push()
            own = {id(p): state.get(prefix + name) for name, p in module._parameters.items()}
            given = {key: value for key, value in own.items() if isinstance(value, Tensor)}
            taken = link.take(given) if given else {}
            if not (about and about[0].get("assign_to_params_buffers")):
                names = {id(p): name for name, p in module._parameters.items()}
                state.update({prefix + names[key]: value for key, value in taken.items()})

    def loaded(self, module: nn.Module, keys: Any) -> None:
        """After a load: masters of this module's own parameters take the 16-bit values that came in."""
        if (link := self._link()) is not None and module._parameters:
            link.pull({id(p) for p in module._parameters.values()})

    def push(self, module: nn.Module, *about: Any) -> None:
        """Before the model runs or is saved: its weights are what was set through the optimizer's groups."""
        if (link := self._link()) is not None and not torch.compiler.is_compiling():
            link.push()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelHooks":
        return ModelHooks()

    def __reduce__(self) -> tuple[type["ModelHooks"], tuple[()]]:
        return ModelHooks, ()


def _other_size(weight: Tensor, master: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"a parameter has shape {list(weight.shape)}, its master {list(master.shape)}: it was given another "
        "size after prepare(); call revert(), change the model and prepare again, or train by an optimizer "
        "of hs.optim, which follows"
    )


def _set_twice(name: str | None, weight: Tensor) -> ConfigError:
    what = "a parameter of shape " + str(list(weight.shape)) if name is None else f"parameter {name!r}"
    return ConfigError(
        f"{what} was changed by hand both in the model and through optimizer.param_groups since its last "
        "step, and which change came last cannot be known: change it on one side only. "
        "MasterWeights.refresh() now keeps the model's values, MasterWeights.write_back() the optimizer's"
    )


def _counted(weight: Tensor, master: Tensor) -> tuple[int, int, torch.dtype]:
    return weight._version, master._version, weight.dtype


def _is_free(weight: Tensor) -> bool:
    owner = OWNERS.get(weight)
    return owner is None or owner() is None


def _differing(weights: Sequence[Tensor], masters: Sequence[Tensor]) -> list[int]:
    """Places of all weights whose values are not their masters, rounded, and of some whose values are."""
    has_kernels, found, away = kernels_if_any() is not None, list[int](), list[int]()
    rows: dict[torch.dtype, list[tuple[int, int, int, int]]] = {}
    for i, (w, m) in enumerate(zip(weights, masters)):
        if not w.is_cpu:
            away.append(i)
        elif has_kernels and _lie_alike(w, m):
            rows.setdefault(w.dtype, []).append((i, w.numel(), w.data_ptr(), m.data_ptr()))
        elif not torch.equal(w, m.to(w.dtype)):
            found.append(i)
    for dtype, own in rows.items():
        places, sizes, *addresses = zip(*own)
        work, table = WorkItems(sizes), np.array(addresses, np.int64).T.copy()
        flags = np.empty(len(work.sizes), np.bool_)
        run_ranges(kernels_if_any().comparer(GRADS[dtype]), work.sizes, work.items, table, flags)
        found += [places[i] for i in set(work.items[flags, 0].tolist())]
    return found + (
        away if away and _differ_away([weights[i] for i in away], [masters[i] for i in away]) else []
    )


def _lie_alike(w: Tensor, m: Tensor) -> bool:
    """Whether the elements of both lie in this process's memory, without gaps and in the same order."""
    kinds = w.dtype in LOW and m.dtype == torch.float32 and m.is_cpu
    dense = w.is_contiguous() or w.is_contiguous(memory_format=torch.channels_last)
    return kinds and dense and w.stride() == m.stride() and bool(w.data_ptr() and m.data_ptr())


def _differ_away(weights: Sequence[Tensor], masters: Sequence[Tensor]) -> bool:
    """Whether any of the weights on an accelerator is not its master, rounded: one value is read."""
    if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    distances = list(map(torch.empty_like, weights))
    foreach_copy_(distances, masters)
    foreach_sub_(distances, weights)
    largest = [d.to(distances[0].device) for d in foreach_norm(distances, torch.inf)]
    return bool(torch.stack(largest).any())


class Link:
    """The pairs of one optimizer, in its order, and the hooks that keep them together."""

    def __init__(self, models: Sequence[nn.Module], names: Mapping[Tensor, str], wide: bool = False) -> None:
        self.wide = wide
        """Whether backward makes fp32 gradients, so that micro-batches add up in fp32."""
        self.weights: list[Tensor] = []
        self.masters: list[Master] = []
        self._named: list[str | None] = []
        self._seen: list[tuple[int, int, torch.dtype]] = []
        """When a pair last agreed: the changes that torch had counted of both, and the weight's dtype."""
        self._models = [weakref.ref(model) for model in models]
        self._given = names
        self._pending: list[Tensor | None] | None = None
        self._stepping = False
        self.finish: Callable[[], None] | None = None
        """Called once, before the next widening: for who left scaled 16-bit gradients with the weights."""

    def adopt(self, optimizer: torch.optim.Optimizer, initial: Mapping[Tensor, Tensor]) -> None:
        """Give each 16-bit parameter in the groups that has no master one, in its place, with its state.

        A frozen one gets it where `initial` has its value, and else when it is to train.
        """
        found = list(self._newcomers(optimizer, initial))
        if not found:
            return
        names = self._known()
        for _, _, weight in found:
            self._check(weight, names)
        for params, index, weight in found:
            given = initial.get(weight)
            value = weight.float() if given is None else given.to(weight.device, torch.float32)
            master = _master_of(weight, value.detach(), self)
            params[index] = master
            if weight in optimizer.state:
                optimizer.state[master] = widen_state(optimizer.state.pop(weight))
            OWNERS[weight] = weakref.ref(self)
            self.weights.append(weight)
            self.masters.append(master)
            self._named.append(names.get(weight))
            self._seen.append(_counted(weight, master))

    def _newcomers(
        self, optimizer: torch.optim.Optimizer, initial: Mapping[Tensor, Tensor]
    ) -> Iterator[tuple[list[Tensor], int, Tensor]]:
        for group in optimizer.param_groups:
            for index, p in enumerate(group["params"]):
                dtype = p.dtype
                if dtype is torch.float32 or dtype is torch.float64 or dtype.is_complex:
                    continue
                if p.requires_grad or (p in initial and _is_free(p)):
                    yield group["params"], index, p

    def _known(self) -> dict[Tensor, str]:
        known = dict(self._given)
        models = [model for ref in self._models if (model := ref()) is not None]
        for index, model in enumerate(models):
            prefix = f"{index}." if len(models) > 1 else ""
            known.update({p: prefix + name for name, p in named_parameters(model).items()})
        return known

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
        if self._models and not self.masters and weight not in names:
            raise ConfigError(f"{what} in the optimizer is not a parameter of the model that was given")
        if not _is_free(weight):
            raise ConfigError(f"{what} already has a master in another optimizer; revert() that one first")

    def names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """A name for each master: fully qualified, the group's own `param_names`, or `group.position`."""
        here: dict[int, str] = {}
        for g, group in enumerate(optimizer.param_groups):
            own = group.get("param_names")
            for i, p in enumerate(group["params"]):
                here[id(p)] = fqn(own[i]) if own else f"{g}.{i}"
        return [name or here[id(m)] for name, m in zip(self._named, self.masters)]

    @torch.no_grad()
    def widen(self) -> tuple[list[Tensor], HostStats | None]:
        """Make every 16-bit gradient fp32, where the weight holds it, so that both sides see one tensor.

        Returns those that were widened now, and what they hold where widening measured them.
        """
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        low = [w for w in self.weights if w.grad is not None and w.grad.dtype in LOW]
        dense = [w for w in low if not cast(Tensor, w.grad).is_sparse]
        wide, measured = widen([cast(Tensor, w.grad) for w in dense]) if dense else ([], None)
        for w, g in zip(dense, wide):
            w.grad = g
        for w in low:
            grad = cast(Tensor, w.grad)
            if grad.is_sparse:
                w.grad = grad.to(torch.float32)
        return wide, measured

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the weights: nearest, ties to even, as torch casts."""
        if self.weights:
            foreach_copy_(self.weights, self.masters)
        self._seen = [_counted(w, m) for w, m in zip(self.weights, self.masters)]

    def sync(self) -> None:
        """Make weights and masters agree, whichever of a pair was set by hand since they last did."""
        self.push()
        self.pull()

    @torch.no_grad()
    def push(self) -> None:
        """Round those masters into their weights that were changed through the optimizer's groups.

        ConfigError where both sides of a pair were changed, since the later change cannot be known.
        """
        for i, (w, m) in enumerate(zip(self.weights, self.masters)):
            of_weight, of_master, _ = self._seen[i]
            if m._version != of_master:
                if w._version != of_weight and _differing([w], [m]):
                    raise _set_twice(self._named[i], w)
                w.copy_(m)
                self._seen[i] = _counted(w, m)

    @torch.no_grad()
    def pull(self, only: Collection[int] | None = None) -> None:
        """Give masters the values of weights that are not their rounding; the other elements keep theirs.

        `only`: the ids of the weights to compare; None compares all.
        """
        places = [i for i, w in enumerate(self.weights) if only is None or id(w) in only]
        weights, masters = [self.weights[i] for i in places], [self.masters[i] for i in places]
        for w, m in zip(weights, masters):
            if w.shape != m.shape:
                raise _other_size(w, m)
        for i in _differing(weights, masters):
            w, m, stored = weights[i], masters[i], self._seen[places[i]][2]
            low = m.to(stored).to(w.dtype)  # of a weight that was only made wider, every element is this
            m.copy_(torch.where(low == w, m, w.to(torch.float32)))
            if w.dtype != stored:
                w.copy_(m)
        for i, w, m in zip(places, weights, masters):
            self._seen[i] = _counted(w, m)

    @torch.no_grad()
    def take(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Set masters from values by the id of their weight; returns what to load in the place of some."""
        instead: dict[int, Tensor] = {}
        for i, (w, m) in enumerate(zip(self.weights, self.masters)):
            value = values.get(id(w))
            # 16-bit values say nothing new where they are the rounded master; `sync` takes the others.
            if value is not None and value.shape == m.shape and value.dtype not in LOW:
                m.copy_(value)
            elif value is not None and saved_masters.is_of_other_bits(value, w):
                instead[id(w)] = m.copy_(saved_masters.widened(value.to(m.device), m)).detach()
            self._seen[i] = self._seen[i][0], m._version, self._seen[i][2]
        return instead

    def matched(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> list[Tensor | None]:
        """The saved masters in our order, by `matched`."""
        return matched(self.names(optimizer), self.weights, state)

    @torch.no_grad()
    def load(self, values: Sequence[Tensor | None]) -> None:
        """Set the masters that have a value, in our order, and round all into the weights."""
        if any(value is None for value in values):
            self.sync()
        for master, value in zip(self.masters, values):
            if value is not None:
                master.copy_(value)
        self.write_back()

    @torch.no_grad()
    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Give groups, state and gradients back to the weights."""
        self.sync()
        self.write_back()
        mine = {id(m): w for w, m in zip(self.weights, self.masters)}
        for group in optimizer.param_groups:
            group["params"][:] = [mine.get(id(p), p) for p in group["params"]]
        for weight, master in zip(self.weights, self.masters):
            if master in optimizer.state:
                optimizer.state[weight] = narrow_state(optimizer.state.pop(master), weight.dtype)
            weight.grad_dtype = None
            # grad_dtype stays None (any): torch cannot give the default back, and a fixed one would outlast
            # a cast.
            weight.grad = None if weight.grad is None else weight.grad.to(weight.dtype)
            OWNERS.pop(weight, None)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step pre-hook."""
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "an optimizer with MasterWeights cannot be compiled; compile the model only"
            )
        self.adopt(optimizer, {})
        self.sync()
        self.widen()
        self._stepping = True

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook."""
        self.end_step()

    def end_step(self) -> None:
        """Round what a step has changed into the weights, where it was broken off before it could."""
        if self._stepping:
            self.write_back()
        self._stepping = False

    def on_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Add the masters by name."""
        self.adopt(optimizer, {})
        self.sync()
        masters = (m.detach().clone() for m in self.masters)
        whose = saved_masters.places(optimizer, self.masters)
        return {**state, "masters": dict(zip(self.names(optimizer), masters)), saved_masters.PLACES: whose}

    def before_load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Check the saved masters before torch changes anything; a state without them leaves ours alone."""
        saved = state.get("masters")
        self.adopt(
            optimizer, _frozen_among(optimizer, self._known(), saved) if isinstance(saved, Mapping) else {}
        )
        self._pending = None if saved is None else self.matched(optimizer, saved)
        return {key: value for key, value in state.items() if key != "masters"}

    def after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the masters that `before_load` found."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.load(pending)

    def places(self, models: Sequence[nn.Module]) -> list[tuple[nn.Module, str, Tensor, Master]]:
        """Every place in the modules that holds one of our weights: (module, key, weight, master)."""
        mine = {id(w): m for w, m in zip(self.weights, self.masters)}
        modules = {id(module): module for model in models for module in model.modules()}
        return [
            (module, key, p, mine[id(getattr(p, "_stands_for", p))])
            for module in modules.values()
            for key, p in module._parameters.items()
            if p is not None and id(getattr(p, "_stands_for", p)) in mine
        ]


def matched(
    own: Sequence[str], weights: Sequence[Tensor], state: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """The saved masters in our order; CheckpointError where names or shapes do not fit.

    None for a frozen weight that was saved without one: it keeps its own.
    """
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"saved masters are tensors by name, got {state!r:.60}")
    names = [name for name, w in zip(own, weights) if w.requires_grad or name in state]
    if set(names) != set(state):
        names = own if len(own) == len(state) else names
        by_place = all(_is_place(n) for n in names) or all(_is_place(n) for n in state)
        if not (by_place and len(names) == len(state)):
            missing, extra = sorted(set(names) - set(state))[:5], sorted(set(state) - set(names))[:5]
            raise CheckpointError(
                f"the saved masters are of other parameters: missing {missing}, unexpected {extra}"
            )
        state = dict(zip(names, state.values()))
    for name, weight in zip(own, weights):
        if name in state and state[name].shape != weight.shape:
            given, wanted = list(state[name].shape), list(weight.shape)
            raise CheckpointError(
                f"the saved master of {name!r} has shape {given}, the parameter has {wanted}"
            )
    return [state.get(name) for name in own]


def _frozen_among(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], saved: Mapping[Any, Any]
) -> dict[Tensor, Tensor]:
    """Frozen 16-bit weights without a master of which the checkpoint has one."""
    params = (p for group in optimizer.param_groups for p in group["params"] if p.dtype in LOW)
    return {p: p.detach() for p in params if not p.requires_grad and names.get(p) in saved}


def _is_place(name: str) -> bool:
    return all(part.isdigit() for part in name.split("."))


def widen_state(value: Any) -> Any:
    """Optimizer state with its 16-bit tensors cast to fp32, containers rebuilt."""
    return _map_state(value, lambda t: t.float() if t.dtype in LOW else t)


def narrow_state(state: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    """Optimizer state with its floating tensors in `dtype`, as torch keeps them; `step` stays as it is."""

    def narrow(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    return {key: value if key == "step" else _map_state(value, narrow) for key, value in state.items()}


def _map_state(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _map_state(v, change) for k, v in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        items = [_map_state(v, change) for v in cast(Sequence[Any], value)]
        return items if isinstance(value, list) else tuple(items)
    return value
