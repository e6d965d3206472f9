"""Which precision policy holds where: the switch behind `autocast`, per thread, in backward and in compiled
code.

A region's policy is read from three places. In eager code it is a plain thread-local. In compiled code it is
the dtypes of two unused autocast devices, which Dynamo traces, guards and puts into its cache keys. In
backward, where checkpointing has restored torch's autocast state but knows nothing of ours, the autograd node
that is running tells by its sequence number in which region it was made. How an op is run under a policy is
decided in `casts.py`.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

from halfstep import devices
from halfstep.casting import casts
from halfstep.casting.casts import OpOnDevice, Runner
from halfstep.casting.kernel_choice import KernelTable
from halfstep.casting.state import (
    CARRIERS,
    ActiveRegion,
    Code,
    Setting,
    Thread,
    _local,
    _SettingLog,
    _shown,
    _threads,
    caller,
    nesting,
    standing,
    turn,
)
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.formats import dtype_name, parse_dtype
from halfstep.policy import op_names, ops
from halfstep.policy.op_tables import SUMS_IN_16_BITS, sums_in_16_bits
from halfstep.policy.ops import Rule
from halfstep.policy.policy import Policy, dict_to_text, names_dtype
from halfstep.torch_private import (
    OpOverload,
    destroy,
    dispatch_key,
    graph_task,
    has_kernel,
    has_kernel_for,
    node_number,
    not_compiled,
    running_node,
    schema_of,
)

# What torch's TransformerEncoder asks in eval before it makes nested tensors of padded ones, which no op of
# its layers takes in 16 bits.
_ASKS_TO_NEST = "_nested_tensor_from_mask_left_aligned"
_COMPUTE = (torch.float16, torch.bfloat16, torch.float32)


# --- settings ----------------------------------------------------------------------------------------------


def readable(policy: Any) -> str | Policy | None:
    """Return a policy as `resolve` takes it; a dict becomes its text. ConfigError for anything else."""
    if policy is None or isinstance(policy, (str, Policy)):
        return policy
    if isinstance(policy, Mapping):
        return dict_to_text(cast("Mapping[str, Any]", policy)) or None
    raise ConfigError(f"policy must be a Policy, its text, a dict or None, not {type(policy).__name__}")


@functools.lru_cache(maxsize=512)
def resolve(
    device_type: str | None,
    dtype: str | torch.dtype | None,
    enabled: bool,
    policy: str | Policy | None,
    kernels: KernelTable,
) -> Setting:
    """Check the arguments of `autocast` and make its setting; the errors are `autocast`'s."""
    kind = devices.resolve(device_type).type
    if not enabled:
        return setting_for(kind, Policy(compute_dtype=torch.float32), kernels)
    chosen = Policy() if policy is None else Policy.parse(policy)
    if dtype is not None:
        chosen = chosen.with_dtype(parse_dtype(dtype))
    elif not names_dtype(policy):
        chosen = chosen.with_dtype(devices.default_dtype(kind))
    return setting_for(kind, chosen, kernels)


@functools.lru_cache(maxsize=512)
def setting_for(device_type: str, policy: Policy, kernels: KernelTable) -> Setting:
    """Return the setting of a policy on a device type.

    With compute dtype fp32 nothing is cast: the region switches autocast off.

    Raises:
        UnsupportedError: the device has no autocast, or no kernels for the compute dtype.
    """
    dtype = policy.compute_dtype
    if dtype not in _COMPUTE:
        raise UnsupportedError(
            f"autocast cannot compute in {dtype_name(dtype)}: expected bf16, fp16, or fp32 to cast nothing"
        )
    if device_type in CARRIERS or not torch.amp.is_autocast_available(device_type):
        raise UnsupportedError(
            f"torch has no autocast for device type {device_type!r}; use 'cpu' or a registered accelerator"
        )
    if dtype is torch.float32:
        return Setting(policy, device_type)
    devices.check_dtype(device_type, dtype)
    with _registry:
        runners, low = _runners(device_type, policy, kernels)
        runs = {op.name(): run for op, run in runners.items()}
        code = _code_for(policy, kernels)
        return Setting(policy, device_type, code, runs, tuple(runners), low, kernels)


