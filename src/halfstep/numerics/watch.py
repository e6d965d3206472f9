"""`watch(model, optimizer)`: what the numbers do while a model trains, without changing one of them.

Always: each parameter's largest gradient and whether it is finite, scale and skips. Every n steps: exponent
histograms of weights, activations, their gradients, weight gradients and updates by module path, and the
share of updates that rounding swallowed. All of it through hooks that `close()` removes. On a CPU a spread of
each tensor's elements is copied as it passes and all are counted together at the end of the step.

Under `torch.compile` activations and their gradients are inside the compiled code and are not seen; weights,
weight gradients and updates are. Values between modules (a residual stream, functional code) are seen only
as far as they are some module's output; the tape of `trace_step` sees them all.

Headroom of a tensor in a format is log2(largest number / largest magnitude): 3 means that it may grow
eightfold. A forecast fits a line through the latest headrooms and is made only where the trend is clear.
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.devices.transfer import AsyncCopy, send_to_host
from halfstep.distributed import gather, local_of, world_size
from halfstep.errors import ConfigError, show
from halfstep.formats import FORMATS, Format, dtype_name, format_of
from halfstep.gradients.per_parameter import amaxes, amaxes_of, worst_of
from halfstep.names import fqn
from halfstep.numerics.histogram import Counts, count, count_many
from halfstep.numerics.snapshot import as_list, is_session, replaying, scale_of
from halfstep.optim.masters import weight_of
from halfstep.optim.resolution import randomly_rounded, value_tensors
from halfstep.torch_private import graph_task, pytree
from halfstep.trees import Ends, dense_values, ends_of, needs_closure, parameters_of, scalar_on

#: Points a forecast looks back on, and the least it needs.
WINDOW, LEAST = 32, 6
#: Headroom in bits beyond which a forecast would be a guess.
FAR = 10.0
#: A trend counts when its slope is this many standard errors from zero.
CLEAR = 4.0


def headroom(amax: float, fmt: str | Format) -> float:
    """Return the bits between `amax` and the largest number of `fmt`; inf for 0, -inf if not finite."""
    fmt = format_of(fmt)
    if not math.isfinite(amax):
        return -math.inf
    return math.log2(fmt.max / amax) if amax > 0 else math.inf


@dataclass(frozen=True)
class Trend:
    """A line through log2(largest magnitude): `slope` in bits a step, `now` its value at the last step."""

    slope: float
    error: float
    now: float

    @property
    def clear(self) -> bool:
        """Whether the slope is more than noise."""
        return abs(self.slope) > CLEAR * self.error and abs(self.slope) > 1e-9


def trend(steps: Sequence[int], amax: Sequence[float]) -> Trend | None:
    """Fit a least-squares line through the last WINDOW finite, nonzero points; None with fewer than LEAST."""
    points = [(s, math.log2(m)) for s, m in zip(steps, amax) if m > 0 and math.isfinite(m)][-WINDOW:]
    if len(points) < LEAST:
        return None
    xs, ys = zip(*points)
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    if spread == 0:
        return None
    slope, start = statistics.linear_regression(xs, ys)
    rest = sum((y - start - slope * x) ** 2 for x, y in points)
    error = math.sqrt(rest / (len(points) - 2) / spread)
    return Trend(slope, error, start + slope * xs[-1])


@dataclass(frozen=True)
class Forecast:
    """`path` leaves the range of `format` in about `steps` steps if it goes on as it does."""

    path: str
    kind: str
    format: str
    steps: int

    def __str__(self) -> str:
        what = "" if self.kind == "activation" else f" ({self.kind})"
        return f"{self.path!r}{what} overflows {self.format} in about {self.steps} steps"


def forecast(
    path: str, kind: str, steps: Sequence[int], amax: Sequence[float], fmt: Format
) -> Forecast | None:
    """Return when the tensor outgrows `fmt`; None without a clear trend, or beyond 6 times the steps seen."""
    line = trend(steps, amax)
    if line is None or not line.clear or line.slope <= 0 or math.log2(fmt.max) - line.now > FAR:
        return None
    lately = trend(steps[-LEAST:], amax[-LEAST:])
    if lately is None or lately.slope < line.slope / 2:
        return None  # the growth of early training, which flattens out
    steps_left = (math.log2(fmt.max) - line.now) / line.slope
    span = steps[-1] - steps[max(0, len(steps) - WINDOW)]
    if not 0 < steps_left < 6 * span:
        return None
    digits = max(0, math.floor(math.log10(max(steps_left, 1))) - 1)
    return Forecast(path, kind, fmt.name, max(1, round(steps_left, -digits).__trunc__()))


@dataclass
class Sample:
    """One tensor at one step: `counts` from exponent `first` on, and what an exponent cannot tell."""

    step: int
    amax: float
    dtype: str
    first: int
    counts: tuple[int, ...]
    zeros: int
    infs: int
    nans: int
    scale: float = 1.0

    @property
    def total(self) -> int:
        """Return the number of elements counted."""
        return sum(self.counts) + self.zeros + self.infs + self.nans


@dataclass
class Series:
    """What was seen of one tensor: `kind` is weight, activation, activation_grad, gradient or update.

    `steps` and `amax` go back to the start (thinned when long); `samples` are the latest histograms.
    """

    path: str
    kind: str
    steps: list[int] = field(default_factory=list)
    amax: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def note(self, step: int, amax: float) -> None:
        """Append a largest magnitude alone."""
        self.steps.append(step)
        self.amax.append(amax)
        if len(self.steps) > 4096:
            half = len(self.steps) // 2
            self.steps[:half], self.amax[:half] = self.steps[:half:2], self.amax[:half:2]


_COUNTED_TOGETHER = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _SampledTensor:
    """One tensor of a sampled step: its ends, and its bins or the elements yet to be counted.

    `elements` are fp32 copies, which hold 16-bit values exactly, and are counted by that format's exponents.
    """

    dtype: str
    ends: Ends
    bins: Tensor | None = None
    elements: tuple[Tensor, ...] = ()

    def join(self, other: _SampledTensor) -> _SampledTensor:
        """Return the sum of both; the later alone where they cannot be added."""
        if self.dtype != other.dtype or (self.bins is None) != (other.bins is None):
            return other
        ends = torch.minimum(self.ends[0], other.ends[0]), torch.maximum(self.ends[1], other.ends[1])
        bins = None if self.bins is None or other.bins is None else self.bins + other.bins
        return _SampledTensor(self.dtype, ends, bins, self.elements + other.elements)


def _see(t: Tensor, exact: bool) -> _SampledTensor:
    """Record a tensor; `exact` counts every element, otherwise an even spread of them."""
    t = dense_values(t.detach())
    name, ends = dtype_name(t.dtype), ends_of(t)
    if exact or t.device.type != "cpu" or t.dtype not in _COUNTED_TOGETHER:
        return _SampledTensor(name, ends, count(t if exact else spread(t)).bins)
    return _SampledTensor(name, ends, None, (spread(t).reshape(-1).to(torch.float32, copy=True),))


def _finish_bins(entries: list[_SampledTensor]) -> list[Tensor]:
    """Return the bins of each, fp64: [zero, exponents..., inf, nan], fp32's where counted together."""
    parts = [torch.cat(s.elements) for s in entries if s.elements]
    # fp64 holds every count below 2**53, and lets one copy carry counts and magnitudes.
    together = iter(count_many(parts).double()) if parts else iter(())
    return [next(together) if s.bins is None else s.bins.double() for s in entries]


