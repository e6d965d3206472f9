"""What a session refuses: the words name what was given, what is expected and what to do."""

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import HalfstepError
from halfstep.optim import split as masters

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def prepared(model=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 4) if model is None else model
    options = {"level": "O1", "dtype": "bf16", "kernels": "native"} | options
    return hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def with_gradients(amp):
    with amp.autocast():
        loss = amp.model(X).float().square().mean()
    amp.backward(loss)
    return amp


def own_step(amp, x):
    with_gradients(amp).step()


def saved(path, **options):
    return lambda amp: amp.save(path, **options)


def reverted(amp):
    amp.revert()
    with pytest.raises(HalfstepError, match=r"session was reverted.*new prepare\(\)"):
        amp.backward(amp.model(X).square().mean())
    amp.model(X).square().mean().backward()
    amp.step()


def autocast_of(given):
    return lambda amp: amp.autocast(given)


CALLS = [
    (lambda amp: amp.step(max_norm=1), r"step\(\) got an unexpected keyword argument 'max_norm'"),
    (lambda amp: amp.step(amp.optimizers[0], 1.0), r"step\(\) takes from 1 to 2 positional arguments but 3"),
    (lambda amp: amp.step(clip_norm=True), "clip_norm=True: expected a number above 0"),
    (
        lambda amp: amp.step(clip_norm=torch.tensor(1.0)),
        r"clip_norm=tensor\(1\..*\): .*of a tensor give its item",
    ),
    (saved("."), r"save\('.'\): expected the name of a folder to make, such as"),
    (saved("step-1", keep_last=1.5), "keep_last=1.5 for step-1: expected a whole number"),
    (saved("step-1", keep_last=True), "keep_last=True for step-1: expected a whole number"),
    (autocast_of("cpu"), r"amp.autocast\('cpu'\): expected enabled=True or False.*hs.autocast takes both"),
    (autocast_of(torch.bfloat16), r"amp.autocast\(torch.bfloat16\): .*dtype from prepare\(dtype=...\)"),
    (reverted, r"session was reverted.*new prepare\(\)"),
]


@pytest.mark.parametrize(("call", "says"), CALLS)
def test_what_a_session_says_of_a_wrong_call(call, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    amp = prepared()
    with pytest.raises((HalfstepError, TypeError), match=says):
        call(amp if call.__name__ == "reverted" or "save" in call.__qualname__ else with_gradients(amp))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step": own_step}, "prepare got step=, which only level='auto' and layout='auto' use: drop it"),
        ({"model": nn.Linear(8, 4).double(), "level": "O2"}, r"2 parameters are fp64.*model.float\(\)"),
    ],
)
def test_what_prepare_says_of_wrong_arguments(options, says):
    with pytest.raises(HalfstepError, match=says):
        prepared(**options)


def test_released_gradients_say_how_to_go_on_after_an_interrupt():
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = hs.optim.SGD(model.parameters(), lr=0.1, release_gradients=True)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16", kernels="native")
    with_gradients(amp)  # and an interrupt, so that no step follows
    with pytest.raises(HalfstepError, match=r"an interrupt came .*call step\(\) once"):
        with_gradients(amp)
    amp.step()
    assert with_gradients(amp).step().taken


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("at", [0, 3])
def test_an_error_in_the_middle_leaves_the_model_as_it_was(monkeypatch, dtype, at):
    """Memory that ends while weights are split: those that have no original any more get it back."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = hs.optim.AdamW(model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    split, left = masters.split, [at]

    def full(*given):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("out of memory")
        return split(*given)

    with monkeypatch.context() as patch:
        patch.setattr(masters, "split", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            hs.prepare(model, optimizer, level="O2", dtype=dtype)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not optimizer.state
    hs.prepare(model, optimizer, level="O2", dtype=dtype)
