"""Regions in which ops run under a precision policy: `autocast` and what goes with it.

Which policy holds where lives in `regions.py`, what a rule does to an op in `casts.py`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import Any, ParamSpec, Self, TypeVar

import torch

from halfstep import devices, torch_private
from halfstep.casting import kernel_probes, regions, state
from halfstep.casting.exporting import record_casts
from halfstep.casting.kernel_choice import Kernels, KernelTable, install_measured, table_of
from halfstep.casting.state import Setting, Switch
from halfstep.errors import ConfigError
from halfstep.policy.policy import Policy
from halfstep.torch_private import (
    allow_in_graph,
    constant_when_traced,
    not_compiled,
    put_back_when_broken,
)

P = ParamSpec("P")
R = TypeVar("R")


@constant_when_traced
def _switch(
    device_type: str | None,
    dtype: str | torch.dtype | None,
    enabled: bool,
    policy: str | Policy | None,
    kernels: Kernels,
) -> Switch:
    setting = regions.ready(regions.resolve(device_type, dtype, enabled, policy, table_of(kernels)))
    if setting.code is not None and torch.compiler.is_exporting():
        record_casts()
    put_back_when_broken((setting.device_type, *state.CARRIERS))
    return setting.switch


_dynamo_traces_autocast = constant_when_traced(torch_private.dynamo_traces_autocast)


def _kernels_around() -> KernelTable:
    """Return the kernels of the region around this one, else the default."""
    for entered in reversed(state.thread().entered):
        if entered.setting.kernels is not None:
            return entered.setting.kernels
    return table_of()


def _setting(
    device_type: str | None,
    dtype: str | torch.dtype | None,
    enabled: bool,
    policy: str | Policy | None,
    kernels: Kernels,
) -> Setting:
    table = _kernels_around() if kernels is None else table_of(kernels)
    return regions.resolve(device_type, dtype, enabled, policy, table)


class autocast:
    """A region in which ops run under a precision policy: a context manager and a decorator.

    Args:
        device_type: "cpu", "cuda" or another device type, or a torch.device; None takes the accelerator,
            else the CPU.
        dtype: what LOW ops run in: bf16, fp16, or fp32 to cast nothing. None takes the policy's compute
            dtype, or without a policy the device's own (`devices.default_dtype`).
        enabled: False casts nothing inside, also within another region.
        policy: a `Policy`, its text form, a dict such as {"full": ["tanh"]}, or the name of an op table
            ("torch" gives what torch.autocast gives).
        kernels: by which kernels LOW ops run on a CPU: "measured" (the fastest on this machine), "native"
            (torch's own), "rounded" (fp32 arithmetic on rounded values), or a TOML file of choices. None
            takes those of the region around, else what the environment variable HALFSTEP_KERNELS says, else
            "measured".

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
        device_type: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        enabled: bool = True,
        policy: str | Policy | Mapping[str, Any] | None = None,
        kernels: Kernels = None,
    ) -> None:
        if isinstance(device_type, torch.device):
            device_type = device_type.type
        self._arguments = (device_type, dtype, enabled, regions.readable(policy), kernels)
        self._traced: list[Switch] = []
        self._setting: Setting | None = None
        if not torch.compiler.is_compiling():
            self._setting = _setting(*self._arguments)

    @not_compiled
    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            return self._enter_traced()
        region = regions.capture_outer(self, self._setting or _setting(*self._arguments))
        try:
            regions.enter(region)
            return self
        except BaseException:  # a signal may come between any two lines
            regions.leave(region)
            raise

    @not_compiled
    def __exit__(self, *_: object) -> None:
        region = None
        try:
            if torch.compiler.is_compiling():
                return self._exit_traced()
            region = regions.innermost_of(self)
            regions.leave(region)
        except BaseException:
            regions.leave(region or regions.innermost_of(self))
            raise

    def _enter_traced(self) -> Self:
        if torch.compiler.is_dynamo_compiling() and not _dynamo_traces_autocast():
            torch_private.graph_break("this torch cannot compile a halfstep region: newer ones can")
        switch = _switch(*self._arguments)
        self._traced = [*self._traced, state.standing(switch)]
        state.turn(switch)
        torch.autocast_increment_nesting()
        return self

    def _exit_traced(self) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        state.turn(self._traced[-1])
        self._traced = self._traced[:-1]

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


allow_in_graph(autocast)

# --- functions that stop and go on -------------------------------------------------------------------------


def _drive(arguments: tuple[Any, ...], running: Any) -> Generator[Any, Any, Any]:
    """Run a generator or an awaitable to its end: in the region while it runs, out while it waits."""
    step: Callable[[], Any] = functools.partial(running.send, None)
    while True:
        try:
            with autocast(*arguments):
                item = step()
        except StopIteration as end:
            return end.value
        try:
            step = functools.partial(running.send, (yield item))
        except GeneratorExit:
            running.close()
            raise
        except BaseException as error:
            step = functools.partial(running.throw, error)


_awaited: Any = types.coroutine(_drive)


def _decorate_generator(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Wrap a generator function or a coroutine function."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _awaited(arguments, function(*args, **kwargs))

        return coroutine

    @functools.wraps(function)
    def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _drive(arguments, function(*args, **kwargs)))

    return generator


def _decorate_async_generator(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        running = function(*args, **kwargs)
        step: Callable[[], Any] = functools.partial(running.asend, None)
        while True:
            try:
                item = await _awaited(arguments, step())
            except StopAsyncIteration:
                return
            try:
                step = functools.partial(running.asend, (yield item))
            except GeneratorExit:
                await running.aclose()
                raise
            except BaseException as error:
                step = functools.partial(running.athrow, error)

    return wrapper


# --- what is active ----------------------------------------------------------------------------------------


def disabled(device_type: str | None = None) -> autocast:
    """Return a region that casts nothing: `autocast(device_type, enabled=False)`."""
    return autocast(device_type, enabled=False)


def active_policy(device_type: str | None = None) -> Policy | None:
    """The policy of the innermost region of this thread (on `device_type`), None outside or where it is
    off."""
    if torch.compiler.is_compiling():
        return policy_under_trace(device_type)
    for setting in (entered.setting for entered in reversed(state.thread().entered)):
        if device_type is None or setting.device_type == device_type:
            return setting.policy if setting.code is not None else None
    return None


@constant_when_traced
def policy_under_trace(device_type: str | None) -> Policy | None:
    """Return the policy of the region that the code Dynamo traces is in, which is in no thread's list."""
    setting = regions.in_force(devices.resolve(device_type).type)
    return None if setting is None else setting.policy


install_measured(kernel_probes.make_measured_table(autocast))
