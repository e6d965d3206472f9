"""Draw docs/images/*.svg, the formats from the table of formats: python docs/generate_images.py.

Labels outside of filled shapes are a grey that reads on white and on black alike.
"""

import math
from pathlib import Path

from halfstep.formats import BF16, E4M3FN, E5M2, FP16, FP32, TF32, Format

IMAGES = Path(__file__).parent / "images"
DRAWN = (FP32, TF32, BF16, FP16, E4M3FN, E5M2)
GREY = "#808080"
FILLS = {
    "sign": "#e8a09a",
    "exponent": "#8fb8e8",
    "mantissa": "#a5d3a0",
    "plain": "#d6d6d6",
    "fp32": "#f0cf86",
}
WIDTH, CELL, LEFT, ROW = 860, 17, 80, 44


def text(x: float, y: float, words: str, *, fill: str = GREY, size: int = 14, anchor: str = "start") -> str:
    """A line of words with its baseline at (x, y)."""
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" text-anchor="{anchor}">{escaped}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, extra: str = "") -> str:
    """A filled rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" {extra}/>'


def picture(height: int, title: str, parts: list[str], width: int = WIDTH) -> str:
    """The parts as one SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" role="img">\n<title>{title}</title>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


# --- formats -----------------------------------------------------------------------------------------------


def largest(fmt: Format) -> str:
    """Exact where that is short."""
    return f"{fmt.max:.0f}" if fmt.max < 1e5 else f"{fmt.max:.2g}".replace("e+", "e")


def power_of_two(x: float) -> str:
    """`2^n`, rounded down."""
    return f"2^{math.floor(math.log2(x))}"


def bit_row(fmt: Format, y: float) -> list[str]:
    """One format: a cell for each bit, and what its limits are."""
    parts = [text(LEFT - 12, y + 19, fmt.name, size=15, anchor="end")]
    x = float(LEFT)
    for part, bits in (("sign", 1), ("exponent", fmt.exponent_bits), ("mantissa", fmt.mantissa_bits)):
        outline = 'stroke="#555" stroke-width="0.7"'
        parts += [box(x + CELL * i, y, CELL, 28, FILLS[part], outline) for i in range(bits)]
        if bits > 1:
            middle = x + CELL * bits / 2
            parts.append(box(middle - 11, y + 1, 22, 26, FILLS[part]))
            parts.append(text(middle, y + 19, str(bits), fill="#222", anchor="middle"))
        x += CELL * bits
    if fmt is TF32:
        unused = 32 - fmt.bits
        dashes = f'stroke="{GREY}" stroke-dasharray="3 3"'
        parts.append(box(x, y, CELL * unused, 28, "none", dashes))
        parts.append(text(x + CELL * unused / 2, y + 19, "stored as fp32", size=12, anchor="middle"))
    columns = (largest(fmt), power_of_two(fmt.smallest_subnormal), power_of_two(fmt.epsilon))
    for column, words in zip((712, 786, 852), columns):
        parts.append(text(column, y + 19, words, anchor="end"))
    return parts


def range_bar(fmt: Format, y: float) -> list[str]:
    """Where a format's numbers lie on a scale of powers of two; the faded end holds subnormals."""

    def at(x: float) -> float:
        return LEFT + (math.log2(x) + 152) * (WIDTH - LEFT - 12) / 284

    low, normal, high = at(fmt.smallest_subnormal), at(fmt.smallest_normal), at(fmt.max)
    return [
        text(LEFT - 12, y + 12, fmt.name, size=15, anchor="end"),
        box(low, y, normal - low, 15, FILLS["exponent"], 'fill-opacity="0.45"'),
        box(normal, y, high - normal, 15, FILLS["exponent"]),
    ]


def formats() -> str:
    """Bit layouts above, ranges below."""
    parts = []
    for x, part in ((LEFT, "sign"), (LEFT + 80, "exponent"), (LEFT + 190, "mantissa")):
        parts += [box(x, 12, 14, 14, FILLS[part]), text(x + 20, 24, part)]
    for x, words in ((712, "largest"), (786, "smallest"), (852, "epsilon")):
        parts.append(text(x, 24, words, anchor="end"))
    for i, fmt in enumerate(DRAWN):
        parts += bit_row(fmt, 40 + ROW * i)
    top = 40 + ROW * len(DRAWN) + 36
    parts.append(text(LEFT, top - 14, "the range of each, in powers of two; subnormals faded"))
    axis = top + 24 * len(DRAWN) + 4
    for power in (-149, -126, -100, -50, -24, -14, 0, 16, 50, 100, 128):
        x = LEFT + (power + 152) * (WIDTH - LEFT - 12) / 284
        parts.append(f'<path d="M{x:g} {top}V{axis}" stroke="{GREY}" stroke-opacity="0.4"/>')
        parts.append(text(x, axis + 16, str(power), size=12, anchor="middle"))
    for i, fmt in enumerate(DRAWN):
        parts += range_bar(fmt, top + 24 * i)
    return picture(axis + 28, "Bit layouts and ranges of fp32, tf32, bf16, fp16, e4m3fn and e5m2", parts)


