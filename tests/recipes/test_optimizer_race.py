"""The comparison of optimizers measures what it says."""

import dataclasses
import json

import pytest
import torch

from halfstep.cli import main
from halfstep.recipes import optimizer_race

CPU = torch.device("cpu")


def test_bytes_are_those_of_the_tensors():
    entries = optimizer_race.contestants()
    results = {r.name: r.bytes_per_param for r in optimizer_race.race(entries, [4096, 2048], 1, CPU)}
    assert results["torch AdamW fused"] == pytest.approx(16, abs=0.01)
    assert results["hs.optim.AdamW exact / fp32"] == pytest.approx(14, abs=0.01)
    assert results["hs.optim.AdamW exact / bf16"] == pytest.approx(10, abs=0.01)
    assert results["hs.optim.AdamW exact / 8bit"] == pytest.approx(8, abs=0.02)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("master", ["exact", "fp32", "stochastic"])
def test_a_weight_of_one_moves_as_in_fp32(master: str, state_dtype: str):
    count = 2**18 if master == "stochastic" else 4096  # the mean of 2^18 weights has a deviation of 0.3 %
    moved = optimizer_race.movement(optimizer_race.ours(master, state_dtype), 1.0, 1e-6, 1500, count)
    assert moved == pytest.approx(1, rel=0.02)


def test_exact_masters_move_exactly_as_fp32_and_no_masters_not_at_all():
    assert optimizer_race.movement(optimizer_race.ours(), 1.0, 1e-6, 300, 64) == 1.0
    assert optimizer_race.movement(optimizer_race.ours(None), 1.0, 1e-6, 300, 64) == 0.0


def test_an_optimizer_that_writes_into_gradients_moves_all_the_same():
    def overwrite(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.zero_()

    plain = optimizer_race.torch_adamw(fused=True)

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = plain.make(params)
        optimizer.register_step_post_hook(overwrite)
        return optimizer

    scribbler = dataclasses.replace(plain, make=make)
    assert optimizer_race.movement(scribbler, 1.0, 1e-4, 50, 64) == optimizer_race.movement(
        plain, 1.0, 1e-4, 50, 64
    )


def test_both_sides_start_from_the_same_gradients():
    fused, ours = (
        optimizer_race.TimedContestant(entry, [512], CPU)
        for entry in (optimizer_race.contestants()[0], optimizer_race.ours())
    )
    for bench in (fused, ours):
        bench.seconds("step")
        bench.refill()
    first, second = (bench.params[0].grad for bench in (fused, ours))
    assert first is not None
    assert second is not None
    assert torch.allclose(first, second.float(), rtol=0.05, atol=1.0)


def test_the_command_prints_json_and_refuses_nonsense(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "step", "--parameters", "4000", "--rounds", "1", "--no-movement", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    fields = {f.name for f in dataclasses.fields(optimizer_race.Result)}
    assert all(set(row) == fields for row in report["results"])
    for wrong, said in (
        ("--rounds 0", "rounds"),
        ("--parameters 3", "parameters"),
        ("--device tpu9", "tpu9"),
    ):
        assert main(["bench", "step", *wrong.split()]) == 2
        assert said in capsys.readouterr().err
