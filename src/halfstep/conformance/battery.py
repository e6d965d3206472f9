"""The battery that a new accelerator has to pass: casting, training, scaling, masters and state.

Each check compares the device with the CPU or with a rule, never with itself. `run_battery` gives the checks
as data; `halfstep devices --check NAME` prints them. What a device must have is described in
docs/new-accelerator.md.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import devices
from halfstep.casting.context import autocast
from halfstep.conformance import numbers
from halfstep.conformance.numbers import Outcome, Status
from halfstep.conformance.probe import ROUNDED, probe_casting
from halfstep.errors import ConfigError, HalfstepError
from halfstep.formats import dtype_name, format_of
from halfstep.gradients.unscale import plain_check_and_unscale, unscale_
from halfstep.policy.levels import level_of
from halfstep.policy.policy import Policy
from halfstep.scaling.grad_scaler import GradScaler
from halfstep.scaling.loss_scale import DynamicLossScale, StaticLossScale
from halfstep.session.prepare import prepare
from halfstep.session.session import Session

GROUPS = ("casting", "numbers", "models", "scaling", "masters", "state")

# Largest relative error against fp32 of (all gradients together, the loss), by compute dtype. The models give
# a few times the unit roundoff (2^-8 for bf16, 2^-11 for fp16); a ReLU that flips at zero adds one step.
TOLERANCES = {torch.bfloat16: (0.1, 2e-2), torch.float16: (2e-2, 2.5e-3)}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: `fails` is the device's fault, `falls back` and `absent` are facts."""

    group: str
    name: str
    status: Status
    detail: str = ""


def run_battery(
    device: str,
    levels: Sequence[str] = ("O1", "O2"),
    dtypes: Sequence[str | torch.dtype] | None = None,
    policy: str | Policy | None = None,
    only: Sequence[str] = GROUPS,
) -> Iterator[Check]:
    """Yield every check of `device` in the groups `only`, as it is done; `dtypes` None: those it has.

    Raises:
        ConfigError: no such device, level, dtype or group.
        UnsupportedError: the device has no kernels for one of the dtypes.
    """
    at = devices.resolve(device)
    names = [level_of(level)[0].name for level in levels]
    if dtypes is None:
        dtypes = [low for low in TOLERANCES if devices.capability(at, low).status != "absent"]
    lows = [devices.check_dtype(at, dtype) for dtype in dtypes]
    if unknown := [dtype_name(low) for low in lows if low not in TOLERANCES]:
        raise ConfigError(f"the battery checks bf16 and fp16, was asked for {', '.join(unknown)}")
    if unknown := sorted(set(only) - set(GROUPS)):
        raise ConfigError(f"unknown group {', '.join(unknown)}; expected one of {', '.join(GROUPS)}")
    with torch.random.fork_rng(devices=[]):
        for low in lows if "casting" in only else ():
            yield from _casting(at, low, policy)
        for group, name, check, *args in _plan(at, names, lows):
            if group in only:
                yield from _run_check(group, name, check, *args)


def _plan(at: torch.device, levels: Sequence[str], lows: Sequence[torch.dtype]) -> Iterator[tuple[Any, ...]]:
    """Group, name, function and arguments of every check but casting."""
    for low in lows:
        for name, check in numbers.checks():
            yield "numbers", f"{name} {dtype_name(low)}", check, at, low
    yield "scaling", "scale follows the rule, bad steps are skipped", _scaler_rule, at
    yield "scaling", "finite check", _finite_check, at
    yield "scaling", "scale update", _scale_update, at
    for low, level in itertools.product(lows, levels):
        where = f"{level} {dtype_name(low)}"
        for name in MODELS:
            yield "models", f"{name} {where}", _trains, at, name, level, low
        yield "scaling", f"an inf skips the step {where}", _skips, at, level, low
        if level_of(level)[0].masters:
            yield "masters", f"small updates add up {where}", _masters, at, level, low
        yield "state", f"saved and resumed {where}", _resumes, at, level, low


