"""Scores the doctor on each project, two at a time: `python -m tests.doctor.score_people [NAME ...]`."""

import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.doctor.people import Project
from tests.doctor.test_people import PROJECTS, Examined, examine


def mark(project: Project, found: Examined) -> str:
    """right, partly, wrong or silent; of a healthy project right or wrong."""
    if project.healthy:
        return "right" if found.code == 0 else "wrong"
    if found.code == 0:
        return "silent"
    asked = len(project.says) + bool(project.places) + (project.step > 0)
    if found.code != 1 or len(found.missing) == asked:
        return "wrong"
    return "partly" if found.missing else "right"


def score(project: Project) -> tuple[Project, str, Examined]:
    with tempfile.TemporaryDirectory() as root:
        found = examine(project, Path(root))
    return project, mark(project, found), found


def main(names: list[str]) -> None:
    chosen = [p for p in PROJECTS if not names or p.name in names]
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(2) as pool:
        for project, word, found in pool.map(score, chosen):
            files = "same" if not found.differs else "not same: " + ", ".join(found.differs)
            kind = "healthy" if project.healthy else "faulty"
            print(f"{word:7} {kind:8} {project.name:42} files {files}", flush=True)
            if word != "right":
                print(f"        exit {found.code}, said: {(found.verdict.splitlines() or [''])[0]}")
                print("".join(f"        missing: {what}\n" for what in found.missing), end="", flush=True)
            counts.update([f"{kind} {word}", f"files {'same' if not found.differs else 'not same'}"])
    print(", ".join(f"{what}: {count}" for what, count in sorted(counts.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
