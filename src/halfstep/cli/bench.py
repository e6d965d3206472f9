"""`halfstep bench step`: optimizers side by side on this machine."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any, Literal

import torch
import tyro

from halfstep.cli._options import Flag, computing_device, with_metavar
from halfstep.cli._output import console, print_json, table
from halfstep.errors import ConfigError
from halfstep.recipes import optimizer_race

#: All contestants' weights, gradients and states together, for one parameter.
BYTES = 110
LEARNING_RATES = (1e-4, 1e-5, 1e-6, 1e-7)


def run(
    what: tyro.conf.Positional[Literal["step"]],
    parameters: Annotated[float, with_metavar("COUNT")] = 5e7,
    rounds: Annotated[int, with_metavar("COUNT")] = 9,
    device: Annotated[str, with_metavar("DEVICE")] = "cpu",
    movement: bool = True,
    against: Annotated[str, with_metavar("NAMES")] = "",
    json: Flag = False,
) -> None:
    """Measure optimizers: milliseconds an update and a step, bytes a parameter, how far weights move.

    Args:
        what: What to measure: step, the optimizers.
        parameters: Number of parameters.
        rounds: Timed rounds of each optimizer; the median counts.
        device: The torch device to measure on.
        movement: Whether to measure the movement of weights at small learning rates.
        against: Packages whose AdamW runs beside, of those installed: bitsandbytes,optimi,torchao.
        json: Print JSON instead of tables.
    """
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // BYTES
    if not 1000 <= parameters <= most:
        raise ConfigError(f"--parameters {parameters:g}: expected 1000 to {most:.2g}, what memory here holds")
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: give at least 1")
    place, entries = computing_device(device), [*optimizer_race.contestants(), *_peers_of(against)]
    size = int(parameters) // 4
    sizes = [size - size % 256 if size >= 4096 else size] * 4  # torchao packs only whole blocks of 256
    out, results = console(stderr=True), []
    with out.status("measuring") as status:
        for result in optimizer_race.race(entries, sizes, rounds, place):
            results.append(result)
            status.update(f"measured {result.name}")
        moved = {
            entry.name: {
                f"{start:g} at {lr:g}": optimizer_race.movement(entry, start, lr, steps=300)
                for start in (1.0, 0.02)
                for lr in LEARNING_RATES
            }
            for entry in (entries if movement else ())
        }
    if json:
        threads = torch.get_num_threads()
        print_json(
            {
                "parameters": sum(sizes),
                "threads": threads,
                "device": device,
                "results": [asdict(r) for r in results],
                "movement": moved,
            }
        )
        return
    _print(results, sum(sizes), moved)


def _peers_of(names: str) -> list[optimizer_race.Contestant]:
    """Return the contestants of the packages that are installed; ConfigError for one that nobody knows."""
    peers = list[optimizer_race.Contestant]()
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in optimizer_race.PEERS:
            raise ConfigError(f"--against {name}: expected one of {', '.join(optimizer_race.PEERS)}")
        try:
            peers.append(optimizer_race.peer(name))
        except ImportError as error:
            console(stderr=True).print(f"{name} is left out: {error}")
    return peers


def _print(results: list[Any], count: int, moved: dict[str, dict[str, float]]) -> None:
    rows = [
        (
            r.name,
            f"{r.update_ms:.1f}",
            f"{r.update_share:.2f}",
            f"{r.step_ms:.1f}",
            f"{r.step_share:.2f}",
            f"{r.bytes_per_param:.2f}",
        )
        for r in results
    ]
    columns = ("optimizer", "update ms", "update time", "step ms", "step time", "bytes/param")
    title = (
        f"{count:,} parameters, {torch.get_num_threads()} threads; times relative to {results[0].name}, "
        "lower is better"
    )
    out = console()
    out.print(table(title, columns, rows, right=",".join(columns[1:])))
    if moved:
        heads = list(next(iter(moved.values())))
        body = [(name, *(f"{row[h] * 100:.1f} %" for h in heads)) for name, row in moved.items()]
        head = "movement of a weight after 300 unit gradients, as a share of fp32 (weight at learning rate)"
        out.print(table(head, ("optimizer", *heads), body, right=",".join(heads)))
