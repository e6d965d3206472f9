"""`tune(compile=True)` and torch.autocast beside the levels: tried, said, and nothing of them left behind."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.session.prepare import arguments_of
from halfstep.tuning import engine
from halfstep.tuning.choices import TORCHS, LevelChoice, Trial
from tests.compiling import traced
from tests.tuning.test_tune import BATCH, image, network, same, step_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Net(nn.Module):
    """A network with dropout and batch norm whose class is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def made() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, hs.optim.AdamW(model.parameters(), lr=0.01)


def of_compiled(trials: tuple[Trial, ...]) -> list[Trial]:
    return [trial for trial in trials if trial.choice.compiled]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "COMPILING", 0.1)


@pytest.mark.usefixtures("quick")
def test_the_two_fastest_levels_are_compiled_and_everything_is_as_before() -> None:
    model, optimizer = made()
    before, names = image(model, optimizer), vars(model).keys()
    with traced() as graphs:
        found = hs.tune(model, optimizer, step_of(model), *BATCH, seconds=4.0, compile=True, layout="keep")
        assert same(image(model, optimizer), before)
        count = len(graphs)
        model(BATCH[0])
        assert len(graphs) == count, "the model was left compiled"
    assert vars(model).keys() == names
    both = of_compiled(found.trials)
    assert len({trial.choice.level for trial in both}) == len(both) == 2
    assert all(trial.usable and trial.compiling for trial in both)
    assert count <= 2 * len(both), "compiled anew in each turn"
    for trial in both:
        assert f"{trial.choice.label} is" in found.reason


@pytest.mark.usefixtures("quick")
def test_what_is_taken_is_compiled_already_and_a_plan_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    monkeypatch.setattr("halfstep.tuning.search.decide", lambda trials: (of_compiled(trials)[0].choice, "so"))
    with traced() as graphs:
        step = step_of(model)
        amp = hs.prepare(
            model, optimizer, "auto", step=step, batch=BATCH, seconds=10.0, compile=True, kernels="native"
        )
        count = len(graphs)
        step(amp, *BATCH)
        assert len(graphs) == count, "compiled anew"
        assert amp.tuning is not None
        plan = hs.Plan.from_toml(amp.tuning.to_toml())
        assert plan.settings is not None
        assert plan.settings.compile
        amp.revert()
        again = hs.prepare(model, optimizer, plan=plan)
        step(again, *BATCH)
        assert "_compiled_call_impl" in vars(model)
        again.revert()


def test_without_the_word_nothing_is_compiled() -> None:
    model, optimizer = made()
    with traced() as graphs:
        found = hs.tune(model, optimizer, step_of(model), *BATCH, seconds=1.0, layout="keep")
    assert not graphs
    assert not of_compiled(found.trials)


def test_without_the_seconds_it_is_left_out_by_name() -> None:
    model, optimizer = made()
    with traced() as graphs:
        found = hs.tune(model, optimizer, step_of(model), *BATCH, seconds=1.0, compile=True, layout="keep")
    assert not graphs
    for trial in of_compiled(found.trials):
        assert "no time was left to measure it: compiling takes about 30 s, and" in str(trial.failed)
        assert f"{trial.choice.label}: {trial.failed}" in found.reason
    assert of_compiled(found.trials)


@pytest.mark.usefixtures("quick")
def test_a_compilation_that_takes_all_the_seconds_is_measured_all_the_same() -> None:
    def slow(graph: Any) -> Any:
        time.sleep(1.5)
        return graph

    model, optimizer = made()
    with traced(slow):
        found = hs.tune(model, optimizer, step_of(model), *BATCH, seconds=1.5, compile=True, layout="keep")
    first, second = of_compiled(found.trials)
    assert first.usable
    assert first.time < 1.0 < 1.5 < (first.compiling or 0.0)
    assert "no time was left to measure it: compiling takes about" in str(second.failed)


@pytest.mark.usefixtures("quick")
def test_a_compiler_that_fails_is_named_and_leaves_the_model() -> None:
    def broken(graph: Any) -> Any:
        raise OSError("no compiler was found")

    model, optimizer = made()
    before, names = image(model, optimizer), vars(model).keys()
    with traced(broken):
        found = hs.tune(model, optimizer, step_of(model), *BATCH, seconds=6.0, compile=True, layout="keep")
    assert ["no compiler was found" in str(t.failed) for t in of_compiled(found.trials)] == [True, True]
    assert not found.choice.compiled
    assert same(image(model, optimizer), before)
    assert vars(model).keys() == names


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_compiled_code_is_not_far_for_the_dropout_mask_that_it_draws(dropout: float) -> None:
    def draws(graph: Any) -> Any:
        def run(*args: Any) -> Any:
            torch.rand(1)
            return graph(*args)

        return run

    model, optimizer = made()
    model.inner[3].p = dropout
    with traced(draws):
        found = hs.tune(model, optimizer, step_of(model), *BATCH, seconds=6.0, compile=True, layout="keep")
    for trial in of_compiled(found.trials):
        assert trial.failed is None
        assert (trial.gradient_error is None) == (dropout > 0)


@pytest.mark.usefixtures("quick")
def test_a_fixed_level_is_compiled_in_the_faster_layout() -> None:
    model, optimizer = made()
    with traced() as graphs:
        amp = hs.prepare(model, optimizer, "O1", layout="auto", step=step_of(model), batch=BATCH, seconds=1.0,
                         compile=True)  # fmt: skip
        assert not graphs
        step_of(model)(amp, *BATCH)
        assert graphs
    assert amp.tuning is not None
    assert all(not t.choice.compiled and t.choice.level == "O1" for t in amp.tuning.trials)


def test_a_script_that_compiles_does_so_under_each_choice() -> None:
    for compile in (True, False):
        assert arguments_of(LevelChoice("O2", "bf16"), {"compile": compile}, None)["compile"] is compile


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_torchs_region_is_timed_beside_the_levels(dtype: str) -> None:
    model, optimizer = made()
    regions = set[tuple[bool, bool]]()
    plain = model.forward

    def noting(self: Net, x: Tensor) -> Tensor:
        regions.add((torch.is_autocast_enabled("cpu"), hs.active_policy("cpu") is not None))
        return plain(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Net, "forward", noting)
        found = hs.tune(
            model,
            optimizer,
            step_of(model),
            *BATCH,
            seconds=1.0,
            dtype=dtype,
            layout="keep",
            kernels="native",
        )
    assert (True, False) in regions
    trial = next(t for t in found.trials if t.choice.level == TORCHS)
    assert trial.choice == LevelChoice(TORCHS, dtype)
    assert trial.usable
    assert trial.seconds
    assert 0 < (trial.gradient_error or 0.0) < 0.1
    assert f"torch.autocast {dtype}" in found.to_toml()


@pytest.mark.long
def test_torchs_own_compiler_is_tried() -> None:
    torch.compiler.reset()
    model, optimizer = made()
    found = hs.tune(model, optimizer, step_of(model), *BATCH, seconds=90.0, compile=True, layout="keep")
    trials = of_compiled(found.trials)
    assert [t.failed for t in trials] == [None, None]
    assert all(t.time < 1.0 and (t.compiling or 0.0) > t.time for t in trials)
    torch.compiler.reset()
