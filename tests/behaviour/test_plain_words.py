"""What goes wrong is said in words of ours, with what was given and what was expected."""

import re

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hs.lint(3), "lint got a int as the step, expected a function"),
        (lambda: hs.lint(nn.Linear(2, 1)), r"lint got a Linear as the step.*lint\(model=...\)"),
        (lambda: hs.watch(nn.Linear(2, 1), every=-1), r"every=-1\): expected a whole number, 0 or more"),
        (lambda: hs.watch(nn.Linear(2, 1), every=2.5), r"every=2.5\): expected a whole number"),
        (lambda: hs.watch(nn.Linear(2, 1), every=True), r"every=True\): expected a whole number"),
        (lambda: hs.watch(nn.Linear(2, 1), keep="all"), r"keep='all'\): expected a whole number, 1 or more"),
        (lambda: hs.GradScaler("foo"), "GradScaler: unknown device 'foo'"),
    ],
)
def test_a_wrong_argument_is_refused_in_our_words(call, message):
    with pytest.raises(hs.ConfigError, match=message):
        call()


def test_an_object_that_prints_as_a_page_is_named_by_its_class():
    model = nn.Linear(2, 1)
    with pytest.raises(hs.ConfigError) as caught:
        hs.Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters()))  # the wrong way round
    assert str(caught.value) == "loss_fn=an object of class SGD; expected a function (output, target) -> loss"


class Own:
    pass


def test_a_file_of_objects_is_refused_without_torchs_advice(tmp_path):
    path = tmp_path / "own.pt"
    torch.save({"model": Own()}, path)
    with pytest.raises(hs.CheckpointError) as caught:
        checkpoint.load(path)
    said = str(caught.value)
    assert "objects that only running its code would make" in said
    assert not re.search(r"[\x00-\x1f]", said)
    assert "weights_only" not in said


def prepared(**options) -> hs.Session:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bf16", **options)


def with_gradients(amp: hs.Session) -> hs.Session:
    with amp.autocast():
        loss = amp.model(torch.ones(3, 4)).float().square().mean()
    amp.backward(loss)
    return amp


def unpacked() -> None:
    _model, _optimizer = hs.prepare(nn.Linear(4, 2), level="O0")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: with_gradients(prepared()).step(1.0),
            r"got 1.0 as the optimizer.*amp.step\(clip_norm=1.0\)",
        ),
        (lambda: with_gradients(prepared()).step(clip_norm=0), "clip_norm=0: expected a number above 0"),
        (lambda: prepared().backward(torch.ones((), requires_grad=True), 1.0), "got 1.0 as the optimizer"),
        (unpacked, r"prepare\(\) returns one Session.*amp = hs.prepare\(model, optimizer\)"),
        (lambda: prepared(levl="O2"), r"prepare\(\) got an unexpected keyword argument 'levl'"),
    ],
)
def test_a_slip_at_the_session_is_answered(call, message):
    with pytest.raises((hs.ConfigError, TypeError), match=message):
        call()


def test_auto_alone_asks_for_the_step_and_speaks_of_no_layout():
    with pytest.raises(hs.ConfigError, match=r"level='auto' is chosen by running training steps") as caught:
        hs.prepare(nn.Linear(4, 2), level="auto")
    assert "layout" not in str(caught.value)
    with pytest.raises(hs.ConfigError, match="layout='auto' is chosen by running"):
        hs.prepare(nn.Linear(4, 2), layout="auto")


def test_gradients_cleared_before_the_step_are_named_as_such():
    amp = with_gradients(prepared())
    amp.optimizers[0].zero_grad()
    with pytest.raises(
        hs.ScalerStateError, match=r"cleared after backward\(\): zero_grad\(\) belongs before"
    ):
        amp.step()


def test_a_trainer_names_a_device_that_is_not_there():
    model = nn.Linear(4, 2)
    absent = "xpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(hs.UnsupportedError, match=f"device '{absent}' is not usable here"):
        hs.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), device=absent)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_prepared_model_can_be_scripted_after_revert():
    amp = prepared(level="O2")
    amp.revert()
    assert torch.jit.script(amp.model)(torch.ones(1, 4)).dtype == torch.float32


def test_fp32_parameters_work_in_a_prepared_model_inside_the_region():
    amp = prepared(level="O2")
    wide = {name: p.detach().float() for name, p in amp.model.named_parameters()}
    with amp.autocast():
        out = torch.func.functional_call(amp.model, wide, (torch.ones(3, 4),))
    torch.testing.assert_close(out, amp.model(torch.ones(3, 4)), rtol=1e-2, atol=1e-2)


def test_the_refusal_of_bce_has_the_remedy_first():
    with hs.autocast("cpu", "fp16"), pytest.raises(hs.BannedOpError) as caught:
        nn.functional.binary_cross_entropy(torch.rand(3), torch.rand(3))
    said = str(caught.value)
    assert said.startswith(
        "binary_cross_entropy is banned under fp16 autocast: give the logits to "
        "binary_cross_entropy_with_logits"
    )
    assert "measured" in said


def test_skips_in_a_row_are_told_once_at_the_fifth():
    model = nn.Linear(4, 2)
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="fp16")

    def step(factor: float) -> hs.Outcome:
        with amp.autocast():
            loss = model(torch.ones(3, 4)).float().mean() * factor
        amp.backward(loss)
        return amp.step()

    for _ in range(4):
        assert not step(float("inf")).taken
    with pytest.warns(hs.HalfstepWarning, match="5 steps in a row were skipped, up to step 5.*50 in a row"):
        step(float("inf"))
    step(1.0)
    for _ in range(6):
        step(float("nan"))
    assert amp.skips.total == 11
