"""What all optimizers here do: torch's interface outside, the one-pass step inside.

What is updated and with which scalars is decided here; arithmetic is in reference.py, storage in storage.py
and the kernels, and each optimizer's algorithm and arguments are in optimizers.py.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from halfstep.devices.transfer import capturing
from halfstep.distributed import local_of
from halfstep.distributed.shards import find_rank_local
from halfstep.errors import ConfigError, MasterRangeError, UnsupportedError, warn
from halfstep.gradients.decision import Decision, Factor, Scalar, decide
from halfstep.gradients.stats import (
    AnyStats,
    GradStats,
    as_tensors,
    combine,
    found_inf_of,
    measure_shards,
    on_host_if_cpu,
)
from halfstep.optim import (
    arguments,
    backends,
    bundles,
    checkpoints,
    entries,
    shards,
    storage,
)
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.bundles import Group, Place, TensorGroup
from halfstep.optim.loading import MasterHolder, warn_of_zero_moments
from halfstep.optim.release import PARTLY, GradientRelease
from halfstep.optim.split import is_described
from halfstep.outcome import Outcome, OutcomeQueue
from halfstep.torch_private import (
    disable_dynamo,
    global_step_post_hooks,
    global_step_pre_hooks,
    load_hooks,
    profiling,
    step_hooks,
)
from halfstep.trees import accumulate_in_fp32, parameters_of

BACKENDS = ("auto", "reference", "triton")


class OnePassOptimizer(MasterHolder, torch.optim.Optimizer):
    """Base of the optimizers here: 16-bit weights with masters, one pass over the gradients a step.

    `Keeping` says what the options mean; those in `defaults` may differ between parameter groups. fp32
    parameters are updated in place and need no master. On a CPU "triton" runs in its interpreter alone.

    `clip_norm` and `skip_nonfinite` (in one group at least) are for loops that call a bare `step()`, a
    framework's for instance; a session has its own. `outcome` then says what the last step did, and a step on
    gradients that hold inf or NaN warns; on an accelerator nothing waits for it.

    Nothing is remembered between steps: all that one uses stands in `param_groups` and `state` (law 15).
    """

    one_pass = True
    _fixed_options: ClassVar[frozenset[str]] = frozenset()
    """Options of groups that make the class what it is: a checkpoint of another class leaves them alone."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Let the signature of each optimizer say the options that all have, with their defaults."""
        super().__init_subclass__(**more)
        init: Any = vars(cls).get("__init__")
        if init is None:
            return
        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = inspect.signature(OnePassOptimizer.__init__).parameters.values()
        signature = inspect.signature(init)
        *first, last = signature.parameters.values()
        if last.kind is inspect.Parameter.VAR_KEYWORD:
            named = [p for p in shared if p.kind is keyword and p.name not in signature.parameters]
            init.__signature__ = signature.replace(parameters=[*first, *named])

    def __init__(
        self,
        params: Any,
        defaults: Group,
        *,
        maximize: bool = False,
        master: str | None = "exact",
        state_dtype: str | torch.dtype = "fp32",
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        release_gradients: bool = False,
        accumulate: str | None = None,
        seed: int = 0,
        backend: str = "auto",
        differentiable: bool = False,
        **unknown: Any,
    ) -> None:
        arguments.check_options(type(self), unknown, seed, release_gradients)
        if backend not in BACKENDS:
            raise ConfigError(f"backend={backend!r}: choose one of {', '.join(map(repr, BACKENDS))}")
        arguments.check_accumulate(accumulate)
        self.seed, self.backend, self.accumulate = seed, backend, accumulate
        self.release_gradients = release_gradients
        self._prepare()
        how = {"maximize": maximize, "clip_norm": clip_norm, "skip_nonfinite": skip_nonfinite}
        how |= {"differentiable": differentiable, **arguments.TORCH_KEYS}
        super().__init__(params, {**how, **defaults, "master": master, "state_dtype": state_dtype})

    def _prepare(self) -> None:
        self.outcome: Outcome | None = None
        """What the last step did, where it clips or skips by itself or by a GradScaler; else None."""
        self._outcomes, self._backends = OutcomeQueue(), backends.Backends()
        self.release = GradientRelease(self) if self.release_gradients else None

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm this group runs."""
        raise TypeError(f"{type(self).__name__} names no algorithm; use AdamW, Adam, SGD, Lion or Muon")

    def _places(self) -> Iterator[tuple[Tensor, Group, Place]]:
        """Yield every parameter with its group, and its place: number of the group and number within."""
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                yield p, group, (g, i)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch; a group may have its own `master` and `state_dtype`."""
        arguments.check_whole_options(self, param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for p in group["params"]:
                arguments.check_parameter(p, group["master"])
            shards.check_blocks(group, group["params"])
            if (self.release is not None or self.accumulate) and shards.any_shard(group["params"]):
                what = "accumulate='fp32'" if self.release is None else "release_gradients"
                raise UnsupportedError(
                    f"{what} is for parameters that are not sharded: fully_shard frees whole gradients by "
                    "itself and reduces them in MixedPrecisionPolicy(reduce_dtype=torch.float32) where asked"
                )
        except BaseException:
            del self.param_groups[-1]
            raise
        self._hook(group["params"])

    def _check_group(self, group: Group) -> None:
        arguments.check_group(group)
        self.algorithm(group)

    def _hook(self, params: list[Tensor]) -> None:
        if self.accumulate == "fp32":
            for p in params:
                accumulate_in_fp32(p)
        if self.release is not None:
            self.release.watch(params)

    def __getstate__(self) -> Group:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in arguments.WHOLE}}

    def __setstate__(self, state: Group) -> None:
        super().__setstate__(state)
        self._prepare()
        for group in self.param_groups:
            self._hook(group["params"])

    def _tensor_groups(self, only: Tensor | None = None) -> list[TensorGroup]:
        return bundles.tensor_groups_of(self.param_groups, self.algorithm, only)

    # ---- measure, decide, apply ---------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, inv_scale: Scalar = None) -> GradStats:
        """Read the gradients once: finite flag, norm and largest magnitude after `inv_scale`.

        With released gradients the answer speaks of those freed since the last step as well.
        """
        return as_tensors(self._stats_of(self._tensor_groups(), inv_scale))

    def _stats_of(self, groups: Sequence[TensorGroup], inv_scale: Scalar) -> AnyStats:
        """Do `measure`, as Python values where kernels of a CPU read all, which is faster.

        The groups are collected with the states where these are there: the update of this step needs them.
        """
        for group in groups:
            if not group.complete:
                group.collect(self.state, makes=False)
        params = parameters_of(self)
        devices = dict.fromkeys(group.device for group in groups) or dict.fromkeys(p.device for p in params)
        parts = [
            (self._backends.of(self.backend, at), [group for group in groups if group.device == at])
            for at in devices
        ]
        if not all(backend.fuses for backend, _ in parts) and shards.any_shard(params):
            return measure_shards([p.grad for p in params], inv_scale, shards.sets_of(params))
        stats = combine([backend.measure(those, inv_scale, params) for backend, those in parts])
        if self.release is None:
            return stats
        return self.release.stats(stats if groups else None) or stats

    def _decide(
        self,
        groups: Sequence[TensorGroup],
        inv_scale: Scalar = None,
        clip_coef: Factor = None,
        found_inf: bool | Tensor | None = None,
        clip_norm: float | None = None,
    ) -> Decision:
        """Return what the arguments of `step` say; what they leave open the parameter groups say."""
        limits = [] if clip_coef is not None else arguments.limits_of(self.param_groups, clip_norm)
        clips, skips = any(limits), found_inf is None and self._skips()
        skip = False if found_inf is None else found_inf
        decision = Decision(inv_scale, [clip_coef] * len(self.param_groups), skip)
        if skip is True or not (clips or skips):
            return decision
        if not self.state and (skips or clip_norm is None):
            self._check_ranks()
        stats = self._stats_of(groups, inv_scale)
        if found_inf is None:
            self._conclude(on_host_if_cpu(stats), skips)
        skip = found_inf_of(stats) if skips else skip
        return decide(stats.norm, limits, inv_scale, skip) if clips else decision._replace(skip=skip)

    def _apply(
        self, groups: Sequence[TensorGroup], decision: Decision, measures: bool = False
    ) -> AnyStats | None:
        """Do what was decided; with `measures` return the stats, found on the way where that can be.

        A flag on a device is read where a backend runs on the host, and decides for that one's groups.
        """
        work = {} if decision.skip is True else self._backends.serving(self.backend, groups)
        skips = decision.skip is not False and any(b.on_host for b in work) and bool(decision.skip)
        work = {backend: those for backend, those in work.items() if not (skips and backend.on_host)}
        for group in chain.from_iterable(work.values()):
            if not group.complete:
                group.collect(self.state)
        only = next(iter(work)) if len(work) == 1 else None
        fuses = measures and self.release is None and only is not None and only.fuses
        stats = self._stats_of(groups, decision.inv_scale) if measures and not fuses else None
        flags = [backend.update(those, decision, self.seed, fuses) for backend, those in work.items()]
        if only is not None and fuses:
            stats = only.measured(groups, decision.inv_scale, parameters_of(self))
        if any(flags):
            raise MasterRangeError(backends.RANGE)
        return stats

    @torch.no_grad()
    def init_states(self) -> None:
        """Make every state now instead of in the first step, so that a checkpoint before it is whole."""
        for p, group, place in self._places():
            if p.requires_grad:
                self._normalize_entry(p, group, place, None)

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        inv_scale: Scalar = None,
        clip_coef: Factor = None,
        found_inf: bool | Tensor | None = None,
        clip_norm: float | None = None,
        decision: Decision | None = None,
        groups: Sequence[TensorGroup] | None = None,
        measures: bool = False,
    ) -> Any:
        """Update every parameter that has a gradient, in one pass.

        Gradients are multiplied by `inv_scale` and `clip_coef` (floats or 0-d tensors; `clip_coef` may be a
        norm and its limit, a `Clip`) on the way and are not changed. Where `found_inf` is true nothing
        changes, step counts included; on an accelerator the flag may be a device tensor and nothing is read
        back. Returns what `closure` returns. Raises MasterRangeError when a weight outgrew an exact fp16
        master (it stays at 65504; on an accelerator the error comes up to two steps late).

        `clip_norm`, in place of `clip_coef`, clips their 2-norm to this: it is measured first, over all ranks
        that hold parts of them. ConfigError for one below 0, or both; UnsupportedError for one where
        gradients were released. Either replaces the groups' `clip_norm`, and `found_inf` their
        `skip_nonfinite`: nothing is clipped twice.

        A session gives a `decision` in place of all these, and the `groups` that it measured. With `measures`
        the step returns what `measure` would have said before it; the decision must not depend on that.
        """
        run: Any = OnePassOptimizer._step_checked_by_torch
        if torch.compiler.is_dynamo_compiling():
            run = _step_outside
        elif any(step_hooks(self)) or global_step_pre_hooks or global_step_post_hooks or profiling():
            run, groups = _hooked_step, None  # hooks may have changed the gradients
        if groups is not None and not all(map(TensorGroup.is_current, groups)):
            groups = None  # so may a wrapper around this step
        return run(
            self,
            *(() if closure is None else (closure,)),
            inv_scale=inv_scale,
            clip_coef=clip_coef,
            found_inf=found_inf,
            clip_norm=clip_norm,
            decision=decision,
            groups=groups,
            measures=measures,
        )

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _step_checked_by_torch(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        decision: Decision | None,
        groups: Sequence[TensorGroup] | None,
        measures: bool,
        **asked: Any,
    ) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if (clip_norm := asked["clip_norm"]) is not None:
            arguments.check_clipping(clip_norm, asked["clip_coef"], self.release is not None)
        self.outcome, errors = None, self._backends.errors
        if errors.flags:
            errors.check()
        groups = self._tensor_groups() if groups is None else groups
        decision = self._decide(groups, **asked) if decision is None else decision
        stats = self._apply(groups, decision, measures)
        if self.release is not None:
            self.release.finish(any(arguments.limits_of(self.param_groups, self.release.clip_norm)))
        if errors.flags:
            errors.send()
        return stats if measures else result

    def _skips(self) -> bool:
        return any(map(itemgetter("skip_nonfinite"), self.param_groups))

    def _check_ranks(self) -> None:
        """Refuse gradients of this rank alone, before the first step that clips or skips by itself."""
        if (issue := find_rank_local(parameters_of(self), self)) is not None:
            raise UnsupportedError(
                f"a parameter of shape {list(issue.parameter.shape)} {issue.why}: clip_norm= and "
                f"skip_nonfinite= of {type(self).__name__} would go by what this rank has, and ranks would "
                "come apart. Leave them out and clip by the wrapper's own clip_grad_norm_, or shard with "
                "hs.distributed.shard(model)"
            )

    def _conclude(self, stats: AnyStats, skips: bool) -> None:
        """Keep the outcome of a bare step; warn of gradients that were not finite once the host knows."""
        taken = stats.finite if skips else True
        reason = PARTLY if self.release is not None else None
        self.outcome = Outcome(
            taken=taken, finite=stats.finite, grad_norm=stats.norm, amax=stats.amax, reason=reason
        )
        if isinstance(stats.norm, Tensor) and capturing(stats.norm.device):
            return
        if not all(record.finite for record in self._outcomes.push(self.outcome)):
            how = "and was skipped" if skips else "and was taken: skip_nonfinite=True skips such steps"
            warn(
                f"a step of {type(self).__name__} had gradients that hold inf or NaN, {how}; "
                "optimizer.outcome says so after each step"
            )

    @torch.no_grad()
    def _release_one(
        self, p: Tensor, inv_scale: Scalar, norm: Tensor | None, limit: float | None
    ) -> AnyStats | None:
        """Do `measure` and `step` for one parameter; None where it has no gradient.

        It is clipped as gradients of this `norm` are, to `limit` or what its group has. With `inv_scale`
        given, or where a group skips, nothing changes where the gradient is not finite.
        """
        groups = [group.collect() for group in self._tensor_groups(p)]
        if not groups:
            return None
        backend = self._backends.of(self.backend, groups[0].device)
        stats = backend.measure(groups, inv_scale, [p])
        skip = found_inf_of(stats) if inv_scale is not None or self._skips() else False
        limits = arguments.limits_of(self.param_groups, limit)
        self._apply(groups, decide(norm, limits, inv_scale, skip))
        return stats

    def _normalize_entry(self, p: Tensor, group: Group, place: Place, value: Tensor | None) -> None:
        """Complete the entry of one parameter; `value` (of this rank's part) sets its master and weight.

        With it, and where the weight is frozen, an entry without moments gets none.
        """
        arguments.check_storage(group)
        weight, old_entry = storage.local_tensor(local_of(p)), cast("Group", self.state.get(p, {}))
        algorithm, kind, state_kind = self._formats(weight, group)
        trains = (p.requires_grad and value is None) or any(
            key not in storage.MASTER_KEYS for key in old_entry
        )
        entry = self.state.setdefault(p, {})
        with torch.inference_mode(False), torch.no_grad(), shards.local_entry(entry, p) as local_state:
            if trains:
                name = arguments.name_of(group, place)
                entries.normalize_entry(local_state, weight, algorithm, kind, state_kind, name, value)
            else:
                entries.normalize_master(local_state, weight, kind, value)
        if not entry:
            del self.state[p]

    def _formats(self, p: Tensor, group: Group) -> tuple[Algorithm, int, int]:
        """Return the algorithm of a group, and the formats of this weight and its states."""
        kind = arguments.kind_of(p.dtype, group["master"])
        return self.algorithm(group), kind, arguments.state_kind_of(p, group["state_dtype"])

    # ---- masters ------------------------------------------------------------------------------------

    @torch.no_grad()
    def seed_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set masters and weights from fp32 `values`, as when a model was made 16-bit after the optimizer.

        Each parameter becomes the rounding of its value, and its master the value itself, where the group's
        `master` can hold it. Parameters of other optimizers are left alone.
        """
        for p, group, place in self._places():
            if p in values:
                self._seed(p, group, place, values[p])

    def _seed(self, p: Tensor, group: Group, place: Place, value: Tensor) -> bool:
        """Do `seed_masters` of one parameter; return whether its master gives the value back as it was."""
        self._normalize_entry(p, group, place, local_of(value).detach())
        return group["master"] in ("exact", "fp32")

    @torch.no_grad()
    def masters(self, only: AnySet[Tensor] | None = None) -> dict[Tensor, Tensor]:
        """Return the exact fp32 value of every parameter, or of those in `only`, in new tensors."""
        return {p: self._master(p, group) for p, group, _ in self._places() if only is None or p in only}

    @torch.no_grad()
    def master_of(self, p: Tensor) -> Tensor:
        """Return the fp32 value of parameter `p` as the optimizer has it, in a new tensor of p's shape."""
        for master in self.masters({p}).values():
            return master
        raise ConfigError(f"a tensor of shape {list(p.shape)} is not a parameter of this optimizer")

    def _master(self, p: Tensor, group: Group) -> Tensor:
        master = self._read_master(p, group)
        if master is not None:
            return master
        return shards.as_dtensor("master", local_of(p).detach().to(torch.float32, copy=True), p)

    @torch.no_grad()
    def _read_master(self, p: Tensor, group: Group) -> Tensor | None:
        """Return the fp32 value of a weight in a new tensor, where it has a master."""
        value = self._rows_of_master(p, group, ...)
        return None if value is None else shards.as_dtensor("master", value, p)

    def _readers(self) -> dict[Tensor, Callable[[Any], Tensor]]:
        """Return, by parameter, what reads the exact fp32 value of a slice of rows of this rank's part."""
        return {p: partial(self._rows, p, group) for p, group, _ in self._places()}

    @torch.no_grad()
    def _rows(self, p: Tensor, group: Group, index: Any) -> Tensor:
        value = self._rows_of_master(p, group, index)
        return local_of(p).detach()[index].to(torch.float32) if value is None else value

    def _rows_of_master(self, p: Tensor, group: Group, index: Any) -> Tensor | None:
        weight, entry = local_of(p).detach(), cast("Group", self.state.get(p, {}))
        kind = arguments.kind_of(weight.dtype, group["master"])
        if kind not in (*storage.EXACT, *storage.WITH_MASTER):
            return None
        local_state = {
            key: shards.local_part(key, entry[key], p) for key in storage.MASTER_KEYS if key in entry
        }
        fitting = {
            key: t[index] for key, t in local_state.items() if getattr(t, "shape", None) == weight.shape
        }
        return entries.fp32_value_of(fitting, weight[index])

    def _has_early_bits(self, p: Tensor) -> bool:
        """Whether a state that was loaded before the value of `p` brought that value's low-order bits."""
        description = cast("Group", self.state.get(p, {})).pop("weight", None)
        return description is not None and is_described(local_of(p), description, p.dtype)

    @torch.no_grad()
    def _take_edits(self) -> None:
        """Set fp32 masters to the weights that were set since the last step."""
        for p, group, _ in self._places():
            entry = cast("Group", self.state.get(p, {}))
            if group["master"] == "fp32" and isinstance(entry.get("master"), Tensor):
                entry["master"].copy_(self._master(p, group))

    # ---- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> Group:
        """Return torch's state dict; each entry also says which 16-bit weight its low-order bits belong to.
        Where gradients are released, the first group holds what the next backward clips by.
        """
        packed, parameters = self._undescribed_state(), parameters_of(self)
        if self.release is not None:
            packed["param_groups"][0]["release"] = self.release.state()
        saved = cast("dict[Any, Group]", packed["state"])
        described = {n: checkpoints.pack(saved.pop(n), p) for n, p in enumerate(parameters) if n in saved}
        packed["state"] = {**described, **saved}
        return packed

    def _undescribed_state(self) -> Group:
        """Return torch's state dict, for what keeps no low-order bits: no weight is read to describe it."""
        self._take_edits()
        whole, parameters = self.state, set(parameters_of(self))
        # A file could not name a parameter that left its group.
        self.state = cast(
            Any, {k: v for k, v in whole.items() if not isinstance(k, Tensor) or k in parameters}
        )
        try:
            return super().state_dict()
        finally:
            self.state = whole

    @torch.no_grad()
    def _load_entry(self, p: Tensor, group: Group, place: Place, saved: Mapping[str, Any]) -> None:
        """Return the entry of one parameter from a saved one without masters, of this rank's tensors."""
        weight, name = local_of(p), arguments.name_of(group, place)
        local_state, _ = self._restore(name, saved, weight, group)
        shards.show(local_state, self.state.setdefault(p, {}), p)

    def _restore(
        self,
        name: str,
        saved: Mapping[str, Any],
        weight: Tensor,
        group: Group,
        present: Callable[[], Tensor] | None = None,
        dry: bool = False,
    ) -> checkpoints.Restored:
        """Do `checkpoints.restore` of this rank's part of a parameter of the group."""
        return checkpoints.restore(name, saved, weight, self._formats(weight, group), present, dry)

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
        for hook in load_hooks(self)[0].values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state_dict = checkpoints.into_entries(state_dict)
        self._take_edits()  # a state_dict() of ours, filled in place since, holds the same tensors
        groups, saved_states = checkpoints.read(self, state_dict)
        for group, options in zip(self.param_groups, groups):
            group.update(options)
        for p in self.state.keys() - saved_states.keys():
            del self.state[p]
        for p, restored in saved_states.items():
            known = self.state.pop(p, {})
            self.state[p] = {key: known[key] for key in storage.MASTER_KEYS if key in known}
            del known  # its memory goes before another takes its place
            local_state, weight = restored()
            del self.state[p]
            if weight is not None:
                local_of(p).copy_(weight)
            shards.show(local_state, self.state.setdefault(p, {}), p)
        release = state_dict["param_groups"][0].get("release")
        if self.release is not None and release is not None:
            self.release.load(release)
        warn_of_zero_moments([self])
        for hook in load_hooks(self)[1].values():
            hook(self)


@disable_dynamo
def _step_outside(optimizer: OnePassOptimizer, *args: Any, **options: Any) -> Any:
    """Run a step that compiled code calls: a graph cannot follow addresses and would lose the state."""
    return optimizer.step(*args, **options)


# What torch wraps every optimizer's step in; ours is marked `hooked` and goes through it only where a hook or
# a profiler is there to see it, for it takes 15 us.
_hooked_step: Any = torch.optim.Optimizer.profile_hook_step(OnePassOptimizer._step_checked_by_torch)  # pyright: ignore
