"""The comparison of optimizers measures what it says."""

import dataclasses
import json

import pytest
import torch

from halfstep.cli import main
from halfstep.optim import contest

CPU = torch.device("cpu")


def test_bytes_are_those_of_the_tensors():
    entries = contest.entries()
    results = {r.name: r.bytes_per_param for r in contest.race(entries, [4096, 2048], 1, CPU)}
    assert results["torch AdamW fused"] == pytest.approx(16, abs=0.01)
    assert results["hs.optim.AdamW exact / fp32"] == pytest.approx(14, abs=0.01)
    assert results["hs.optim.AdamW exact / bf16"] == pytest.approx(10, abs=0.01)
    assert results["hs.optim.AdamW exact / 8bit"] == pytest.approx(8, abs=0.02)


def test_movement_is_a_share_of_float64():
    assert contest.movement(contest.ours(), 1.0, 1e-5, 50, 64) == pytest.approx(1, rel=0.02)
    assert contest.movement(contest.ours(None), 1.0, 1e-5, 50, 64) == 0.0


def test_both_sides_start_from_the_same_gradients():
    fused, ours = (contest.Bench(entry, [512], CPU) for entry in (contest.entries()[0], contest.ours()))
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
    fields = {f.name for f in dataclasses.fields(contest.Result)}
    assert all(set(row) == fields for row in report["results"])
    for wrong, said in (
        ("--rounds 0", "rounds"),
        ("--parameters 3", "parameters"),
        ("--device tpu9", "tpu9"),
    ):
        assert main(["bench", "step", *wrong.split()]) == 2
        assert said in capsys.readouterr().err
