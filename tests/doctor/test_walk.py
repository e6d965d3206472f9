"""How many files of ours one bad step enters while the doctor judges it."""

import contextlib
import io
import os
import pickle
import sys

import pytest

import halfstep
from halfstep.doctor import examiner
from halfstep.doctor.process import ForkPoint
from halfstep.numerics.fault import Investigation
from tests.doctor.test_zoo import examine, named

ROOT = os.path.dirname(halfstep.__file__) + os.sep


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="copies are forks")
def test_a_bad_step_of_a_plain_script_enters_at_most_25_files(tmp_path, monkeypatch):
    """From the moment it is known to be bad to its verdict, in this process and in the copies of it.

    Four of them are about its remedy: the file of that kind, those of all and of an op's, and the list; one
    keeps the files of the script, one knows who owns its gradients.
    """
    entered, judged = set(), set()
    told, tell = os.pipe()  # a copy writes no file
    os.set_blocking(told, False)
    look, answer, begin = Investigation.rerun, ForkPoint.send_and_exit, examiner.Examiner._begin

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name != "<module>":
            entered.add(code.co_filename.removeprefix(ROOT))

    def began(self):
        if self.active_request is None:
            entered.clear()
        begin(self)

    def answered(self, seen):
        os.write(tell, pickle.dumps(entered))
        answer(self, seen)

    def looked(investigation, suspect):
        if not suspect.bad or judged:
            return look(investigation, suspect)
        entered.clear()
        drained()
        result = look(investigation, suspect)
        judged.update(entered)
        file = io.BytesIO(drained())
        while file.getbuffer().nbytes > file.tell():
            judged.update(pickle.load(file))
        return result

    def drained():
        with contextlib.suppress(BlockingIOError):
            return os.read(told, 1 << 16)
        return b""

    monkeypatch.setattr(ForkPoint, "send_and_exit", answered)
    monkeypatch.setattr(examiner.Examiner, "_begin", began)
    monkeypatch.setattr(Investigation, "rerun", looked)
    monkeypatch.setattr("halfstep.doctor.examiner.scale_of_apex", lambda: None)  # Apex is not in the script
    sys.setprofile(note)
    try:
        document = examine(named("distance_of_equal_points"), tmp_path, monkeypatch)
    finally:
        sys.setprofile(None)
        os.close(told)
        os.close(tell)
    assert not document.healthy
    assert "numerics/remedies/edge.py" in judged
    assert len(judged) <= 25, sorted(judged)
