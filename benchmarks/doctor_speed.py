"""What CPU time `halfstep doctor` takes relative to the script alone.

PYTHONPATH=. python benchmarks/doctor_speed.py [COUNT] [ROUNDS] [LONG], from the root of the repository.

COUNT: so many scripts of the zoo, which take about 10 steps: whole commands are compared, and what imports
cost is shown. LONG (0: none): scripts that train for about 10 seconds, healthy and with a fault at three
quarters of the way, followed to the end by `--steps 0`: compared without imports. CPU time is that of all
processes, the median of the rounds, in which script and doctor take turns.
"""

import ast
import functools
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _machine import save
from tests.doctor.test_zoo import FAULTS, HEALTHY

TRAINED = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
MODEL
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for i in range(STEPS):
    x, y = BATCH
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x).float()
    loss = F.cross_entropy(out / (0.0 if i == BAD else 1.0), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
"""
MODELS = {
    "perceptron": (
        """model = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)""",
        "torch.randn(256, 64), torch.randint(10, (256,))",
        4000,
    ),
    "convolutions": (
        """def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))

model = nn.Sequential(block(3, 32), block(32, 64), block(64, 64), nn.Flatten(), nn.Linear(1024, 10))""",
        "torch.randn(32, 3, 32, 32), torch.randint(10, (32,))",
        400,
    ),
    "transformer": (
        """layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True)
body = nn.TransformerEncoder(layer, 4)
model = nn.Sequential(nn.Embedding(64, 128), body, nn.Linear(128, 64), nn.Flatten(0, 1))""",
        "torch.randint(64, (8, 64)), torch.randint(64, (512,))",
        250,
    ),
}


def seconds(*command):
    """CPU time of a command and all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_of(text):
    """The lines of a script that import."""
    return "\n".join(
        ast.unparse(x) for x in ast.parse(text).body if isinstance(x, ast.Import | ast.ImportFrom)
    )


def doctor(path, *options):
    return sys.executable, "-m", "halfstep_command", "doctor", str(path), *options


@functools.cache
def imports(*command):
    """CPU seconds of a command that only imports."""
    return min(seconds(*command) for _ in range(3))


def measured(path, text, rounds, *options):
    """CPU seconds of script and doctor, and of what each imports (the doctor: for an empty script)."""
    empty = path.with_name("empty.py")
    empty.write_text("")
    path.write_text(text)
    commands = {"plain": (sys.executable, str(path)), "examined": doctor(path, *options)}
    taken = [{name: seconds(*command) for name, command in commands.items()} for _ in range(rounds)]
    row = {f"{name}_seconds": statistics.median(one[name] for one in taken) for name in commands}
    row |= {
        "plain_imports": imports(sys.executable, "-c", imports_of(text)),
        "examined_imports": imports(*doctor(empty)),
    }
    own = {name: row[f"{name}_seconds"] - row[f"{name}_imports"] for name in commands}
    row["ratio"] = row["examined_seconds"] / row["plain_seconds"]
    row["ratio_without_imports"] = own["examined"] / own["plain"]
    return row


def shown(name, row):
    print(
        f"{name:42} {row['plain_seconds']:6.2f} s (imports {row['plain_imports']:.2f}), doctor "
        f"{row['examined_seconds']:6.2f} s (imports {row['examined_imports']:.2f}): "
        f"{row['ratio']:.2f}, without imports {row['ratio_without_imports']:.2f}",
        flush=True,
    )


def summary(rows, ratio):
    ratios = [row[ratio] for row in rows.values()]
    print(f"{ratio}: median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}")
    return {"median": statistics.median(ratios), "largest": max(ratios)}


def main(count=1000, rounds=3, long=1):
    found = {"rounds": rounds}
    zoo = [*FAULTS, *HEALTHY]
    zoo = zoo[:: -(-len(zoo) // count)] if count else []
    scripts = {script.name: (script.text, ()) for script in zoo}
    trained = {
        f"{name}, {kind}": (TRAINED.replace("MODEL", model).replace("BATCH", batch)
                            .replace("STEPS", str(steps)).replace("BAD", str(bad)), ("--steps", "0"))
        for name, (model, batch, steps) in MODELS.items()
        for kind, bad in (("healthy", -1), ("with a fault", steps * 3 // 4))
    } if long else {}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for part, ratio, texts in (
            ("zoo", "ratio", scripts), ("to the end", "ratio_without_imports", trained),
        ):  # fmt: skip
            rows = {}
            for name, (text, options) in texts.items():
                rows[name] = measured(Path(folder) / "train.py", text, rounds, *options)
                shown(name, rows[name])
            if rows:
                found[part] = {**summary(rows, ratio), "rows": rows}
    save("doctor_speed", found, None)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
