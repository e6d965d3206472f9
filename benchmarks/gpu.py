"""What a GPU has to show, in ten minutes, the most valuable first; `make gpu` runs it.

python benchmarks/gpu.py [--out FOLDER] [--minutes 9.5] [PART ...]

Each part writes gpu_PART.json as it goes and is left out where no time is left: `bits` (kernels against the
reference), `tests` (tests/gpu), `copy` (the speed of the memory), `optimizers` (update and step at the 124M
parameters of GPT-2, device and host apart, beside torch and FlashOptim), `training` (whole steps beside
torch.amp), `regions` (autocast's host time beside torch.autocast), `more` (the tests marked long). Nothing
needs the network. Exit: 9 where torch sees no CUDA, 1 where bits differ, a test fails or a part breaks.
"""

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _gpu import Gpu, Rehearsal, host_ms
from _machine import folder, save
from autocast import Block

import halfstep as hs
from halfstep.casting import regions as our_regions
from halfstep.recipes.optimizer_race import Contestant, ours

ROOT = Path(__file__).parents[1]
SHARE_OF_TESTS = 0.4  # of the time, so that benchmarks are reached
TEST_FILES = ("kernels", "step", "training", "numerics")
WIDTH, LAYERS, TOKENS, CONTEXT = 768, 12, 50257, 1024


@dataclass
class Run:
    """One run: the clock, when it must end, where results go, and how large and how often."""

    clock: Gpu
    folder: Path
    ends: float
    rehearsal: bool
    broken: list[str] = field(default_factory=list)

    def left(self) -> float:
        """Seconds until the end."""
        return self.ends - time.monotonic()

    @property
    def rounds(self) -> int:
        return 2 if self.rehearsal else 20

    @property
    def layers(self) -> int:
        return 1 if self.rehearsal else LAYERS

    @property
    def width(self) -> int:
        return 48 if self.rehearsal else WIDTH

    @property
    def tokens(self) -> int:
        return 101 if self.rehearsal else TOKENS


Rows = Iterator[tuple[str, Any]]


def attempt(run: Run, name: str, work: Callable[[], Any]) -> tuple[str, Any]:
    """A row by its name; what went wrong in it is the row, and the run goes on."""
    started = time.perf_counter()
    try:
        row = work()
    except Exception:
        run.broken.append(name)
        row = {"error": traceback.format_exc()[-1500:]}
    gc.collect()
    run.clock.forget()
    print(f"[{time.perf_counter() - started:5.1f} s] {name}: {json.dumps(row)[-300:]}", flush=True)
    return name, row


# ---- bits and tests -------------------------------------------------------------------------------------


def bits(run: Run) -> Rows:
    """Three steps of AdamW, the second skipped: the kernels' weights and states are the reference's."""
    low, half, full = torch.bfloat16, torch.float16, torch.float32
    kinds = ((low, "exact"), (full, None), (half, "exact"), (low, "fp32"), (low, "stochastic"))
    for dtype, master in kinds[: 1 if run.rehearsal else None]:
        for states in ("fp32", "8bit"):
            for shift in (0, 3):
                name = f"{str(dtype)[6:]} {master} {states}, {shift} elements off alignment"
                yield attempt(run, name, lambda d=dtype, m=master, s=states, n=shift: same(run, d, m, s, n))


def same(run: Run, dtype: torch.dtype, master: str | None, states: str, shift: int) -> bool:
    """Whether kernels and reference end with the same bits."""
    one, other = (
        three_steps(run, backend, dtype, master, states, shift) for backend in ("triton", "reference")
    )
    equal = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    if not equal:
        run.broken.append(f"bits of {dtype} {master} {states} differ")
    return equal


def three_steps(
    run: Run, backend: str, dtype: torch.dtype, master: str | None, states: str, shift: int
) -> list[torch.Tensor]:
    """The bytes of weights and states afterwards; weights begin `shift` elements into their memory."""
    made = torch.Generator().manual_seed(1)
    device, params = run.clock.device, []
    for shape in ((3, 768), (40, 100), (7,), (2, 2048)):
        buffer = (torch.randn(torch.Size(shape).numel() + shift, generator=made) * 0.02).to(device, dtype)
        params.append(torch.nn.Parameter(buffer[shift:].view(shape)))
    optimizer = hs.optim.AdamW(params, lr=1e-2, master=master, state_dtype=states, backend=backend)
    for step in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=made).to(device, dtype)
        found = torch.full((), step == 1, device=device)
        optimizer.step(inv_scale=torch.full((), 0.5, device=device), found_inf=found)
    held = [*params, *(value for p in params for value in optimizer.state[p].values())]
    return [t.detach().flatten().view(torch.uint8) for t in held]


