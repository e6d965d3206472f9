"""`halfstep tune` of scripts that never heard of halfstep: right, or refused by name."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.cli import _tune_script, main
from halfstep.cli._foreign_script import ForeignScript
from halfstep.cli.tune import _code, _lines
from halfstep.doctor.process import StopScript, in_words, run_main, seed
from halfstep.recipes import runs
from halfstep.tuning import choices
from halfstep.tuning.choices import LevelChoice, Trial, decide, gradient_bound
from halfstep.tuning.engine import FirstStep
from halfstep.tuning.search import Tuning
from tests.cli import foreign_scripts
from tests.cli.foreign_scripts import REFUSED, TRIED, Foreign

STEPS = 12


def tried(script: Foreign, dtype: torch.dtype | None, folder: Path) -> ForeignScript:
    """The script after some steps in this process."""
    path, left = folder / "train.py", iter(range(STEPS))

    def stepped() -> None:
        if next(left, None) is None:
            raise StopScript

    path.write_text(script.text)
    foreign = ForeignScript(dtype, stepped)
    foreign.install()
    seed(0)
    try:
        error = run_main(str(path), ())
    finally:
        foreign.close()
    assert error is None, in_words(error, 0)
    return foreign


@pytest.mark.parametrize("script", TRIED, ids=lambda s: s.name)
def test_losses_and_gradients_are_near_those_of_fp32(script: Foreign, tmp_path: Path) -> None:
    base = tried(script, None, tmp_path)
    assert base.refused is None
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        low = tried(script, dtype, tmp_path)
        assert len(low.losses) == len(base.losses) >= STEPS
        assert low.skipped == 0
        assert not torch.equal(torch.stack(low.losses), torch.stack(base.losses))
        assert torch.allclose(torch.stack(low.losses), torch.stack(base.losses), rtol=0.05, atol=0.02)
        error = low.first.distance(base.first)[1]
        assert error is not None
        assert 0 < error < gradient_bound(name)


def test_lines_below_a_choice_of_fp32_say_why_one_may_want_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slower = (Trial(LevelChoice("O0"), (1.0,), losses=(1.0,)), Trial(LevelChoice("O1", "bf16"), (2.0,)))
    found = Tuning(slower, *decide(slower), 0.0)
    assert "to train in bf16 all the same (for its memory" in _lines(found)
    monkeypatch.setattr(_tune_script, "tune_script", lambda *_: found)
    script = tmp_path / "train.py"
    script.touch()
    assert main(["tune", str(script), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == _lines(found)


LOSSES = {"bce": lambda out: nn.BCELoss()(out.sigmoid(), torch.ones_like(out))}


@pytest.mark.parametrize("script", TRIED, ids=lambda s: s.name)
def test_the_lines_to_write_train_as_the_script_did(script: Foreign, tmp_path: Path) -> None:
    uses = tried(script, None, tmp_path).uses
    assert uses == {
        "mlp": {"clip_grad_norm_"},
        "own scaler": {"clip_grad_norm_", "GradScaler"},
        "gan": {"several optimizers"},
        "bce": {"clip_grad_value_"},
    }.get(script.name, set())
    for dtype in ("bf16", "fp16"):
        code = textwrap.dedent(_code(dtype, uses))
        assert ("amp.unscale()" in code) == ("clip_grad_value_" in uses)
        assert ("GradScaler" in code) == ("GradScaler" in uses)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.detach().clone()
        given: dict[str, Any] = {"model": model, "models": [model], "optimizer": optimizer, "hs": hs}
        given |= {"optimizers": [optimizer], "input": torch.ones(2, 4), "max_norm": 0.05}
        exec(code, given | {"loss_of": LOSSES.get(script.name, lambda out: out.mean() / 10)})
        moved = float((model.weight.detach() - before).norm())
        # four weights and a bias of the same gradient, 0.1
        expected = 0.05 * (4 / 5) ** 0.5 if "clip_grad_norm_" in uses else 0.2
        assert moved > 0.05 if script.name in LOSSES else moved == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("script", REFUSED[:-1], ids=lambda s: s.name)
def test_what_cannot_be_tried_is_refused_by_name(script: Foreign, tmp_path: Path) -> None:
    refused = tried(script, None, tmp_path).refused
    assert refused is not None
    assert script.refused in refused


def test_weights_updated_by_hand_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(foreign_scripts.BY_HAND.text)
    assert main(["tune", str(script)]) == 2
    assert foreign_scripts.BY_HAND.refused in capsys.readouterr().err


def test_what_argparse_said_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert main(["tune", str(script), "--", "--epoch", "1"]) == 2
    assert "unrecognized arguments: --epoch 1" in capsys.readouterr().err.splitlines()[-1]


def test_a_script_of_one_step_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        foreign_scripts.MLP.text.replace("range(20)", "range(1)").replace("split(32)", "split(256)")
    )
    assert main(["tune", str(script)]) == 2
    assert "it took 1 step, and 4 are needed" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["train.py", "digits-mlp"])
@pytest.mark.parametrize("dtype", ["fp8", "e4m3fn", "fp32"])
def test_only_16_bit_dtypes_are_tried(
    target: str,
    dtype: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_tune_script, "tune_script", None)
    monkeypatch.setattr(runs, "tune_recipe", None)
    assert main(["tune", target, "--dtype", dtype]) == 2
    said = capsys.readouterr().err
    assert dtype in said
    assert "expected bf16 or fp16" in said


def test_the_command_prints_loss_time_and_memory_and_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(path: Any, args: Any, choice: LevelChoice, *more: Any) -> _tune_script.Run:
        numbers = {"O0": (0.1, 3.0, 8_000_000), "O1 bf16": (0.06, 3.25, 5_000_000)}
        seconds, loss, peak = numbers.get(choice.label, (0.2, 3.5, 6_000_000))
        losses, skipped = (9.0,) * 30 + (loss,) * 10, int(seconds == 0.2)
        trial = Trial(choice, (seconds,), losses=losses, peak_bytes=peak, skipped=skipped)
        return _tune_script.Run(trial, FirstStep(loss, {(0, 0): torch.ones(2)}))

    monkeypatch.setattr(_tune_script, "run_script", child)
    monkeypatch.setattr(choices, "LOSS_ULPS", 1000)
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["tune", str(script)]) == 0
    said = capsys.readouterr().out
    for words in ("O1 bf16", "3.25", "5 MB", "60 ms", "1.7x faster", "O1 fp16", "3.5", "gradients: 1"):
        assert words in said
    assert "to train in bf16, import halfstep as hs and write:" in said
    assert said.count('amp = hs.prepare(model, optimizer, level="O1", dtype="bf16")') == 1


@pytest.mark.long
@pytest.mark.parametrize("script", [*TRIED, *REFUSED], ids=lambda s: s.name)
def test_every_script_through_the_command(
    script: Foreign, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tune_script, "TURNS", 1)
    path = tmp_path / "train.py"
    path.write_text(script.text)
    code = main(["tune", str(path), "--json"])
    said = capsys.readouterr()
    if script.refused:
        assert code == 2
        assert script.refused in said.err
        assert len(said.err.strip().splitlines()) == 1
        return
    assert code == 0
    document = json.loads(said.out)
    assert "amp = hs.prepare(" in document["lines"]
    base, *others = document["measured"]
    assert [row["setting"] for row in others] == ["O1 bf16", "O1 fp16"]
    for row in others:
        assert row["note"] == ""
        assert row["skipped"] == 0
        assert row["loss"] == pytest.approx(base["loss"], rel=0.05, abs=0.02)
        assert row["peak_bytes"] > 0
        assert row["milliseconds"] > 0


# --- the gradients that a script sees in fp16 --------------------------------------------------------------


class Chain:
    """Two modules called one after the other, and leaves of other kinds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.second = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.x = torch.randn(5, 6, requires_grad=True)
        torch.optim.SGD([self.scale], lr=0.1)

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [*self.first.parameters(), *self.second.parameters(), self.scale, self.x]


