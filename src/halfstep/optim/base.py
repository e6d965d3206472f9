"""What all optimizers here do: torch's interface outside, the one-pass step inside.

What is updated and with which scalars is decided here; arithmetic is in reference.py, storage in storage.py
and the kernels, and each optimizer's algorithm and arguments are in optimizers.py.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from halfstep.distributed import local_of
from halfstep.distributed.shards import find_rank_local
from halfstep.errors import ConfigError, MasterRangeError, UnsupportedError, warn
from halfstep.gradients.stats import (
    AnyStats,
    Clip,
    GradStats,
    HostStats,
    found_inf_of,
    measure_shards,
    on_host_if_cpu,
)
from halfstep.kernels import codes as L
from halfstep.optim import (
    arguments,
    backends,
    bundles,
    checkpoints,
    cuda,
    entries,
    shards,
    storage,
)
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.backends import Factor, Scalar
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
Work = tuple[TensorGroup, str]


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
        super().__init__(params, {**defaults, **how, "master": master, "state_dtype": state_dtype})

    def _prepare(self) -> None:
        self.outcome: Outcome | None = None
        """What the last step did, where it clips or skips by itself or by a GradScaler; else None."""
        self._outcomes, self._late = OutcomeQueue(), backends.LateErrors()
        self._plans = cuda.Plans()
        self.release = GradientRelease(self) if self.release_gradients else None

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm this group runs."""
        raise TypeError(f"{type(self).__name__} names no algorithm; use AdamW, Adam, SGD or Lion")

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
            arguments.check_group(group)
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

    # ---- the two passes -----------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, inv_scale: Scalar = None) -> GradStats:
        """Read the gradients once: finite flag, norm and largest magnitude after `inv_scale`.

        With released gradients the answer speaks of those freed since the last step as well.
        """
        params = parameters_of(self)
        if shards.any_shard(params):
            shards.add_partial_sums(params)
            return measure_shards([p.grad for p in params], inv_scale, shards.sets_of(params))
        grads = [g for bundle in self._tensor_groups() for g in bundle.collect().grads]
        rest = backends.measure_all(grads, inv_scale, self.backend, self._plans)
        if self.release is None:
            return rest
        return self.release.stats(rest if grads else None) or rest

    @torch.no_grad()
    def measure_on_host(self, inv_scale: Scalar = None) -> HostStats | None:
        """Do `measure` as Python numbers, faster; None where the CPU kernels cannot read every gradient."""
        if self.release is not None or not all(p.is_cpu for p in parameters_of(self)):
            return None
        if backends.runner(self.backend, torch.device("cpu")) != "numba":
            return None
        sums = [bundle.collect().prepare().measure() for bundle in self._tensor_groups()]
        return self._combine(sums, inv_scale)

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
        look: list[AnyStats] | None = None,
        clip_norm: float | None = None,
    ) -> Any:
        """Update every parameter that has a gradient, in one pass.

        Gradients are multiplied by `inv_scale` and `clip_coef` (floats or 0-d tensors; `clip_coef` may be a
        norm and its limit, a `Clip`) on the way and are not changed. Where `found_inf` is true nothing
        changes, step counts included; on an accelerator the flag may be a device tensor and nothing is read
        back. Returns what `closure` returns. Raises MasterRangeError when a weight outgrew an exact fp16
        master (it stays at 65504; on an accelerator the error comes up to two steps late).

        With a list as `look`, what `measure` would have said before is appended to it, where possible at the
        price of no further pass. `clip_norm`, in place of `clip_coef`, clips their 2-norm to this: it is
        measured first, over all ranks that hold parts of them. ConfigError for one below 0, or both;
        UnsupportedError for one where gradients were released. Either replaces the groups' `clip_norm`, and
        `found_inf` their `skip_nonfinite`: nothing is clipped twice.
        """
        run: Any = OnePassOptimizer._step_checked_by_torch
        if torch.compiler.is_dynamo_compiling():
            run = _step_outside
        elif any(step_hooks(self)) or global_step_pre_hooks or global_step_post_hooks or profiling():
            run = _hooked_step
        return run(
            self,
            *(() if closure is None else (closure,)),
            inv_scale=inv_scale,
            clip_coef=clip_coef,
            found_inf=found_inf,
            look=look,
            clip_norm=clip_norm,
        )

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _step_checked_by_torch(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if (clip_norm := options.get("clip_norm")) is not None:
            arguments.check_clipping(clip_norm, options.get("clip_coef"), self.release is not None)
        self.outcome = None
        self._late.check()
        self._update(self._tensor_groups(), **options)
        if self.release is not None:
            self.release.finish(any(arguments.limits_of(self.param_groups, self.release.clip_norm)))
        self._late.send()
        return loss

    def _combine(self, sums: list[tuple[Any, float, float]], inv_scale: Scalar) -> HostStats:
        return shards.combine_stats(sums, parameters_of(self), backends.number(inv_scale))

    def _not_skipped(self, all_bundles: list[TensorGroup], found_inf: bool | Tensor) -> list[TensorGroup]:
        """Return the groups to update: none where the step is skipped, as far as the host knows or reads."""
        host_flags = [bundle.device.type == "cpu" and self.backend != "triton" for bundle in all_bundles]
        if found_inf is True:
            return []
        skips = any(host_flags) and bool(found_inf)
        return [bundle for bundle, on_host in zip(all_bundles, host_flags) if not (skips and on_host)]

    def _runner(self, bundle: TensorGroup) -> str:
        return backends.runner(self.backend, bundle.device, bundle.algorithm.code)

    def _skips(self) -> bool:
        return any(map(itemgetter("skip_nonfinite"), self.param_groups))

    def _update(
        self,
        all_bundles: list[TensorGroup],
        inv_scale: Scalar = None,
        clip_coef: Factor = None,
        found_inf: bool | Tensor | None = None,
        look: list[AnyStats] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Update these; CPU kernels measure on the way where nothing clips or skips."""
        limits = [] if clip_coef is not None else arguments.limits_of(self.param_groups, clip_norm)
        clips = found_inf is not True and any(limits)
        skips = found_inf is None and self._skips()
        if not self.state and (skips or (clips and clip_norm is None)):
            self._check_ranks()
        decided, clip_coefs = found_inf is not None, [clip_coef] * len(self.param_groups)
        if found_inf is not None and found_inf is not False:
            all_bundles = self._not_skipped(all_bundles, found_inf)
        work = [(bundle.collect(self.state), self._runner(bundle)) for bundle in all_bundles]
        cpu_bundles = [bundle.prepare() for bundle, runner in work if runner == "numba"]
        all_on_cpu = self.release is None and 0 < len(cpu_bundles) == len(all_bundles)
        fused_measure = look is not None and all_on_cpu and not clips and not skips
        if clips or skips or (look is not None and not fused_measure):
            stats = (
                self._combine([bundle.measure() for bundle in cpu_bundles], inv_scale) if all_on_cpu else None
            )
            stats = stats or self.measure_on_host(inv_scale) or self.measure(inv_scale)
            if clips:
                clip_coefs = [None if limit is None else Clip(stats.norm, limit) for limit in limits]
            if skips:
                found_inf = found_inf_of(stats)
                live_bundles = self._not_skipped(all_bundles, found_inf)
                work = [item for item in work if item[0] in live_bundles]
            if look is not None:
                look.append(stats)
            elif not decided:
                self._conclude(on_host_if_cpu(stats), skips)
        out_of_range = self._run(work, inv_scale, clip_coefs, found_inf, fused_measure)
        if look is not None and fused_measure:
            look.append(self._combine([bundle.totals() for bundle in cpu_bundles], inv_scale))
        if out_of_range:
            raise MasterRangeError(backends.RANGE)

    def _check_ranks(self) -> None:
        """Refuse gradients of this rank alone, before the first step that clips or skips by itself."""
        if (issue := find_rank_local(parameters_of(self), self)) is not None:
            raise UnsupportedError(
                f"a parameter of shape {list(issue.parameter.shape)} {issue.why}: clip_norm= and "
                f"skip_nonfinite= of {type(self).__name__} would go by what this rank has, and ranks would "
                "come apart. Leave them out and clip by the wrapper's own clip_grad_norm_, or shard with "
                "hs.distributed.shard(model)"
            )

    def _run(
        self,
        work: list[Work],
        inv_scale: Scalar,
        clip_coefs: Sequence[Factor],
        found_inf: bool | Tensor | None,
        measures: bool = False,
    ) -> bool:
        """Update these, whose groups have a clip factor each; true where one left its master's range."""
        out_of_range: list[Any] = []
        gpu_groups: dict[tuple[int, torch.device], list[TensorGroup]] = {}
        for bundle, runner in work:
            scalars = inv_scale, clip_coefs[bundle.number]
            if runner == "numba":
                hyper = arguments.numbers_of(bundle.group)
                out_of_range.append(
                    bundle.update(hyper, backends.factor_of(scalars, hyper), self.seed, measures)
                )
            elif runner == "triton":
                gpu_groups.setdefault((bundle.number, bundle.device), []).append(bundle)
            elif bundle.device.type == "cpu":
                out_of_range.append(backends.by_reference(bundle, scalars, None, self.seed))
            else:
                flag = backends.by_reference(bundle, scalars, found_inf, self.seed)
                if flag is not None:
                    self._late.flag(flag.device).bitwise_or_(flag)
        for (number, device), gpu_bundles in gpu_groups.items():
            scalars = inv_scale, clip_coefs[number]
            bounded = any(bundle.kind == L.FP16_EXACT for bundle in gpu_bundles)
            flag = self._late.flag(device) if bounded else None
            self._plans.update(gpu_bundles, scalars, found_inf, flag, self.seed)
        return any(map(bool, out_of_range))

    def _conclude(self, stats: AnyStats, skips: bool) -> None:
        """Keep the outcome of a bare step; warn of gradients that were not finite once the host knows."""
        taken = stats.finite if skips else True
        reason = PARTLY if self.release is not None else None
        self.outcome = Outcome(
            taken=taken, finite=stats.finite, grad_norm=stats.norm, amax=stats.amax, reason=reason
        )
        if isinstance(stats.norm, Tensor) and cuda.capturing(stats.norm.device):
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
    ) -> GradStats | None:
        """Do `measure` and `step` for one parameter; None where it has no gradient.

        It is clipped as gradients of this `norm` are, to `limit` or what its group has. With `inv_scale`
        given, or where a group skips, nothing changes where the gradient is not finite.
        """
        p_bundles = self._tensor_groups(p)
        if not p_bundles:
            return None
        stats = backends.measure_all(p_bundles[0].collect().grads, inv_scale, self.backend, self._plans)
        found_inf = found_inf_of(stats) if inv_scale is not None or self._skips() else None
        limit = arguments.limits_of(self.param_groups, limit)[p_bundles[0].number]
        self._update(
            p_bundles, inv_scale, 1.0 if norm is None or limit is None else Clip(norm, limit), found_inf
        )
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
        local_state, _ = checkpoints.restore(name, saved, weight, self._formats(weight, group))
        shards.show(local_state, self.state.setdefault(p, {}), p)

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
