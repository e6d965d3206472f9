"""Works means works: a cure, written into its script, does in the whole of it what was said of it.

With a cure that holds the script is finite, the fault gone, and the loss within 5 % of fp32's over the same
steps; or better than without, and the step well. That is so to the end, or until another fault comes behind.
"""

import pytest

from halfstep.doctor.edit import is_gone, write_dose
from halfstep.errors import ConfigError
from halfstep.numerics.remedies.base import UNTRIED, WORKS
from halfstep.numerics.remedies.loss import DivideLoss
from tests.doctor.test_diff import applied, examined
from tests.doctor.test_zoo import FAULTS
from tests.doctor.whole import is_better, trains_as, whole, whole_in_fp32

BY_NAME = {script.name: script for script in FAULTS}
DAILY = {
    "distance_of_equal_points", "entropy_of_a_certain_half", "squares_summed_in_half",
    "temperature_that_reaches_zero",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DAILY else pytest.mark.exhaustive) for n in sorted(BY_NAME)]
)
def test_what_is_said_of_a_cure_holds_of_the_whole_script(name, tmp_path, monkeypatch):
    text, path = BY_NAME[name].text, tmp_path / f"{name}.py"
    document = examined(text, path, 0, monkeypatch, diff=True)
    fault = document.faults[0]
    fp32, without = whole_in_fp32(text, path), whole(text, path)

    def cured(cure, dose, new):
        until = fault.step + cure.over if len(document.faults) > 1 and cure.status == WORKS else None
        times = 2.0**dose.bits if isinstance(dose, DivideLoss) else 1.0
        run = whole(new, path)
        alike = trains_as(run, fp32, fault.step, until, times)
        better = alike or is_better(run, without, fault.step, until, times)
        if not (better and run.is_well(without, until)):
            return False
        try:
            found = examined(new, path, 0, monkeypatch)
        except ConfigError:
            return False
        bad = [f for f in found.faults if f.taped and not f.underflow]  # the others are finite, and come next
        return is_gone(fault, found) and (alike or not any(f.step <= fault.step for f in bad))

    wrong = []
    for cure in fault.cures:
        doses = cure.doses if cure.status != UNTRIED else ()
        ways = [(dose, new) for dose in doses for new in write_dose(text, dose, fault.location)]
        if ways and any(cured(cure, *way) for way in ways) != (cure.status == WORKS):
            wrong.append(f"{cure.kind} {cure.verdict}: {cure.text}")
    assert not wrong
    run = whole(applied(text, document.diff, path), path) if document.diff else None
    assert run is None or run.is_well(without)
    assert run is None or trains_as(run, fp32, fault.step) or is_better(run, without, fault.step)
