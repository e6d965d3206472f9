"""What the ranks of one script found, made one: the origin stays, what others were sent goes."""

import pytest

from halfstep.doctor import CauseFound, Document, Fault
from halfstep.doctor import script as ranks
from halfstep.errors import ConfigError
from halfstep.numerics.fault import RerunResult
from halfstep.numerics.tape import OpLocation


def fault(step=3, phase="forward", op="linear", origin=True):
    place = OpLocation("0", "", None, "train.py", 7)
    return Fault(phase, op, place, CauseFound("data", "1 inf"), step=step, origin=origin)


def document(*faults, error=None, steps=6, losses=(1.0, 2.0)):
    return Document("train.py", steps, list(losses), error, bad=list(faults))


def seen(*faults, bad_at=3, applied=True):
    return RerunResult(list(faults), bad_at=bad_at, applied=applied)


def over(monkeypatch, *everyone):
    monkeypatch.setattr(ranks, "gather", lambda one: list(everyone))
    monkeypatch.setattr(ranks, "world_size", lambda: len(everyone))
    return everyone


def test_the_rank_where_it_began_is_named(monkeypatch):
    sent = seen(fault(phase="optimizer", op="step", origin=False))
    one = ranks.merge_results(over(monkeypatch, sent, seen(fault(), bad_at=2), sent)[0])
    assert [(f.phase, f.rank) for f in one.faults] == [("forward", 1)]
    assert one.bad_at == 2
    told = ranks.one_document([document(*ranks.of_rank(one.faults, number)) for number in range(3)])
    assert "step 4, rank 1, 0, train.py:7" in told.headline


def test_a_fault_of_all_ranks_is_told_once_without_a_rank(monkeypatch):
    one = ranks.merge_results(over(monkeypatch, seen(fault()), seen(fault()))[0])
    assert [(f.step, f.rank) for f in one.faults] == [(3, None)]
    told = ranks.one_document([document(*ranks.of_rank(one.faults, number)) for number in range(2)])
    assert [(f.step, f.rank) for f in told.bad] == [(3, None)]


def test_what_one_rank_could_not_run_again_or_change_is_not_tried(monkeypatch):
    assert ranks.merge_results(over(monkeypatch, seen(), None)[0]) is None
    assert not ranks.merge_results(over(monkeypatch, seen(), seen(applied=False))[0]).applied


def test_faults_of_different_steps_stay_and_losses_are_the_mean(monkeypatch):
    one = ranks.one_document([document(fault(1), losses=(1.0, 3.0)), document(fault(2), losses=(3.0, 5.0))])
    assert [(f.step, f.rank) for f in one.bad] == [(1, 0), (2, 1)]
    assert one.losses == [2.0, 4.0]


def test_the_error_of_the_rank_that_failed_is_told_not_that_of_the_one_left_alone(monkeypatch):
    over(monkeypatch, "t.py could not be run: gloo closed", "t.py could not be run: no module x")
    with pytest.raises(ConfigError, match=r"rank 1: t.py could not be run: no module x"):
        ranks.from_all("")
    alone = document(error="DistBackendError after 2 steps: Connection closed by peer", steps=2)
    one = ranks.one_document([alone, document(error="ValueError after 2 steps: no such file", steps=2)])
    assert one.error == "rank 1: ValueError after 2 steps: no such file"
