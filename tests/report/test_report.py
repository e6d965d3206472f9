"""The HTML report: self-contained, escaped, complete; its charts and sentences."""

import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from halfstep.errors import ConfigError
from halfstep.report import render, write_report
from halfstep.report.comparison import Bound, Comparison, RecipeRows, SeedRun, SettingRow
from halfstep.report.page import smooth
from halfstep.report.svg import Line, line_chart, nice_ticks, number, power_ticks
from halfstep.report.words import bounds, busy, cells, columns, find_recommended, sentence, verdict

BOUND = Bound(0.004, 0.001, 0.00005, flops=2 * 10**9, bytes=10**7, ops=40)


def run(scales=None, skipped=(), losses=(2.0, 1.5, 1.2, 1.0)):
    return SeedRun(0, list(losses), scales or [1.0] * 4, list(skipped))


def row(level="O0", dtype="fp32", **changes):
    made = {
        "label": level if level == "O0" else f"{level} {dtype}", "level": level, "dtype": dtype,
        "mean": 0.975, "spread": 0.0021, "difference": 0.0,
        "seconds": 0.008, "samples_per_second": 8000.0, "peak_bytes": 2e7,
        "saved_bytes": 1e7, "skipped": 0, "last_scale": 1.0, "failed": None, "diverged": 0,
        "bound": BOUND,
        "runs": [run()],
    }  # fmt: skip
    return SettingRow(**made | changes)


def document(**changes):
    """Three settings; `changes` of the recipe."""
    fp16 = row(
        "O1", "fp16", seconds=0.006, saved_bytes=6e6, difference=-0.001, skipped=1, last_scale=32768.0,
        runs=[run([65536.0, 65536.0, 32768.0, 32768.0], [2])],
    )  # fmt: skip
    failed = row(
        "O3", "fp16", mean=None, spread=None, difference=None, failed="<b>boom</b>", seconds=None,
        peak_bytes=None, saved_bytes=None, samples_per_second=None, bound=None,
        runs=[run(losses=[2.0, math.nan, math.inf, math.nan])],
    )  # fmt: skip
    shown = {
        "name": "digits<script>", "about": "a & b", "data": "digits", "metric": "accuracy", "steps": 4,
        "batch_size": 64, "seeds": 1, "rows": [row(), fp16, failed],
    }  # fmt: skip
    machine = {"halfstep": "1", "torch": "2", "device": "cpu", "slow": {"fp16": "no unit"}}
    return Comparison(machine, [RecipeRows(**shown | changes)])


def recipe(rows, metric="accuracy"):
    """Rows alone."""
    words = {"name": "r", "about": "a", "data": "d", "steps": 4, "batch_size": 1, "seeds": 1}
    return RecipeRows(rows=rows, metric=metric, **words)


#: A row of a machine that does other work, by the clock.
BUSY = {"noise": 0.4, "processor_seconds": 0.004}