def chained(c: Chain) -> None:
    out = c.second(input=c.first(c.x)) * c.scale
    penalty = sum(p.square().sum() for p in c.first.parameters())
    (F.cross_entropy(out, torch.tensor([0, 1, 2, 0, 1])) + 1e-2 * penalty).backward()


def accumulated(c: Chain) -> None:
    chained(c)
    chained(c)


def checkpointed(c: Chain) -> None:
    (c.second(checkpoint(c.first, c.x, use_reentrant=True)) * c.scale).square().sum().backward()


def with_given_gradients(c: Chain) -> None:
    hidden = c.first(c.x)
    out = c.second(hidden) * c.scale
    torch.autograd.backward([out, hidden.sum()], [torch.ones_like(out), None])


def penalised(c: Chain) -> None:
    out = (c.second(c.first(c.x)) * c.scale).sum()
    (slope,) = torch.autograd.grad(out, c.x, create_graph=True)
    (out + slope.square().sum()).backward()


def gradients(step: Callable[[Chain], None], dtype: torch.dtype | None) -> list[torch.Tensor]:
    foreign = ForeignScript(dtype, lambda: None)
    foreign.install()
    try:
        chain = Chain()
        step(chain)
    finally:
        foreign.close()
    found = [leaf.grad for leaf in chain.leaves if leaf.grad is not None]
    assert len(found) == len(chain.leaves)
    return found


@pytest.mark.parametrize("step", [chained, accumulated, checkpointed, with_given_gradients, penalised])
def test_every_leaf_has_its_true_gradient_in_fp16(step: Callable[[Chain], None]) -> None:
    for low, full in zip(gradients(step, torch.float16), gradients(step, None), strict=True):
        torch.testing.assert_close(low, full, rtol=0.02, atol=0.005)


def test_a_step_on_gradients_that_overflow_changes_nothing_and_halves_the_scale() -> None:
    foreign = ForeignScript(torch.float16, lambda: None)
    foreign.install()
    try:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        for factor in (1e6, 1.0):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)) * factor).sum().backward()
            optimizer.step()
            if factor > 1:
                assert torch.equal(model.weight, before)
                assert not optimizer.state
    finally:
        foreign.close()
    assert foreign.skipped == 1
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((1, 4), 2.0))


class Careful(nn.Module):
    """Keeps one of its layers in fp32, and notes the dtypes of both."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.full = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.low(x)
        with torch.autocast("cpu", enabled=False):
            out = self.full(x.float())
        self.dtypes = [x.dtype, out.dtype]
        return self.low(out)


def test_a_region_inside_a_module_goes_first() -> None:
    foreign = ForeignScript(torch.bfloat16, lambda: None)
    foreign.install()
    try:
        model = Careful()
        out = model(torch.ones(2, 4))
    finally:
        foreign.close()
    assert model.dtypes == [torch.bfloat16, torch.float32]
    assert out.dtype is torch.float32


def test_everything_is_as_before_once_it_is_closed() -> None:
    before = nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.add_param_group
    foreign = ForeignScript(torch.bfloat16, lambda: None)
    foreign.install()
    foreign.close()
    assert before == (nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.add_param_group)
