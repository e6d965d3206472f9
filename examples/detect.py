"""Train a YOLO-style detector, alone or by several processes, in fp32 or in mixed precision.

    python examples/detect.py --data digits --epochs 8 --amp
    torchrun --nproc_per_node 2 examples/detect.py --data digits --epochs 8 --batch-size 64 --device cpu --amp

An accelerator's plugin is imported by --plugin: `--plugin mychip.py --device mychip`.

`--data` takes the bundled digits, a folder with images/ and labels/ (YOLO txt) or a COCO json.
"""

import argparse
import importlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from detection.data import Images, load
from detection.metrics import mean_average_precision
from detection.model import Detector, detection_loss, detections
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs

#: Model widths by the names that --cfg takes.
WIDTHS = {"yolov5n.yaml": 16, "yolov5s.yaml": 32, "yolov5m.yaml": 48}


@dataclass
class Result:
    """What a run gave: mAP and seconds by epoch, whether each step was taken, the share of fp32 traffic."""

    scores: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)
    traffic_share: float = 1.0


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a one-stage detector in mixed precision.")
    parser.add_argument("--data", default="digits", help="digits, a YOLO folder or a COCO json")
    parser.add_argument("--cfg", default="yolov5s.yaml", choices=sorted(WIDTHS), help="size of the model")
    parser.add_argument("--weights", default="", help="start from this file; '' starts from scratch")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes together")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or a registered accelerator")
    parser.add_argument(
        "--plugin", default="", help="module or file that brings an accelerator up, read first"
    )
    parser.add_argument("--amp", "--pyamp", action="store_true", help="mixed precision at level O1")
    parser.add_argument("--dtype", default=None, choices=["bf16", "fp16"], help="default: the device's own")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--train-images", type=int, default=3072, help="of the bundled digits")
    parser.add_argument("--save", default="", help="write the trained weights here")
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name, least in (
        ("epochs", 1),
        ("batch_size", 1),
        ("image_size", 16),
        ("train_images", args.batch_size),
    ):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected {least} or more")
    if args.weights and not os.path.isfile(args.weights):
        parser.error(f"--weights {args.weights}: no such file")
    if args.save and (os.path.isdir(args.save) or not os.path.isdir(os.path.dirname(args.save) or ".")):
        parser.error(f"--save {args.save}: expected a file name in a folder that exists")
    if args.plugin:
        bring_up(args.plugin, parser)
    try:
        hs.devices.resolve(args.device)
    except hs.errors.HalfstepError as error:
        parser.error(f"--device: {error}")
    return args


def bring_up(plugin: str, parser: argparse.ArgumentParser) -> None:
    """Import a vendor's plugin by its dotted name, from the present folder too, or by its file."""
    name = plugin
    if plugin.endswith(".py"):
        folder, name = os.path.dirname(os.path.abspath(plugin)), os.path.basename(plugin).removesuffix(".py")
        sys.path.insert(0, folder)
    else:
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(name)
    except ImportError as error:
        parser.error(f"--plugin {plugin}: {error}")


def join_processes(device: str) -> tuple[int, int, torch.device]:
    """Rank, number of ranks and this rank's device, from torchrun's environment."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return 0, 1, torch.device(device)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        # None: the collective that a registered accelerator brought.
        dist.init_process_group({"cuda": "nccl", "cpu": "gloo"}.get(device))
    here = torch.device(device, local) if device == "cuda" else torch.device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or ranks) // ranks))
    return dist.get_rank(), ranks, here


def evaluate(amp: hs.Session, model: nn.Module, images: Images, device: torch.device) -> float:
    model.eval()
    found = []
    with torch.inference_mode(), amp.autocast():
        for start in range(0, len(images), 64):
            found += [rows.cpu() for rows in detections(model(images.pixels[start : start + 64].to(device)))]
    model.train()
    truth = [torch.from_numpy(rows) for rows in images.labels]
    return mean_average_precision(found, truth, len(images.names))


def shares(order: np.ndarray, batch: int, rank: int, ranks: int) -> list[np.ndarray]:
    """This rank's part of every whole batch."""
    part = batch // ranks
    return [order[n + rank * part : n + (rank + 1) * part] for n in range(0, len(order) - batch + 1, batch)]


def train(args: argparse.Namespace, after_backward: Callable[[int, nn.Module], None] | None = None) -> Result:
    """Train and score; `after_backward(step, model)` may look at the gradients before each step."""
    rank, ranks, device = join_processes(args.device)
    torch.manual_seed(0)
    training, held_out = load(args.data, args.image_size, args.train_images)
    model = Detector(len(training.names), WIDTHS[args.cfg]).to(device)
    if args.weights:
        model.load_state_dict(torch.load(args.weights, map_location=device, weights_only=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    amp = hs.prepare(
        model, optimizer, level="O1" if args.amp else "O0", dtype=args.dtype if args.amp else None
    )
    net: nn.Module = model
    hook = hs.distributed.compress_hook(amp.policy.compute_dtype) if args.amp and ranks > 1 else None
    if ranks > 1:
        net = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        if hook is not None:
            net.register_comm_hook(None, hook)
    steps = args.epochs * (len(training) // args.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: warm_cosine(n, steps))
    result, order = Result(), np.random.default_rng(0)
    for epoch in range(args.epochs):
        batches = shares(order.permutation(len(training)), args.batch_size, rank, ranks)
        start = time.perf_counter()
        for indices in track(
            batches, f"epoch {epoch + 1}", disable=rank > 0 or not sys.stdout.isatty(), transient=True
        ):
            images, targets = (t.to(device) for t in training.batch(indices))
            with amp.autocast():
                loss, _ = detection_loss(net(images), targets)
            amp.backward(loss)
            if after_backward is not None:
                after_backward(len(result.taken), model)
            result.taken.append(amp.step(clip_norm=10.0, scheduler=schedule).taken)
        result.seconds.append(time.perf_counter() - start)
        result.scores.append(evaluate(amp, model, held_out, device))
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}  {result.seconds[-1]:.2f} s  loss {loss.item():.3f}  "
                f"mAP@0.5 {result.scores[-1]:.3f}  skipped {amp.skips.total}",
                flush=True,
            )
    result.traffic_share = hook.traffic.share if hook is not None else 1.0
    if rank == 0 and args.save:
        torch.save(model.state_dict(), args.save)
    return result


def warm_cosine(step: int, steps: int) -> float:
    return min((step + 1) / 20, 0.5 * (1 + math.cos(math.pi * step / max(1, steps))))


def main() -> None:
    args = arguments()
    result = train(args)
    if int(os.environ.get("RANK", "0")) == 0:
        how = (
            f"mixed precision ({result.traffic_share:.0%} of fp32's gradient traffic)" if args.amp else "fp32"
        )
        hours = sum(result.seconds) / 3600
        print(f"{args.epochs} epochs in {hours:.4f} h, mAP@0.5 {result.scores[-1]:.3f}, {how}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        print(end.code, file=sys.stderr)  # what detection/data.py could not read
        sys.exit(2)
