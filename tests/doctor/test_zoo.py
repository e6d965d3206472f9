"""Each script of the zoo gets its verdict (step, phase, module, op, line, cause, cure): no false alarm.

And the same verdict by every way to run its steps again.
"""

import os
import pickle
import warnings

import pytest
import torch

import halfstep as hs
from halfstep.compat.apex import amp
from halfstep.doctor import script as _script
from halfstep.doctor.script import examine_script
from halfstep.numerics.remedies.base import FAILS, WORKS
from tests.doctor import (
    zoo,
    zoo_fields,
    zoo_habits,
    zoo_healthy,
    zoo_more,
    zoo_named,
    zoo_quiet,
    zoo_range,
    zoo_strange,
    zoo_taken,
)
from tests.doctor.stepwise import first_in_place, training_loops

ROOMS = (zoo_taken, zoo_range, zoo_quiet, zoo_more, zoo_strange, zoo_habits, zoo_named, zoo_fields)
FAULTS = [script for room in ROOMS for script in room.SCRIPTS]
HEALTHY = [
    *zoo_healthy.SCRIPTS,
    *(s for room in (zoo_strange, zoo_habits, zoo_named, zoo_fields) for s in room.HEALTHY),
]
QUIET = [*zoo_named.QUIET, *zoo_fields.QUIET]
#: StopScript of each kind for every day; the rest belongs to the exhaustive runs.
DAILY = {
    "distance_of_equal_points", "adam_in_half", "no_valid_token", "own_optimizer", "where_trap_of_a_norm",
    "nan_in_the_target", "summed_loss", "embedding_row", "second_behind_the_first", "running_variance",
    "overflow_that_is_swallowed", "updates_lost_to_rounding", "parameter_flushed_by_prepare",
    "learning_rate_spike", "outlier_batch", "start_up_skips", "missing_values_are_masked", "warm_up",
    "low_rank_adapters", "line_search", "sparse_embedding", "restart_of_another_schedule",
    "weight_decay_of_three_hundred", "poisoned_padding_row", "rate_in_two_stages",
    "squares_summed_in_half", "entropy_of_a_certain_half", "gan_feature_matching",
}  # fmt: skip
_REPORTED = [s.name for room in (zoo_named, zoo_fields) for s in (*room.SCRIPTS, *room.HEALTHY)]
DAILY |= {*_REPORTED[::4]}
#: Those that CI runs besides.
LONG = {*_REPORTED, "norm_by_hand_in_half"} - DAILY


#: Those that are run in every way: what only a look at a good step shows, one that is cured from the start of
#: the run, ones without a value that is not finite; in CI also a fault behind another and a healthy script.
EVERY_WAY = {"overflow_that_is_swallowed", "adam_in_half", "learning_rate_spike"}
EVERY_WAY_LONG = {"second_behind_the_first", "start_up_skips"}


def cases(scripts, daily=frozenset(DAILY), long=frozenset(LONG)):
    later = {s.name: pytest.mark.long if s.name in long else pytest.mark.exhaustive for s in scripts}
    return [pytest.param(s, id=s.name, marks=() if s.name in daily else later[s.name]) for s in scripts]


def run_here(run, *how):
    """A run of the script in this process, which then is as if the script had never run in it."""
    try:
        before = hs.prepare, hs.convert, torch.float16
        found = run()
        assert (hs.prepare, hs.convert, torch.float16) == before, "hooks are left"
        return found, ""
    finally:
        amp.shutdown()