def ready(setting: Setting) -> Setting:
    """Return the same setting, its kernels registered."""
    if setting not in _ready:
        with _registry:
            for op in setting.ops:
                _register(op, setting.device_type)
            _ready.add(setting)
    return setting


def _runners(
    device_type: str, policy: Policy, kernels: KernelTable
) -> tuple[dict[OpOverload, Runner], frozenset[str]]:
    rows, native = policy.rows(device_type), _native_rows(device_type)
    mirrors_torch = policy.table == "torch" and bool(native)
    choose = kernels if device_type == "cpu" and not mirrors_torch else None
    slow = device_type != "cpu" and not mirrors_torch and devices.is_slow(device_type, policy.compute_dtype)
    runs: dict[OpOverload, Runner] = {}
    low: set[str] = set()
    sums = sums_in_16_bits(device_type)
    in_place = {f"{name}_": row for name, row in rows.items() if row.rule is Rule.WIDEST}
    rows = {**in_place, **rows}
    edits = (name for name in rows if name.removesuffix("_") in policy.edits)
    for name in (*edits, *sums) if mirrors_torch else {**rows, **native, **dict.fromkeys(sums)}:
        for op in _overloads(name):
            site, row = _site(op, device_type), rows.get(name)
            if mirrors_torch and site.native is None and name.removesuffix("_") not in policy.edits:
                row = None  # a name of torch's list that its autocast does not act on
            run = casts.runner(site, row, policy.compute_dtype, slow, choose)
            if run is None:
                continue
            runs[op] = run
            if row is not None and row.rule is Rule.LOW:
                low.add(op.name())
    runs.update(dict.fromkeys(_overloads(_ASKS_TO_NEST), casts.keep_padding))
    return runs, frozenset(low)


def _native_rows(device_type: str) -> Mapping[str, ops.OpRow]:
    """Return what torch's own Autocast kernels do, for the device types whose lists are known."""
    return ops.rows("torch", device_type) if device_type in ("cpu", "cuda") else {}


def _overloads(name: str) -> Iterator[OpOverload]:
    """The overloads of an op that reach the Autocast key with tensors and write none of their arguments.

    A name in "_" is an op in place, which writes its first one.
    """
    if name in op_names.OWN_OPS:
        return
    namespace, _, short = name.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), short, None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        schema = schema_of(op)
        if (
            (not schema.is_mutable or short.endswith("_"))
            and any("Tensor" in str(a.type) for a in schema.arguments)
            and has_kernel(op.name())
        ):
            yield op


# --- kernels at the Autocast key ---------------------------------------------------------------------------

_registry = threading.RLock()
_sites: dict[tuple[OpOverload, str], OpOnDevice] = {}
_ready: set[Setting] = set()
_registered: set[tuple[OpOverload, str]] = set()
_libraries: dict[str, torch.library.Library] = {}


def key_name(device_type: str) -> str:
    """Return the dispatch key at which a device type's regions work."""
    private_type = torch.device("privateuseone").type
    return f"Autocast{'PrivateUse1' if device_type == private_type else device_type.upper()}"


def _site(op: OpOverload, device_type: str) -> OpOnDevice:
    """Return the site of an op, with torch's own kernel as it was before ours was registered."""
    site = _sites.get((op, device_type))
    if site is None:
        name, native, rule = key_name(device_type), None, None
        if has_kernel_for(op.name(), name):
            native = torch.library.get_kernel(op, name)
            row = _native_rows(device_type).get(schema_of(op).name.removeprefix("aten::"))
            rule = None if row is None else row.rule
        site = _sites[op, device_type] = OpOnDevice(op, device_type, dispatch_key(name), native, rule)
    return site


def _register(op: OpOverload, device_type: str) -> None:
    if (op, device_type) in _registered:
        return
    site = _site(op, device_type)
    namespace = op.namespace
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid", category=UserWarning)
        _libraries[namespace].impl(op, _kernel(site), key_name(device_type), with_keyset=True)
    _registered.add((op, device_type))


