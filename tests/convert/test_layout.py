"""Memory layout: the same values in another order, undone by revert."""

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.convert.layout import Relayout, convolution_weights


def network() -> nn.Sequential:
    torch.manual_seed(0)
    tail = (nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *tail)


def test_convolutions_of_two_and_three_dimensions_are_found_once() -> None:
    shared = nn.Conv2d(2, 2, 3)
    model = nn.Sequential(shared, shared, nn.Conv1d(2, 2, 3), nn.Conv3d(2, 2, 3), nn.Linear(2, 2))
    assert [w.dim() for w in convolution_weights([model])] == [4, 5]


def test_revert_gives_strides_values_and_gradients_back() -> None:
    model = network()
    model(torch.ones(1, 2, 8, 8)).sum().backward()
    before = [(p.stride(), p.detach().clone(), p.grad.clone()) for p in model.parameters()]  # type: ignore[union-attr]
    layout = Relayout([model])
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    layout.revert()
    for p, (stride, value, gradient) in zip(model.parameters(), before):
        assert p.stride() == stride
        assert torch.equal(p, value)
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("ours", [False, True])
def test_a_run_in_channels_last_is_the_same_run(level: str, ours: bool) -> None:
    def run(layout: str) -> list[float]:
        model = network()
        kind = hs.optim.SGD if ours else torch.optim.SGD
        amp = hs.prepare(
            model, kind(model.parameters(), lr=0.05, momentum=0.9), level=level, layout=layout,
            dtype=None if level == "O0" else "bf16",
        )  # fmt: skip
        losses = []
        for _ in range(4):
            with amp.autocast():
                loss = model(torch.ones(2, 2, 8, 8)).float().square().mean()
            amp.backward(loss)
            amp.step()
            losses.append(float(loss.detach()))
        strides = [p.is_contiguous() for p in model.parameters()]
        assert all(strides) == (layout == "keep")
        amp.revert()
        assert all(p.is_contiguous() for p in model.parameters())
        return losses

    assert run("channels_last") == pytest.approx(run("keep"), rel=1e-2 if level != "O0" else 1e-5)


def test_an_unknown_layout_is_refused_before_anything_changes() -> None:
    model = network()
    with pytest.raises(hs.ConfigError, match="expected one of keep, auto, channels_last"):
        hs.prepare(model, None, layout="nhwc")
    assert model[0].weight.is_contiguous()