def tests(run: Run) -> Rows:
    """The tests of tests/gpu, a process for each file: an error of the device stays in its own."""
    ends = time.monotonic() + SHARE_OF_TESTS * run.left()
    for name in ("numerics",) if run.rehearsal else TEST_FILES:
        limit = max(20.0, ends - time.monotonic())
        yield attempt(
            run, name, lambda n=name, s=limit: pytest_file(run, n, "not exhaustive and not long", s)
        )


def more(run: Run) -> Rows:
    """The tests of the kernels that are marked long."""
    name = "numerics" if run.rehearsal else "kernels"
    limit = max(20.0, run.left())
    yield attempt(
        run, name, lambda: pytest_file(run, name, "not exhaustive" if run.rehearsal else "long", limit)
    )


def pytest_file(run: Run, name: str, marked: str, limit: float) -> dict[str, Any]:
    """What pytest says of a file, whose last lines are kept; only halfstep's own warnings are errors."""
    quiet = ("-p", "no:cacheprovider", "--confcutdir=tests", "--tb=short", "-W", "ignore")
    ours = ("-W", "error::halfstep.HalfstepWarning")
    command = [sys.executable, "-m", "pytest", *quiet, *ours, "-m", marked, f"tests/gpu/test_{name}.py"]
    said = run.folder / f"gpu_tests_{name}.txt"
    with said.open("w") as out:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = -1
    text = said.read_text()
    if code:
        run.broken.append(f"tests/gpu/test_{name}.py")
    verdict = "ran out of time" if code == -1 else f"exit {code}"
    return {"verdict": verdict, "said": text.strip().splitlines()[-1:], "tail": text[-3000:] if code else ""}


# ---- memory and optimizers ------------------------------------------------------------------------------


def copy(run: Run) -> Rows:
    """Terabytes a second that a copy reads and writes."""
    size = 1 << (16 if run.rehearsal else 30)

    def speed() -> float:
        source = torch.empty(size, dtype=torch.uint8, device=run.clock.device)
        target = torch.empty_like(source)
        return round(2 * size / run.clock.device_ms(lambda: target.copy_(source), run.rounds) / 1e9, 4)

    yield attempt(run, "terabytes a second", speed)


def shapes(run: Run) -> Iterator[tuple[int, ...]]:
    """The parameters of GPT-2 small, its output layer tied: 124,439,808 elements in 148 tensors."""
    width = run.width
    yield from ((run.tokens, width), (CONTEXT, width))
    for _ in range(run.layers):
        for rows in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            yield from (rows, (rows[1],))
        yield from ((width,),) * 4
    yield from ((width,),) * 2


def contestants() -> list[Any]:
    """torch's fused AdamW in fp32 and bf16, ours by master and states, FlashOptim where it is installed."""

    def fused(params: list[torch.nn.Parameter]) -> Any:
        return torch.optim.AdamW(params, fused=True, capturable=params[0].is_cuda)

    def flash(params: list[torch.nn.Parameter]) -> Any:
        return flashoptim.FlashAdamW(params, lr=1e-3)

    modes = (
        ("exact", "fp32"),
        ("exact", "bf16"),
        ("exact", "8bit"),
        ("fp32", "fp32"),
        ("stochastic", "8bit"),
    )
    low, full = torch.bfloat16, torch.float32
    found = [
        Contestant("torch AdamW fused, fp32", full, fused, ScaledStep()),
        *(ours(master, states) for master, states in modes),
        Contestant("torch AdamW fused, bf16 without masters", low, fused, clip_and_step),
    ]
    try:
        import flashoptim
    except ImportError:
        return found
    return [*found, Contestant("FlashOptim FlashAdamW", low, flash, clip_and_step)]


def clip_and_step(optimizer: Any, params: list[torch.nn.Parameter]) -> None:
    """The whole step of one that scales no loss."""
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()


class ScaledStep:
    """The whole step with torch's GradScaler, kept from step to step: unscale, clip, check, update."""

    def __init__(self) -> None:
        self._scaler: Any = None

    def __call__(self, optimizer: Any, params: list[torch.nn.Parameter]) -> None:
        device = params[0].device
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=10**6)
            self._scaler.scale(torch.ones((), device=device))
        self._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        self._scaler.step(optimizer)
        self._scaler.update()


def optimizers(run: Run) -> Rows:
    """Each contestant alone on the device."""
    for entry in contestants()[: 2 if run.rehearsal else None]:
        yield attempt(run, entry.name, lambda e=entry: contest(run, e))


