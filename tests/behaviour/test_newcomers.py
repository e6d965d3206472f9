"""What a newcomer does by habit: it gives the right numbers, or says at once what to do instead."""

import pytest
import torch
from torch import nn

import halfstep as hs

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def small(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, width))


def backward(amp: hs.Session, model: nn.Module, *named: torch.optim.Optimizer) -> None:
    with amp.autocast():
        loss = (model(X).float() - 1).square().mean()
    amp.backward(loss, *named)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fp32_state_dict_has_the_masters_of_a_torch_optimizer(dtype):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = hs.prepare(model, optimizer, level="O2", dtype=dtype)
    for _ in range(3):
        backward(amp, model)
        amp.step()
    with torch.no_grad():
        model[0].bias.fill_(0.1)  # adopted by the master, as by a step
    state = hs.optim.fp32_state_dict(model, optimizer)
    assert torch.equal(state["0.bias"], model[0].bias.float())
    amp.revert()
    for key, value in model.state_dict().items():
        assert state[key].dtype == torch.float32
        torch.testing.assert_close(state[key], value, rtol=0, atol=0)
    assert not torch.equal(state["0.weight"], state["0.weight"].to(hs.formats.parse_dtype(dtype)).float())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("own", [True, False])
def test_a_direct_optimizer_step_on_scaled_gradients_is_refused(level, own):
    model = small()
    optimizer = (hs.optim if own else torch.optim).SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level=level, dtype="fp16")
    before = [p.detach().clone() for p in model.parameters()]
    backward(amp, model)
    with pytest.raises(hs.ScalerStateError, match=r"SGD.step\(\) was called on .* loss scale 65536"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert amp.step().taken  # nothing was lost by the mistake
    amp.revert()
    backward(hs.prepare(model, level="O0"), model)
    optimizer.step()


def test_a_direct_optimizer_step_is_fine_without_a_scale():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    before = [p.detach().clone() for p in model.parameters()]
    backward(amp, model)
    optimizer.step()
    assert not all(map(torch.equal, model.parameters(), before))


def clip_by_value(level: str, optimizer_of: type, unscale: bool, **options: object) -> torch.Tensor:
    model = small()
    optimizer = optimizer_of(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level=level, **options)
    for _ in range(3):
        for _ in range(2):
            backward(amp, model)
        if unscale:
            amp.unscale()
            amp.unscale()  # the second changes nothing
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        outcome = amp.step()
        assert outcome.scale == amp.loss_scale.read()
    amp.revert()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, hs.optim.SGD])
def test_gradients_are_clipped_by_hand_after_unscale(level, optimizer_of):
    plain = clip_by_value("O0", torch.optim.SGD, False)
    scaled = {"dtype": "fp16", "loss_scale": 2.0**12}
    right = clip_by_value(level, optimizer_of, True, **scaled)
    torch.testing.assert_close(right, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, hs.optim.SGD])
def test_a_mean_over_ranks_taken_by_hand_is_no_mistake(optimizer_of):
    """It used to be called one: gradients were changed while they carried the scale."""
    model = small()
    amp = hs.prepare(model, optimizer_of(model.parameters(), lr=0.1), level="O1", dtype="fp16")
    backward(amp, model)
    before = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad.div_(2)  # what all_reduce of a mean does
    assert amp.step().grad_norm == pytest.approx(
        float(nn.utils.get_total_norm(before)) / 2 / amp.loss_scale.read(), rel=1e-4
    )


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, hs.optim.SGD])
@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp16", "loss_scale": 1.0}])
def test_gradients_that_carry_no_scale_are_clipped_by_hand_without_a_word(options, optimizer_of, unscale):
    plain = clip_by_value("O0", torch.optim.SGD, False)
    torch.testing.assert_close(
        clip_by_value("O2", optimizer_of, unscale, **options), plain, rtol=0, atol=0.02
    )


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, hs.optim.SGD])
def test_an_inf_seen_by_unscale_skips_the_step_though_clipping_hides_it(optimizer_of):
    model = small()
    amp = hs.prepare(model, optimizer_of(model.parameters(), lr=0.1), level="O2", dtype="fp16")
    before = [p.detach().clone() for p in model.parameters()]
    backward(amp, model)
    model[0].weight.grad[0, 0] = float("inf")
    amp.unscale()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    assert not amp.step().taken
    assert all(map(torch.equal, model.parameters(), before))
    assert amp.loss_scale.read() == 32768.0


def test_unscaled_gradients_that_are_added_to_carry_one_scale():
    model = small()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), level="O1", dtype="fp16")
    backward(amp, model)
    amp.unscale()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    backward(amp, model)
    assert amp.step().grad_norm == pytest.approx(2 * norm, rel=1e-5)


def test_unscale_needs_gradients_that_are_still_there():
    model = small()
    optimizer = hs.optim.SGD(model.parameters(), lr=0.1, release_gradients=True)
    amp = hs.prepare(model, optimizer, level="O2", dtype="fp16")
    with pytest.raises(hs.ScalerStateError, match="no gradients"):
        amp.unscale()
    backward(amp, model)
    with pytest.raises(hs.UnsupportedError, match="release_gradients"):
        amp.unscale()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_backward_for_one_optimizer_leaves_the_others_gradients_alone(level):
    first, second = small(8), small()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    amp = hs.prepare([first, second], optimizers, level=level, dtype="fp16")
    backward(amp, nn.Sequential(first, second), optimizers[0])
    assert all(p.grad is None for p in second.parameters())
    assert amp.step(optimizers[0]).taken
    backward(amp, second, optimizers[1])
    alone = [p.grad.clone() for p in second.parameters()]
    backward(amp, nn.Sequential(first, second), optimizers[0])
    assert all(torch.equal(p.grad, before) for p, before in zip(second.parameters(), alone))


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, hs.optim.SGD])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_loss_of_another_model_is_an_error(level, optimizer_of):
    model, other = small(), small()
    amp = hs.prepare(model, optimizer_of(model.parameters(), lr=0.1), level=level)
    backward(amp, other)
    with pytest.raises(hs.ScalerStateError, match="loss does not depend on the parameters of this SGD"):
        amp.step()
    backward(amp, model)
    assert amp.step().taken


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_states_follow_the_weights_into_o3_and_back(dtype):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    backward(hs.prepare(model, level="O0"), model)
    optimizer.step()
    optimizer.zero_grad()
    amp = hs.prepare(model, optimizer, level="O3", dtype=dtype)
    backward(amp, model)
    assert amp.step().taken
    amp.revert()
    backward(hs.prepare(model, level="O0"), model)
    optimizer.step()
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}


def test_an_epsilon_that_is_zero_is_named_where_the_loss_turns_nan():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp = hs.prepare(model, optimizer, level="O3", dtype="fp16")
    with torch.no_grad():
        model[0].bias[0] = -100.0  # a dead unit: its gradients are zero
    backward(amp, model)
    amp.step()
    backward(amp, model)
    with pytest.warns(hs.HalfstepWarning, match="AdamW group 0: eps 1e-08 is zero beside fp16 weights"):
        amp.step()
