"""Regions in which ops run under a precision policy: `autocast` and what goes with it.

This is the public face. Which policy holds where lives in `regions.py`, what a rule does to an op in
`casting.py`.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch.utils import _pytree as pytree

from halfstep.autocast import casts, regions
from halfstep.autocast.regions import Switch
from halfstep.errors import ConfigError
from halfstep.formats import parse_dtype
from halfstep.policy import policy as policies
from halfstep.policy.ops import OpRow
from halfstep.policy.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")


def _switch(
    device_type: str | None, dtype: str | torch.dtype | None, enabled: bool, policy: str | Policy | None
) -> Switch:
    return regions.ready(regions.resolve(device_type, dtype, enabled, policy)).switch


# Dynamo calls it once and puts the answer into the graph (what torch.compiler.assume_constant_result does,
# without importing Dynamo).
_switch._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


class autocast:
    """A region in which ops run under a precision policy: a context manager and a decorator.

    Args:
        device_type: "cpu", "cuda" or another device type; None takes the accelerator, else the CPU.
        dtype: what LOW ops run in: bf16, fp16, or fp32 to cast nothing. None takes the policy's compute
        dtype,
            or without a policy the device's own (`devices.default_dtype`).
        enabled: False casts nothing inside, also within another region.
        policy: a `Policy`, its text form, or the name of an op table ("torch" gives what torch.autocast
        gives).

    Regions nest, one instance may be entered again at any time, also by itself and in several threads.
    Weights are cast at every use; see `frozen_weights`. A decorated generator or coroutine function is in the
    region while it runs and out of it while it waits.

    Raises:
        ConfigError: an unknown dtype, policy, table or device.
        UnsupportedError: the device cannot compute in this dtype.
        BannedOpError: from an op in the region that the policy refuses.
    """

    def __init__(
        self,
        device_type: str | None = None,
        dtype: str | torch.dtype | None = None,
        enabled: bool = True,
        policy: str | Policy | None = None,
    ) -> None:
        self._arguments = (device_type, dtype, enabled, policy)
        self._states: dict[int, list[tuple[Any, ...]]] = {}
        if torch.compiler.is_compiling():
            self._traced = _switch(device_type, dtype, enabled, policy)
        else:
            self._setting = regions.resolve(device_type, dtype, enabled, policy)

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            self._states[0] = [*self._states.get(0, []), regions.turn(self._traced)]
        else:
            self._states.setdefault(threading.get_ident(), []).append(regions.enter(self._setting))
        return self

    def __exit__(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            regions.turn_back(self._traced[0], self._states[0][-1])
            self._states[0] = self._states[0][:-1]
        else:
            regions.leave(self._states[threading.get_ident()].pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, generator function, coroutine function or asynchronous generator function."""
        if not callable(function):
            raise ConfigError(f"autocast(...) decorates functions, not {type(function).__name__}; use `with`")
        arguments = self._arguments
        if inspect.isasyncgenfunction(function):
            return _decorate_async_generator(function, arguments)
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            return _decorate_generator(function, arguments)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with autocast(*arguments):
                return function(*args, **kwargs)

        return wrapper


# --- functions that stop and go on -------------------------------------------------------------------------


