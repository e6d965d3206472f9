"""Apply a level or a plan to a model: dtypes, casts at the edges, and a record that undoes it all.

Parameters keep their identity (`p.data` is swapped), so optimizers, ties and DDP buckets built later stay
right. What the ops inside compute in is `casting/`'s affair; a converted model also runs without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from halfstep import devices
from halfstep.convert.buffers import LowBuffers, follows_weight
from halfstep.convert.hooks import (
    FP32_OUT_OPS,
    WITH_KERNELS,
    CastInputs,
    CastOutputs,
    CastToWeight,
    ComputeIn,
    Exact,
    HookSwitch,
    WideCopies,
    keeps_fp32,
    own_dtype,
)
from halfstep.convert.in_place import (
    cast_together,
    own_tensors,
    powers_of,
    refresh_flat,
    replace_data,
    stand_in,
)
from halfstep.convert.sharded import (
    announce,
    check_before,
    check_groups,
    gather_in,
    has_run,
    is_shard,
)
from halfstep.errors import ConfigError, PlanError, UnsupportedError
from halfstep.formats import dtype_name, parse_dtype
from halfstep.names import fqns, unwrap
from halfstep.policy.declared import rules_declared_by
from halfstep.policy.levels import LOW_DTYPES, Level, level_of
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule
from halfstep.policy.policy import Policy
from halfstep.trees import compute_device, each_parameter

_CONVERTED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
#: Each gives a context in which a model is converted, for who wants to see what that does to it.
conversion_listeners: list[Callable[[nn.Module], AbstractContextManager[None]]] = []
_WRAPPERS = {
    "DistributedDataParallel": "convert the model, then wrap it",
    "DataParallel": "convert the model, then wrap it",
    "FullyShardedDataParallel": (
        "it has flattened the parameters, whose dtypes O2 and O3 would change: shard with "
        "hs.distributed.shard(model) in its place, or keep fp32 weights by prepare(model, optimizer, "
        "level='O1', norm_group=model.process_group)"
    ),
}
"""What belongs around a prepared model, and what to do where it is there before."""


@dataclass(frozen=True)
class Change:
    """One thing a conversion did, or kept on purpose: of which module, from and to which dtype, and why.

    what: "parameter NAME", "buffer NAME", "inputs", "outputs" or "ops". before, after: None where there is no
    dtype to tell; equal where something was kept.
    """

    module: str
    what: str
    before: torch.dtype | None
    after: torch.dtype | None
    why: str

    def __str__(self) -> str:
        names = [dtype_name(d) if d is not None else "any" for d in (self.before, self.after)]
        dtypes = f"kept {names[1]}" if self.before == self.after else f"{names[0]} -> {names[1]}"
        return f"{self.module or '(model)'}: {self.what} {dtypes} ({self.why})"


class Conversion:
    """The record of one `convert`: what changed and why, and how to take it back. It keeps no model alive.

    changes: every tensor and every cast, in the model's order.
    buffers: the model's own that became 16-bit, which have no masters.
    originals: fp32 weights before rounding, by parameter, kept where a level has masters: hand them to
        `MasterWeights(initial=...)`, which takes the memory over, then call `forget_originals()`.
    """

    def __init__(self, model: nn.Module, what: str) -> None:
        self._model, self.what = weakref.ref(model), what
        self.changes: tuple[Change, ...] = ()
        self.originals: dict[Tensor, Tensor] = {}
        self._power = HookSwitch()
        self._handles: list[Any] = []
        self._before: list[tuple[Tensor, torch.dtype]] = []
        self.buffers = LowBuffers()
        self._policies: list[tuple[Any, Any]] = []
        self._active = True

    @property
    def model(self) -> nn.Module:
        """The model that was converted; ConfigError once nothing else refers to it."""
        if (model := self._model()) is None:
            raise ConfigError("the model of this Conversion is gone: keep a reference to it")
        return model

    def __str__(self) -> str:
        return "\n".join([f"converted to {self.what}", *(f"  {change}" for change in self.changes)])

    def forget_originals(self) -> None:
        """Free the fp32 weights kept from before the conversion."""
        self.originals = {}

    def widen_copies(self, exact: Exact) -> None:
        """Make deep copies of the model fp32 models, with `exact()`'s values where it has them."""
        if not any(is_shard(tensor) for tensor, _ in self._before):
            self._power.off_in_copies = True
            hook = WideCopies(self._power, self._before, exact)
            for module in self.model.modules():
                self._handles.append(module.register_load_state_dict_post_hook(hook))

    def revert(self, keeper: Keeper | None = None) -> None:
        """Give parameters and buffers their dtypes back and remove every cast; a second call does nothing.

        What still is its rounded original becomes that again, bit for bit (buffers always, weights while
        `originals` are kept); what was trained is widened, or what `keeper` has for it. Where there are
        `MasterWeights`, revert those afterwards: they then hold the exact values.
        """
        if not self._active:
            return
        model = self._model()
        if model is not None and (self._before or self._policies) and has_run(model):
            raise UnsupportedError(
                "a sharded model that has run cannot go back to fp32 in place (fully_shard has fixed its "
                "dtypes): take hs.optim.fp32_state_dict(model, optimizer), or Session.save it, and in one "
                "process prepare a new model at this level, Session.load and revert() that"
            )
        for handle in self._handles:
            handle.remove()
        for holder, policy in self._policies:
            holder.mp_policy = policy
        for tensor, dtype in self._before:
            exact = None if keeper is None else keeper.exact(tensor)
            replace_data(tensor, self._wide(tensor, dtype) if exact is None else exact.to(dtype))
            if keeper is not None and exact is not None:
                keeper.take(tensor, exact)
        if model is not None:
            announce(model)
            for module in model.modules():
                _CONVERTED.pop(module, None)
        self.forget_originals()
        self._handles, self._before, self._active = [], [], False
        self.buffers = LowBuffers()

    def _wide(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        low, wide = tensor.data, tensor.data.to(dtype)
        original = self.originals.get(tensor, self.buffers.originals.get(tensor))
        if original is None or original.shape != low.shape:
            return wide
        original = original.to(low.device)  # the model may have been moved since
        return torch.where(original.to(low.dtype) == low, original.to(wide), wide)

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Within, the model is an fp32 model with the same values: no casts, 16-bit tensors widened copies.

        For evaluation, copies and averages, not for training: what is written to a widened copy is lost. With
        masters: `with masters.swap(), conversion.suspended(): ...` evaluates with them.
        """
        if self._policies or any(is_shard(tensor) for tensor, _ in self._before):
            raise UnsupportedError(
                "a sharded model cannot be evaluated with fp32 weights in place: evaluate it under "
                "torch.no_grad() as it is, or load hs.optim.fp32_state_dict(model, optimizer), each value's "
                "full_tensor(), into an fp32 model"
            )
        before = {id(tensor): dtype for tensor, dtype in self._before}
        modules = [*self.model.modules()]
        stores: list[dict[str, Any]] = [cast(Any, s) for m in modules for s in (m._parameters, m._buffers)]
        places = [(store, key, t) for store in stores for key, t in store.items() if id(t) in before]
        stand_ins = {id(t): stand_in(t, before[id(t)]) for *_, t in places}
        was_on, self._power.on = self._power.on, False
        try:
            for store, key, tensor in places:
                store[key] = stand_ins[id(tensor)]
            refresh_flat(modules)
            yield
        finally:
            for store, key, tensor in places:
                store[key] = tensor
            refresh_flat(modules)
            self._power.on = was_on


class Keeper(Protocol):
    """Takes over the fp32 values of weights as they are rounded, one by one: no model is there twice."""

    def take(self, parameter: Tensor, value: Tensor) -> bool:
        """Keep the value of a parameter, which has its new dtype; false where it cannot be given back."""
        ...

    def exact(self, parameter: Tensor) -> Tensor | None:
        """Return what it keeps for a parameter, in fp32; None for nothing."""
        ...


def convert(
    model: nn.Module,
    plan_or_level: Plan | Level | str,
    dtype: str | torch.dtype | None = None,
    *,
    plan: Plan | None = None,
    keep_originals: bool | Collection[Tensor] | None = None,
    keep_shards: bool = False,
) -> Conversion:
    """Convert a model in place to a level ("O2"), a plan, or a level with a plan on top; returns the record.

    At O2 floating parameters become `dtype`, those of normalisation layers stay fp32, and the model's
    floating outputs are cast to fp32. At O3 all parameters become `dtype`. At both orthogonal
    parametrizations compute in fp32, for want of 16-bit kernels. O0 and O1 change nothing. Inputs and buffers
    are data and keep their dtype: they are cast where they meet a 16-bit op, by its rule in a region, to the
    dtype of its weight outside of one. (Statistics of normalisations and vectors of spectral norms follow
    their weights.) A plan says it by module path; a module in fp32 computes in fp32 and gives fp32. Integer
    tensors, complex numbers and 8-bit floats are untouched, gradients follow their parameters, modules with
    `to_float` keep what it asked for.

    Args:
        model: any module, before DDP; a compiled one is looked into.
        plan_or_level: a `Plan`, a `Level`, or the name of a level.
        dtype: fp16 or bf16; None takes the level's word or asks the device.
        plan: rules on top of the level or plan.
        keep_originals: keep the fp32 weights that train in `Conversion.originals`; None does where the level
        has masters, and so does a collection of parameters, those of frozen ones included.
        keep_shards: leave fp32 shards of `fully_shard` as they are, as masters, and have it gather them in
        the level's dtype.

    Raises:
        ConfigError: an unknown level or dtype, no parameters, a model converted before or already in DDP.
        PlanError: a rule that matches nothing, or a tied weight whose modules want different dtypes.
        UnsupportedError: lazy parameters without a shape, a dtype this device cannot compute in.
    """
    return Casting.of(
        model, plan_or_level, dtype, plan=plan, keep_originals=keep_originals, keep_shards=keep_shards
    ).run()


def _read(
    plan_or_level: Plan | Level | str, dtype: str | torch.dtype | None, model: nn.Module
) -> tuple[Level | None, torch.dtype]:
    level, word = (None, None) if isinstance(plan_or_level, Plan) else level_of(plan_or_level)
    compute_dtype = parse_dtype(dtype) if dtype is not None else word
    device = compute_device(each_parameter([model]))
    if level is not None and level.compute_role == "full":
        return level, level.check_dtype(compute_dtype)
    if compute_dtype is None:
        compute_dtype = torch.bfloat16 if device.type == "meta" else devices.default_dtype(device)
    if level is not None:
        level.check_dtype(compute_dtype)
    if device.type != "meta" and compute_dtype != torch.float32:
        devices.check_dtype(device, compute_dtype)
    return level, compute_dtype


def _check_first(path: str, module: nn.Module) -> None:
    if module in _CONVERTED:
        raise ConfigError(
            f"{path or 'this model'} was already converted to {_CONVERTED[module]}: revert() that first "
            "(hs.revert(model) finds what prepared it)"
        )


def _check_model(model: nn.Module, stores: bool, changes: bool) -> None:
    for path, module in model.named_modules():
        kinds = {base.__name__ for base in type(module).__mro__}
        if changes and (wrappers := kinds & _WRAPPERS.keys()):
            raise ConfigError(f"{type(module).__name__} at {path or 'the root'}: {_WRAPPERS[wrappers.pop()]}")
        _check_first(path, module)
        if any(power.on for power in powers_of(module)):
            raise ConfigError(
                f"{path or 'this model'} was already converted to another precision, as a copy of a "
                "converted model (torch.load of a whole one?): hs.revert(model) makes it fp32 with the "
                "values that it has; masters stayed with the original, whose fp32 state_dict can be loaded"
            )
    parameters = dict(model.named_parameters())
    if not parameters and stores:
        raise ConfigError(f"{type(model).__name__} has no parameters: pass the module that is trained")
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UnsupportedError(
                f"parameter {name!r} has no shape yet: run one batch through the model first"
            )
    if changes:
        check_before(model)


@dataclass
class Casting:
    """One conversion, decided and checked: the record to write, the model's resolved rules, what is kept.

    `keeper` takes over what would be kept as an original.
    """

    record: Conversion
    resolved: Mapping[str, PlanRule]
    low: torch.dtype
    level: Level | None
    keep: bool
    kept_params: Set[Tensor]  # parameters whose fp32 values are kept even where they are frozen
    keep_shards: bool
    stores: bool
    edits: bool
    keeper: Keeper | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan_or_level: Plan | Level | str,
        dtype: str | torch.dtype | None = None,
        *,
        plan: Plan | None = None,
        keep_originals: bool | Collection[Tensor] | None = None,
        keep_shards: bool = False,
    ) -> Casting:
        """Check the arguments, as `convert` has them, and decide what becomes what; changes nothing."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"convert takes a torch.nn.Module, not {type(model).__name__}")
        if plan is not None and not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"got {type(plan).__name__} as a plan: Plan.from_toml(text) makes one")
        inner = unwrap(model)
        level, low = _read(plan_or_level, dtype, inner)
        base = plan_or_level if isinstance(plan_or_level, Plan) else Plan.for_level(cast(Level, level), low)
        if level is not None and level.param_role != "full":
            base = base.with_rules(*rules_declared_by(inner, low))
        rules = base + (plan or Plan.empty())
        edits = bool(plan) or level is None or level.param_role != "full"
        stores = any(rule.dtype is not None for rule in rules.rules)
        _check_model(inner, stores, edits)
        shown = f"{level.name} in {dtype_name(low)}" if level else f"a plan of {len(rules)} rules"
        keep = keep_originals if isinstance(keep_originals, bool) else level is not None and level.masters
        kept_params = {*keep_originals} if isinstance(keep_originals, Collection) else set[Tensor]()
        record, resolved = Conversion(inner, shown), rules.resolve(inner)
        if level is not None and level.compute_role == "full":
            _check_outputs(resolved)
        return cls(record, resolved, low, level, keep, kept_params, keep_shards, stores, edits)

    def __post_init__(self) -> None:
        self.model = self.record.model
        self.changes: list[Change] = []
        self.paths = dict(self.model.named_modules())
        self.names = fqns(self.paths)
        self.wanted = self._find_dtypes()

    def run(self) -> Conversion:
        """Change the model; returns the record, which also takes back a part of it."""
        for path, module in self.paths.items() if self.edits else ():
            _check_first(path, module)  # a model inside of another one, converted since
        with ExitStack() as stack:
            for listen in conversion_listeners:
                stack.enter_context(listen(self.model))
            self._cast_tensors(self.wanted)
            self.record.buffers.watch(self.names, self.paths)
            for path, module in self.paths.items():
                self._edges(path, module)
            self.record.changes = tuple(self.changes)
        if self.record._before or self.record._handles:
            _CONVERTED.update(dict.fromkeys(self.model.modules(), self.record.what))
        return self.record

    def leaves(self, tensor: Tensor) -> bool:
        """Whether a tensor stays as it is, a shard that is a master."""
        return self.keep_shards and is_shard(tensor)

    def _note(
        self, path: str, what: str, before: torch.dtype | None, after: torch.dtype | None, why: str
    ) -> None:
        self.changes.append(Change(self.names[path], what, before, after, why))

    def _find_dtypes(self) -> dict[int, tuple[Tensor, torch.dtype]]:
        """Return the dtype of every floating tensor that a rule reaches, by id; notes each."""
        targets: dict[int, tuple[Tensor, torch.dtype]] = {}
        first: dict[int, str] = {}
        for path, module in self.paths.items():
            rule = self.resolved.get(path)
            for what, key, tensor in own_tensors(module):
                named = self.resolved.get(f"{path}.{key}".lstrip("."), rule) if what == "buffer" else rule
                dtype, why = (named.dtype, named.reason) if named else (None, "")
                if what == "buffer" and named and not named.buffers and not follows_weight(module, key):
                    continue
                if own_dtype(module) is not None:
                    dtype, why = tensor.dtype, "to_float casts it in use"
                if dtype is None:
                    continue
                name = f"{self.names[path]}.{key}".lstrip(".")
                before = targets.setdefault(id(tensor), (tensor, dtype))
                if before[1] != dtype:
                    raise PlanError(
                        f"{first[id(tensor)]!r} and {name!r} are one tied tensor, but the plan wants "
                        f"{dtype_name(before[1])} and {dtype_name(dtype)}: give both modules one rule. Where "
                        "results of a 16-bit head are to be fp32, output='fp32' leaves its weight as it is"
                    )
                if first.setdefault(id(tensor), name) == name:
                    self._note(path, f"{what} {key}", tensor.dtype, dtype, why)
        return targets

    def _cast_tensors(self, targets: Mapping[int, tuple[Tensor, torch.dtype]]) -> None:
        check_groups(self.model, targets, self.low, self.keep_shards)
        if self.keep_shards:
            self.record._policies = gather_in(self.model, targets)
            targets = {key: pair for key, pair in targets.items() if not self.leaves(pair[0])}
        changing = [(tensor, dtype) for tensor, dtype in targets.values() if tensor.dtype != dtype]
        for tensor, data in cast_together(changing):
            self._cast_one(tensor, data)
        if any(is_shard(tensor) for tensor, _ in changing):
            announce(self.model)
        for module in self.paths.values():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()

    def _cast_one(self, tensor: Tensor, data: Tensor) -> None:
        original, record = tensor.data, self.record
        record._before.append((tensor, tensor.dtype))
        replace_data(tensor, data)
        if not isinstance(tensor, nn.Parameter):
            record.buffers.originals[tensor] = original
        elif self.keep and (tensor.requires_grad or tensor in self.kept_params) and not tensor.is_meta:
            try:
                if self.keeper is None or not self.keeper.take(tensor, original):
                    record.originals[tensor] = original
            except BaseException:
                replace_data(tensor, original)
                cast(Keeper, self.keeper).take(tensor, original)
                record._before.pop()
                raise

    def _edges(self, path: str, module: nn.Module) -> None:
        """Hang on a module what its rule asks for: a dtype to compute in, edits of ops, casts."""
        rule = self.resolved.get(path)
        above = self.resolved.get(path.rpartition(".")[0]) if path else None
        computes = None if rule is None else self._computes(rule, above)
        if rule is None or own_dtype(module) is not None:
            pass
        elif computes is not None:
            self._compute_in(path, module, rule, computes, above)
        elif rule.dtype in LOW_DTYPES and isinstance(module, WITH_KERNELS):
            hook = CastToWeight(self.record._power, rule.dtype)
            self.record._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if rule is not None and rule is not above:
            self._edit_ops(path, module, rule, computes)
        if not path:
            self._root_output(module, rule)
        elif computes is None:
            self._storage_edges(path, module, rule, above)
        if rule is not above and above is not None and above.computes is Rule.FULL:
            self._back_to_wide(path, module, rule, above)

    def _computes(self, rule: PlanRule, above: PlanRule | None) -> Rule | None:
        """Return what the ops of a module do; inside one that computes in fp32, 16-bit weights mean LOW."""
        inside_fp32 = above is not None and rule is not above and above.computes is Rule.FULL
        return Rule.LOW if rule.computes is None and inside_fp32 and rule.dtype == self.low else rule.computes

    def _compute_in(
        self, path: str, module: nn.Module, rule: PlanRule, computes: Rule, above: PlanRule | None
    ) -> None:
        edge, dtype = rule is not above, {Rule.FULL: _wide_of(rule), Rule.LOW: self.low}.get(computes)
        if edge or any(t.dtype != dtype for _, _, t in own_tensors(module)):
            self.record._handles += ComputeIn(self.record._power, dtype, edge=edge).attach(module)
            self._note(path, f"ops {computes.value}", None, dtype, rule.reason)
        default_in_fp32 = not rule.required and above is not None and above.computes is Rule.FULL
        ends_fp64 = dtype == torch.float64 and (above is None or above.dtype != dtype)
        output = rule.output or (torch.float32 if ends_fp64 else None)
        if edge and output is not None and output != dtype and not default_in_fp32:
            self._cast("outputs", path, module, output, rule.reason)
        elif edge and dtype in LOW_DTYPES and (above is None or above.dtype in (None, torch.float32)):
            why = "what follows is in fp32 outside of a region"
            self._cast("outputs", path, module, torch.float32, why, regions=False)

    def _edit_ops(self, path: str, module: nn.Module, rule: PlanRule, computes: Rule | None) -> None:
        edits = dict(rule.ops)
        if rule.output == torch.float32 and rule.computes is not Rule.FULL:
            edits = {**dict.fromkeys(FP32_OUT_OPS, Rule.FP32_OUT), **edits}
            self._cast("outputs", path, module, torch.float32, rule.reason)
        elif rule.output is not None and rule.required and computes is None:
            self._cast("outputs", path, module, rule.output, rule.reason, regions=True if path else None)
        if edits:
            level_low = self.level is not None and self.level.param_role == "low"
            stored_low = level_low or rule.dtype == self.low
            outside = Policy(compute_dtype=self.low, table="low") if stored_low else None
            self.record._handles += ComputeIn(self.record._power, ops=edits, outside=outside).attach(module)
            self._note(path, "ops " + ", ".join(edits), None, None, rule.reason)

    def _storage_edges(
        self, path: str, module: nn.Module, rule: PlanRule | None, above: PlanRule | None
    ) -> None:
        """Casts where a module is stored in another dtype than the module above, which only widen."""
        inner = None if rule is None else rule.dtype
        outer = torch.float32 if above is None or above.dtype is None else above.dtype
        float_dtype = own_dtype(module)
        if float_dtype is not None and float_dtype != outer:
            if own_dtype(self.paths.get(path.rpartition(".")[0], self.model)) is None:
                self._cast("outputs", path, module, outer, "to_float above it ends here")
        elif rule is not None and inner not in (None, outer) and rule is not above and float_dtype is None:
            if keeps_fp32(module, outer):
                return
            why = f"rule {rule.pattern!r} stores it in {dtype_name(inner)}"
            if inner == torch.float32:
                self._cast("inputs", path, module, torch.float32, why)
            output = rule.output or (outer if outer == torch.float32 else None)
            if output is not None and (rule.output is None or not rule.required):
                self._cast("outputs", path, module, output, why)

    def _back_to_wide(self, path: str, module: nn.Module, rule: PlanRule | None, above: PlanRule) -> None:
        """Widen what a module gives to one that computes in fp32 or fp64, where no region casts."""
        wide = _wide_of(above)
        is_wide = rule is None or not rule.required or (rule.computes is Rule.FULL and rule.output is None)
        if not is_wide or (rule is not None and rule.required and _wide_of(rule) != wide):
            why = f"rule {above.pattern!r} computes in {dtype_name(wide)} around it"
            self._cast("outputs", path, module, wide, why)

    def _root_output(self, module: nn.Module, rule: PlanRule | None) -> None:
        level = self.level
        if level is None or (rule is not None and rule.required and rule.output is not None):
            return
        output = level.policy(None if level.compute_role == "full" else self.low).output_dtype
        if output is not None:
            self._cast("outputs", "", module, output, f"{level.name} gives its outputs in it")

    def _cast(
        self,
        what: str,
        path: str,
        module: nn.Module,
        dtype: torch.dtype,
        why: str,
        regions: bool | None = None,
    ) -> None:
        """Cast the floating "inputs" or "outputs" of a module; `regions` as `CastOutputs` has it."""
        power = self.record._power
        if what == "inputs":
            handle = module.register_forward_pre_hook(CastInputs(power, dtype), with_kwargs=True)
        else:
            handle = module.register_forward_hook(CastOutputs(power, dtype, regions))
        self.record._handles.append(handle)
        self._note(path, what, None, dtype, why)


def _wide_of(rule: PlanRule) -> torch.dtype:
    """The dtype in which a module computes whose rule is FULL."""
    return torch.float64 if rule.dtype == torch.float64 else torch.float32


def _check_outputs(resolved: Mapping[str, PlanRule]) -> None:
    """Refuse outputs of 16 bits inside a model whose ops are in no region, and all in fp32."""
    for rule in resolved.values():
        if rule.output in LOW_DTYPES and rule.required and rule is not resolved.get(""):
            raise PlanError(
                f"plan rule {rule.pattern!r}: output={dtype_name(rule.output)}: at O0 what follows computes "
                "in fp32 and takes no 16-bit input: leave output out, or prepare at O1"
            )


def is_converted(model: nn.Module) -> bool:
    """Whether a record knows the model, or a module in it, and can take its conversion back."""
    return any(module in _CONVERTED for module in model.modules())
