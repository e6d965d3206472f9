"""One step of another package's optimizer in a new instance, and a trial of whether that is the same step."""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from halfstep.errors import UnsupportedError
from halfstep.policy.levels import LOW_DTYPES
from halfstep.torch_private import pytree
from halfstep.trees import needs_closure

Group = dict[str, Any]
Kind = type[torch.optim.Optimizer]
STEPS = 12
"""Of a trial: more than the intervals at which common optimizers do something else."""
COUNT = "roundings"
"""The option of a group that counts its steps, for random rounding."""
OURS = ("params", "param_names", "master", "state_dtype", "clip_norm", "skip_nonfinite", COUNT)
"""What a group holds that the optimizer does not see."""
_INSTEAD = "Give hs.prepare the optimizer itself: at level O2 it gets fp32 masters"


def run_alone(
    kind: Kind,
    options: Group,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    states: Sequence[Group],
    method: str = "step",
    args: Sequence[Any] = (),
) -> tuple[Group, list[Tensor], list[Group]]:
    """Run a method of a new optimizer over fp32 `values`, which may change in place.

    Its parameter group has the options of `group`, its parameters have these gradients and states. Returns
    the options, values and states afterwards.
    """
    params, own = [nn.Parameter(value) for value in values], copy.deepcopy(dict(group))
    optimizer = kind([{**own, "params": params}], **options)
    optimizer.param_groups[0].update(own)  # some begin with other options than they were given
    for p, grad, state in zip(params, grads, states):
        p.grad = grad
        if state:
            optimizer.state[p] = state
    run = getattr(kind, method)
    run = run.__wrapped__ if getattr(run, "hooked", False) else run  # global hooks are for the outer step
    run(optimizer, *args)
    after = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return after, [p.detach() for p in params], [dict(optimizer.state.get(p, {})) for p in params]


class Found(NamedTuple):
    """What a trial shows of an optimizer."""

    defaults: Group
    narrow: frozenset[str]
    """The states that it keeps in 16 bits beside fp32 weights."""
    copies: frozenset[str]
    """The states that hold weights, such as `z` of schedule-free ones: few bits would move the weights."""


def check_kind(kind: Kind, options: Group, params: Any) -> Found:
    """Return what a trial shows of an optimizer that can be stepped a bucket at a time.

    A trial on small fp32 tensors, with the options of the first group in `params`, finds out: tensors,
    `(name, tensor)` pairs or groups of these. UnsupportedError where a bucket of parameters in a new instance
    a step would not be the same.
    """
    tensors = [t for t in _tensors_in(params) if not isinstance(t, UninitializedParameter)]
    shapes = list({t.dim(): tuple(min(n, 6) for n in t.shape) for t in tensors}.values()) or [(6, 4)]
    shapes = (shapes * 3)[: max(3, len(shapes))]
    device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        first = next((dict(item) for item in params if isinstance(item, Mapping)), {})
        group = {key: value for key, value in first.items() if key not in OURS}
        values = [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]
        optimizer = kind([{**group, "params": values}], **options)
        if needs_closure(optimizer):
            raise UnsupportedError(
                f"compact({kind.__name__}): its step computes the loss by a closure, as often as it likes, "
                "which no bucket of parameters can: call its own step(closure) on fp32 weights"
            )
        of_group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                narrow = _try(kind, options, of_group, shapes, device)
                copies = _find_copies(kind, options, of_group, shapes[0], device)
            except UnsupportedError:
                raise
            except Exception as error:
                raise UnsupportedError(
                    f"compact({kind.__name__}): in a trial on dense tensors it raised "
                    f"{type(error).__name__}: {error}"
                ) from error
    return Found(dict(optimizer.defaults), narrow, copies)


def _tensors_in(params: Any) -> Iterator[Tensor]:
    for item in [params] if isinstance(params, Tensor) else params:
        if isinstance(item, Mapping):
            yield from _tensors_in(item["params"])
        elif isinstance(t := item[-1] if isinstance(item, tuple) else item, Tensor):
            yield t