def _decorate_generator(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Wrap a generator function or a coroutine function: in the region while it runs, out while it waits."""

    def drive(running: Any) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: running.send(None)  # noqa: E731
        while True:
            try:
                with autocast(*arguments):
                    item = step()
            except StopIteration as end:
                return end.value
            step = yield from _next_step(running, item)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await types.coroutine(drive)(function(*args, **kwargs))

        return coroutine

    @functools.wraps(function)
    def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from drive(function(*args, **kwargs)))

    return generator


def _next_step(running: Any, item: Any) -> Generator[Any, Any, Callable[[], Any]]:
    """Hand `item` out, and return the call that hands what comes back to the function that waits."""
    try:
        sent = yield item
    except GeneratorExit:
        running.close()
        raise
    except BaseException as error:
        thrown = error
        return lambda: running.throw(thrown)
    return lambda: running.send(sent)


def _decorate_async_generator(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    in_region = _decorate_generator

    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        running = function(*args, **kwargs)
        step: Callable[[], Any] = lambda: running.__anext__()  # noqa: E731
        while True:

            async def advance(step: Callable[[], Any] = step) -> Any:
                return await step()

            try:
                item = await in_region(advance, arguments)()
            except StopAsyncIteration:
                return
            try:
                sent = yield item
            except GeneratorExit:
                await running.aclose()
                raise
            except BaseException as error:
                thrown = error
                step = lambda: running.athrow(thrown)  # noqa: E731, B023
            else:
                step = lambda: running.asend(sent)  # noqa: E731, B023

    return wrapper


# --- what is active ----------------------------------------------------------------------------------------


def disabled(device_type: str | None = None) -> autocast:
    """A region that casts nothing: `autocast(device_type, enabled=False)`."""
    return autocast(device_type, enabled=False)


def active_policy(device_type: str | None = None) -> Policy | None:
    """The policy of the innermost region of this thread (on `device_type`), None outside or where it is
    off."""
    for setting in reversed(regions.thread().entered):
        if device_type is None or setting.device_type == device_type:
            return setting.policy if setting.switch[1] else None
    return None


def _call_own(name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function registered by `halfstep.op`: one op, cast by its rule, with no casting inside."""
    kind = _first_device((args, kwargs))
    row, compute = _rule(name, kind)
    if row is None:
        return fn(*args, **kwargs)
    args, kwargs = casts.cast_arguments(row, compute, args, kwargs)
    with autocast(kind, enabled=False):
        return fn(*args, **kwargs)


def _rule(name: str, device_type: str) -> tuple[OpRow | None, torch.dtype]:
    setting = regions.in_force(device_type)
    return (None, torch.float32) if setting is None else (setting.policy.rows().get(name), setting.dtype)


_rule._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
policies.set_own_op_caller(_call_own)


# --- torch.autograd.Function -------------------------------------------------------------------------------


def _first_device(args: Any) -> str:
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    floating = [t for t in tensors if t.is_floating_point()]
    return (floating or tensors)[0].device.type if tensors else "cpu"


def _here(device_type: str) -> Callable[[], Any]:
    """What enters again the region, ours or torch's, that is in force now."""
    setting = regions.in_force(device_type)
    if setting is not None:
        return functools.partial(autocast, device_type, policy=setting.policy)
    on, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return functools.partial(torch.autocast, device_type, dtype if on else None, on)


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: str | torch.dtype | None = None,
) -> Callable[..., Any]:
    """Decorate `forward` of a `torch.autograd.Function`; its `backward` takes `custom_bwd`.

    Without `cast_inputs`, forward runs in the region it is called in and backward in the same. With it,
    inside a region the floating inputs are cast to that dtype, and both run with autocast off.

    Args:
        fwd: the static method; None when called with keywords only.
        device_type: whose region counts; None takes the device of the first floating input.
        cast_inputs: a dtype; fp64 inputs keep theirs.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    wanted = None if cast_inputs is None else parse_dtype(cast_inputs)

    @functools.wraps(fwd)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        kind = device_type or _first_device((args, kwargs))
        if wanted is None or not torch.is_autocast_enabled(kind):
            ctx.halfstep_region = _here(kind)
            return fwd(ctx, *args, **kwargs)
        ctx.halfstep_region = functools.partial(autocast, kind, enabled=False)

        def change(value: Any) -> Any:
            fits = isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == kind
            return value.to(wanted) if fits and value.dtype is not torch.float64 else value

        args, kwargs = pytree.tree_map(change, (args, kwargs))
        with ctx.halfstep_region():
            return fwd(ctx, *args, **kwargs)

    return wrapper


def custom_bwd(
    bwd: Callable[..., Any] | None = None, *, device_type: str | None = None
) -> Callable[..., Any]:
    """Decorate `backward` of a Function whose forward has `custom_fwd`: it runs in forward's region.

    `device_type` is accepted for likeness with torch.amp; forward decides.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        region = getattr(ctx, "halfstep_region", None)
        if region is None:
            raise ConfigError("custom_bwd needs custom_fwd on the forward of the same Function")
        with region():
            return bwd(ctx, *grads)

    return wrapper


# --- frozen weights ----------------------------------------------------------------------------------------


@contextmanager
def frozen_weights(module: torch.nn.Module) -> Generator[None]:
    """A scope in which autocast casts each fp32 weight of `module` once instead of at every use.

    For recurrent cells and shared weights. The promise is the caller's: no weight changes inside, for a
    change would not be seen. Every use sends its gradient to the fp32 weight, where they are summed in fp32.
    The copies (2 bytes an element) live until the scope ends and in graphs made inside; the scope holds for
    this thread, and does nothing in compiled code, which casts once anyway.
    """
    if torch.compiler.is_compiling():
        yield
        return
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"frozen_weights takes a torch.nn.Module, got {type(module).__name__}")
    frozen = regions.thread().frozen
    weights = [p for p in module.parameters() if p.dtype is torch.float32 and id(p) not in frozen]
    frozen.update((id(p), (p, {})) for p in weights)
    try:
        yield
    finally:
        for p in weights:
            del frozen[id(p)]
