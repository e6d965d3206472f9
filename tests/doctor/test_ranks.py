"""What the ranks of one script found, made one: the origin stays, what others were sent goes."""

import pytest

from halfstep.doctor import ranks
from halfstep.doctor.document import CauseFound, Document, Fault
from halfstep.doctor.order import RunFindings
from halfstep.errors import ConfigError


def fault(step=3, phase="forward", op="linear", origin=True):
    return Fault(
        step, phase, "0", op, "train.py:7", CauseFound("data", "1 inf", None), [], "story", origin=origin
    )


def found(*faults, error=None, steps=6, losses=(1.0, 2.0), bad=None):
    document = Document("train.py", steps, list(losses), error, bad=list(faults))
    return RunFindings(document, steps, bad, True, True, True, error)


def agreed(monkeypatch, *everyone):
    monkeypatch.setattr(ranks, "gather", lambda one: list(everyone))
    monkeypatch.setattr(ranks, "world_size", lambda: len(everyone))
    return ranks.agreed(everyone[0])


def test_the_rank_where_it_began_is_named(monkeypatch):
    sent = found(fault(phase="optimizer", op="step", origin=False), bad=3)
    one = agreed(monkeypatch, sent, found(fault(), bad=3), sent)
    assert [(f.phase, f.rank) for f in one.document.bad] == [("forward", 1)]
    assert one.first_bad == 3
    assert "step 4, rank 1, 0, train.py:7" in one.document.headline


def test_a_fault_of_all_ranks_is_told_once_without_a_rank(monkeypatch):
    one = agreed(monkeypatch, found(fault(), bad=3), found(fault(), bad=3))
    assert [(f.step, f.rank) for f in one.document.bad] == [(3, None)]


def test_faults_of_different_steps_stay_and_losses_are_the_mean(monkeypatch):
    one = agreed(
        monkeypatch, found(fault(1), bad=1, losses=(1.0, 3.0)), found(fault(2), bad=2, losses=(3.0, 5.0))
    )
    assert [(f.step, f.rank) for f in one.document.bad] == [(1, 0), (2, 1)]
    assert (one.first_bad, one.document.losses) == (1, [2.0, 4.0])


def test_the_error_of_the_rank_that_failed_is_told_not_that_of_the_one_left_alone(monkeypatch):
    alone = found(error="DistBackendError after 2 steps: Connection closed by peer", steps=2)
    one = agreed(monkeypatch, alone, found(error="ValueError after 2 steps: no such file", steps=2))
    assert one.error == one.document.error == "rank 1: ValueError after 2 steps: no such file"
    with pytest.raises(ConfigError, match=r"rank 2: t.py could not be run: no module x"):
        agreed(
            monkeypatch, found(), "t.py could not be run: gloo closed", "t.py could not be run: no module x"
        )