# --- the mixed-precision step ------------------------------------------------------------------------------


def station(x: float, y: float, width: float, kind: str, title: str, note: str) -> list[str]:
    """A box with a title and a note."""
    middle = x + width / 2
    return [
        box(x, y, width, 60, FILLS[kind], 'rx="8" stroke="#555" stroke-width="0.7"'),
        text(middle, y + 26, title, fill="#222", size=15, anchor="middle"),
        text(middle, y + 46, note, fill="#333", size=12, anchor="middle"),
    ]


def arrow(path: str, words: str = "", x: float = 0, y: float = 0, anchor: str = "middle") -> list[str]:
    """A line that ends in a head, with words beside it."""
    line = f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.6" marker-end="url(#head)"/>'
    return [line, text(x, y, words, size=13, anchor=anchor)] if words else [line]


def step() -> str:
    """Where a step goes, in which width."""
    low, full = "exponent", "fp32"
    parts = [
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{GREY}"/></marker></defs>',
        *station(40, 40, 140, low, "weights", "16 bits (O2)"),
        *station(250, 40, 140, low, "forward", "each op by its rule"),
        *station(460, 40, 140, full, "loss", "fp32"),
        *station(670, 40, 140, full, "loss x S", "S: the loss scale"),
        *arrow("M180 70H246"),
        *arrow("M390 70H456"),
        *arrow("M600 70H666"),
        *station(670, 180, 140, low, "backward", "as forward ran"),
        *arrow("M740 100V176"),
        *station(460, 180, 140, low, "gradients x S", "16 bits (O2)"),
        *arrow("M670 210H604"),
        *station(250, 180, 140, "plain", "all finite?", "OR over ranks"),
        *arrow("M460 210H394"),
        *station(40, 180, 140, full, "/ S, clip, update", "in fp32"),
        *arrow("M250 210H184", "yes", 217, 202),
        *station(40, 310, 140, full, "fp32 masters", "the exact weights"),
        *arrow("M110 240V306"),
        *arrow("M40 340H14V70H36", "rounded to 16 bits", 22, 146, "start"),
        *station(250, 310, 140, "plain", "skip the step", "weights untouched"),
        *arrow("M320 240V306", "no", 336, 278),
        *station(460, 310, 350, "plain", "the next S", "halved after a skip, doubled after 2000 taken steps"),
        *arrow("M390 340H456"),
        *arrow("M810 340H842V70H814"),
    ]
    for x, fill, words in ((40, low, "16 bits"), (130, full, "fp32")):
        parts += [box(x, 8, 14, 14, FILLS[fill]), text(x + 20, 20, words, size=13)]
    return picture(384, "A mixed-precision step with masters and a dynamic loss scale", parts)


# --- bytes of a parameter ---------------------------------------------------------------------------------


PARTS = {"weights": "exponent", "16 bits that bf16 drops": "fp32", "gradients": "plain", "states": "mantissa"}
#: With AdamW: bytes of each part, as `halfstep memory` counts them.
BYTES = {
    "fp32": (4, 0, 4, 8),
    "bf16 weights": (2, 2, 2, 8),
    "bf16 states": (2, 2, 2, 4),
    "8-bit states": (2, 2, 2, 2),
    "gradients released": (2, 2, 0, 2),
}


def memory() -> str:
    """A bar for each way to keep a parameter."""
    left, unit, parts = 140, 15, [text(0, 16, "bytes per parameter with AdamW", size=15)]
    for i, (name, sizes) in enumerate(BYTES.items()):
        x, y = float(left), 34 + 32 * i
        parts.append(text(left - 8, y + 17, name, size=13, anchor="end"))
        for kind, size in zip(PARTS.values(), sizes):
            parts.append(box(x, y, unit * size, 24, FILLS[kind]))
            x += unit * size
        parts.append(text(x + 8, y + 17, str(sum(sizes)), size=15))
    for i, (name, kind) in enumerate(PARTS.items()):
        x, y = (0, 130)[i % 2], 212 + 22 * (i // 2)
        parts += [box(x, y - 11, 12, 12, FILLS[kind]), text(x + 18, y, name, size=12)]
    return picture(244, "Bytes per parameter: 16 in fp32; 14, 10, 8 and 6 with halfstep", parts, 420)


PICTURES = {"formats.svg": formats, "step.svg": step, "memory.svg": memory}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
