"""What each rule does to the tensors of one op: the runners that autocast regions install.

A runner gets the arguments of an op at the Autocast dispatch key, casts them as the rule says, and calls the
op below that key, so that autograd records the casts and backward runs in the dtype of forward. Which region
is active, and where, is decided in `regions.py`; nothing here has state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from halfstep.casting.fp32_out import PRODUCTS
from halfstep.casting.kernel_choice import KernelTable
from halfstep.casting.kernel_runners import (
    CASTABLE,
    PLAIN,
    choice_of_gradients,
    make_low_op_runner,
    tensors_of,
)
from halfstep.casting.kinds.convolution import sums_in_fp32
from halfstep.casting.long_sums import with_fp32_sums
from halfstep.casting.saved_low import SavedLow
from halfstep.errors import BannedOpError
from halfstep.formats import dtype_name
from halfstep.policy.op_tables import CONVOLUTIONS
from halfstep.policy.ops import REMEDIES, OpRow, Rule
from halfstep.torch_private import (
    DispatchKey,
    OpOverload,
    call_of,
    exclude_key,
    functorch_level,
    in_forward_ad,
    is_jit_tracing,
    keys_below,
    not_compiled,
    schema_of,
)

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Runner = Callable[[Any, Args, Kwargs], Any]

_F32, _F64 = torch.float32, torch.float64
_LOW = frozenset({torch.float16, torch.bfloat16})
_WIDE = frozenset({_F64, torch.complex32, torch.complex64, torch.complex128})
# These promote mixed dtypes themselves, autocast or not.
_PROMOTES_ITSELF = frozenset({"cat", "stack", "where", "addcdiv", "addcmul", "atan2"})
# Op -> positions of affine parameters that must fit the input. Running statistics are changed in place: never
# cast.
_NORM_PARAMETERS: Mapping[str, tuple[int, ...]] = {
    "layer_norm": (2, 3),
    "native_layer_norm": (2, 3),
    "group_norm": (2, 3),
    "rms_norm": (2,),
    "batch_norm": (1, 2),
    "instance_norm": (1, 2),
}


@dataclass(frozen=True)
class OpOnDevice:
    """One overload of an op on one device type, with torch's own Autocast kernel if it has one.

    `native_rule`: what that kernel does; None where there is no kernel or its rule is not known.
    """

    op: OpOverload
    device_type: str
    key: DispatchKey
    native: Any
    native_rule: Rule | None

    @property
    def name(self) -> str:
        """The op as policies name it."""
        return schema_of(self.op).name.removeprefix("aten::")

    def call_below_autocast(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the op with autocast out of the way, for itself and for the ops it is made of.

        Its sums are fp32, whichever dtype it runs in.
        """
        return self.without_autocast(self.summing, *args, **kwargs)

    @functools.cached_property
    def summing(self) -> Callable[..., Any]:
        """The op's own kernels, or what stands for them where they add in 16 bits."""
        return with_fp32_sums(self.name, self.device_type, call_of(self.op))

    def without_autocast(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call with autocast out of the way."""
        exclude, key = exclude_key, self.key
        exclude(key, True)
        try:
            return call(*args, **kwargs)
        finally:
            exclude(key, False)

    def call_own_kernel(self, keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        """Call the op as if nothing were registered for it; the ops it is made of are still autocast."""
        if any(isinstance(args[i], int | float | complex) for i in _tensor_places(self.op) if i < len(args)):
            # `x * 2.0`: redispatching does not take a number where the schema has a tensor.
            return self.call_below_autocast(args, kwargs)
        return self.op.redispatch(keyset & keys_below(self.key), *args, **kwargs)

    def call_as_torch_autocast(self, keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        """Do what torch alone would do inside `torch.autocast`."""
        if self.native is None:
            return self.call_own_kernel(keyset, args, kwargs)
        return self.native.call_boxed(keyset, *args, **kwargs)


def keep_padding(keyset: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether a padded batch can become a nested tensor: no, as under torch.autocast on CUDA."""
    del keyset, args, kwargs
    return False


@functools.cache
def _tensor_places(op: OpOverload) -> tuple[int, ...]:
    """Return positions of the arguments that the schema declares as single tensors."""
    return tuple(i for i, a in enumerate(schema_of(op).arguments) if str(a.type) == "Tensor")


def runner(
    site: OpOnDevice, row: OpRow | None, compute: torch.dtype, slow: bool, kernels: KernelTable | None = None
) -> Runner | None:
    """Return the runner for an op whose rule is `row`; None where torch's own behaviour already is that rule.

    `slow`: the device has no fast kernels for `compute`; LOW ops then round their inputs, compute in fp32 and
    round the output, forward and backward. `kernels`: where given, it says so for each op instead.
    """
    if row is None and site.native is None:
        under, call = site.without_autocast, site.summing
        return None if call is call_of(site.op) else lambda _, args, kwargs: under(call, *args, **kwargs)
    if row is None:
        return site.call_own_kernel
    rule, native = row.rule, site.native_rule
    if rule is Rule.BANNED and site.name.endswith("_"):
        return functools.partial(_refuse_in_place, site, row.reason, compute)
    if rule is Rule.BANNED:
        return functools.partial(_refuse, site.name, row.reason, compute)
    if rule is Rule.LOW:
        is_right = site.device_type != "cpu" or site.name not in CONVOLUTIONS.split() or sums_in_fp32(compute)
        casts_in_cpp = native is Rule.LOW and is_right
        low = (_native_low_runner if casts_in_cpp else _low_runner)(site, compute)
        rounded = _slow_runner(site, compute)
        if kernels is None:
            return rounded if slow else low
        straight = site.native.call_boxed if casts_in_cpp else None
        return make_low_op_runner(
            site.op.name(), compute, kernels, site.without_autocast, low, rounded, straight
        )
    if rule is Rule.FP32_OUT:
        return _fp32_out_runner(site, compute, kernels)
    if rule is Rule.FULL:
        if native is Rule.FULL:
            return None
        return _dtype_argument_runner(site) if row.via_dtype else _full_runner(site)
    if rule is Rule.WIDEST and site.name.removesuffix("_") not in _PROMOTES_ITSELF:
        return _in_place_runner(site) if site.name.endswith("_") else _widest_runner(site)
    if rule is Rule.KEEP and site.name in _NORM_PARAMETERS:
        return _norm_runner(site)
    if rule is Rule.KEEP and native is Rule.LOW:
        return _keep_runner(site)
    # Torch's own kernel stands in the way: even its promotion refuses fp16 in a bf16 region.
    is_native = site.native is None and site.summing is call_of(site.op)
    return None if is_native else lambda _, args, kwargs: site.call_below_autocast(args, kwargs)


def _dtypes(args: Args, kwargs: Kwargs) -> set[torch.dtype]:
    dtypes = {t.dtype for t in tensors_of(args)}
    return dtypes | {t.dtype for t in tensors_of(kwargs.values())} if kwargs else dtypes


def _map(args: Args, kwargs: Kwargs, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Args, Kwargs]:
    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, (list, tuple)):
            return [one(v) for v in cast("list[Any]", value)]
        return value

    return [one(a) for a in args], {k: one(v) for k, v in kwargs.items()} if kwargs else kwargs


