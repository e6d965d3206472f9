"""Measuring: from a probe to a table on disk, without the caller's data, generators or modes."""

import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import halfstep as hs
from halfstep.casting import kernel_probes as probes
from halfstep.casting.kernel_choice import DIRECTIONS, IMPLEMENTATIONS, KernelTable
from halfstep.casting.kinds import KINDS
from halfstep.casting.kinds.kind import Choice, OpClass

CLASS = OpClass("linear", "fp16", "plain", "tiny", 1)


def measured(file, times, log=None, steady=True):
    def run(cls: OpClass, direction: str, skip: frozenset[str]) -> probes.Timing:
        if log is not None:
            log.append((cls.size, direction, skip))
        return probes.Timing({name: None if name in skip else t for name, t in times(cls).items()}, steady)

    return probes.Measurements(lambda: file, run)


def test_times_are_kept_on_disk_and_not_measured_again(tmp_path) -> None:
    file = tmp_path / "new folder" / "kernels.json"
    first = measured(file, lambda cls: {"native": 2.0, "rounded": 1.0})
    assert first.times(CLASS, "forward") == {"native": 2.0, "rounded": 1.0}
    assert (first.probes, list(file.parent.iterdir())) == (1, [file])
    second = measured(file, lambda cls: {"native": 0.0})
    assert second.times(CLASS, "forward") == {"native": 2.0, "rounded": 1.0}
    assert second.probes == 0


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"linear|fp16|plain|tiny|1|forward": {"native": "x"}}', "\x00"]
)
def test_a_damaged_file_is_measured_anew(tmp_path, damage: str) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(damage)
    again = measured(file, lambda cls: {"native": 2.0, "rounded": 1.0})
    assert again.times(CLASS, "forward")["native"] == 2.0
    assert json.loads(file.read_text())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = measured(blocked / "kernels.json", lambda cls: {"native": 2.0, "rounded": 1.0})
    assert found.times(CLASS, "forward")["rounded"] == found.times(CLASS, "forward")["rounded"] == 1.0
    assert found.probes == 1


def test_what_was_taken_on_a_busy_machine_serves_one_process(tmp_path) -> None:
    file = tmp_path / "kernels.json"
    busy = measured(file, lambda cls: {"native": 1.0, "rounded": 1.0}, steady=False)
    assert busy.times(CLASS, "forward") == busy.times(CLASS, "forward") == {"native": 1.0, "rounded": 1.0}
    quiet = measured(file, lambda cls: {"native": 2.0, "rounded": 1.0})
    assert quiet.times(CLASS, "forward") == {"native": 2.0, "rounded": 1.0}
    assert (busy.probes, quiet.probes) == (1, 1)


def test_one_thread_stands_in_for_several_that_wait_for_a_core(monkeypatch) -> None:
    """Others hold the cores: of two threads native seems far slower than it is."""
    line = itertools.count()
    monkeypatch.setattr(probes, "read_scheduler_wait", lambda: float(next(line)))
    threads: list[int] = []

    def native() -> None:
        threads.append(torch.get_num_threads())
        spends(1e-3 if threads[-1] == 1 else 2e-2, 0.0)()

    before = torch.get_num_threads()
    times, steady = probes.time_candidates({"native": native, "rounded": spends(4e-3, 0.0)}, 2)
    assert (threads[0], threads[-1], steady) == (before, 1, False)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    native_time, rounded = times["native"], times["rounded"]
    assert native_time is not None
    assert rounded is not None
    assert native_time < rounded


def test_two_processes_keep_each_others_rows(tmp_path) -> None:
    file = tmp_path / "kernels.json"
    one, two = (measured(file, lambda cls: {"native": 2.0, "rounded": 1.0}) for _ in range(2))
    one.times(CLASS, "forward")
    two.times(CLASS, "input")
    one.times(CLASS, "weight")
    assert len(json.loads(file.read_text())) == 3


def test_what_loses_ever_more_clearly_is_not_run_at_larger_sizes(tmp_path) -> None:
    growth = {"tiny": 4.0, "small": 6.0, "medium": 7.0, "large": 8.0}
    log: list = []
    found = measured(tmp_path / "k", lambda cls: {"native": growth[cls.size], "rounded": 1.0}, log)
    assert found.times(replace(CLASS, size="large"), "forward")["native"] is None
    assert [(size, "native" in skip) for size, _, skip in log] == [
        ("tiny", False),
        ("small", False),
        ("medium", True),
        ("large", True),
    ]


def test_what_catches_up_with_size_is_run_again(tmp_path) -> None:
    shares = {"tiny": 9.0, "small": 6.0, "medium": 2.0, "large": 0.8}
    found = measured(tmp_path / "k", lambda cls: {"native": shares[cls.size], "rounded": 1.0})
    assert found.times(replace(CLASS, size="large"), "input")["native"] == 0.8


@pytest.mark.parametrize("op", [*KINDS])
def test_every_kind_of_op_has_probes_that_run(op: str) -> None:
    for geometry in KINDS[op].geometries:
        cls = OpClass(op, "bf16", geometry, "tiny", 1)
        for direction in DIRECTIONS:
            if direction == "weight" and KINDS[op].one_backward:
                continue
            candidates = KINDS[op].probe(cls, direction)
            assert "native" in candidates
            assert set(candidates) <= set(IMPLEMENTATIONS)
            for call in candidates.values():
                out = call()
                tensors = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
                assert tensors[0].dtype is torch.bfloat16


