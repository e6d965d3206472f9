"""`tune` and `level="auto"`: what they leave behind is nothing, and what they give can be prepared."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.tuning import search as searching
from halfstep.tuning.choices import LevelChoice, Trial


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 5)
    )


BATCH = (torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5)

KINDS = {
    "torch AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "torch SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "halfstep AdamW": lambda m: hs.optim.AdamW(m.parameters(), lr=0.01),
    "halfstep SGD": lambda m: hs.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, master="exact"),
}


def step_of(model: nn.Module) -> Any:
    def step(amp: hs.Session, x: Tensor, y: Tensor) -> Tensor:
        with amp.autocast():
            loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return step


def trained(model: nn.Module, amp: hs.Session, steps: int) -> list[float]:
    step = step_of(model)
    return [float(step(amp, *BATCH)) for _ in range(steps)]


def image(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything a run depends on, as copies."""
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    strides = [p.stride() for p in model.parameters()]
    parts = (model.state_dict(), optimizer.state_dict(), grads, strides, torch.get_rng_state())
    return copy.deepcopy(parts)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begun", [False, True])
def test_everything_is_as_before_bit_for_bit(kind: str, begun: bool) -> None:
    model = network()
    optimizer = KINDS[kind](model)
    if begun:
        amp = hs.prepare(model, optimizer, level="O0")
        trained(model, amp, 2)
        amp.revert()
        F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    before = image(model, optimizer)
    found = hs.tune(model, optimizer, step_of(model), *BATCH, seconds=1.0)
    assert len(found.trials) >= 3
    assert same(image(model, optimizer), before)


@pytest.mark.parametrize("kind", ["torch AdamW", "halfstep AdamW"])
def test_a_tuned_run_has_the_losses_of_its_plan_without_tuning(kind: str) -> None:
    model = network()
    optimizer = KINDS[kind](model)
    torch.manual_seed(3)
    amp = hs.prepare(model, optimizer, level="auto", step=step_of(model), batch=BATCH, seconds=1.0)
    assert amp.tuning is not None
    losses = trained(model, amp, 4)
    again = network()
    torch.manual_seed(3)
    plain = hs.prepare(again, KINDS[kind](again), plan=hs.Plan.from_toml(amp.tuning.to_toml()))
    assert trained(again, plain, 4) == losses
    assert plain.level.name == amp.level.name


def test_auto_says_what_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    amp = hs.prepare(model, KINDS["torch SGD"](model), level="auto", step=step_of(model), batch=BATCH,
                     layout="auto", seconds=1.0)  # fmt: skip
    assert amp.tuning is not None
    assert amp.tuning.reason in capsys.readouterr().err
    assert amp.tuning.reason in str(amp)
    labels = [trial.choice.label for trial in amp.tuning.trials]
    assert {"O0", "O1 bf16", "O2 bf16"} <= set(labels)
    assert any("channels_last" in label for label in labels)


def test_the_layout_alone_can_be_measured() -> None:
    model = network()
    amp = hs.prepare(model, KINDS["torch SGD"](model), level="O1", dtype="bf16", layout="auto",
                     step=step_of(model), batch=BATCH, seconds=1.0)  # fmt: skip
    assert amp.level.name == "O1"
    assert amp.tuning is not None
    assert [t.choice.label for t in amp.tuning.trials] == ["O1 bf16", "O1 bf16 channels_last"]