def _caster(device_type: str, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Cast what a rule may change to `dtype`, tensors of other devices (0-d scalars on the CPU) left
    alone."""

    def change(t: torch.Tensor) -> torch.Tensor:
        if t.dtype is not dtype and t.dtype in CASTABLE and t.device.type == device_type:
            return t.to(dtype)
        return t

    return change


def _cast_below(site: OpOnDevice, dtype: torch.dtype, args: Args, kwargs: Kwargs) -> Any:
    return site.call_below_autocast(*_map(args, kwargs, _caster(site.device_type, dtype)))


def _run_wide(site: OpOnDevice, wide: set[torch.dtype], args: Args, kwargs: Kwargs) -> Any:
    """Run a LOW op of fp64, wholly in fp64, or of complex numbers, which stay."""
    return _cast_below(site, _F64, args, kwargs) if _F64 in wide else site.call_below_autocast(args, kwargs)


def _low_runner(site: OpOnDevice, compute: torch.dtype) -> Runner:
    to_compute = _caster(site.device_type, compute)

    def run(_: Any, args: Args, kwargs: Kwargs) -> Any:
        if wide := _dtypes(args, kwargs) & _WIDE:
            return _run_wide(site, wide, args, kwargs)
        return site.call_below_autocast(*_map(args, kwargs, to_compute))

    return run


def _native_low_runner(site: OpOnDevice, compute: torch.dtype) -> Runner:
    """Torch's kernel casts in C++; only fp64 inputs need more."""
    call, general = site.native.call_boxed, _low_runner(site, compute)
    lists = any("[]" in str(a.type) and "Tensor" in str(a.type) for a in schema_of(site.op).arguments)

    def run(keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        for value in tensors_of(args) if lists else args:
            if getattr(value, "dtype", None) is _F64:
                return general(keyset, args, kwargs)
        return call(keyset, *args, **kwargs)

    return run


def _slow_runner(site: OpOnDevice, compute: torch.dtype, rounds_result: bool = True) -> Runner:
    """fp32 arithmetic on values rounded to `compute`: what a tensor core does (see `saved_low.py`).

    Without `rounds_result` the result, and the gradient that comes back for it, stay in fp32, and so does an
    fp32 tensor that is added to the result.
    """
    added = None if rounds_result else _ADDED.get(site.name)
    device_type, to_compute = site.device_type, _caster(site.device_type, compute)

    def widen(saved: SavedLow, t: torch.Tensor) -> torch.Tensor:
        if t.dtype not in CASTABLE or t.device.type != device_type:
            return t
        low = to_compute(t)
        return saved.remember(low.to(_F32), low)

    def narrow(out: Any) -> Any:
        narrows = rounds_result and isinstance(out, torch.Tensor) and out.dtype is _F32
        return out.to(compute) if narrows else out

    def run(_: Any, args: Args, kwargs: Kwargs) -> Any:
        if wide := _dtypes(args, kwargs) & _WIDE:
            return _run_wide(site, wide, args, kwargs)
        if functorch_level() is not None:
            # Function transforms run this once for each of their levels: only plain casts bear that.
            if rounds_result:
                return _cast_below(site, compute, args, kwargs)
            changed, named = _map(args, kwargs, to_compute)
            return _cast_below(site, _F32, _keep_added(changed, args, added), named)
        saved = SavedLow()
        with saved:
            changed, named = _map(args, kwargs, functools.partial(widen, saved))
            out = site.call_below_autocast(_keep_added(changed, args, added), named)
        return tuple(narrow(o) for o in out) if isinstance(out, (tuple, list)) else narrow(out)

    return run


_ADDED: Mapping[str, int] = {
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), 0),
    **dict.fromkeys(("linear", *CONVOLUTIONS.split()), 2),
}
"""By product: the position of what is added to it, a bias say."""


