"""The bench that choices are tried on: first steps that compile count neither as slow nor as measuring."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.tuning import engine
from halfstep.tuning.choices import NO_TIME, LevelChoice
from halfstep.tuning.engine import Bench, FirstStep
from halfstep.tuning.search import search


def bench(waits: list[float], seconds: float = 60.0) -> Bench:
    """A bench whose first steps also wait, as steps that compile do."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 4), torch.zeros(2, dtype=torch.long)

    def step(amp: hs.Session, x: Tensor, y: Tensor) -> Tensor:
        until = time.perf_counter() + (waits.pop(0) if waits else 0.0)
        while time.perf_counter() < until:
            pass
        with amp.autocast():
            loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    def make(choice: LevelChoice) -> Any:
        return hs.prepare(model, optimizer, level=choice.level, dtype=choice.dtype)

    return Bench([model], [optimizer], step, (x, y), make, seconds)


def test_a_second_step_that_compiles_is_not_the_time_of_fp32() -> None:
    assert bench([0.5, 0.5]).first(LevelChoice("O0")).time < 0.4


def test_nor_of_a_level_that_would_seem_hopeless() -> None:
    tried = bench([0.0, 0.0, 0.0, 0.5, 0.5])
    tried.first(LevelChoice("O0"))
    assert tried.first(LevelChoice("O1", "bf16")).time < 0.4


def test_what_compiles_in_fp32s_first_steps_is_not_counted() -> None:
    tried = bench([0.3, 0.3], seconds=4.0)
    tried.first(LevelChoice("O0"))
    assert tried.budget.seconds_left() > 3.5


def test_what_takes_longer_than_is_left_is_measured_no_further() -> None:
    tried = bench([0.0, 0.0, 0.0, 1.2], seconds=0.01)
    tried.first(LevelChoice("O0"))
    time.sleep(0.02)
    found = tried.first(LevelChoice("O1", "bf16"))
    assert found.failed == NO_TIME


def convolutions(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(128, 3),
    )


def trained_by(model: nn.Module, wait: Any = None) -> tuple[Any, Any, Any, tuple[Tensor, Tensor]]:
    """Optimizer, step, prepare for a choice, and batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def step(amp: hs.Session, x: Tensor, y: Tensor) -> Tensor:
        if wait is not None:
            wait()
        with amp.autocast():
            loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    def make(choice: LevelChoice) -> Any:
        rules = choice.rules if choice.rules.rules else None
        return hs.prepare(
            model, optimizer, level=choice.level, dtype=choice.dtype, layout=choice.layout, plan=rules
        )

    return optimizer, step, make, (x, torch.arange(4) % 3)


@pytest.mark.parametrize("seconds", [5.0, 12.0, 40.0, 100.0])
def test_no_more_is_measured_than_the_seconds_hold(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(engine, "time", clock)

    def second() -> None:
        now[0] += 1.0

    model = convolutions(0.0)
    optimizer, step, make, batch = trained_by(model, second)
    found = search([model], [optimizer], step, batch, make, dtype="bf16", device=torch.device("cpu"),
                   seconds=seconds)  # fmt: skip
    assert now[0] <= seconds + 1.0
    measured = [trial.choice.level for trial in found.trials[:3] if trial.seconds]
    assert measured == (["O0", "O1"] if seconds < 7.0 else ["O0", "O1", "O2"])


def test_gradients_are_kept_of_fp32_alone() -> None:
    tried = bench([])
    tried.first(LevelChoice("O0"))
    seen: list[FirstStep] = []
    look = tried._run_first_step
    tried._run_first_step = lambda *given: seen.append(look(*given)) or seen[-1]
    found = tried.first(LevelChoice("O1", "bf16"))
    assert [len(one.gradients) for one in seen] == [0]
    assert found.gradient_error == pytest.approx(0.002, abs=0.002)
    base = tried._bases["keep"]
    kept = FirstStep(gradients={key: value.clone() for key, value in base.gradients.items()})
    kept.gradients[0, 0] *= 1.5
    whole = torch.cat([value.flatten() for value in base.gradients.values()]).norm()
    assert kept.distance(base)[1] == pytest.approx(float(base.gradients[0, 0].norm() / 2 / whole))


def test_what_does_not_fit_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolutions(0.0)
    optimizer, step, make, batch = trained_by(model)
    monkeypatch.setattr(engine, "_free", lambda device: 6000.0)
    found = search([model], [optimizer], step, batch, make, dtype="bf16", device=torch.device("cpu"))
    assert found.choice.level == "O0"
    needed = sum(p.numel() for p in model.parameters()) * 6 / 1e9
    assert found.trials[1].failed == f"it needs {needed:.3g} GB beside what is held, and 6e-06 GB are free"
    assert "O2 bf16: it needs" in found.reason
    assert not optimizer.state


def test_fp32_that_does_not_fit_is_left_out_by_name() -> None:
    model = convolutions(0.0)
    optimizer, step, make, batch = trained_by(model)

    def large(amp: hs.Session, *batch: Tensor) -> Tensor:
        if amp.level.name == "O0":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(amp, *batch)

    found = search([model], [optimizer], large, batch, make, dtype="bf16", device=torch.device("cpu"))
    assert found.choice.level in ("O1", "O2")
    assert "O0: CUDA out of memory" in found.reason
    assert found.trials[0].choice.label == "O1 bf16"


def test_nothing_that_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolutions(0.0)
    optimizer, step, make, batch = trained_by(model)
    monkeypatch.setattr(engine, "_free", lambda device: 3000.0)
    with pytest.raises(hs.ConfigError, match="no step can be taken at O0: it needs"):
        search([model], [optimizer], step, batch, make, dtype="bf16", device=torch.device("cpu"))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_layout_is_not_far_for_the_dropout_mask_that_it_draws(level: str) -> None:
    model = convolutions(0.5)
    optimizer, step, make, batch = trained_by(model)
    tried = Bench([model], [optimizer], step, batch, make, 60.0)
    tried.first(LevelChoice("O0"))
    dtype = None if level == "O0" else "bf16"
    assert (tried.first(LevelChoice(level, dtype)).gradient_error or 0.0) < 0.02
    last = tried.first(LevelChoice(level, dtype, "channels_last"))
    assert last.failed is None
    assert (last.gradient_error or 0.0) < 0.02
    assert (last.gradient_error is None) == (level == "O0"), "nothing to compare fp32 with but itself"


def test_a_layout_of_a_fixed_level_is_not_far_for_its_mask_either() -> None:
    model = convolutions(0.5)
    optimizer, step, make, batch = trained_by(model)
    found = search([model], [optimizer], step, batch, make, dtype="bf16", device=torch.device("cpu"),
                   level="O1", seconds=0.3)  # fmt: skip
    assert [t.too_far for t in found.trials] == [None, None]
    assert found.trials[1].gradient_error is None