class Holding(torch.optim.SGD):
    """Keeps references of its own, which masters cannot take the place of."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.held = [p for group in self.param_groups for p in group["params"]]


def test_a_choice_that_cannot_be_prepared_is_named() -> None:
    model = network()
    found = hs.tune(model, Holding(model.parameters()), step_of(model), *BATCH, seconds=1.0, layout="keep")
    assert "Holding" in str(next(t.failed for t in found.trials if t.choice.level == "O2"))


@pytest.mark.parametrize("returned", [True, False])
def test_a_step_that_takes_none_is_refused(returned: bool) -> None:
    model = network()

    def step(amp: hs.Session, x: Tensor, y: Tensor) -> Tensor | None:
        with amp.autocast():
            loss = F.cross_entropy(model(x), y)
        return loss.detach() if returned else None

    with pytest.raises(hs.ConfigError, match=r"no step can be taken at O0: it ends without amp\.step"):
        hs.tune(model, KINDS["torch SGD"](model), step, *BATCH, seconds=1.0, layout="keep")


def test_a_step_that_always_fails_is_an_error_and_leaves_the_model() -> None:
    model = network()
    optimizer = KINDS["torch AdamW"](model)
    before = image(model, optimizer)

    def step(amp: hs.Session, *batch: Any) -> None:
        raise RuntimeError("no such batch")

    with pytest.raises(hs.ConfigError, match="no step can be taken at O0: no such batch"):
        hs.tune(model, optimizer, step, *BATCH)
    assert same(image(model, optimizer), before)


@pytest.mark.parametrize("wanted", ["level", "layout"])
def test_auto_without_a_step_says_what_to_give(wanted: str) -> None:
    model = network()
    with pytest.raises(hs.ConfigError, match=r"function step\(amp, \*batch\)"):
        hs.prepare(model, KINDS["torch SGD"](model), **{wanted: "auto"})


@pytest.mark.parametrize("batch", [BATCH[0], {"x": BATCH[0]}])
def test_a_batch_that_is_no_tuple_is_told_how_to_be_one(batch: Any) -> None:
    model = network()
    with pytest.raises(hs.ConfigError, match=r"for one argument batch=\(x,\)"):
        hs.prepare(model, KINDS["torch SGD"](model), level="auto", step=step_of(model), batch=batch)


def test_auto_is_read_in_any_case() -> None:
    model = network()
    with pytest.raises(hs.ConfigError, match=r"function step\(amp, \*batch\)"):
        hs.prepare(model, KINDS["torch SGD"](model), level="Auto")


def test_a_dtype_to_try_that_is_none_offers_those_that_work() -> None:
    model = network()
    for arguments in ({"level": "O1"}, {"level": "auto", "step": step_of(model), "batch": BATCH}):
        with pytest.raises(hs.ConfigError, match="'half16' as dtype=: a level computes in fp16 or bf16"):
            hs.prepare(model, KINDS["torch SGD"](model), dtype="half16", **arguments)


@pytest.mark.parametrize("seconds", [0, -1.0, "long"])
def test_seconds_are_a_number_above_0(seconds: Any) -> None:
    model = network()
    with pytest.raises(hs.ConfigError, match="seconds"):
        hs.tune(model, KINDS["torch SGD"](model), step_of(model), *BATCH, seconds=seconds)


def test_a_plan_with_settings_is_loaded_from_its_file(tmp_path: Path) -> None:
    trials = (
        Trial(LevelChoice("O0"), (0.1,), 0.0, 0.0),
        Trial(LevelChoice("O2", "bf16", "channels_last"), (0.05,), 1e-4, 0.02),
    )
    found = hs.Tuning(trials, *searching.decide(trials), 1.0)
    path = tmp_path / "plan.toml"
    path.write_text(found.to_toml())
    assert hs.Plan.read(path) == found.plan
    model = network()
    amp = hs.prepare(model, KINDS["torch AdamW"](model), plan=path)
    assert amp.level.name == "O2"
    assert amp.policy.compute_dtype == torch.bfloat16
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    amp.revert()
    assert model[0].weight.is_contiguous()
    with pytest.raises(hs.ConfigError, match="O3"):
        hs.prepare(model, KINDS["torch AdamW"](model), plan=path, level="O3")
    with pytest.raises(hs.PlanError, match=r"nowhere\.toml"):
        hs.prepare(model, KINDS["torch AdamW"](model), plan=str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[settings]\nlevel = 'O9'", "O9"),
        ("[settings]\ndtype = 'bf16'", "no level"),
        ("[settings]\nlevel = 'O1'\ndtype='bf16'\nlayot = 'keep'", "layout"),
        ("[settings]\nlevel = 'O0'\n[[measured]]\nsetting = 1", "setting must be"),
    ],
)
def test_a_plan_file_that_cannot_be_read_names_the_key(text: str, said: str) -> None:
    with pytest.raises(hs.ConfigError, match=said):
        hs.Plan.from_toml(text)