def examine(script, folder, monkeypatch, way="copies"):
    monkeypatch.setattr(_script, "run_in_process", run_here)
    path = folder / f"{script.name}.py"
    path.write_text(script.text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return examine_script(path, [], script.steps, 0, way == "copies")


def check(script, document):
    """The first fault that needs something done is the one that was planted."""
    assert not document.healthy
    fault = document.faults[0]
    told = "\n".join(document.verdict)
    if script.step >= 0:
        assert fault.step == script.step
    assert fault.phase == script.phase
    assert script.module in ("", fault.module)
    assert not script.op or fault.op in script.op
    assert not script.line or fault.where == f"{script.name}.py:{script.line}"
    assert fault.cause.kind in script.cause
    assert [words for words in script.says if words not in told] == []
    helping = [c.kind for c in fault.cures if c.status != "does not help"]
    assert not script.cure or script.cure in helping


@pytest.mark.parametrize("script", cases(FAULTS))
def test_a_planted_fault_is_named(script, tmp_path, monkeypatch):
    check(script, examine(script, tmp_path, monkeypatch))


@pytest.mark.parametrize("script", cases(HEALTHY))
def test_a_healthy_script_is_called_healthy(script, tmp_path, monkeypatch):
    document = examine(script, tmp_path, monkeypatch)
    assert document.healthy, document.verdict
    assert document.counts


@pytest.mark.parametrize("script", QUIET, ids=lambda s: s.name)
def test_what_rounding_swallows_outside_of_parameters_is_named(script, tmp_path, monkeypatch):
    document = examine(script, tmp_path, monkeypatch)
    assert not document.healthy
    assert not document.faults
    told = "\n".join(document.verdict)
    assert [words for words in script.says if words not in told] == []
    assert f"{script.name}.py:{script.line}" in told


def told(document):
    """The verdict, as data (each fault with its place, its cause, and what became of its cures) and in words.

    Without the script's own warnings, which this process swallows.
    """
    words = [line for line in document.verdict if not line.startswith("the script warned: ")]
    return words, [
        (f.step, f.phase, f.module, f.op, f.where, f.cause.kind, f.harmless, f.masked_by is not None,
         [(c.kind, c.status, c.code) for c in f.cures])
        for f in document.bad
    ]  # fmt: skip


def named(name):
    return next(s for s in (*FAULTS, *HEALTHY) if s.name == name)


def of_two_ranks(monkeypatch):
    """Every run as two ranks find it that do the same."""
    monkeypatch.setattr(_script, "world_size", lambda: 2)
    monkeypatch.setattr(
        _script, "gather", lambda found: [pickle.loads(pickle.dumps(found)) for _ in range(2)]
    )
    monkeypatch.setattr(_script, "rendezvous_env", lambda: dict(os.environ))


def in_processes(script, folder, forked):
    """The verdict where each run has a process of its own, a copy of this one or a fresh one."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a process that pytest did not start
        return examine_script(folder / f"{script.name}.py", [], script.steps, 0, copies=False, forked=forked)


@pytest.mark.parametrize("script", cases((*FAULTS, *HEALTHY, *QUIET), EVERY_WAY, EVERY_WAY_LONG))
def test_every_way_to_run_again_gives_the_same_verdict(script, tmp_path, monkeypatch):
    by_copies = examine(script, tmp_path, monkeypatch, "copies")
    anew = examine(script, tmp_path, monkeypatch, "anew")
    with monkeypatch.context() as patch:
        of_two_ranks(patch)
        ranks = examine(script, tmp_path, patch, "ranks")
    monkeypatch.undo()
    for other in (anew, ranks, in_processes(script, tmp_path, forked=True)):
        assert told(other) == told(by_copies)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gradients_that_vanish", "warm_up"])
def test_a_fresh_process_for_each_run_gives_the_same_verdict(name, tmp_path, monkeypatch):
    script = named(name)
    by_copies = examine(script, tmp_path, monkeypatch)
    monkeypatch.undo()
    assert told(in_processes(script, tmp_path, forked=False)) == told(by_copies)


BEFORE_THE_STEP = {"standardised_by_its_own_spread"}  # the loader makes what is not finite
IN_PLACE = [s for s in FAULTS if len(training_loops(s.text)) == 1 and s.name not in BEFORE_THE_STEP]
IN_PLACE_DAILY = {"overflow_that_is_swallowed", "polynomial_schedule_past_its_end", "squares_summed_in_half"}


@pytest.mark.parametrize("script", cases(IN_PLACE, IN_PLACE_DAILY, set()))
def test_a_step_traced_in_place_shows_the_same_fault_and_no_other_verdict_on_a_cure(
    script, tmp_path, monkeypatch
):
    """In place one step alone is judged: of what only a run from the start tells, it says nothing."""
    document = examine(script, tmp_path, monkeypatch)
    fault = document.faults[0]
    if not fault.taped:
        pytest.skip("this is told by the notes of a run")
    monkeypatch.undo()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bad = first_in_place(tmp_path / f"{script.name}.py", fault.step)
    finally:
        amp.shutdown()
    assert (bad.phase, bad.op, bad.where, bad.cause.kind) == (
        fault.phase, fault.op, fault.where, fault.cause.kind,
    )  # fmt: skip
    said = {c.text: c.status for c in fault.cures}
    wrong = [c for c in bad.cures if c.status == FAILS and said.get(c.text) == WORKS]
    assert not wrong


FIRST = """
import torch, halfstep as hs
from torch import nn

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = self.a(x)  # HERE
        return self.b(h.float() / 1e4)

torch.manual_seed(1)
model = Deep()
model.a.weight.data *= 1e4
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
amp = hs.prepare(model, opt, dtype="fp16", loss_scale=1024.0)
for i in range(8):
    x = torch.randn(6, 8)
    if i == STEP:
        x = x * 10
    with amp.autocast():
        loss = model(x).square().mean()
    amp.backward(loss)
    amp.step()
"""


@pytest.mark.parametrize("step", [0, 3])
def test_a_policy_is_cured_before_the_region_reads_it_at_the_first_step_too(step, tmp_path, monkeypatch):
    script = zoo.Script(
        "first", FIRST.replace("STEP", str(step)), step, "forward", "a", ("linear",), ("range",)
    )
    document = examine(script, tmp_path, monkeypatch)
    check(script, document)
    assert document.faults[0].cures[0].status == WORKS
    assert document.faults[0].cures[0].verdict == f"works over {8 - step} steps"
    assert f"cure (works over {8 - step} steps): run linear in fp32" in "\n".join(document.verdict)
    assert document.faults[0].cures[0].code == 'hs.prepare(..., policy="full=linear")'


def test_there_are_enough_scripts():
    assert len(FAULTS) >= 110
    assert len(HEALTHY) >= 55
    assert {s.name for s in (*FAULTS, *HEALTHY)} >= {*DAILY, *EVERY_WAY, *IN_PLACE_DAILY}
