"""Ctrl-C at any line of a step, and going on: weights and masters agree, nothing stays open."""

import sys

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import HalfstepError

KINDS = {"ours": hs.optim.AdamW, "torch": torch.optim.AdamW}
SETTINGS = [("O2", "bf16", "torch"), ("O2", "fp16", "torch"), ("O2", "fp16", "ours"), ("O1", "fp16", "torch")]


def prepared(level, dtype, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = KINDS[kind](model.parameters(), lr=0.01)
    return model, optimizer, hs.prepare(model, optimizer, level=level, dtype=dtype, kernels="native")


def forward(model, amp, at):
    with amp.autocast():
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(at))
        loss = model(x).float().square().mean()
    amp.backward(loss)


def interrupted(step, lines, of=("halfstep", "torch/optim"), spared=lambda frame, event: False):
    """Run `step` with a KeyboardInterrupt at so manieth event in files `of` these names; whether it came."""
    left = lines

    def trace(frame, event, arg):
        nonlocal left
        code = frame.f_code
        ours = any(name in code.co_filename for name in of) and not spared(frame, event)
        if ours and code.co_name != "<genexpr>":  # one that is closed tells nobody of an error
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def apart(model, optimizer, amp):
    """The 16-bit weights that are not their masters rounded, when these are asked for."""
    if isinstance(optimizer, hs.optim.AdamW):
        pairs = [*optimizer.masters().items()]
    else:
        pairs = [pair for masters in amp.masters.values() for pair in masters.pairs()]
    return [w for w, v in pairs if not torch.equal(v.to(w.dtype), w.detach())]


def goes_on(setting, lines):
    """Whether the interrupt came; three more steps are taken after it."""
    model, optimizer, amp = prepared(*setting)
    forward(model, amp, 0)
    amp.step(clip_norm=1.0)
    forward(model, amp, 1)
    came = interrupted(lambda: amp.step(clip_norm=1.0), lines)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not apart(model, optimizer, amp)
    told = amp.steps
    for at in range(2, 5):
        forward(model, amp, at)
        assert amp.step(clip_norm=1.0).taken
    assert amp.steps == told + 3
    assert not apart(model, optimizer, amp)
    assert all(p.isfinite().all() for p in model.parameters())
    return came


@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
def test_a_step_that_is_interrupted_leaves_nothing_half_done(setting):
    """It used to leave masters ahead of their weights, and gradients scaled and unscaled for the next one."""
    lines = 1
    while goes_on(setting, lines):
        lines += 61
    assert lines > 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
def test_at_every_line(setting):
    lines = 1
    while goes_on(setting, lines):
        lines += 1


def test_gradients_of_a_step_that_was_interrupted_are_gone():
    model, _, amp = prepared("O2", "fp16", "torch")
    forward(model, amp, 0)
    amp.early_listeners.append(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        amp.step()
    amp.early_listeners.clear()
    with pytest.raises(HalfstepError, match="no gradients"):
        amp.step()
    forward(model, amp, 1)
    assert amp.step().taken


def no_signal_comes(frame, event):
    """Where Python handles none: returns, the start of `__exit__`, and a `finally` right after a call."""
    code, line = frame.f_code, frame.f_lineno - frame.f_code.co_firstlineno
    start = {"__exit__": 3, "nesting": 9}.get(code.co_name, -1)
    return event == "return" or line <= start


@pytest.mark.parametrize("around", [False, True])
def test_a_region_that_is_entered_or_left_under_a_signal_is_not_left_open(around):
    """It used to stay open, or shut the one around it, and its log went out of step with itself."""
    weight = torch.randn(4, 4, requires_grad=True)

    def regions():
        with hs.autocast("cpu", "bf16", kernels="native"), hs.autocast("cpu", "fp16", kernels="native"):
            pass

    def one_more(lines):
        came = interrupted(regions, lines, ("halfstep/casting",), no_signal_comes)
        assert (weight @ weight).dtype == (torch.bfloat16 if around else torch.float32)
        with hs.autocast("cpu", "fp16", kernels="native"):
            out = weight @ weight
        assert out.dtype == torch.float16
        assert torch.autograd.grad(out.float().sum(), [weight])[0].isfinite().all()
        return came

    regions()
    lines, outer = 1, hs.autocast("cpu", "bf16", enabled=around, kernels="native")
    with outer:
        while one_more(lines):
            lines += 1
    assert 100 < lines < 1000
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0