def _keep_added(changed: Args, args: Args, added: int | None) -> Args:
    """Return the changed arguments, with an fp32 tensor at the position `added` as it was among `args`."""
    if added is None or added >= len(args) or getattr(args[added], "dtype", None) is not _F32:
        return changed
    return [*changed[:added], args[added], *changed[added + 1 :]]


def _fp32_out_runner(site: OpOnDevice, compute: torch.dtype, kernels: KernelTable | None) -> Runner:
    """16-bit inputs, fp32 sums and result: by CUDA's own products where it has them, else fp32 arithmetic.

    Products of 16-bit numbers are exact in fp32 (and in TF32, which holds all bits of bf16 and fp16), so the
    two differ in the order of their sums alone. On a CPU whose 16-bit kernels are the fastest for a gradient
    that is rounded first, as on CUDA; elsewhere it stays in fp32.
    """
    in_fp32, product = _slow_runner(site, compute, rounds_result=False), PRODUCTS.get(site.name)
    if product is None or (kernels is None and site.device_type != "cuda"):
        return in_fp32
    to_compute = _caster(site.device_type, compute)

    def run(keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        strange = kwargs or functorch_level() is not None or in_forward_ad() or is_jit_tracing()
        plain = not strange and all(type(t) in PLAIN for t in tensors_of(args))
        if plain and not _dtypes(args, kwargs) - CASTABLE:
            choice = None if kernels is None else choice_of_gradients(kernels, site.op.name(), args, compute)
            if kernels is None or choice is not None:
                low = _map(args, kwargs, to_compute)[0]
                out = site.without_autocast(product, choice, *_keep_added(low, args, _ADDED.get(site.name)))
                if out is not NotImplemented:
                    return out
        return in_fp32(keyset, args, kwargs)

    return run


def _full_runner(site: OpOnDevice) -> Runner:
    to_full = _caster(site.device_type, _F32)
    return lambda _, args, kwargs: site.call_below_autocast(*_map(args, kwargs, to_full))


def _dtype_argument_runner(site: OpOnDevice) -> Runner:
    """Pass `dtype=torch.float32`: the kernel reads 16 bits and accumulates in fp32, no copy is made.

    An op called with a dtype of the user's keeps it. Overloads that have no such argument are cast.
    """
    names = [a.name for a in schema_of(site.op).arguments]
    if "dtype" not in names:
        return _full_runner(site)
    position = names.index("dtype")

    def run(keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        dtype = args[position] if position < len(args) else kwargs.get("dtype")
        if dtype is not None or not _dtypes(args, {}) & _LOW:
            return site.call_below_autocast(args, kwargs)
        return site.call_below_autocast(args[:position], {**kwargs, "dtype": _F32})

    return run


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the dtype that holds all the floating ones of 16 bits or more; None when there is none.

    bf16 and fp16 together give fp32, as torch promotes them.
    """
    floating = [d for d in dtypes if d in CASTABLE or d is _F64]
    return functools.reduce(torch.promote_types, floating) if floating else None


def _widest_runner(site: OpOnDevice) -> Runner:
    def run(_: Any, args: Args, kwargs: Kwargs) -> Any:
        dtypes = _dtypes(args, kwargs)
        target = widest(dtypes)
        if target is None or len(dtypes) == 1:
            return site.call_below_autocast(args, kwargs)
        return _cast_below(site, target, args, kwargs)

    return run


def _keep_runner(site: OpOnDevice) -> Runner:
    """What a product is given is cast to the dtype of its first floating tensor."""

    def run(_: Any, args: Args, kwargs: Kwargs) -> Any:
        if wide := _dtypes(args, kwargs) & _WIDE:
            return _run_wide(site, wide, args, kwargs)
        dtype = next((t.dtype for t in tensors_of([*args, *kwargs.values()]) if t.dtype in CASTABLE), _F32)
        return _cast_below(site, dtype, args, kwargs)

    return run


def _in_place_runner(site: OpOnDevice) -> Runner:
    """Cast what is written to the dtype of the tensor that it is written into."""

    def run(_: Any, args: Args, kwargs: Kwargs) -> Any:
        target = args[0].dtype
        if (target in CASTABLE or target is _F64) and len(_dtypes(args, kwargs) & {*CASTABLE, _F64}) > 1:
            return _cast_below(site, target, args, kwargs)
        return site.call_below_autocast(args, kwargs)

    return run


def _norm_runner(site: OpOnDevice) -> Runner:
    """Give out the dtype of the input and round no fp32 parameter: beside one a 16-bit input is widened
    where the kernel cannot mix the two.

    CPU kernels take fp32 parameters beside a 16-bit input, but for `rms_norm`; CUDA's do where there are
    running statistics in that op. Other parameters are cast to the dtype of these statistics or of the input.
    Beside statistics of another dtype that are not fp32, or in fp64, all of it is computed in a wider one.
    """
    positions = _NORM_PARAMETERS[site.name]
    has_statistics = site.name in ("batch_norm", "instance_norm")
    mixes = site.name != "rms_norm" and (
        site.device_type == "cpu" or (site.device_type == "cuda" and has_statistics)
    )

    def run(_: Any, args: Args, kwargs: Kwargs) -> Any:
        x, running_mean = args[0], args[3] if has_statistics else None
        into = (x if running_mean is None else running_mean).dtype
        dtypes = {args[i].dtype for i in positions if i < len(args) and args[i] is not None}
        if x.dtype is not into and (into is not _F32 or x.dtype is _F64):
            wide = _F64 if _F64 in {x.dtype, into} else _F32
            return _beside_statistics(site, wide, args, kwargs)
        if x.dtype is _F64 and dtypes - {_F64}:  # as a LOW op: all of it in fp64
            return site.call_below_autocast(cast_parameters(args, _F64), kwargs)
        if not dtypes - {into} or (mixes and dtypes == {_F32}):
            return site.call_below_autocast(args, kwargs)
        is_low = x.dtype is not _F32 and x.dtype in CASTABLE
        if not is_low or _F32 not in dtypes or not (running_mean is None or into is _F32):
            return site.call_below_autocast(cast_parameters(args, into), kwargs)
        saved = SavedLow()
        with saved:
            wide = [saved.remember(x.to(_F32), x), *args[1:]]
            out = site.call_below_autocast(cast_parameters(wide, _F32), kwargs)
        return (out[0].to(x.dtype), *out[1:]) if isinstance(out, tuple) else out.to(x.dtype)

    def cast_parameters(args: Args, into: torch.dtype) -> Args:
        changed = list(args)
        for i in positions:
            value = args[i] if i < len(args) else None
            if value is not None and value.dtype in CASTABLE and (into in CASTABLE or into is _F64):
                changed[i] = value.to(into)
        return changed

    return run


def _beside_statistics(site: OpOnDevice, dtype: torch.dtype, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Run a normalisation in `dtype` and write to its statistics, 4th and 5th of `args`, what they became."""
    wide = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]
    out = site.call_below_autocast(wide, kwargs)
    for kept, new in zip(args[3:5], wide[3:5], strict=True):
        kept.copy_(new)
    return out.to(args[0].dtype)


def refusal(name: str, reason: str, compute: torch.dtype, remedy: str | None = None) -> BannedOpError:
    """Return the error for a banned op, with the remedy."""
    remedy = remedy or REMEDIES.get(
        name, f"call it outside the region, or allow it: policy.with_rules(full=[{name!r}]) or low, keep"
    )
    return BannedOpError(f"{name} is banned under {dtype_name(compute)} autocast: {remedy}. Why: {reason}")


def _refuse(name: str, reason: str, compute: torch.dtype, _: Any, args: Args, kwargs: Kwargs) -> Any:
    raise refusal(name, reason, compute)


def _refuse_in_place(
    site: OpOnDevice, reason: str, compute: torch.dtype, keyset: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Refuse an op in place on 16-bit tensors, to which it must not round its result."""
    if _dtypes(args, kwargs) & {torch.float16, torch.bfloat16}:
        raise refusal(f"{site.name} on 16 bits", reason, compute, REMEDIES.get(site.name))
    return site.call_own_kernel(keyset, args, kwargs)


# Weights cast once for a scope, by id: the weight and its copies by dtype.
Frozen = dict[int, tuple[torch.Tensor, dict[torch.dtype, torch.Tensor]]]


class _UseFrozen(torch.autograd.Function):
    """One use of a weight that was cast before: its gradient goes to the weight itself, summed there in
    fp32."""

    @staticmethod
    @not_compiled
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.view_as(copy)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_outputs[0].to(_F32), None


def use_cast_weights(frozen: Frozen, args: Args, dtype: torch.dtype) -> Args:
    """Arguments with each frozen fp32 weight replaced by its copy in `dtype`, made at the first use."""

    def one(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [one(v) for v in cast("list[Any]", value)]
        entry = frozen.get(id(value)) if isinstance(value, torch.Tensor) else None
        if entry is None or value.dtype is not _F32:
            return value
        copy = entry[1].get(dtype)
        if copy is None:
            copy = entry[1][dtype] = value.detach().to(dtype)
        if torch.is_grad_enabled() and value.requires_grad:
            return _UseFrozen.apply(value, copy)
        return copy

    return [one(a) for a in args]