def release() -> None:
    """Take every kernel of ours out of the dispatcher; the next region registers what it needs again.

    Kernels left in place cost `torch.autocast` regions elsewhere about 2 us on each op that has one, and
    change nothing else. Raises ConfigError inside a region.
    """
    if any(t.entered for t in _threads):
        raise ConfigError("release() was called inside an autocast region; leave every region first")
    with _registry:
        for library in _libraries.values():
            destroy(library)
        for memory in (_libraries, _registered, _ready):
            memory.clear()


def _kernel(site: OpOnDevice) -> Callable[..., Any]:
    """Return the kernel registered for an op: under our policy its runner, else what torch alone would do."""
    op, device_type = site.op.name(), site.device_type
    local, task = _local, graph_task
    deeper, back = torch.autocast_increment_nesting, torch.autocast_decrement_nesting

    @not_compiled
    def kernel(keyset: Any, *arguments: Any, **kwargs: Any) -> Any:
        args: casts.Args = arguments
        thread = local.thread
        setting = thread.active.get(device_type)
        try:
            depth = deeper()
        finally:
            back()
        if setting is None or depth != thread.depth or task() != -1:
            setting = _elsewhere(device_type)
            if setting is _STRAIGHT:
                return site.call_below_autocast(args, kwargs)
        elif thread.frozen and op in setting.low:
            args = casts.use_cast_weights(thread.frozen, args, setting.dtype)
        run = None if setting is None else setting.runs.get(op)
        return site.call_as_torch_autocast(keyset, args, kwargs) if run is None else run(keyset, args, kwargs)

    return kernel


# --- where no region of this thread is in force, or backward runs ------------------------------------------

# Stands for "autocast off": an op of a backward formula, which runs in the dtype its forward ran in.
_STRAIGHT = Setting(Policy(), "cpu")


def _elsewhere(device_type: str) -> Setting | None:
    """The setting in force where the thread-local alone does not tell; None for a region of torch's own."""
    if graph_task() != -1:
        return _in_backward(device_type)
    setting = _local.thread.active.get(device_type)
    if setting is not None and _is_switched_to(setting):
        return setting
    return None if torch.is_autocast_cache_enabled() else _from_code(device_type)


def in_force(device_type: str) -> Setting | None:
    """The setting that ops on `device_type` run under now; None where autocast is off or torch's own."""
    if not torch.is_autocast_enabled(device_type):
        return None
    setting = _elsewhere(device_type)
    return None if setting is _STRAIGHT else setting


def _in_backward(device_type: str) -> Setting | None:
    who = caller()
    inside = who.active.get(device_type)
    if inside is not None:
        around = (e.began for e in reversed(who.entered) if e.setting.device_type == device_type)
        depth, task = next(around, (0, -1))
        if task == graph_task():
            return inside
        if nesting() == (depth if who.ident == threading.get_ident() else 0):
            # Not forward run again, which would be inside one more region, of checkpoint's making.
            return inside if isinstance(running_node(), _PythonNode) else _STRAIGHT
    if torch.is_autocast_cache_enabled():
        return None
    return _find_setting(_first_node(), device_type, who)


_PythonNode = torch.autograd.function.BackwardCFunction


def _first_node() -> Any:
    """Return the running autograd node that forward made.

    Reentrant checkpointing runs a backward inside the backward of a Python Function, through a graph made on
    the spot; the outermost such Function on the stack is of the graph that forward made.
    """
    node = running_node()
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_argcount:
            ctx = frame.f_locals.get(code.co_varnames[0])
            if isinstance(ctx, _PythonNode):
                node = ctx
        frame = frame.f_back
    return node


def _find_setting(node: Any, device_type: str, caller: Thread) -> Setting | None:
    """The setting under which forward made a node; every thread numbers its own, so the likeliest goes first.

    That is the thread that calls backward, then those that were in a region most recently.
    """
    number = -1 if node is None else node_number(node)
    caller_history = caller.histories.get(device_type)
    histories = [t.histories.get(device_type) for t in list(_threads)]
    others = [h for h in histories if h is not None and h is not caller_history]
    for history in (caller_history, *sorted(others, key=lambda h: h.latest, reverse=True)):
        setting = None if history is None else history.at(number)
        if setting is not None:
            return setting
    return None