def contest(run: Run, entry: Any) -> dict[str, Any]:
    """Milliseconds of the update and of the whole step, on device and host, eager and from a graph."""
    made = torch.Generator(run.clock.device).manual_seed(0)
    device, clock = run.clock.device, run.clock
    params = [
        torch.nn.Parameter((torch.randn(s, device=device, generator=made) * 0.02).to(entry.dtype))
        for s in shapes(run)
    ]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = entry.make(params)
    works = {
        "update": optimizer.step,
        "step": lambda: entry.step(optimizer, params),
    }
    for _ in range(3):
        for work in works.values():
            work()
    row: dict[str, Any] = {}
    for kind, work in works.items():
        row[f"{kind}_device_ms"] = clock.device_ms(work, run.rounds)
        row[f"{kind}_host_ms"] = host_time(run, work)
        row[f"{kind}_launches"] = clock.launches(work)
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    moved = sum(2 * t.nbytes for t in (*params, *states)) + sum(p.grad.nbytes for p in params)
    row["update_terabytes_a_second"] = round(moved / row["update_device_ms"] / 1e9, 4)
    row["bytes_a_parameter"] = round(held(params, states) / sum(p.numel() for p in params), 3)
    row["peak_mib"] = clock.peak_mib(works["step"])
    for kind, work in works.items():
        row[f"{kind}_graph_ms"] = graph_time(run, work)
    return row


def held(params: list[Any], states: list[torch.Tensor]) -> int:
    """Bytes of weights, gradients and states."""
    return sum(p.nbytes + p.grad.nbytes for p in params) + sum(t.nbytes for t in states)


def host_time(run: Run, work: Callable[[], object]) -> float:
    """The median of milliseconds until `work` is in the queue."""
    return host_ms(run.clock, work, run.rounds)


def graph_time(run: Run, work: Callable[[], object]) -> float | str:
    """Milliseconds of a replay, or why it cannot be captured; a failed capture is the last thing done."""
    try:
        return run.clock.device_ms(run.clock.capture(work), run.rounds)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


# ---- training -------------------------------------------------------------------------------------------