def spread(t: Tensor, most: int = 1 << 12) -> Tensor:
    """Return about `most` elements evenly spread over a tensor, some of every column."""
    size = t.numel()
    if size <= 2 * most or t.layout != torch.strided or t.is_complex():
        return t
    stride = size // most
    while math.gcd(stride, t.shape[-1]) > 1:
        stride += 1
    return t.reshape(-1)[::stride]


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TOGETHER = 64
"""Steps whose notes are made in one go, unless somebody reads them before."""


@dataclass(frozen=True)
class StepNote:
    """One step: largest gradient over all parameters (as backward left it, scale included), and its fate."""

    step: int
    amax: float
    scale: float
    taken: bool
    worst: str

    @property
    def finite(self) -> bool:
        """Whether every gradient was."""
        return math.isfinite(self.amax)


@dataclass(frozen=True)
class LostUpdates:
    """At one step: share of the elements with a gradient whose weight did not change; dtype of the worst."""

    step: int
    share: float
    worst: str
    worst_share: float
    dtype: str


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    every: int = 10,
    keep: int = 64,
    dtype: str | torch.dtype | Format | None = None,
    scaler: Any = None,
    exact: bool = False,
) -> Watch:
    """Watch a model in training as long as the result is alive, which is also a context manager.

    Args:
        model: the model, before or after DDP.
        optimizer: an optimizer, several, or the Session that `prepare` returned.
        every: take histograms every so many steps; 0 never.
        keep: histograms kept for each tensor.
        dtype: the format headroom is counted in; None takes the session's compute dtype, else the tensors'.
        scaler: a GradScaler used beside a plain optimizer, for the scale's history.
        exact: count every element; otherwise a large tensor's histogram is of 4,096 elements spread evenly
            over it. Largest magnitudes are of all elements either way.

    Raises:
        ConfigError: no model, or one without parameters; `every` or `keep` that is no count.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"watch got a {type(model).__name__}, expected the torch.nn.Module that is trained")
    for name, value, least in (("every", every, 0), ("keep", keep, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"watch(..., {name}={show(value)}): expected a whole number, {least} or more")
    return Watch(model, optimizer, every, keep, dtype, scaler, exact)


def leave(listeners: list[Any], listener: Any) -> None:
    """Remove a listener from a list of them, if it is there."""
    if listener in listeners:
        listeners.remove(listener)


def _while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a method as long as its object is alive, without keeping it alive."""
    weak_method = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and (alive := weak_method()) is not None:
            alive(*args, **kwargs)

    return call


