"""Progress without a terminal: a line a name, a line when nothing was said for a while, none if quiet."""

import time

from halfstep.cli._progress import _time_left, progress


def test_each_name_is_told_once(capsys):
    with progress("training", 4, quiet=False) as tell:
        for name in ("a O0", "a O0", "a O1", "a O1"):
            tell(name)
    assert capsys.readouterr().err.splitlines() == ["training a O0", "training a O1"]


def test_a_long_silence_is_broken_even_within_a_step(capsys):
    with progress("training", 9, quiet=False, every=0.05) as tell:
        tell("a O1")
        time.sleep(0.4)
    first, *beats = capsys.readouterr().err.splitlines()
    assert first == "training a O1"
    assert beats[0].startswith("  a O1: step 1 of 9 in all, ")


def test_quiet_says_nothing(capsys):
    with progress("training", 9, quiet=True, every=0.01) as tell:
        tell("a O1")
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_work_of_unknown_length_tells_its_seconds(capsys):
    with progress("tuning", None, quiet=False, every=0.05):
        time.sleep(0.2)
    assert set(capsys.readouterr().err.splitlines()) == {"  tuning: 0 s"}


def test_a_line_says_how_long_the_rest_takes(capsys):
    with progress("training", 9, quiet=False, every=0.05) as tell:
        tell("a O1")
        time.sleep(0.2)
    assert " s left" in capsys.readouterr().err
    assert _time_left(60.0, 3, 9) == ", about 2 min left"
    assert _time_left(60.0, 0, 9) == _time_left(60.0, 3, None) == ""
