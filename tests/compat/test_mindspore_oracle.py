"""Our MindSpore against MindSpore itself: dtypes of layers at every level, types of errors.

The answers of MindSpore 2.10 are kept in mindspore_2_10.json. Where HALFSTEP_MINDSPORE_PYTHON names an
interpreter that has MindSpore (its wheel wants numpy < 2, so it needs an environment of its own), it
is asked again and must still give them.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.compat import mindspore_cases

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "mindspore_2_10.json").read_text())
ANSWERED = {
    (layer, level): dtypes
    for layer, levels in RECORDED["layer_dtypes"].items()
    for level, dtypes in levels.items()
    if not dtypes[0].endswith("Error")  # no kernel on a CPU, or no source that its rewriting takes
}

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.HalfstepWarning")


def test_every_layer_gives_mindspores_dtypes_at_every_level():
    ours = mindspore_cases.layer_dtypes()
    differing = {
        key: (theirs, ours[key[0]][key[1]])
        for key, theirs in ANSWERED.items()
        if theirs != ours[key[0]][key[1]]
    }
    assert not differing
    assert len({layer for layer, _ in ANSWERED}) >= 15
    assert 2 * len(ANSWERED) >= 160


def test_every_mistake_raises_what_mindspore_raises():
    ours = mindspore_cases.error_types()
    differing = {
        mistake: (kinds[0], ours[mistake])
        for mistake, kinds in RECORDED["error_types"].items()
        if kinds[0] not in ours[mistake]
    }
    assert not differing
    assert sum(kinds != ["no error"] for kinds in RECORDED["error_types"].values()) >= 75
    assert set(ours) == set(RECORDED["error_types"])


def test_mindspore_still_answers_so(tmp_path):
    python = os.environ.get("HALFSTEP_MINDSPORE_PYTHON")
    if not python:
        pytest.skip(
            "HALFSTEP_MINDSPORE_PYTHON names no interpreter that has MindSpore 2.10 (pip install it "
            "in an environment of its own, with numpy < 2)"
        )
    cases = shutil.copy(mindspore_cases.__file__, tmp_path)
    answered = subprocess.run(
        [python, cases],
        env={**os.environ, "PRECISION_LIBRARY": "mindspore"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    answers = json.loads(answered.stdout)
    for name in ("version", "layer_dtypes", "error_types"):
        assert answers[name] == RECORDED[name]