def _try(kind: Kind, options: Group, group: Group, shapes: Sequence[Any], device: Any) -> frozenset[str]:
    """Return which states are 16 bits wide; UnsupportedError where our steps are others than the optimizer's.

    The last parameter is in a group of its own, with another learning rate where the optimizer takes one.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def draw() -> list[Tensor]:
        return [3 * torch.randn(shape, generator=generator, device="cpu").to(device) for shape in shapes]

    values, grads, lr, last = draw(), [draw() for _ in range(STEPS)], group.get("lr"), len(shapes) - 1
    parts = [range(last), range(last, last + 1)]
    groups = [group, {**group, "lr": lr / 2} if isinstance(lr, float) else group]
    try:
        together = _steps(kind, options, list(zip(groups, parts)), values, grads)
    except Exception:
        groups = [group, group]
        together = _steps(kind, options, list(zip(groups, parts)), values, grads)
    alone = [
        _steps(kind, options, [(own, [n])], values, grads)[0]
        for own, part in zip(groups, parts)
        for n in part
    ]
    if not _same(together, alone):
        raise UnsupportedError(
            f"compact({kind.__name__}): its update of a parameter depends on other parameters, or on torch's "
            f"random numbers, so that they cannot be stepped a bucket at a time. {_INSTEAD}"
        )
    states: list[Group] = [{} for _ in values]
    for method, now in [("train", grads[0]), *(("step", now) for now in grads)]:
        for g, part in enumerate(parts) if hasattr(kind, method) else ():
            before = groups[g]
            for n in part:
                one = [values[n].clone()], [now[n].clone()], [states[n]]
                groups[g], (values[n],), (states[n],) = run_alone(kind, options, before, *one, method)
    if not _same(together, [(values[n], groups[g]) for g, part in enumerate(parts) for n in part]):
        raise UnsupportedError(
            f"compact({kind.__name__}): it keeps more from step to step than `state` and `param_groups`. "
            f"{_INSTEAD}"
        )
    tensors = [(k, v) for state in states for k, v in state.items() if isinstance(v, Tensor)]
    return frozenset(key for key, value in tensors if value.dtype in LOW_DTYPES)


def _find_copies(kind: Kind, options: Group, group: Group, shape: Any, device: Any) -> frozenset[str]:
    """Return the names of the states that are the weight after a step without a gradient."""
    weight = torch.linspace(1, 2, math.prod(shape), device=device).view(shape)
    states, zero = list[Group]([{}]), torch.zeros_like(weight)
    for method in ("train", "step") if hasattr(kind, "train") else ("step",):
        group, _, states = run_alone(kind, options, group, [weight.clone()], [zero.clone()], states, method)
    alike = [(k, v) for k, v in states[0].items() if isinstance(v, Tensor) and v.shape == weight.shape]
    return frozenset(key for key, v in alike if torch.allclose(v.to(weight), weight, rtol=0.2))


def _steps(
    kind: Kind, options: Group, groups: Sequence[tuple[Group, Sequence[int]]], values: Any, grads: Any
) -> list[tuple[Tensor, Group]]:
    """Return value and group of the parameters after some steps of one optimizer."""
    params = [nn.Parameter(value.clone()) for value in values]
    own = [{**copy.deepcopy(group), "params": [params[n] for n in part]} for group, part in groups]
    optimizer = kind(own, **options)
    getattr(optimizer, "train", lambda: None)()
    for now in grads:
        for p, grad in zip(params, now):
            p.grad = grad.clone()
        optimizer.step()
    after = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [(params[n].detach(), group) for (_, part), group in zip(groups, after) for n in part]


def _same(a: Any, b: Any) -> bool:
    """Whether nests hold the same values, bit for bit but for NaN, which is one."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(
        torch.allclose(x, y, 0.0, 0.0, equal_nan=True) if isinstance(x, Tensor) else x == y
        for x, y in zip(leaves, others)
    )
