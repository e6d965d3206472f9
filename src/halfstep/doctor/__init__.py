"""Examines a training (a step or a script) and says in a document what was found."""

from halfstep.doctor.document import CauseFound, CureFound, Document, Fault
from halfstep.doctor.script import examine_script
from halfstep.doctor.step import examine

__all__ = ["CauseFound", "CureFound", "Document", "Fault", "examine", "examine_script"]


def __dir__() -> list[str]:
    return __all__
