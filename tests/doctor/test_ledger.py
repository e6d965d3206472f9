"""What the notes of a run tell: spikes, divergence, and what came of them."""

import math

import pytest

from halfstep.doctor import CauseFound, Fault
from halfstep.doctor.ledger import GroupOptions, Ledger, Note, quiet_faults, with_roots
from halfstep.numerics.remedies.loop import LimitRates
from halfstep.numerics.tape import OpLocation
from halfstep.numerics.watch import LostUpdates


def run(updates, losses, rate=0.01, rates=(), sizes=(), **last):
    """A ledger of steps with these updates and losses; `last` changes the note of the last one."""
    ledger = Ledger()
    for i, (update, loss) in enumerate(zip(updates, losses)):
        given = (rates[i],) if rates else (rate,)
        size = sizes[i] if sizes else 1.0
        ledger.notes.append(
            Note(
                i,
                loss=loss,
                rates=given,
                taken=True,
                update=update,
                size=size,
                gradient=1.0,
                where=("t.py", 9),
            )
        )
    for name, value in last.items():
        setattr(ledger.notes[-1], name, value)
    return ledger


def overflow(step, kind="range"):
    place = OpLocation("2", "Linear", None, "t.py", 5)
    return Fault("forward", "linear", place, CauseFound(kind, kind), step=step)


def test_a_rate_that_jumped_is_the_root_of_an_overflow_steps_later():
    ledger = run([0.1] * 5 + [9e3, 1e20, math.inf], [1.0] * 6 + [1e9, math.nan], rates=[0.01] * 5 + [1e3] * 3)
    ledger.notes[-1].bad, ledger.notes[-1].lasting_damage = "loss", True
    (fault,) = with_roots(ledger, [overflow(7)])
    assert (fault.step, fault.cause.kind, fault.where) == (5, "learning rate", "t.py:9")
    assert "then: step 8: forward: linear in 2 (Linear), t.py:5" in fault.story()
    assert fault.cures[0].doses == [LimitRates((0.01,))]


def test_a_jump_is_told_from_the_rate_of_the_step_before():
    ledger = run([0.1] * 5 + [9e3], [1.0] * 6, rates=[0.1, 0.2, 0.18, 0.17, 0.16, 1e3])
    (fault,) = quiet_faults(ledger)
    assert "it jumps from 0.16 to 1000" in fault.cause.text
    assert fault.cures[0].doses == [LimitRates((0.2,))]


def test_updates_that_are_lost_are_told_at_the_first_step_that_loses_them():
    for dtype, cure in (("bf16", "masters"), ("fp32", "advice")):
        lost = [LostUpdates(i, 0.96 if i else 0.5, "w", 1.0, dtype) for i in (0, 1, 2, 3)]
        ledger = run([1e-6] * 4, [1.0] * 4)
        ledger.lost = lost
        (fault,) = quiet_faults(ledger)
        assert (fault.step, fault.cause.kind, fault.cures[0].kind) == (1, "rounding", cure)
        assert f"the {dtype} weights" in fault.cause.text


def test_bad_data_after_a_jump_stays_a_fault_of_its_own():
    ledger = run(
        [0.1] * 5 + [9e3, 0.1], [1.0] * 7, rates=[0.01] * 5 + [1e3, 0.01], bad="loss", lasting_damage=True
    )
    assert with_roots(ledger, [overflow(6, "data")])[0].cause.kind == "data"


def test_a_first_real_rate_after_almost_none_is_no_spike():
    ledger = run([1e-7] * 5 + [1e-2] * 9, [1.0] * 14)
    assert ledger.spike() is None
    assert run([1e-7] * 5 + [0.5] * 9, [1.0] * 14).spike() == 5


def test_a_loss_that_grew_is_told_with_the_step_whose_update_it_came_of():
    ledger = run([1.0] * 4, [2.0, 2.5, 4e3, math.nan], sizes=[1, 1, 50, 2e3], bad="loss", lasting_damage=True)
    (fault,) = with_roots(ledger, [overflow(3)])
    assert (fault.step, fault.cause.kind) == (1, "divergence")
    assert "learning rate of 0.01 is too large" in fault.cause.text


def test_a_loss_that_grew_over_still_weights_is_not_the_rates_fault():
    ledger = run([1e-4] * 4, [2.0, 2e2, 4e5, math.nan], bad="loss")
    (fault,) = with_roots(ledger, [overflow(3)])
    assert "learning rate" not in fault.cause.text
    assert "the weights did not" in fault.cause.text


def test_a_division_by_zero_is_not_explained_by_a_growing_loss():
    ledger = run([1.0] * 4, [2.0, 2e2, 4e5, math.nan], bad="loss", lasting_damage=True)
    assert [f.cause.kind for f in with_roots(ledger, [overflow(3, "mathematics")])] == ["mathematics"]


def test_a_weight_decay_beyond_two_steps_is_named():
    ledger = run([1.0] * 12, [10.0 ** (i * 2) for i in range(12)])
    for note in ledger.notes:
        note.options = (GroupOptions(weight_decay=300.0),)
    (fault,) = quiet_faults(ledger)
    assert "weight decay 300 times the learning rate is 3" in fault.cause.text


@pytest.mark.parametrize(("betas", "code"), [((0.9, 0.0), "betas=(0.9, 0.999)"), ((0.9, 0.999), "eps=1e-4")])
def test_a_large_update_of_small_gradients_blames_the_divisor(betas, code):
    ledger = run([1e-3] * 5 + [50.0], [1.0] * 6, gradient=0.0, options=(GroupOptions(0.0, betas, 1e-8),))
    (fault,) = quiet_faults(ledger)
    assert "though the gradients are no larger" in fault.cause.text
    assert [c.code for c in fault.cures] == [code]


@pytest.mark.parametrize(
    ("turns", "numbers"),
    [("dgdgdg", [0, 0, 1, 1, 2, 2]), ("dddgddd", [0, 1, 2, 2, 3, 4, 5]), ("aaabbb", [0, 1, 2, 2, 3, 4])],
)
def test_an_iteration_ends_where_an_optimizer_has_its_turn_again(turns, numbers):
    ledger = Ledger()
    owners = {name: object() for name in turns}
    assert [ledger.close(owners[name]).number for name in turns] == numbers
    assert ledger.iterations == len(set(numbers))


def test_a_scalar_that_goes_one_way_is_named_where_its_module_leaves_its_range():
    ledger = run([0.1] * 6, [1.0] * 6)
    for note, wander in zip(ledger.notes, (1.0, -2.0, 1.0, 3.0, -1.0, 2.5)):
        note.scalars = {"head.log_scale": 0.6 * note.number, "body.gain": wander}
    assert ledger.drift("head", 5) == "head.log_scale has gone from 0 to 3 in 6 steps"
    assert ledger.drift("head.inner", 5)
    assert ledger.drift("body", 5) == ""
    assert ledger.drift("head", 3) == ""
