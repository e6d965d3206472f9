"""Progress without a terminal: a line a name, a line when nothing was said for a while, none if quiet."""

import time

from halfstep.cli._progress import progress, time_left


def test_each_name_without_a_share_is_told_once(capsys):
    with progress("tuning", quiet=False) as tell:
        for name in ("a O0", "a O0", "a O1", "a O1"):
            tell(name)
    assert capsys.readouterr().err.splitlines() == ["tuning a O0", "tuning a O1"]


def test_names_that_take_turns_are_not_told_each_time(capsys):
    with progress("training a", quiet=False) as tell:
        for share in (0.25, 0.5, 0.75, 1.0):
            tell("a O0", share)
            tell("a O1", share)
    assert capsys.readouterr().err.splitlines() == ["training a"]


def test_a_long_silence_is_broken_even_within_a_step(capsys):
    with progress("training a", quiet=False, every=0.05) as tell:
        tell("a O1", 0.25)
        time.sleep(0.4)
    first, *beats = capsys.readouterr().err.splitlines()
    assert first == "training a"
    assert beats[0] == "  a O1: 25 %, 0 s, about 0 s left"


def test_quiet_says_nothing(capsys):
    with progress("training", quiet=True, every=0.01) as tell:
        tell("a O1", 0.5)
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_work_of_unknown_length_tells_its_seconds(capsys):
    with progress("tuning", quiet=False, every=0.05):
        time.sleep(0.2)
    assert set(capsys.readouterr().err.splitlines()) == {"  tuning: 0 s"}


def test_a_line_says_how_long_the_rest_takes():
    assert time_left(60.0, 1 / 3) == "about 2 min left"
    assert time_left(60.0, 0.75) == "about 20 s left"