# --- compiled code -----------------------------------------------------------------------------------------

_dtypes = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_policies: dict[Code, tuple[Policy, KernelTable]] = {}
_codes: dict[tuple[Policy, KernelTable], Code] = {}


def _code_for(policy: Policy, kernels: KernelTable) -> Code:
    """A pair of dtypes that stands for a policy: by content, so that caches on disk tell policies apart."""
    if (policy, kernels) not in _codes:
        if len(_policies) == len(_dtypes) ** 2:
            raise UnsupportedError(
                f"this process has used {len(_policies):,} pairs of a policy and a table of kernels, and can "
                "tell no more apart: keep a policy and use it again, or start a new process"
            )
        rules = sorted((name, row.rule.value) for name, row in policy.rows().items())
        place = int(
            hashlib.sha256(f"{policy} {rules} {kernels.digest} {SUMS_IN_16_BITS}".encode()).hexdigest(), 16
        )
        while (code := (_dtypes[place % len(_dtypes)], _dtypes[place // 64 % len(_dtypes)])) in _policies:
            place += 1
        _codes[policy, kernels], _policies[code] = code, (policy, kernels)
    return _codes[policy, kernels]


def _from_code(device_type: str) -> Setting | None:
    if not torch.is_autocast_enabled(CARRIERS[0]):
        return None
    code = (torch.get_autocast_dtype(CARRIERS[0]), torch.get_autocast_dtype(CARRIERS[1]))
    entry = _policies.get(code)
    if entry is None or entry[0].compute_dtype is not torch.get_autocast_dtype(device_type):
        return None
    return ready(setting_for(device_type, *entry))


def _is_switched_to(setting: Setting) -> bool:
    """Whether torch's state says so too: compiled code may be in a region of its own."""
    now = (torch.get_autocast_dtype(CARRIERS[0]), torch.get_autocast_dtype(CARRIERS[1]))
    return now == setting.code and torch.get_autocast_dtype(setting.device_type) is setting.dtype


# --- entering and leaving ----------------------------------------------------------------------------------


def capture_outer(owner: object, setting: Setting) -> ActiveRegion:
    """Return what a region finds that is about to be entered; nothing is changed but kernels registered."""
    thread = _local.thread
    if setting not in _ready:
        ready(setting)
    if _shown.get(None) is not thread:
        thread.show()
    active, began = thread.active.get(setting.device_type), (nesting(), graph_task())
    return ActiveRegion(owner, setting, active, thread.depth, began, standing(setting.switch))


def enter(region: ActiveRegion) -> None:
    """Begin this region on this thread."""
    thread, setting = _local.thread, region.setting
    thread.entered = *thread.entered, region
    thread.depth = region.began[0] + 1
    _put(thread, setting.device_type, setting if setting.runs else None)
    turn(setting.switch)


def leave(region: ActiveRegion) -> None:
    """End that region; regions may end in any order. It may be done again where a signal broke it off."""
    thread = _local.thread
    turn(region.torchs)
    _put(thread, region.setting.device_type, region.active)
    thread.depth = region.depth
    thread.entered = tuple(other for other in thread.entered if other is not region)


def innermost_of(owner: object) -> ActiveRegion:
    """Return the innermost region of this thread that is the owner's."""
    return next(region for region in reversed(_local.thread.entered) if region.owner is owner)


def _put(thread: Thread, device_type: str, setting: Setting | None) -> None:
    if setting is None:
        thread.active.pop(device_type, None)
    else:
        thread.active[device_type] = setting
    if device_type not in thread.histories:
        thread.histories[device_type] = _SettingLog()
    thread.histories[device_type].record(setting)


def forget() -> None:
    """Rebuild every setting at its next use; for when what is known of a device has changed."""
    for memory in (resolve, setting_for):
        memory.cache_clear()