def _run_check(group: str, name: str, check: Callable[..., Outcome], *args: object) -> Iterator[Check]:
    """Run one check; what it raises is a failure of the device, in one line."""
    torch.manual_seed(0)
    try:
        status, detail = check(*args)
    except (HalfstepError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        lines = str(error).strip().splitlines() or [""]
        status, detail = "fails", f"{type(error).__name__}: {lines[0][:160]}"
    yield Check(group, name, status, detail)


# --- casting -----------------------------------------------------------------------------------------------


def _casting(at: torch.device, low: torch.dtype, policy: str | Policy | None) -> Iterator[Check]:
    chosen = (Policy() if policy is None else Policy.parse(policy)).with_dtype(low)
    region = lambda: autocast(at.type, policy=chosen)  # noqa: E731
    statuses: dict[str, Status] = {"agrees": "passes", "differs": "fails"}
    for name, observation in probe_casting(at, low, chosen.rows(at.type), region).items():
        status = statuses.get(observation.verdict, "absent")
        rounded = observation.note == ROUNDED
        detail = observation.note
        if status == "fails":
            got = "+".join(dtype_name(d) for d in observation.compute) or "nothing"
            gave = "nothing" if observation.output is None else dtype_name(observation.output)
            detail = f"{observation.note}; computed in {got}, gave {gave}"
        yield Check("casting", f"{name} {dtype_name(low)}", "falls back" if rounded else status, detail)


# --- models ------------------------------------------------------------------------------------------------


class _Tokens(nn.Module):
    """A transformer encoder over 12 tokens that predicts a class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.encode = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.read = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.read(self.encode(self.embed(tokens))).flatten(0, 1)


def _mlp() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 5))
    return model, torch.randn(32, 12), torch.randint(0, 5, (32,))


def _cnn() -> tuple[nn.Module, Tensor, Tensor]:
    features = (nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
    model = nn.Sequential(*features, nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    return model, torch.randn(16, 1, 8, 8), torch.randint(0, 5, (16,))


MODELS = {
    "MLP": _mlp,
    "CNN": _cnn,
    "transformer": lambda: (_Tokens(), torch.randint(0, 12, (6, 8)), torch.randint(0, 5, (48,))),
}


def _gradients(model: nn.Module, scale: float = 1.0) -> Tensor:
    """Return all gradients as one fp32 vector on the CPU, the loss scale divided out."""
    return torch.cat(
        [p.grad.float().cpu().flatten() / scale for p in model.parameters() if p.grad is not None]
    )


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _trains(at: torch.device, name: str, level: str, low: torch.dtype) -> Outcome:
    """Four steps on the device against the same four in fp32 on the CPU: first gradients, last loss."""
    plain, x, y = MODELS[name]()
    model = copy.deepcopy(plain).to(at)
    optimizer, loss_of = _sgd(plain), nn.CrossEntropyLoss()
    session = prepare(model, _sgd(model), level=level, dtype=low)
    device_x, device_y = x.to(at), y.to(at)
    gradient_error, loss_error = 0.0, 0.0
    for step in range(4):
        with session.autocast():
            device_loss = loss_of(model(device_x), device_y)
        session.backward(device_loss)
        loss = loss_of(plain(x), y)
        loss.backward()
        if step == 0:
            theirs, ours = _gradients(plain), _gradients(model, float(session.loss_scale.value))
            gradient_error = float((ours - theirs).norm() / theirs.norm())
        outcome = session.step()
        if not outcome.taken:
            return "fails", f"step {step + 1} was skipped: its gradients were not finite"
        optimizer.step()
        optimizer.zero_grad()
        loss_error = abs(float(device_loss.detach()) - float(loss.detach())) / float(loss.detach())
    tolerances = TOLERANCES[low]
    detail = f"gradients within {gradient_error:.1e} of fp32, loss within {loss_error:.1e}"
    if gradient_error > tolerances[0] or loss_error > tolerances[1]:
        return "fails", f"{detail}; allowed are {tolerances[0]:.1e} and {tolerances[1]:.1e}"
    return ("falls back" if devices.is_slow(at, low) else "passes"), detail


# --- scaling -----------------------------------------------------------------------------------------------

_OVERFLOWS = (False, False, True, False, True, True, False, False, False)


def _scaler_rule(at: torch.device) -> Outcome:
    """Inject infs and compare the scale, the skips and the weights with the rule, step by step."""
    weight = nn.Parameter(torch.ones(4, device=at))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    scaler = GradScaler(at.type, init_scale=1024.0, growth_interval=2)
    rule, value = DynamicLossScale(1024.0, interval=2), 1.0
    for step, overflow in enumerate(_OVERFLOWS, start=1):
        scaler.scale(weight.sum()).backward()
        if overflow and weight.grad is not None:
            weight.grad[step % 4] = float("inf") if step % 2 else float("nan")
        outcome = scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        value = value if overflow else value - 0.125
        rule = rule.adjust(not overflow)
        if outcome.taken == overflow:
            return "fails", f"step {step} was {'taken' if overflow else 'skipped'}"
        if scaler.get_scale() != rule.value:
            return "fails", f"after step {step} the scale is {scaler.get_scale()}, the rule says {rule.value}"
        if weight.tolist() != [value] * 4:
            return "fails", f"after step {step} a weight is {weight.tolist()}, expected {value}"
    return "passes", f"{len(_OVERFLOWS)} steps, {sum(_OVERFLOWS)} with an inf or NaN"


def _gradient_cases() -> Iterator[tuple[str, list[Tensor]]]:
    base = [torch.linspace(-3, 3, 40).reshape(5, 8), torch.full((3,), 2.0**-12), torch.zeros(0)]
    yield "finite gradients", base
    for word, bad in (("inf", float("inf")), ("-inf", float("-inf")), ("NaN", float("nan"))):
        for place in (0, 1):
            grads = [g.clone() for g in base]
            grads[place].view(-1)[-1] = bad
            yield f"{word} in gradient {place + 1}", grads


def _finite_check(at: torch.device) -> Outcome:
    """Compare the device's finite-check-and-unscale with the plain one on the CPU, bit for bit."""
    declared = [torch.float32] + [d for d in TOLERANCES if devices.capability(at, d).status != "absent"]
    for dtype in declared:
        for name, grads in _gradient_cases():
            ours = [g.to(dtype).to(at) for g in grads]
            theirs = [g.to(dtype) for g in grads]
            found_inf = unscale_(ours, torch.tensor(0.25, device=at))
            flag = torch.zeros(())
            plain_check_and_unscale(theirs, flag, torch.tensor(0.25))
            if bool(found_inf) != bool(flag):
                return (
                    "fails",
                    f"{name} ({dtype_name(dtype)}): found_inf is {bool(found_inf)}, not {bool(flag)}",
                )
            for our_grad, their_grad in zip(ours, theirs):
                if not torch.equal(our_grad.cpu().nan_to_num(9.0), their_grad.nan_to_num(9.0)):
                    return "fails", f"{name} ({dtype_name(dtype)}): unscaled to other values than on the CPU"
    if devices.declared(at.type).finite_check is not None:
        return "passes", "the vendor's kernel"
    return "falls back", "no kernel registered; torch's or ordinary ops do it"


def _scale_update(at: torch.device) -> Outcome:
    """Compare the vendor's scale update with the rule, over growth, backoff and a run of both."""
    kernel = devices.declared(at.type).update_scale
    if kernel is None:
        return "falls back", "no kernel registered; ordinary ops do it"
    scale = torch.tensor(1024.0, device=at)
    tracker = torch.zeros((), dtype=torch.int32, device=at)
    loss_scale = DynamicLossScale(1024.0, 2.0, 0.5, 2)
    for step, overflow in enumerate(_OVERFLOWS, start=1):
        kernel(scale, tracker, torch.tensor(float(overflow), device=at), 2.0, 0.5, 2)
        loss_scale = loss_scale.adjust(not overflow)
        if float(scale) != loss_scale.value:
            return "fails", f"after step {step} the kernel gives {float(scale)}, the rule {loss_scale.value}"
    return "passes", "the vendor's kernel"


def _prepare(at: torch.device, level: str, low: torch.dtype) -> tuple[Session, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = _mlp()
    model = model.to(at)
    scale = DynamicLossScale(256.0, interval=3) if low is torch.float16 else None
    session = prepare(model, _sgd(model), level=level, dtype=low, loss_scale=scale, skip_nonfinite=True)
    return session, x.to(at), y.to(at)


def _one_step(session: Session, x: Tensor, y: Tensor, spoil: bool = False) -> bool:
    with session.autocast():
        loss = nn.functional.cross_entropy(session.model(x), y)
    session.backward(loss)
    if spoil:
        last = [p for p in session.model.parameters() if p.grad is not None][-1]
        last.grad = torch.full_like(last, float("inf"))
    return bool(session.step().taken)


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


def _same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _skips(at: torch.device, level: str, low: torch.dtype) -> Outcome:
    session, x, y = _prepare(at, level, low)
    if not _one_step(session, x, y):
        return "fails", "a clean step was skipped"
    before, scale = _weights(session.model), float(session.loss_scale.value)
    if _one_step(session, x, y, spoil=True):
        return "fails", "a step with an inf in its gradients was taken"
    if not _same(before, _weights(session.model)):
        return "fails", "a skipped step changed weights"
    if low is torch.float16 and float(session.loss_scale.value) != scale / 2:
        return "fails", f"the scale went from {scale} to {float(session.loss_scale.value)}, not to its half"
    return ("passes", "") if _one_step(session, x, y) else ("fails", "the next clean step was skipped too")


# --- masters and state -------------------------------------------------------------------------------------


def _masters(at: torch.device, level: str, low: torch.dtype) -> Outcome:
    """Updates of an eighth of the spacing at 1: lost in 16 bits, kept in the masters."""
    model = nn.Linear(1, 4, bias=False).to(at)
    nn.init.ones_(model.weight)
    update, steps = format_of(low).epsilon / 8, 20
    optimizer = torch.optim.SGD(model.parameters(), lr=update)
    session = prepare(model, optimizer, level=level, dtype=low, loss_scale=StaticLossScale(64.0))
    for _ in range(steps):
        with session.autocast():
            loss = model(torch.ones(1, 1, device=at)).float().sum()
        session.backward(loss)
        session.step()
    expected = torch.full((4, 1), 1 - steps * update)
    masters = [m.cpu() for m in session.masters[0].params()]
    if not _same(masters, [expected]):
        return "fails", f"masters are {masters[0].flatten().tolist()}, expected {1 - steps * update}"
    if not _same(_weights(model), [expected.to(low)]):
        return "fails", "the model's weights are not the rounded masters"
    return "passes", f"{steps} updates of {update:.1e} to weights of 1"


def _resumes(at: torch.device, level: str, low: torch.dtype) -> Outcome:
    """Two steps, save, load into a new model on the device, one step more: the same bits as three steps."""
    session, x, y = _prepare(at, level, low)
    for _ in range(2):
        _one_step(session, x, y)
    resumed_session, _, _ = _prepare(at, level, low)
    with tempfile.TemporaryDirectory() as folder:
        resumed_session.load(session.save(Path(folder) / "saved"))
    _one_step(session, x, y)
    _one_step(resumed_session, x, y)
    if not _same(_weights(session.model), _weights(resumed_session.model)):
        return "fails", "the resumed run has other weights than the one that was not stopped"
    if float(session.loss_scale.value) != float(resumed_session.loss_scale.value):
        return "fails", "the resumed run has another loss scale"
    return "passes", ""
