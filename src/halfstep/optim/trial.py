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
                problem, states = _try(kind, options, of_group, shapes, device)
            except Exception as error:
                problem, states = f"in a trial on dense tensors it raised {type(error).__name__}: {error}", []
    if problem:
        raise UnsupportedError(f"compact({kind.__name__}): {problem}")
    tensor_states = [(k, v) for state in states for k, v in state.items() if isinstance(v, Tensor)]
    narrow = frozenset(key for key, value in tensor_states if value.dtype in LOW_DTYPES)
    return Found(dict(optimizer.defaults), narrow, _find_copies(kind, options, of_group, shapes[0], device))


def _tensors_in(params: Any) -> Iterator[Tensor]:
    for item in [params] if isinstance(params, Tensor) else params:
        if isinstance(item, Mapping):
            yield from _tensors_in(item["params"])
        elif isinstance(t := item[-1] if isinstance(item, tuple) else item, Tensor):
            yield t


def _try(
    kind: Kind, options: Group, group: Group, shapes: Sequence[Any], device: Any
) -> tuple[str, list[Group]]:
    """Return what makes some steps of all parameters together others than ours, or nothing; and the states.

    The last parameter is in a group of its own, with another learning rate where the optimizer takes one.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def draw() -> list[Tensor]:
        return [3 * torch.randn(shape, generator=generator, device="cpu").to(device) for shape in shapes]

    values, grads, lr = draw(), [draw() for _ in range(STEPS)], group.get("lr")
    parts = [range(len(shapes) - 1), range(len(shapes) - 1, len(shapes))]
    groups = [group, {**group, "lr": lr / 2} if isinstance(lr, float) else group]
    try:
        together = _steps(kind, options, list(zip(groups, parts)), values, grads)
    except Exception:
        groups = [group, group]
        together = _steps(kind, options, list(zip(groups, parts)), values, grads)
    alone = [
        row
        for of_part, part in zip(groups, parts)
        for n in part
        for row in _steps(kind, options, [(of_part, range(n, n + 1))], values, grads)
    ]
    if not _same(together, alone):
        return (
            "its update of a parameter depends on other parameters, or on torch's random numbers, so "
            f"that they cannot be stepped a bucket at a time. {_INSTEAD}"
        ), []
    states: list[Group] = [{} for _ in values]
    for method, now in [("train", [None] * len(values)), *(("step", now) for now in grads)]:
        for g, part in enumerate(parts) if hasattr(kind, method) else ():
            done = [
                run_alone(kind, options, groups[g], [values[n].clone()], [_copy(now[n])], [states[n]], method)
                for n in part
            ]
            groups[g] = done[0][0]
            for n, (_, (value,), (state,)) in zip(part, done):
                values[n], states[n] = value, state
    if not _same(together, [(values[n], groups[g]) for g, part in enumerate(parts) for n in part]):
        return f"it keeps more from step to step than `state` and `param_groups`. {_INSTEAD}", []
    return "", states


def _find_copies(kind: Kind, options: Group, group: Group, shape: Any, device: Any) -> frozenset[str]:
    """Return the names of the states that are the weight after a step without a gradient."""
    weight = torch.linspace(1, 2, math.prod(shape), device=device).view(shape)
    states, zero = [dict[str, Any]()], torch.zeros_like(weight)
    for method in ("train", "step") if hasattr(kind, "train") else ("step",):
        group, _, states = run_alone(kind, options, group, [weight.clone()], [zero.clone()], states, method)
    alike = [(k, v) for k, v in states[0].items() if isinstance(v, Tensor) and v.shape == weight.shape]
    return frozenset(key for key, v in alike if torch.allclose(v.to(weight), weight, rtol=0.2))


def _steps(
    kind: Kind, options: Group, groups: Sequence[tuple[Group, range]], values: Any, grads: Any
) -> list[tuple[Tensor, Group]]:
    """Return value and group of the parameters after some steps of one optimizer."""
    params, groups = (
        {n: nn.Parameter(values[n].clone()) for _, part in groups for n in part},
        copy.deepcopy(groups),
    )
    optimizer: Any = kind(
        [{**group, "params": [params[n] for n in part]} for group, part in groups], **options
    )
    if hasattr(optimizer, "train"):
        optimizer.train()
    for now in grads:
        for n, p in params.items():
            p.grad = now[n].clone()
        optimizer.step()
    after = [
        (part, {k: v for k, v in g.items() if k != "params"})
        for (_, part), g in zip(groups, optimizer.param_groups)
    ]
    return [(params[n].detach(), group) for part, group in after for n in part]


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()


def _same(a: Any, b: Any) -> bool:
    """Whether nests hold the same values, bit for bit but for NaN, which is one."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(
        torch.allclose(x, y, 0.0, 0.0, equal_nan=True) if isinstance(x, Tensor) else x == y
        for x, y in zip(leaves, others)
    )