class Watch:
    """What `watch` returns. Read `notes`, `series`, `lost`, `headrooms()`, `forecasts()`, `summary()`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        every: int,
        keep: int,
        dtype: str | torch.dtype | Format | None,
        scaler: Any,
        exact: bool,
    ) -> None:
        self.every, self.keep, self.exact = every, keep, exact
        self.step = 0
        self._notes: deque[StepNote] = deque(maxlen=10_000)
        self._all_series: dict[tuple[str, str], Series] = {}
        self._lost: list[LostUpdates] = []
        self._model, self._scaler = model, scaler
        self._session = optimizer if is_session(optimizer) else None
        self._optimizers = as_list(optimizer if self._session is None else self._session.optimizers)
        self._format = None if dtype is None else format_of(dtype)
        self._names: dict[Tensor, str] = {p: fqn(n) for n, p in model.named_parameters()}
        if not self._names:
            raise ConfigError(f"watch got a model without parameters ({type(model).__name__})")
        self._sampling = every > 0
        self._ends: dict[str, Ends] = {}
        self._gradients: tuple[tuple[str, ...], Tensor] | None = None
        self._seen: dict[tuple[str, str], _SampledTensor] = {}
        self._before: dict[Tensor, tuple[Tensor, list[Tensor]]] = {}
        self._late: deque[tuple[AsyncCopy, Callable[[Tensor], None]]] = deque()
        self._scale_of_step = scale_of(self._session, self._scaler)
        self._hooks = ExitStack()
        self._install()
        weakref.finalize(self, self._hooks.close)

    def _install(self) -> None:
        released = {
            p for o in self._optimizers if getattr(o, "release", None) is not None for p in parameters_of(o)
        }
        # All gradients are looked at together when a session's step begins; not over several ranks, where
        # they are averages by then, nor where backward releases them.
        if self._session is not None and world_size() == 1 and not released:
            self._listen(self._session.early_listeners, _while_alive(self._before_step))
        else:
            see = _while_alive(self._on_gradient)
            for parameter, name in self._names.items():
                hook = partial(see, name)
                if parameter in released:
                    self._own_hook(parameter.register_hook(hook))
                elif parameter.requires_grad and parameter.is_leaf:
                    self._own_hook(parameter.register_post_accumulate_grad_hook(partial(_of_gradient, hook)))
        if self.every > 0:
            see = _while_alive(self._on_output)
            for name, module in self._model.named_modules():
                if fqn(name) and not isinstance(module, _CONTAINERS):
                    hook = partial(see, fqn(name))
                    self._own_hook(module.register_forward_hook(hook))
        for optimizer in self._optimizers:
            self._own_hook(optimizer.register_step_pre_hook(_while_alive(self._before_update)))
            self._own_hook(optimizer.register_step_post_hook(_while_alive(self._after_update)))
        if self._session is not None:
            self._listen(self._session.listeners, _while_alive(self._on_outcome))

    def _listen(self, listeners: list[Any], mine: Any) -> None:
        listeners.append(mine)
        self._hooks.callback(leave, listeners, mine)

    def _own_hook(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def close(self) -> None:
        """Remove every hook; what was recorded can still be read."""
        self._hooks.close()

    def __repr__(self) -> str:
        return f"{self.step} steps watched. " + ". ".join(self.summary())

    def _repr_html_(self) -> str:
        """Return the headroom of each tensor as a table, the least first."""
        bits = sorted((room, kind, path) for (kind, path), room in self.headrooms().items())
        rows = "".join(f"<tr><td>{escape(p)}</td><td>{k}</td><td>{room:.1f}</td></tr>" for room, k, p in bits)
        head = "<tr><th>tensor</th><th>kind</th><th>bits left</th></tr>"
        return f"<p>{escape(repr(self))}</p><table>{head}{rows}</table>"

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def format(self) -> Format | None:
        """Return the format headroom is counted in; None means each tensor's own."""
        if self._format is None and self._session is not None:
            return format_of(self._session.policy.compute_dtype)
        return self._format

    def class_of(self, path: str) -> str:
        """Return the class of the module at a path; empty where there is none (a parameter)."""
        modules = {fqn(name): module for name, module in self._model.named_modules()}
        return type(modules[path]).__name__ if path in modules else ""

    # Hooks. Each returns None: what autograd and modules hand on stays what it was.

    def _before_step(self, session: Any, optimizer: torch.optim.Optimizer) -> None:
        if replaying():
            return
        weights = [weight_of(p) for p in parameters_of(optimizer)]
        grads = {self._names[w]: w.grad for w in reversed(weights) if w in self._names and w.grad is not None}
        if not grads:
            return
        self._gradients = tuple(grads), amaxes(list(grads.values()))
        if self._sampling:
            for name, gradient in grads.items():
                self._count("gradient", name, gradient)

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if replaying():
            return
        if not self._ends:  # backward of this step: a scaler changes its scale only after the step
            self._scale_of_step = scale_of(self._session, self._scaler)
        # Accumulated gradients come by once for each backward; the last one is the step's.
        self._ends[name] = ends_of(dense_values(gradient.detach()))
        if self._sampling:
            self._count("gradient", name, gradient)

    def _on_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._sampling or replaying():
            return
        recomputed = graph_task() != -1
        floats = (t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point())
        tensor = next((t for t in floats if t.numel()), None)
        if tensor is None:
            return
        if not recomputed and module.training:
            self._count("activation", name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(partial(_while_alive(self._on_output_gradient), name))

    def _on_output_gradient(self, name: str, gradient: Tensor | None) -> None:
        if self._sampling and gradient is not None and not replaying():
            self._count("activation_grad", name, gradient)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._sampling and not replaying():
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    values = [spread(t).clone() for t in _value_tensors(optimizer, parameter)]
                    self._before[parameter] = local_of(parameter).detach().clone(), values

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if replaying():
            return
        if self._sampling:
            decision = kwargs.get("decision")  # of a session; a GradScaler gives the flag alone
            self._compare(optimizer, kwargs.get("found_inf") if decision is None else decision.skip)
        if self._session is None:
            self._end(self._scale_of_step, True)

    def _on_outcome(self, session: Any, outcome: Any) -> None:
        if replaying():
            return
        # On a CPU the outcome is there already; elsewhere it is read when the note is.
        self._end(outcome.device_value("scale"), outcome.device_value("taken"))

    @torch.no_grad()
    def _compare(self, optimizer: torch.optim.Optimizer, found_inf: bool | Tensor | None) -> None:
        """Record an update: its histogram, and the share lost to rounding."""
        shares: dict[str, tuple[Tensor, Tensor]] = {}
        dtypes: dict[str, str] = {}
        random = randomly_rounded(optimizer)
        searches = needs_closure(optimizer)  # it may find no better place than where it is
        for place, parameter in enumerate(parameters_of(optimizer)):
            if parameter not in self._before:
                continue
            before, held_before = self._before.pop(parameter)
            name = self._names.get(weight_of(parameter), f"parameter {place}")
            update = local_of(parameter).detach() - before
            self._count("update", name, update)
            gradient, now = parameter.grad, _value_tensors(optimizer, parameter)
            # Masters that the step itself made have no value from before it.
            if (
                searches
                or gradient is None
                or gradient.layout != torch.strided
                or len(now) != len(held_before)
            ):
                continue
            gradient = local_of(gradient)
            if gradient.shape != before.shape:  # partial sums of tensor parallelism
                continue
            moved = spread(gradient) != 0
            if found_inf is not None:  # a skipped step loses nothing; its flag stays on the device
                moved = moved & ~scalar_on(found_inf, torch.bool, moved.device)
            lost = moved & (parameter not in random)
            for old, new in zip(held_before, now):
                lost = lost & (old == spread(new))
            shares[name] = (torch.count_nonzero(lost), torch.count_nonzero(moved))
            dtypes[name] = dtype_name(parameter.dtype if len(now) == 1 else torch.float32)  # with a master
        if shares:
            values = torch.stack([v for pair in shares.values() for v in pair])
            self._late.append((send_to_host(values), partial(self._take_lost, self.step, dtypes)))

    def _count(self, kind: str, name: str, tensor: Tensor) -> None:
        sampled = _see(tensor, self.exact)
        entry = self._seen.get((kind, name))
        if entry is not None and kind in ("activation", "activation_grad"):
            # Used several times in one step (accumulation, a shared module): one histogram of all.
            sampled = entry.join(sampled)
        self._seen[kind, name] = sampled

    @torch.no_grad()
    def _end(self, scale: float | Tensor, taken: bool | Tensor) -> None:
        """Close a step: note its gradients, and send sampled counts to the host."""
        if self._sampling:
            for parameter, name in self._names.items():
                self._count("weight", name, parameter)
            self._send_counts(scale)
        if self._ends:
            self._gradients = tuple(self._ends), amaxes_of(list(self._ends.values()))
        if self._gradients is not None:
            names, values = self._gradients
            fate = [scalar_on(x, torch.float64, values.device) for x in (scale, taken)]
            packed = send_to_host(torch.cat([values.double(), torch.stack(fate)]))
            self._late.append((packed, partial(self._take_note, self.step, names)))
        self._seen, self._ends, self._before, self._gradients = {}, {}, {}, None
        self.step += 1
        self._sampling = self.every > 0 and self.step % self.every == 0
        if len(self._late) >= _TOGETHER:
            self.collect(wait=False)

    def note_skip(self) -> None:
        """Close a step that a GradScaler skipped; only needed where no Session is watched."""
        self._end(self._scale_of_step, False)

    def collect(self, wait: bool = True) -> None:
        """Read what has arrived on the host; with `wait`, all of it."""
        while self._late and (wait or self._late[0][0].done()):
            packed, take = self._late.popleft()
            take(packed.wait())

    @property
    def notes(self) -> Sequence[StepNote]:
        """Return the latest 10,000 steps, oldest first."""
        self.collect(wait=False)
        return self._notes

    @property
    def series(self) -> Mapping[tuple[str, str], Series]:
        """Return the series of each tensor, by (kind, path)."""
        self.collect(wait=False)
        return self._all_series

    @property
    def lost(self) -> Sequence[LostUpdates]:
        """Return the lost updates of each sampled step."""
        self.collect(wait=False)
        return self._lost

    def _take_note(self, step: int, names: tuple[str, ...], packed: Tensor) -> None:
        *amaxes, scale, taken = packed.tolist()
        by_name = dict(zip(names, amaxes))
        worst = worst_of(by_name)
        self._notes.append(StepNote(step, by_name[worst], scale, bool(taken), worst))
        for name, amax in by_name.items():
            self._all_series.setdefault(("gradient", name), Series(name, "gradient")).note(step, amax)

    def _send_counts(self, scale: float | Tensor) -> None:
        """Send the step's histograms, largest magnitudes and scale to the host, in one copy."""
        entries = list(self._seen.values())
        bins = _finish_bins(entries)
        amaxes = amaxes_of([entry.ends for entry in entries]).double()
        last = scalar_on(scale, torch.float64, amaxes.device).view(1)
        packed = send_to_host(torch.cat([*bins, amaxes, last]))
        layouts = ("fp32" if s.elements else s.dtype for s in entries)
        kinds = [(*key, s.dtype, x, b.numel()) for key, s, x, b in zip(self._seen, entries, layouts, bins)]
        self._late.append((packed, partial(self._take_counts, self.step, kinds)))

    def _take_counts(self, step: int, kinds: list[tuple[str, str, str, str, int]], packed: Tensor) -> None:
        *bins, amaxes = packed.split([*(size for *_, size in kinds), len(kinds) + 1])
        *largest, scale = amaxes.tolist()
        for (kind, name, dtype, layout, _), counted, amax in zip(kinds, bins, largest):
            hist = Counts(layout, counted.long()).read()
            scaled = scale if kind in ("gradient", "activation_grad") else 1.0
            sample = Sample(step, amax, dtype, *hist.trimmed(), hist.zeros, hist.infs, hist.nans, scaled)
            series = self._all_series.setdefault((kind, name), Series(name, kind))
            series.samples = [*series.samples, sample][-self.keep :]
            if kind != "gradient":  # its magnitude is noted every step
                series.note(step, amax)

    def _take_lost(self, step: int, dtypes: dict[str, str], packed: Tensor) -> None:
        values: list[float] = packed.tolist()
        lost, of = values[0::2], values[1::2]
        shares = {name: a / b for name, a, b in zip(dtypes, lost, of) if b}
        if shares:
            worst = max(shares, key=lambda n: shares[n])
            self._lost.append(LostUpdates(step, sum(lost) / sum(of), worst, shares[worst], dtypes[worst]))

    # Reading.

    def headrooms(self) -> dict[tuple[str, str], float]:
        """Return the bits left before overflow by (kind, path), at the last step each tensor was seen."""
        self.collect()
        return {
            (s.kind, s.path): headroom(s.amax[-1], self._format_for(s))
            for s in self.series.values()
            if s.amax and s.kind != "update"
        }

    def _format_for(self, series: Series) -> Format:
        if self.format is not None:
            return self.format
        return FORMATS[series.samples[-1].dtype] if series.samples else FORMATS["fp32"]

    def forecasts(self) -> list[Forecast]:
        """Return activations and weights that will leave the format if they go on growing, soonest first."""
        self.collect()
        candidates = [
            forecast(s.path, s.kind, s.steps, s.amax, self._format_for(s))
            for s in self.series.values()
            if s.kind in ("activation", "weight") and s.steps
        ]
        return sorted((f for f in candidates if f is not None), key=lambda f: f.steps)

    def skipped(self) -> list[StepNote]:
        """Return the steps whose update was skipped."""
        self.collect()
        return [note for note in self.notes if not note.taken]

    def worst_over_ranks(self, group: Any = None) -> dict[tuple[str, str], tuple[float, int]]:
        """Return the least headroom over all ranks by (kind, path), with its rank; every rank calls this."""
        mine = self.headrooms()
        everyone = gather(mine, group)
        keys = {key for row in everyone for key in row}
        return {k: min((row[k], rank) for rank, row in enumerate(everyone) if k in row) for k in sorted(keys)}

    def summary(self) -> list[str]:
        """Return the findings in a few lines: skips, the least headroom, forecasts, lost updates."""
        return [
            *skips_in_words([note.step for note in self.skipped()], len(self.notes)),
            *self.outlook(),
        ]

    def outlook(self) -> list[str]:
        """Return the findings without skips."""
        lines: list[str] = []
        tight = [(bits, key) for key, bits in self.headrooms().items() if key[0] == "activation"]
        if tight:
            bits, (_, path) = min(tight)
            name = self._format_for(self.series["activation", path]).name
            text = f"has {bits:.1f} bits left in {name}" if bits > -math.inf else "is not finite any more"
            lines.append(f"least headroom: '{path}' ({self.class_of(path)}) {text}")
        lines += [str(f) for f in self.forecasts()[:3]]
        if self.lost and self.lost[-1].share > 0.01:
            last = self.lost[-1]
            lines.append(
                f"{last.share:.0%} of the updates are lost to rounding (worst: {last.worst}, "
                f"{last.worst_share:.0%})"
            )
        return lines


def skips_in_words(steps: Sequence[int], of: int) -> list[str]:
    """Say which steps were skipped, in a line; no line where none was."""
    return [f"{len(steps)} of {of} steps skipped, the last at step {steps[-1] + 1}"] if steps else []


def _of_gradient(see: Callable[[Tensor], None], parameter: Tensor) -> None:
    if parameter.grad is not None:
        see(parameter.grad)


def _value_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    """Return the tensors that hold the value of a parameter, on this rank."""
    return [local_of(t) for t in value_tensors(optimizer, parameter)]