class Checker(HTMLParser):
    VOID = frozenset(("meta", "link", "br", "line", "path", "rect"))

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parse(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def test_the_page_is_well_formed_self_contained_and_escaped():
    page = render(document())
    found = parse(page)
    assert "script" not in found.tags
    assert all(link.startswith("#") for link in found.links)
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "url(" not in page
    assert "@import" not in page
    assert "<b>boom</b>" not in page
    text = "".join(found.text)
    assert "digits<script>" in text
    assert "prefers-color-scheme: dark" in page


def test_the_page_shows_every_row_chart_and_sentence():
    page = render(document())
    text = "".join(parse(page).text)
    for piece in ("97.50 ± 0.21", "-0.10", "O1 fp16 (slow here)", "failed", "32,768", "8,000", "8.00"):
        assert piece in text
    for title in ("Training loss", "Loss scale", "Time of a step", "Memory"):
        assert title in text
    assert "O1 fp16: step 2 skipped" in text
    assert page.count("class='skip ") == 1
    assert "What bounds a step" in text


def test_a_recipe_without_scales_has_no_scale_chart():
    assert "Loss scale" not in render(document(rows=[row()]))


def test_what_json_says_is_what_was_found():
    base, fp16, failed = document().as_dict()["recipes"][0]["rows"]
    assert base["bound"] == vars(BOUND)
    assert fp16["runs"] == [vars(run([65536.0, 65536.0, 32768.0, 32768.0], [2]))]
    assert (failed["failed"], failed["seconds"]) == ("<b>boom</b>", None)


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = write_report(document(), tmp_path / "r.html")
    assert path.read_text().endswith("</html>")
    with pytest.raises(KeyError):
        write_report(document(rows=[row("O7")]), path)
    assert path.read_text().endswith("</html>")
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    with pytest.raises(ConfigError, match="cannot write the report"):
        write_report(document(), tmp_path / "no" / "r.html")


def test_sentences_say_what_was_done_and_what_bounds():
    base, faster = row(), row("O1", "bf16", seconds=0.004, saved_bytes=5e6)
    assert "Against O0" not in sentence(base, base, {})
    told = sentence(faster, base, {})
    assert "Against O0: 2x faster, the same peak memory, 50 % less saved memory." in told
    assert bounds(faster) == ["4 ms", "arithmetic", "4 ms", "1 ms", "50 µs"]
    assert bounds(row(bound=None)) == []
    assert "bf16 is slow on this device (none)" in sentence(faster, base, {"bf16": "none"})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(), row("O2", "bf16", seconds=0.00568, peak_bytes=1.7e7)],
         "Recommended: O2 bf16. 1.4x faster, 15 % less memory, test accuracy within 0.005 of O0's "
         '(4 steps, 1 seed): hs.prepare(model, optimizer, level="O2", dtype="bf16")'),
        ([row(), row("O1", "bf16", seconds=0.009)], "Keep fp32 (O0): no setting here is faster"),
        ([row(), row("O2", "bf16", seconds=0.004, difference=-0.2)], "no other setting trains as well"),
        ([row(), row("O2", "bf16", seconds=0.004, diverged=1)], "no other setting trains as well"),
        ([row(), row("O2", "bf16", seconds=0.0081, peak_bytes=1e7)], "O2 bf16: as fast, 50 % less memory"),
        ([row(noise=0.4), row("O2", "bf16", seconds=0.004, noise=0.4, peak_bytes=1.2e7)],
         "Speed not judged: the machine is busy: times differ by 40 % from round to round. "
         "O2 bf16: 40 % less memory, test accuracy within 0.005 of O0's (4 steps, 1 seed): hs.prepare("),
        ([row(**BUSY, processor_noise=0.1),
          row("O2", "bf16", **BUSY | {"processor_seconds": 0.002}, processor_noise=0.1)],
         "Recommended: O2 bf16. 2x faster by processor time, the same memory, test accuracy"),
        ([row(**BUSY, processor_noise=0.1), row("O2", "bf16", **BUSY, processor_noise=0.1)], "Keep fp32"),
        ([row(**BUSY, processor_noise=0.3), row("O2", "bf16", **BUSY, processor_noise=0.3)], "Speed not"),
        ([row(failed="boom", mean=None), row("O1", "bf16")], "No verdict: O0 itself failed"),
        ([row(diverged=1, mean=math.nan), row("O1", "bf16")], "No verdict: O0 itself diverged"),
        ([row(), row("O2", "bf16", seconds=0.004), row("O3", "bf16", seconds=0.0038)], "Recommended: O2"),
        ([row(), row("O2", "bf16", seconds=0.004), row("O3", "bf16", seconds=0.003)], "no masters: check"),
        ([row("O1", "bf16")], "compare with O0"),
    ],
)  # fmt: skip
def test_the_verdict_is_one_sentence_with_the_call_to_write(rows, words):
    assert words in verdict(recipe(rows))


def test_a_busy_machine_is_named_once_in_the_verdict():
    page = render(document(rows=[row(noise=0.4), row("O1", "bf16", noise=0.4)]))
    assert page.count("the machine is busy: times differ by 40 %") == 1


def test_one_setting_that_varies_does_not_make_the_machine_busy():
    one = [row(noise=0.05), row("O1", "bf16", noise=0.6), row("O2", "bf16", noise=0.08)]
    assert busy(recipe(one)) == ""
    assert busy(recipe([row(), row("O1", "bf16")])) == ""
    assert "differ by 60 %" in busy(
        recipe([*one, row("O3", "bf16", noise=0.7), row("O3", "fp16", noise=0.65)])
    )


def test_losses_are_drawn_against_o0_with_the_band_of_its_seeds():
    runs = [run(), run(losses=(2.1, 1.6, 1.1, 0.9))]
    page = render(document(rows=[row(runs=runs), row("O1", "fp16", runs=runs)]))
    assert "Training loss minus O0" in page
    assert page.count("class='band'") == 1
    assert "class='band'" not in render(document())