@pytest.mark.parametrize("op", ["lstm", "gru", "rnn_tanh"])
def test_recurrent_probes_meet_no_denormal_numbers(op: str) -> None:
    """Gates that weights of one had closed left gradients that took fp32 three times as long."""
    cls = OpClass(op, "fp32", "plain", "large", 1)
    gradients: tuple[torch.Tensor, ...] = KINDS[op].probe(cls, "input")["native"]()
    smallest = torch.finfo(torch.float32).smallest_normal
    assert all(((g == 0) | (g.abs() >= smallest)).all() for g in gradients)
    assert all(g.abs().median() > 1e-12 for g in gradients)


def test_measuring_sees_and_moves_nothing_of_the_caller(tmp_path) -> None:
    found = probes.Measurements(lambda: tmp_path / "k")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        times = found.times(replace(CLASS, dtype="bf16"), "forward")
    assert all(t is not None and t > 0 for t in times.values())
    assert torch.equal(torch.get_rng_state(), before)


def spends(processor: float, waits: float):
    """A candidate that computes for some seconds and does not get the core for others."""

    def call() -> None:
        until = time.thread_time() + processor
        while time.thread_time() < until:
            pass
        time.sleep(waits)

    return call


def test_a_busy_machine_does_not_change_what_is_chosen(tmp_path, monkeypatch) -> None:
    """Others hold the core while native runs: its wall time is ten times rounded's, its own half of it."""
    candidates = {"rounded": spends(2e-3, 0.0), "native": spends(1e-3, 0.02)}
    linear = replace(KINDS["linear"], probe=lambda cls, direction: candidates)
    monkeypatch.setitem(KINDS, "linear", linear)
    table = KernelTable((), probes.Measurements(lambda: tmp_path / "k").times)
    assert table.choose(CLASS, "").is_native


LAYERS = [
    OpClass("linear", "bf16", "thin", "tiny", 1),
    OpClass("bmm", "bf16", "matrices up to 64", "tiny", 1),
    OpClass("convolution", "bf16", "1d stem", "tiny", 1),
]


@pytest.mark.parametrize("needs", ["", "w", "iw"])
@pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.op)
def test_a_layer_is_timed_both_ways(cls: OpClass, needs: str) -> None:
    times, _ = probes.time_layer(hs.autocast, cls, needs, Choice("rounded", "rounded", "rounded"))
    assert set(times) == {"native", "rounded"}
    assert all(t is not None and t > 0 for t in times.values())


def test_what_wins_little_in_a_layer_does_not_pay(tmp_path, monkeypatch) -> None:
    rows = {"linear": {"native": 1.0, "rounded": 0.95}, "bmm": {"native": 1.0, "rounded": 0.5}}
    asked: list[str] = []

    def time_layer(region: object, cls: OpClass, needs: str, choice: Choice) -> probes.Timing:
        asked.append(cls.op)
        return probes.Timing({**rows.get(cls.op, {"native": 1.0, "rounded": None})}, steady=True)

    monkeypatch.setattr(probes, "time_layer", time_layer)
    found = probes.Measurements(lambda: tmp_path / "k")
    choice = Choice("rounded")
    assert [found.pays(hs.autocast, cls, "iw", choice) for cls in LAYERS * 2] == [False, True, False] * 2
    assert found.pays(hs.autocast, replace(CLASS, size="large"), "iw", choice)
    assert found.pays(hs.autocast, replace(CLASS, op="attention"), "i", choice)
    assert asked == ["linear", "bmm", "convolution"]


def test_a_table_of_all_classes_knows_every_need(tmp_path) -> None:
    found = measured(tmp_path / "k", lambda cls: {"native": 2.0, "rounded": 1.0})
    rows = probes.whole_table(KernelTable((), found.times), torch.bfloat16)
    classes = probes.all_classes("bf16", torch.get_num_threads())
    assert len(rows) == len(classes) * len(probes.NEEDS)


def test_the_second_process_measures_nothing(tmp_path) -> None:
    code = (
        "import torch, halfstep as hs; from halfstep.casting.kernel_probes import measurements;"
        "torch.set_num_threads(1); layer = torch.nn.Linear(8, 8);\n"
        "with hs.autocast('cpu', 'bf16'): layer(torch.ones(4, 8)).sum().backward()\n"
        "print(measurements.probes)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HALFSTEP_KERNELS": "measured"}
    counts = [
        int(
            subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, check=True
            ).stdout
        )
        for _ in range(2)
    ]
    assert counts[0] > 0
    assert counts[1] == 0


def test_other_instruction_sets_have_other_files(monkeypatch, no_limits) -> None:
    files = {probes.times_file()}
    for variable in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.setenv(variable, "AVX2")
        files.add(probes.times_file())
    assert len(files) == 3


def test_a_whole_table_is_measured_for_so_long_and_no_longer():
    """Ranks wait for it: on a machine under load that was half a minute."""

    def slowly(cls, direction):
        time.sleep(0.01)
        return {"native": 9.0, "rounded": 1.0}

    began = time.monotonic()
    rows = probes.whole_table(KernelTable((), slowly), torch.bfloat16, seconds=0.1)
    assert time.monotonic() - began < 5
    assert 1 <= len(rows) < 50
    shared, last = KernelTable(rows), probes.all_classes("bf16", torch.get_num_threads())[-1]
    assert shared.choose(last, "iw").is_native
    assert not shared.choose(rows[0].exact[0], rows[0].exact[1]).is_native
