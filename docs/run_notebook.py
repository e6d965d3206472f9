"""Run docs/first-steps.ipynb and save what it prints and draws: python docs/run_notebook.py.

A notebook is JSON: nothing of Jupyter is needed.
"""

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("first-steps.ipynb")
Cell = dict[str, Any]


def lines(text: str) -> list[str]:
    """Text as notebooks keep it."""
    return text.splitlines(keepends=True)


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells in order, in one namespace; returns the notebook with their outputs.

    Raises what a cell raises, with the cell's id in a note.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = cell | {"outputs": run(cell, namespace, pyplot), "execution_count": count}
        cells.append(cell)
    return notebook | {"cells": cells}


def run(cell: Cell, namespace: dict[str, Any], pyplot: Any) -> list[Cell]:
    """Run one cell; what it printed, then the figures it left open."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), namespace)
    except Exception as error:
        error.add_note(f"in cell {cell['id']} of {NOTEBOOK.name}")
        raise
    outputs: list[Cell] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    for number in pyplot.get_fignums():
        png = io.BytesIO()
        pyplot.figure(number).savefig(png, format="png", dpi=80, metadata={"Software": None})
        data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": ["a figure"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        pyplot.close(number)
    return outputs


if __name__ == "__main__":
    done = execute(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    NOTEBOOK.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
