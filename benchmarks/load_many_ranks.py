"""What one rank of a thousand pays to load its part of a checkpoint: seconds, memory, files opened.

    python benchmarks/load_many_ranks.py [--ranks 1000] [--layers 80] [--out FILE]

Makes the folder that such a run leaves behind (the 723 parameters of 80 layers, each with as many rows as
there are ranks, two states and a count of steps) and loads it as rank 7 does, in a fresh process: by the
index in the manifest, then by the headers of all files, as with earlier folders. Writes load_many_ranks.json.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _machine import save

from halfstep import checkpoint, shardfiles
from halfstep.shardfiles import Index, Piece

RANK = 7
WIDTHS = {
    "attention.q": (64,),
    "attention.k": (8,),
    "attention.v": (8,),
    "attention.o": (64,),
    "mlp.gate": (32,),
    "mlp.up": (32,),
    "mlp.down": (16,),
    "norm.attention": (),
    "norm.mlp": (),
}
STATES = ("exp_avg", "exp_avg_sq")


def parameters(layers: int) -> dict[str, tuple[int, ...]]:
    """Names, and what follows the rows in their shapes."""
    named = {f"layers.{n}.{part}.weight": width for n in range(layers) for part, width in WIDTHS.items()}
    return {**named, "embedding.weight": (16,), "head.weight": (16,), "norm.weight": ()}


def make(folder: Path, layers: int, ranks: int) -> None:
    """Write every rank's file and the manifest."""
    sums, summaries = {}, []
    for rank in range(ranks):
        pieces = {f".rank.{rank}.random": Piece(torch.zeros(5056, dtype=torch.uint8), (0,), (5056,))}
        for name, width in parameters(layers).items():
            place = (rank, *(0 for _ in width))
            piece = Piece(torch.full((1, *width), float(rank)), place, (ranks, *width))
            pieces |= {name: piece} | {f".optimizer.0.{name}.{state}": piece for state in STATES}
            if rank == 0:
                pieces[f".optimizer.0.{name}.step"] = Piece(torch.ones(()), (), ())
        name = f"rank-{rank:05d}-of-{ranks:05d}.safetensors"
        digest, count = shardfiles.write(folder / name, pieces, {"own": None, "ranks": ranks})
        sums[name] = {"sha256": digest, "bytes": count}
        summaries.append(json.loads(json.dumps(shardfiles.summary(pieces))))
    manifest = {"format": checkpoint.FOLDER_FORMATS[-1], "halfstep": "1", "files": sums}
    manifest["index"] = shardfiles.join_index(summaries)
    text = json.dumps({**manifest, "sha256": checkpoint.checksum_of(manifest)})
    (folder / checkpoint.MANIFEST).write_text(text)


def load(folder: Path, layers: int, ranks: int, way: str) -> None:
    """As rank 7: the manifest, the checksums of its share of the files, its rows of every tensor."""
    opened: set[str] = set()
    sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, worked = time.perf_counter(), time.process_time()
    manifest = checkpoint.manifest_of(folder, RANK, ranks)
    found = Index(folder, manifest["files"], manifest["index"] if way == "index" else None)
    for name, width in parameters(layers).items():
        place = (RANK, *(0 for _ in width))
        for tensor in (name, *(f".optimizer.0.{name}.{state}" for state in STATES)):
            assert bool((found.read(tensor, place, (1, *width)) == RANK).all())
        found.read(f".optimizer.0.{name}.step")
    found.private(RANK, f".rank.{RANK}.random")
    found.close()
    measured = {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - worked, 2),
        "more_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
        "files_opened": sum(str(folder) in path for path in opened),
    }
    print(json.dumps(measured))


def main() -> None:
    """Make the folder and load it in fresh processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "WAY"), help="only this, for its own calls")
    given = parser.parse_args()
    if given.load:
        load(Path(given.load[0]), given.layers, given.ranks, given.load[1])
        return
    found: dict[str, object] = {"parameters": len(parameters(given.layers)), "ranks": given.ranks}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), given.layers, given.ranks)
        found["manifest_bytes"] = (Path(folder) / checkpoint.MANIFEST).stat().st_size
        size = ["--ranks", str(given.ranks), "--layers", str(given.layers)]
        for way in ("index", "headers"):
            command = [sys.executable, __file__, *size, "--load", folder, way]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[way] = json.loads(done.stdout)
    save("load_many_ranks", found, given.out)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
