"""Projects as people write them: what the doctor says, and that the folder is as after a plain run."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.doctor import (
    people_files,
    people_guards,
    people_healthy,
    people_owners,
    people_quiet,
    people_settings,
)
from tests.doctor.people import Project

SOURCE = Path(__file__).resolve().parents[2] / "src"
THEMES = (people_guards, people_settings, people_files, people_owners, people_quiet, people_healthy)
PROJECTS = [project for theme in THEMES for project in theme.PROJECTS]
BY_NAME = {project.name: project for project in PROJECTS}
SECONDS = 240


@dataclass(frozen=True)
class Examined:
    """What the doctor said of a project, and in what the folder differs from that of a plain run."""

    code: int
    verdict: str
    missing: tuple[str, ...]
    differs: tuple[str, ...]


def start(arguments, folder):
    """Runs Python in a folder; returns what `subprocess.run` gives."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def run_plainly(project: Project, root: Path) -> dict[str, bytes]:
    """The files that the project and a plain run of it leave."""
    folder = root / "plain" / project.name
    project.write(folder)
    done = start([*project.started, *project.args], folder)
    assert done.returncode == project.exit_code, done.stderr
    return files_of(folder)


def run_doctor(project: Project, root: Path) -> tuple[int, str, dict[str, bytes]]:
    """The exit code of the doctor, its verdict (what it printed, where it gave none), and the files then."""
    folder = root / "examined" / project.name
    project.write(folder)
    options = ["--steps", str(project.steps), "--json"]
    try:
        done = start(["-m", "halfstep", "doctor", *project.started, *options, "--", *project.args], folder)
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {SECONDS} s", files_of(folder)
    return done.returncode, verdict_of(done), files_of(folder)


def verdict_of(done) -> str:
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return done.stdout + done.stderr
    return "\n".join(found["verdict"] + ([f"error: {found['error']}"] if found["error"] else []))


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (p for p in sorted(folder.rglob("*")) if "__pycache__" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in paths}


def different_files(
    plain: dict[str, bytes], examined: dict[str, bytes], root: Path, name: str
) -> tuple[str, ...]:
    """The names that only one folder has, or whose contents differ."""
    found = []
    for file in sorted({*plain, *examined}):
        if file not in plain or file not in examined:
            found.append(f"{file} ({'only' if file in examined else 'not'} after the doctor)")
        elif plain[file] != examined[file] and not (
            file.endswith(".pt")
            and same_tensors(*(root / kind / name / file for kind in ("plain", "examined")))
        ):
            found.append(file)
    return tuple(found)


def same_tensors(first: Path, second: Path) -> bool:
    """Whether two checkpoints hold the same, NaN equal to NaN."""
    try:
        return equal(torch.load(first), torch.load(second))
    except Exception:
        return False


def equal(a, b) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
    return a == b


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor


def missing_from(verdict: str, project: Project) -> tuple[str, ...]:
    """What the verdict should say and does not; the lines of the script that it quotes say nothing."""
    code = {line.strip() for text in project.files.values() for line in text.splitlines()}
    lines = [line for line in verdict.splitlines() if line.strip() not in code]
    said = "\n".join(line for line in lines if not line.startswith("least headroom")).lower()
    said = said.replace("halfstep", "")
    missing = [" or ".join(words) for words in project.says if not any(word in said for word in words)]
    if project.places and not any(re.search(re.escape(p) + r"(?!\d)", verdict) for p in project.places):
        missing.append(" or ".join(project.places))
    if project.step > 0 and not re.search(rf"\bstep {project.step}\b", said):
        missing.append(f"step {project.step}")
    return tuple(missing)


def examine(project: Project, root: Path) -> Examined:
    """Runs a project plainly and under the doctor, in fresh copies."""
    plain = run_plainly(project, root)
    left = {
        name
        for name in plain
        if name not in project.files and (root / "plain" / project.name / name).is_file()
    }
    assert left == set(project.files_written)
    code, verdict, examined = run_doctor(project, root)
    missing = () if project.healthy else missing_from(verdict, project)
    return Examined(code, verdict, missing, different_files(plain, examined, root, project.name))


#: What is said of these in part, and what the truth asks for besides.
IN_PART = {
    "package_that_breaks_at_a_missing_age": "names the line that reads the data, not the one that computes",
    "json_with_one_class_too_few": "names the script's own error after 4 steps, not in step 5",
    "float16_without_a_scaler": "names the loss's line, not the model's or that of backward",
}


def cases():
    for name in BY_NAME:
        marks = [pytest.mark.xfail(reason=IN_PART[name], strict=True)] if name in IN_PART else []
        yield pytest.param(name, marks=marks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*cases()])
def test_of_what_people_write_the_doctor_says_what_is_wrong_and_touches_no_file(name, tmp_path):
    project = BY_NAME[name]
    found = examine(project, tmp_path)
    assert found.code == (0 if project.healthy else 1), found.verdict
    assert not found.missing, found.verdict
    assert not found.differs