def test_a_constant_scale_is_a_line_of_text():
    page = render(document(rows=[row(), row("O1", "fp16", runs=[run([1024.0] * 4)])]))
    assert "Loss scale: O1 fp16 stayed at 1,024." in page
    assert "<h3>Loss scale</h3>" not in page


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failed": "the scale collapsed."}, "A run failed: the scale collapsed."),
        ({"diverged": 1}, "1 of 1 runs diverged"),
        ({"runs": [run([1024.0] * 4)], "skipped": 1}, "stayed at 1,024; 1 step skipped"),
        ({"runs": [run([1024.0, 512.0])], "skipped": 2}, "between 512 and 1,024; 2 steps skipped"),
        ({"bound": None}, "16-bit"),
    ],
)
def test_sentences_of_scale_and_failure(changes, words):
    assert words in sentence(row("O2", "fp16", **changes), row(), {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (12345, "12,345"),
        (2.5e7, "2.5e+07"),
        (1e-5, "1e-05"),
        (-3.0, "-3"),
        (125.5, "125.5"),
        (0.1 + 0.2, "0.3"),
    ],
)
def test_tick_labels_are_short(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 17.0), (1e-4, 3e-4), (5.0, 5.0), (0.0, 1e6)])
def test_ticks_are_round_and_inside(low, high):
    ticks = nice_ticks(low, high)
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert 1 <= len(ticks) <= 12
    assert power_ticks(1.0, 2.0**40)[0] == 1.0
    assert len(power_ticks(1.0, 2.0**40)) <= 8


def test_a_line_breaks_where_the_loss_is_not_finite():
    points = [(1.0, 1.0), (2.0, math.nan), (3.0, 2.0), (4.0, 3.0)]
    drawn = line_chart([Line("a<b", "level-O1", points)], x_label="x", y_label="y")
    path = drawn.split("class='curve")[1].split("d='")[1].split("'")[0]
    assert path.count("M") == 2
    assert path.count("L") == 1
    assert "a&lt;b" in drawn
    parse(drawn)
    nothing = line_chart([Line("a", "", [(1.0, math.inf)])], x_label="x", y_label="y")
    assert "no finite values" in nothing


def test_a_flat_line_and_one_point_are_drawable():
    for points in ([(1.0, 5.0), (2.0, 5.0)], [(1.0, 5.0)]):
        drawn = line_chart([Line("a", "", points)], x_label="x", y_label="y", powers_of_two=True)
        assert "nan" not in drawn
        parse(drawn)


def test_bars_are_in_proportion():
    drawn = render(document(rows=[row(seconds=0.01), row("O1", "fp16", seconds=0.005, saved_bytes=5e6)]))
    times, memory = (part.partition("</ul>")[0] for part in drawn.split("class='bars'")[1:])
    widths = [[float(w.split("%")[0]) for w in text.split("width:")[1:]] for text in (times, memory)]
    assert widths[0] == [100.0, 50.0]
    assert widths[1][2:] == [100.0, 25.0]


def test_smoothing_keeps_length_and_means():
    assert smooth([1.0, 2.0, 3.0, 4.0], 1) == [1.0, 2.0, 3.0, 4.0]
    assert smooth([1.0, 2.0, 6.0], 3) == [1.5, 3.0, 4.0]
    assert smooth([1.0, math.inf, -math.inf, 1.0, 1.0], 1)[3:] == [1.0, 1.0]


def test_cells_fit_their_columns():
    for metric in ("accuracy", "loss"):
        assert len(cells(row(), metric, {})) == len(columns(metric))
    assert cells(row(mean=0.00058, spread=0.0000031), "loss", {})[1] == "0.0005800 ± 3.1e-06"
    assert cells(row(diverged=1), "loss", {})[1].endswith("diverged")
    spoiled = cells(row(mean=math.nan, spread=math.nan, difference=math.nan, diverged=2), "loss", {})
    assert spoiled[1:3] == ["diverged", ""]


def test_the_recommended_row_is_marked_once_and_the_command_is_named():
    fast = row("O2", "bf16", seconds=0.004)
    shown = Comparison({"command": "halfstep train r", "date": "2026-01-02 03:04"}, [recipe([row(), fast])])
    page = render(shown)
    assert page.count("<tr class='best'><td>O2 bf16 <b>recommended</b>") == 1
    assert "halfstep train r · 2026-01-02 03:04" in page
    assert find_recommended(recipe([row(), row("O2", "bf16")])) is None


def test_an_interrupted_comparison_has_no_verdict():
    partial = replace(recipe([row()]), interrupted=True)
    assert verdict(partial) == "Interrupted: no verdict; 1 setting trained"


def test_points_show_their_values_under_the_pointer():
    line = Line("O1 <x>", "level-O1", [(float(x), x / 7) for x in range(1000)])
    page = line_chart([line], x_label="step", y_label="loss")
    assert "<title>O1 &lt;x&gt;, step 25: 3.571</title>" in page
    assert page.count("class='dot") <= 41


def test_a_headroom_axis_starts_at_0_with_the_danger_marked():
    page = line_chart([Line("a", "k0", [(1.0, 125.0), (2.0, 126.0)])], x_label="s", y_label="b", danger=1.0)
    assert ">0</text>" in page
    assert page.count("class='danger'") == 1
