"""Outcomes: lazily read, once, in one transfer; what they say about a step."""

import copy
import pickle

import pytest
import torch

from halfstep import outcome as outcome_module
from halfstep.devices.transfer import send_to_host
from halfstep.outcome import Outcome, OutcomeQueue


def outcome(finite: bool = True, **kwargs) -> Outcome:
    flag = torch.tensor(finite)
    return Outcome(taken=flag, finite=flag, **kwargs)


def test_reads_device_scalars_as_plain_values():
    o = outcome(scale=torch.tensor(4.0), grad_norm=torch.tensor(2.0, dtype=torch.float64), amax=1, step=7)
    plain = {"taken": True, "finite": True, "scale": 4.0, "grad_norm": 2.0, "amax": 1.0}
    assert o.read().as_dict() == plain | {"reason": "", "step": 7}
    assert all(getattr(o, name) == value for name, value in o.read().as_dict().items())


@pytest.mark.parametrize(
    ("taken", "finite", "reason"),
    [
        (True, True, ""),
        (False, False, "skipped: gradients hold inf or NaN"),
        (True, False, "taken although gradients hold inf or NaN"),
        (False, True, "skipped"),
    ],
)
def test_bool_and_reason(taken, finite, reason):
    o = Outcome(taken=taken, finite=torch.tensor(finite))
    assert bool(o) is taken
    assert o.reason == reason


def test_a_given_reason_is_that_of_a_skipped_step():
    assert Outcome(taken=False, finite=True, reason="no gradients").reason == "no gradients"
    assert not Outcome(taken=True, finite=True, reason="no gradients").reason


def test_on_read_runs_once_when_read():
    seen = []
    o = outcome(on_read=seen.append)
    assert seen == []
    assert o.taken
    assert o.finite
    assert [record.taken for record in seen] == [True]


def test_reading_is_one_transfer(monkeypatch):
    copies = []
    monkeypatch.setattr(outcome_module, "send_to_host", lambda t: copies.append(t) or send_to_host(t))
    o = outcome(scale=torch.tensor(8.0), grad_norm=torch.tensor(1.0), amax=torch.tensor(0.5))
    assert (o.scale, o.grad_norm, o.amax, o.taken) == (8.0, 1.0, 0.5, True)
    assert len(copies) == 1


def test_repr_says_what_happened():
    taken = Outcome(taken=True, finite=True, scale=65536.0, grad_norm=1.5e-5, step=2)
    assert repr(taken) == "step 2: taken, grad norm 1.5e-05, loss scale 65536"
    assert taken._repr_html_() == f"<p>{taken}</p>"
    assert repr(Outcome(taken=False, finite=False)) == "step: skipped: gradients hold inf or NaN"


def test_repr_of_a_device_value_does_not_read_it():
    o = Outcome(taken=torch.empty((), dtype=torch.bool, device="meta"), finite=True, step=3)
    assert repr(o) == "step 3: on the device, not read"  # to read a meta tensor is an error


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_carry_plain_values(clone):
    twin = clone(outcome(scale=torch.tensor(2.0), result=5, on_read=lambda record: None))
    assert (twin.scale, twin.result, twin.device_value("scale")) == (2.0, 5, 2.0)


def test_queue_reads_host_outcomes_at_once():
    queue = OutcomeQueue()
    assert [r.taken for flag in (True, False) for r in queue.push(outcome(flag))] == [True, False]
    assert queue.drain() == []


def test_queue_waits_for_at_most_two_steps(monkeypatch):
    monkeypatch.setattr(Outcome, "on_host", property(lambda self: False))
    queue = OutcomeQueue()
    arrived = [len(queue.push(outcome())) for _ in range(5)]
    assert arrived == [0, 0, 1, 1, 1]
    assert len(queue.drain()) == 2