class Transformer(torch.nn.Module):
    """GPT-2's shape: learned positions, pre-norm blocks, the output layer tied to the embedding."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(run.tokens, run.width)
        self.places = torch.nn.Embedding(CONTEXT, run.width)
        self.blocks = torch.nn.Sequential(*(Block(run.width, run.width // 16) for _ in range(run.layers)))
        self.norm = torch.nn.LayerNorm(run.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x) + self.places.weight[: x.shape[1]]
        return torch.nn.functional.linear(self.norm(self.blocks(hidden)), self.words.weight)


class TorchAmp:
    """torch.autocast, GradScaler for fp16, clipping and fused AdamW behind a session's methods."""

    def __init__(self, net: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self._net, self._device, self._dtype = net, device.type, dtype
        self._optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32)

    def backward(self, loss: torch.Tensor) -> None:
        self._scaler.scale(loss).backward()

    def step(self, clip_norm: float) -> None:
        self._scaler.unscale_(self._optimizer)
        torch.nn.utils.clip_grad_norm_(self._net.parameters(), clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()


def training(run: Run) -> Rows:
    """Whole steps of GPT-2: 8 x 1,024 tokens keep the device busy, 1 x 64 the host."""

    def session(level: str, dtype: str, states: str) -> Callable[[torch.nn.Module], Any]:
        def make(net: torch.nn.Module) -> Any:
            optimizer = hs.optim.AdamW(net.parameters(), lr=1e-4, state_dtype=states)
            return hs.prepare(net, optimizer, level=level, dtype=dtype)

        return make

    def torchs(dtype: torch.dtype) -> Callable[[torch.nn.Module], Any]:
        return lambda net: TorchAmp(net, run.clock.device, dtype)

    kinds = {
        "torch.amp bf16": torchs(torch.bfloat16),
        "halfstep O1 bf16": session("O1", "bf16", "fp32"),
        "halfstep O2 bf16": session("O2", "bf16", "fp32"),
        "torch.amp fp16": torchs(torch.float16),
        "halfstep O1 fp16": session("O1", "fp16", "fp32"),
        "halfstep O2 fp16": session("O2", "fp16", "fp32"),
        "halfstep O2 bf16, 8-bit states": session("O2", "bf16", "8bit"),
        "torch fp32": torchs(torch.float32),
    }
    for name, make in list(kinds.items())[: 2 if run.rehearsal else None]:
        yield attempt(run, name, lambda m=make: training_step(run, m))


def training_step(run: Run, make: Callable[[torch.nn.Module], Any]) -> dict[str, Any]:
    """Milliseconds a step of several in a row, those of the host for one, and the peak of memory."""
    torch.manual_seed(0)
    net = Transformer(run).to(run.clock.device)
    amp = make(net)
    row: dict[str, Any] = {}
    for name, size in (("8 x 1,024", (8, CONTEXT)), ("1 x 64", (1, 64))):
        x, y = (
            torch.randint(0, run.tokens, (1, 8) if run.rehearsal else size).to(run.clock.device) for _ in "xy"
        )

        def step(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            with amp.autocast():
                loss = torch.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
            amp.backward(loss)
            amp.step(clip_norm=1.0)

        for _ in range(3):
            step()
        row[f"{name}: step_ms"] = in_a_row(run, step)
        row[f"{name}: host_ms"] = host_time(run, step)
        row[f"{name}: peak_mib"] = run.clock.peak_mib(step)
    return row


def in_a_row(run: Run, step: Callable[[], None]) -> float:
    """Milliseconds a step, from an idle device to an idle device."""
    run.clock.synchronize()
    start = time.perf_counter()
    for _ in range(run.rounds // 2):
        step()
    run.clock.synchronize()
    return round((time.perf_counter() - start) * 1e3 / (run.rounds // 2), 4)


def regions(run: Run) -> Rows:
    """Host microseconds of what runs in a region, ours and torch's, whose turns have ours out of the way."""
    device, kind = run.clock.device, run.clock.device.type
    torch.manual_seed(0)
    block, hidden = Block(run.width, 4).to(device), torch.randn(1, 16, run.width, device=device)
    layer, x = torch.nn.Linear(8, 8).to(device), torch.randn(4, 8, device=device)

    def train() -> None:
        block(hidden).float().sum().backward()

    works = {"sin": (lambda: x.sin(), 200), "linear": (lambda: layer(x), 200), "block, trained": (train, 1)}
    for name, (work, times) in works.items():

        def beside(work: Callable[[], object] = work, times: int = times) -> dict[str, float]:
            inside = {"halfstep": hs.autocast, "torch": torch.autocast}
            return {
                f"{who}_us": round(1e3 / times * region_time(run, region, who, kind, work, times), 3)
                for who, region in inside.items()
            }

        yield attempt(run, name, beside)


def region_time(
    run: Run, region: Callable[..., Any], who: str, kind: str, work: Callable[[], object], times: int
) -> float:
    """Host milliseconds of `times` runs of `work` in a region."""

    def inside() -> None:
        with region(kind, torch.bfloat16):
            for _ in range(times):
                work()

    if who == "torch":
        our_regions.release()
    inside()
    return host_time(run, inside)


# ---- the run --------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Run], Rows]] = {
    "bits": bits,
    "tests": tests,
    "copy": copy,
    "optimizers": optimizers,
    "training": training,
    "regions": regions,
    "more": more,
}


def write(run: Run, part: str, rows: dict[str, Any], complete: bool) -> None:
    """Put what is known of a part into its file."""
    document = {"complete": complete, "rows": rows}
    save(f"gpu_{part}", document, run.folder / f"gpu_{part}.json", **run.clock.facts())


def run_part(run: Run, part: str) -> None:
    """One part, its file written again after each row, until it or the time ends."""
    print(f"== {part}, {run.left():.0f} s left", flush=True)
    rows: dict[str, Any] = {}
    if run.left() <= 0:
        return write(run, part, rows, False)
    try:
        for name, row in PARTS[part](run):
            rows[name] = row
            write(run, part, rows, False)
            if run.left() <= 0:
                return None
    except Exception:
        run.broken.append(part)
        traceback.print_exc()
    return write(run, part, rows, True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"parts to run: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, help="default: the machine's folder in benchmarks/results/")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--rehearse", action="store_true", help="run every part small and on the CPU")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if not arguments.rehearse and not torch.cuda.is_available():
        print("nothing was tested or measured: torch sees no CUDA device here", file=sys.stderr)
        return 9
    if arguments.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    clock = Rehearsal() if arguments.rehearse else Gpu()
    out = arguments.out or folder(clock.name())
    out.mkdir(parents=True, exist_ok=True)
    run = Run(clock, out, time.monotonic() + 60 * arguments.minutes, arguments.rehearse)
    for part in arguments.parts or PARTS:
        run_part(run, part)
    print(
        f"results are in {out}; "
        + (f"not as they should be: {', '.join(run.broken)}" if run.broken else "all well")
    )
    return 1 if run.broken else 0


if __name__ == "__main__":
    sys.exit(main())
