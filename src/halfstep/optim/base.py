"""The optimizer class: torch's interface outside, the one-pass step inside.

What is updated and with which scalars is decided here; arithmetic is in reference.py, storage in storage.py
and the kernels. Subclasses give an algorithm and its arguments, nothing else.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from halfstep.errors import ConfigError
from halfstep.gradients import cpu as cpus_
from halfstep.gradients.stats import GradStats, HostStats, clip_coefficient
from halfstep.kernels import codes as L
from halfstep.optim import arguments, backends, checkpoints, cuda, saved_masters, state_dicts, storage
from halfstep.optim.backends import Scalar
from halfstep.optim.cpu_plan import HostPlan
from halfstep.optim.release import GradientRelease
from halfstep.optim.remembered import MASTER_KEYS, Group, Place, Remembering
from halfstep.optim.sharded import Shards, any_shard
from halfstep.optim.source import OwnGradients, Source, dense_grad
from halfstep.optim.state import State
from halfstep.optim.step_hooks import is_watched

BACKENDS = ("auto", "reference", "triton")


class OnePassOptimizer(Remembering):
    """Base of the optimizers here: 16-bit weights with masters, one pass over the gradients a step.

    `master` and `state_dtype` may differ between parameter groups. fp32 parameters are updated in place and
    need no master. `release_gradients` updates each parameter during backward (`.release` has the details),
    `accumulate="fp32"` adds up micro-batches' gradients in fp32. `seed` keys all random rounding;
    `backend="reference"` runs plain torch everywhere; "auto" runs Numba kernels on a CPU, Triton kernels on
    CUDA and the reference elsewhere; "triton" insists on those (on a CPU, in Triton's interpreter alone).
    """

    one_pass = True

    def __init__(
        self,
        params: Any,
        defaults: Group,
        *,
        release_gradients: bool = False,
        accumulate: str | None = None,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"backend={backend!r}: choose one of {', '.join(map(repr, BACKENDS))}")
        if accumulate not in (None, "fp32"):
            raise ConfigError(f"accumulate={accumulate!r}: choose 'fp32' or None (the weights' own dtype)")
        self.seed = seed
        self.backend = backend
        self.accumulate = accumulate
        self.release_gradients = release_gradients
        self._prepare()
        super().__init__(params, defaults)
        self.state: Any = State()
        self._shard()

    def _shard(self) -> None:
        if any_shard([p for p, _, _ in self.places()]):
            self._shards = Shards(self)

    def _prepare(self) -> None:
        self._start_memory()
        self._shards: Shards | None = None
        self.source: Source = OwnGradients()
        self._late = backends.LateErrors()
        self._plans = cuda.Plans()
        self.release = GradientRelease(self) if self.release_gradients else None

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch; a group may have its own `master` and `state_dtype`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            arguments.settle_group(group)
            for p in group["params"]:
                storage.check_parameter(p, group["master"])
        except BaseException:
            del self.param_groups[-1]
            raise
        self._hook(group["params"])
        if self._shards is not None:
            self._shards.regroup()

    def _hook(self, params: list[Tensor]) -> None:
        if self.accumulate == "fp32":
            for p in params:
                p.grad_dtype = torch.float32
        if self.release is not None:
            self.release.watch(params)

    def __getstate__(self) -> Group:
        own = ("seed", "backend", "accumulate", "release_gradients")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: Group) -> None:
        super().__setstate__(state)
        entries = dict(self.state)
        self.state = State()
        for p, entry in entries.items():
            self.state[p].update(entry)
        self._prepare()
        for group in self.param_groups:
            self._hook(group["params"])
        self._shard()

    def _runner(self, device: torch.device) -> str:
        return backends.runner(self.backend, device)

    # ---- the two passes -----------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, inv_scale: Scalar = None) -> GradStats:
        """Read the gradients once: finite flag, norm and largest magnitude after `inv_scale`.

        With released gradients the answer speaks of those freed since the last step as well.
        """
        if self._shards is not None:
            return self._shards.measure(inv_scale)
        grads = self._gradients()
        seen = None if self.release is None else self.release.stats(None)
        if seen is None:
            return self._measure(grads, inv_scale)
        rest = self._measure(grads, inv_scale) if grads else None
        assert self.release is not None
        return self.release.stats(rest) or seen

    def measure_on_host(self, inv_scale: Scalar = None) -> HostStats | None:
        """`measure` as Python numbers, faster; None where the CPU kernels did not see everything."""
        if self._shards is not None:
            return self._shards.measure_on_host(inv_scale)
        known = self.measure_by_plan(inv_scale)
        if known is not None:
            return known
        with torch.no_grad():
            return None if self.release is not None else self._by_kernels(self._gradients(), inv_scale)

    def measure_by_plan(self, inv_scale: Scalar) -> HostStats | None:
        """`measure_on_host` by the plan that the last step left; None where it no longer holds."""
        return self._plan.measure(backends.number(inv_scale)) if self._planned() and self._plan else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or with `set_to_none=False` fill them with zeros, as in torch."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
        elif self._shards is not None:
            self._shards.source.clear()
        else:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None

    @property
    def planned(self) -> bool:
        """Whether the last step left a plan, by which the next can measure and update in one pass."""
        return self._shards.twin.planned if self._shards is not None else self._plan is not None

    def on_kernels(self) -> bool:
        """Whether the CPU kernels run here."""
        return self._runner(torch.device("cpu")) == "numba"

    @torch.no_grad()
    def init_states(self) -> None:
        """Make every state now instead of in the first step, so that a checkpoint before it is whole."""
        if self._shards is not None:
            self._shards.enter().init_states()
            return self._shards.show()
        for p, group, place in self.places():
            if p.requires_grad:
                self._slot(p, group, place)
        return None

    def _gradients(self) -> list[Tensor]:
        return [g for p, group, at in self.places() if (g := self._gradient(p, group, at)) is not None]

    def _gradient(self, p: Tensor, group: Group, place: Place) -> Tensor | None:
        """The gradient of `p` as the kernels read it, or None."""
        grad = self.source.of(p)
        return None if grad is None else dense_grad(p, grad, lambda: self.name_of(group, place))

    def _by_kernels(self, grads: list[Tensor], inv_scale: Scalar) -> HostStats | None:
        if grads and all(grad.is_cpu for grad in grads) and self._runner(grads[0].device) == "numba":
            return cpus_.measure(grads, backends.number(inv_scale))
        return None

    def _measure(self, grads: list[Tensor], inv_scale: Scalar) -> GradStats:
        known = self._by_kernels(grads, inv_scale)
        if known is None:
            return backends.measure_all(grads, inv_scale, self.backend, self._plans)
        return GradStats(*map(torch.tensor, known))

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        inv_scale: Scalar = None,
        clip_coef: Scalar = None,
        found_inf: bool | Tensor | None = None,
        look: bool = False,
        clip_norm: float | None = None,
    ) -> Any:
        """Update every parameter that has a gradient, in one pass.

        Gradients are multiplied by `inv_scale` and `clip_coef` (floats or 0-d tensors) on the way and are not
        changed. Where `found_inf` is true nothing changes, step counts included; on an accelerator the flag
        may be a device tensor and nothing is read back. Returns what `closure` returns. Raises
        MasterRangeError when a weight outgrew an exact fp16 master (it stays at 65504; on an accelerator the
        error comes up to two steps late).

        With `look`, `looked` holds afterwards what `measure_on_host` would have said before, at the price of
        no further pass; None where `planned` was false. `clip_norm`, in place of `clip_coef`, clips their
        2-norm to this: it is measured first, over all ranks that hold parts of them, and `looked` says what
        was found. ConfigError for a `clip_norm` below 0, or both; UnsupportedError for one where gradients
        were released.
        """
        options = {
            "inv_scale": inv_scale,
            "clip_coef": clip_coef,
            "found_inf": found_inf,
            "look": look or None,
            "clip_norm": clip_norm,
        }
        if torch.compiler.is_dynamo_compiling():
            return _step_outside(self, closure, options)
        if not is_watched(self):
            return self._checked_step(closure, inv_scale, clip_coef, found_inf, look, clip_norm)
        given = {name: value for name, value in options.items() if value is not None}
        return _hooked_step(self, *(() if closure is None else (closure,)), **given)

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _checked_step(
        self,
        closure: Callable[[], Any] | None = None,
        inv_scale: Scalar = None,
        clip_coef: Scalar = None,
        found_inf: bool | Tensor | None = None,
        look: bool = False,
        clip_norm: float | None = None,
    ) -> Any:
        loss, measured = None, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if clip_norm is not None:
            arguments.check_clipping(clip_norm, clip_coef, self.release is not None)
        twin = self if self._shards is None else self._shards.enter()
        twin._late.check()
        if not twin._step_by_plan(inv_scale, clip_coef, found_inf, look, clip_norm):
            if clip_norm is not None and found_inf is not True:
                measured = self.measure_on_host(inv_scale) or self.measure(inv_scale)
                clip_coef = clip_coefficient(measured.norm, clip_norm)
            twin.looked = measured
            twin._step_by_slots(inv_scale, clip_coef, found_inf)
        self.looked = twin.looked
        if self._shards is not None:
            self._shards.leave(found_inf)
        return loss

    def _step_by_slots(self, inv_scale: Scalar, clip_coef: Scalar, found_inf: bool | Tensor | None) -> None:
        if self.release is None:
            self._recall()
        try:
            with torch.no_grad():
                self._step(self.places(), inv_scale, clip_coef, found_inf)
        finally:
            self._edits.after_step()
        if self.release is not None:
            self.release.finish()
            return
        if self._check is None:
            self._remember()
        if not (isinstance(found_inf, Tensor) and not found_inf.is_cpu) and not found_inf:
            self._plan = self._new_plan()

    def _new_plan(self) -> HostPlan | None:
        params = [p for p, _, _ in self.places()]
        grads = self.source.of_all(params)
        if any(not HostPlan.fits(p, grad) for p, grad in zip(params, grads)):
            return None
        if any(self._runner(device) != "numba" for device in {p.device for p in params}):
            return None
        if any(self.algorithm(group).code == L.NO_KERNEL for group in self.param_groups):
            return None
        self._edits.plan([p for p, grad in zip(params, grads) if grad is not None])
        return HostPlan(self.param_groups, self.algorithm, self._slots, self.source)

    def _step(
        self,
        places: Iterable[tuple[Tensor, Group, Place]],
        inv_scale: Scalar,
        clip_coef: Scalar,
        found_inf: bool | Tensor | None,
    ) -> None:
        found: dict[tuple[int, torch.device], list[tuple[storage.Slot, Tensor]]] = {}
        host_skips: bool | None = None
        for p, group, place in places:
            grad = self._gradient(p, group, place)
            if grad is None:
                continue
            device = p.device
            if p.is_cpu and self.backend != "triton":
                host_skips = bool(found_inf) if host_skips is None else host_skips
                if host_skips:
                    continue
            slot = (self._slot if self.release is None else self._slot_alone)(p, group, place)
            found.setdefault((place[0], device), []).append((slot, grad))
        for (g, device), work in found.items():
            self._run(self.param_groups[g], device, work, inv_scale, clip_coef, found_inf)

    def _run(
        self,
        group: Group,
        device: torch.device,
        work: list[tuple[storage.Slot, Tensor]],
        inv_scale: Scalar,
        clip_coef: Scalar,
        found_inf: bool | Tensor | None,
    ) -> None:
        """Update one group's parameters on one device."""
        update = backends.GroupUpdate(self.algorithm(group), group, work, inv_scale, clip_coef)
        name = "reference" if update.algorithm.code == L.NO_KERNEL else self._runner(device)
        if name == "triton":
            self._late.add(backends.on_device(update, device, found_inf, self._plans))
        elif device.type == "cpu":
            backends.on_host(update, name == "numba")
        else:
            self._late.add(backends.on_device(update, device, found_inf))

    @torch.no_grad()
    def measure_one(self, p: Tensor, inv_scale: Scalar) -> GradStats | None:
        """`measure` for one parameter; None where it has no gradient."""
        grad = self._gradient(p, *self._find(p))
        return None if grad is None else self._measure([grad], inv_scale)

    @torch.no_grad()
    def step_one(
        self, p: Tensor, *, inv_scale: Scalar, clip_coef: Scalar, found_inf: bool | Tensor | None
    ) -> None:
        """`step` for one parameter."""
        self._edits.take_one(p)
        self._step([(p, *self._find(p))], inv_scale, clip_coef, found_inf)
        self._edits.after_one(p)

    # ---- masters ------------------------------------------------------------------------------------

    @torch.no_grad()
    def seed_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set masters and weights from fp32 `values`, as when a model was made 16-bit after the optimizer.

        Each parameter becomes the rounding of its value, and its master the value itself, where the group's
        `master` can hold it. Parameters of other optimizers are left alone.
        """
        if self._shards is not None:
            self._shards.seed_masters(values)
            return
        for p, group, place in self.places():
            if p in values:
                self._seed(p, group, place, values[p].detach())

    @torch.no_grad()
    def masters(self) -> dict[Tensor, Tensor]:
        """The exact fp32 value of every parameter, in new tensors."""
        if self._shards is not None:
            return self._shards.masters()
        return {p: self.master_of(p) for p, _, _ in self.places()}

    @torch.no_grad()
    def master_of(self, p: Tensor) -> Tensor:
        """The fp32 value of parameter `p` as the optimizer knows it, in a new tensor of p's shape."""
        if self._shards is not None:
            return self._shards.master_of(p)
        group, _ = self._find(p)
        self._edits.take_one(p)
        state = cast("dict[str, Any]", self.state.get(p, {}))
        if (exact := self._before_widening(p, state)) is not None:
            return exact
        state = {**state, **self._lost_master(p, state)}
        kind = storage.kind_of(p.dtype, group["master"])
        extra = state.get("master" if kind in storage.WITH_MASTER else "lacking")
        if extra is None or extra.shape != p.shape or kind == L.PLAIN:
            kind, extra = storage.kind_of(p.dtype, None), None
        out = torch.empty_like(p, dtype=torch.float32)
        return out.copy_(storage.read_weight(kind, storage.local_tensor(p).detach(), extra))

    def settled_master(self, p: Tensor) -> Tensor | None:
        """`master_of(p)`; None where it has no master yet, or was set by hand since the last step."""
        entry = cast("dict[str, Any]", self.state.get(p, {}))
        known = {**entry, **self._lost_master(p, entry)}
        if self._edits.is_set(p) or not any(key in known for key in MASTER_KEYS):
            return None
        return self.master_of(p)

    def awaits(self, p: Tensor) -> bool:
        """Whether the bits that `p` lacks were loaded since the last step: its own may come after."""
        if self._shards is not None:
            return self._shards.awaits(p)
        return p in self._edits.awaiting

    # ---- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> Group:
        """torch's state dict; each entry also says which 16-bit weight its lacking bits belong to.

        Where gradients are released, the first group holds what the next backward clips by.
        """
        if self._shards is not None:
            return self._shards.state_dict()
        self._edits.take()
        with self._without_strangers():
            packed = super().state_dict()
        if self.release is not None:
            packed["param_groups"][0]["release"] = self.release.state()
        for group, own in zip(packed["param_groups"], self.param_groups):
            group["algorithm"] = self.algorithm(own).name
        entries = cast("dict[Any, Group]", packed["state"])
        for index, (p, _, _) in enumerate(self.places()):
            whole = self._whole_entry(p, entries.get(index, {}))
            if whole or index in entries:
                entries[index] = checkpoints.pack(whole, p)
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: Group) -> None:
        """Load a state of any master and state format, torch's own included; ours stay as they are.

        Parameters are matched by the groups' `param_names` where both sides have them, else by position.
        Masters are the checkpoint's; where it has none, as torch's have, they stay what they are.
        Load the model's weights first, after `prepare` where they are of the other 16 bits. CheckpointError
        where groups, names or shapes do not fit, or masters are of other weights than the model's; nothing is
        changed then.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state_dict = saved_masters.into_entries(state_dict)
        if self._shards is not None:
            self._shards.load_state_dict(state_dict)
            for hook in self._optimizer_load_state_dict_post_hooks.values():
                hook(self)
            return
        loaded = state_dicts.read(self, state_dict)
        for group, options in zip(self.param_groups, loaded.groups):
            group.update(options)
        self.state.clear()
        for p, entry in loaded.entries.items():
            self._kept_dtype[p] = p.dtype
            if entry.weight is not None:
                p.copy_(entry.weight)
            self.state[p].update(entry.state)
            settle = self._edits.know if entry.kept else self._edits.loaded
            settle(p, entry.state.get("lacking"))
        self._forget()
        release = state_dict["param_groups"][0].get("release")
        if self.release is not None and release is not None:
            self.release.load(release)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)


@_disable_dynamo
def _step_outside(optimizer: OnePassOptimizer, closure: Any, options: dict[str, Any]) -> Any:
    """A step asked for by compiled code, which cannot follow addresses and would lose the state."""
    return optimizer.step(closure, **options)


# What torch wraps every optimizer's step in; ours is marked `hooked` and goes through it only where a hook or
# a profiler is there to see it, for it takes 15 us.
_hooked_step: Any = torch.optim.Optimizer.profile_hook_step(OnePassOptimizer._checked_step)  # pyright: ignore
