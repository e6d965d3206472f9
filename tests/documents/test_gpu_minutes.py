"""`make gpu`: each part runs, small, on the false CUDA device; two files come back; its exit status."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from tests.falsecuda import build

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
BARE = ROOT / "tests" / "gpu" / "bare"
SOURCE = Path(halfstep.__file__).parents[1]
NO_DEVICE = "nothing was tested or measured: torch sees no CUDA device here"
PARTS = (
    *("facts", "smoke", "ceilings", "optimizers", "training", "launches", "bits", "tests", "compiled"),
    *("large", "small", "knobs", "regions", "peers", "profiled"),
)
needs_device = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "there is one")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(*command: str, path: tuple[Path, ...] = (BARE, SOURCE), **more: str) -> Any:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))} | more
    return subprocess.run(command, capture_output=True, text=True, timeout=560, env=env, cwd=ROOT)


def rehearse(out: Path, *arguments: str, **more: str) -> tuple[Any, dict[str, Any]]:
    """gpu.py, small and on the false device; what it said and the rows of gpu.json."""
    command = (sys.executable, "-m", "tests.falsecuda", str(SCRIPT), "--out", str(out), *arguments)
    done = run(*command, path=(SOURCE, ROOT), HALFSTEP_GPU_TINY="1", **more)
    return done, json.loads((out / "gpu.json").read_text())


def errors(rows: dict[str, Any]) -> list[Any]:
    return [row for row in rows.values() if isinstance(row, dict) and "error" in row]


@needs_no_gpu
def test_without_a_gpu_it_ends_at_once_with_9_and_make_with_2(tmp_path: Path):
    script = run(sys.executable, str(SCRIPT), "--out", str(tmp_path / "a"))
    assert (script.returncode, script.stderr.strip()) == (9, NO_DEVICE)
    made = run("make", "gpu", f"PY={sys.executable}", f"OUT={tmp_path / 'b'}")
    assert made.returncode == 2
    assert "Error 9" in made.stderr
    lines = [line for line in (made.stdout + made.stderr).splitlines() if not line.startswith("make")]
    assert lines == [NO_DEVICE]
    assert list(tmp_path.iterdir()) == []


def test_a_word_that_is_no_part_is_an_error():
    done = run(sys.executable, str(SCRIPT), "smoke", "optimisers")
    assert done.returncode == 1
    assert "'optimisers': expected a part" in done.stderr


def test_the_parts_that_are_rehearsed_are_all():
    code = "import gpu; print(*gpu.PARTS, *gpu.EXTRA)"
    assert run(sys.executable, "-c", code, path=(SOURCE, SCRIPT.parent)).stdout.split() == [*PARTS]


def test_the_parts_import_nothing_that_a_bare_machine_lacks():
    names = "_gpu_bits, _gpu_optimizers, _gpu_training"
    code = f"import {names}, sys; assert not {{'sybil', 'tyro', 'sklearn'}} & set(sys.modules)"
    done = run(sys.executable, "-c", code, path=(BARE, SOURCE, SCRIPT.parent))
    assert done.returncode == 0, done.stderr


def test_rows_of_the_reference_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    optimizers = importlib.import_module("_gpu_optimizers")
    monkeypatch.setattr("halfstep.kernels.cuda.launch.why_not", lambda device: "a machine without Triton")
    assert optimizers.ours("exact", "8bit").name == "halfstep IN PLAIN TORCH bf16, exact / 8bit"
    monkeypatch.setattr("halfstep.kernels.cuda.launch.why_not", lambda device: "")
    assert optimizers.ours("exact", "8bit").name == "halfstep bf16, exact / 8bit"


@needs_device
@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_each_part_runs_and_two_files_come_back(part: str, tmp_path: Path):
    done, rows = rehearse(tmp_path, part)
    assert (done.returncode, errors(rows[part])) == (0, []), done.stdout[-3000:] + done.stderr[-2000:]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu.json", "gpu.log"]
    ending = rows[part].pop("the part")
    assert ending["expected"] > 0
    assert f"== {part}: about {ending['expected']} s, at most" in done.stdout
    assert rows[part] or part == "profiled"
    if part in ("optimizers", "training", "compiled", "large"):
        names = list(rows[part])
        assert names[0].startswith("torch")
        assert names[-1] == f"{names[0]}, again"
        assert all({"peak_mib", "peak_above_start_mib"} <= row.keys() for row in rows[part].values())


@needs_device
@pytest.mark.long
def test_a_part_that_hangs_or_dies_costs_itself_alone(tmp_path: Path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "gpu_fault.py").write_text(
        "import os, time\nhang = lambda: time.sleep(600)\ndie = lambda: os._exit(7)\n"
    )
    launcher = tmp_path / "gpu_with_faults.py"
    launcher.write_text(
        f"import sys\nsys.path[:0] = [{str(SCRIPT.parent)!r}, {str(site)!r}]\n"
        "import gpu\n"
        "gpu.__file__ = __file__\n"
        "gpu.PARTS['regions'] = gpu.Part('gpu_fault', 'hang', 1, 2)\n"
        "gpu.PARTS['knobs'] = gpu.Part('gpu_fault', 'die', 1, 60)\n"
        "sys.exit(gpu.main())\n"
    )
    out = tmp_path / "out"
    command = (
        sys.executable,
        "-m",
        "tests.falsecuda",
        str(launcher),
        "--out",
        str(out),
        "regions",
        "knobs",
        "facts",
    )
    done = run(*command, path=(SOURCE, ROOT), HALFSTEP_GPU_TINY="1")
    rows = json.loads((out / "gpu.json").read_text())
    assert done.returncode == 1
    assert rows["regions"]["the part"]["error"] == "stopped after 2 s"
    assert rows["knobs"]["the part"]["error"] == "exit status 7"
    assert errors(rows["facts"]) == []
    assert done.stdout.splitlines()[-2:] == ["  regions: the part", "  knobs: the part"]


@needs_device
@pytest.mark.long
def test_what_does_not_fit_into_the_minutes_is_named(tmp_path: Path):
    done, rows = rehearse(tmp_path, "--minutes", "0.05", "ceilings")
    assert rows["ceilings"]["the part"].endswith("s were left, it takes about 12 s")
    assert "== ceilings: left out" in done.stdout
