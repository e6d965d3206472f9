"""Build the source archive, a wheel from it, and run the installed wheel away from the checkout.

python .ci/package.py
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
#: What a user does first: the commands, a training step and the data files of a report.
TRY = """
import sys, torch, halfstep as hs
assert hs.__file__.startswith(sys.argv[1]), hs.__file__
model = torch.nn.Linear(4, 2)
amp = hs.prepare(model, hs.optim.AdamW(model.parameters()), level="O2", dtype="bf16")
with amp.autocast():
    loss = model(torch.ones(3, 4)).float().square().mean()
amp.backward(loss)
assert amp.step().taken
"""


def main() -> None:
    """Build, install beside the environment's packages, and try it; CalledProcessError if a step fails."""
    files = {
        path.relative_to(ROOT / "src") for path in (ROOT / "src" / "halfstep").rglob("*") if path.is_file()
    }
    expected = {path for path in files if "__pycache__" not in path.parts and path.suffix != ".md"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.chdir(ROOT)
        with contextlib.redirect_stdout(io.StringIO()):
            archive = folder / build_meta.build_sdist(str(folder))
        subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", folder, archive], check=True)
        (wheel,) = folder.glob("*.whl")
        installed = folder / "installed"
        subprocess.run([*PIP, "install", "--no-deps", "--target", installed, wheel], check=True)
        missing = sorted(str(path) for path in expected if not (installed / path).exists())
        assert not missing, f"the wheel lacks {missing}"
        env = {**os.environ, "PYTHONPATH": str(installed)}
        subprocess.run([sys.executable, "-c", TRY, str(installed)], cwd=folder, env=env, check=True)
        for command in (["--version"], ["devices"]):
            program = [sys.executable, installed / "bin" / "halfstep", *command]
            subprocess.run(program, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
        print(f"{archive.name} and {wheel.name}: built, installed and tried")


if __name__ == "__main__":
    main()
