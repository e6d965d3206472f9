"""The pages in a browser: nothing wider than a phone, the heat map by keyboard, the verdict on top."""

import json
import re
import shutil
import subprocess

import pytest

from halfstep.report import render
from halfstep.report.doctor import render_doctor
from tests.doctor.test_doctor import nasty
from tests.report.test_report import document

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=2000", "--dump-dom",
)  # fmt: skip

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here to open the pages in")

# Chromium's own window is never narrower than 500 px; a frame in it is.
PHONE = """<body style="margin:0">
<iframe id="phone" width="400" height="900" style="border:0"></iframe><script>
const frame = document.getElementById("phone");
frame.srcdoc = PAGE;
frame.onload = () => {
  const page = frame.contentDocument, shown = (e) => e.getClientRects().length > 0, told = {};
  const text = [...page.querySelectorAll("svg text")].filter(shown);
  told.letters = text.length;
  told.smallest = Math.min(...text.map((e) => {
    const svg = e.ownerSVGElement, size = page.defaultView.getComputedStyle(e).fontSize;
    return parseFloat(size) * svg.clientWidth / svg.viewBox.baseVal.width;
  }));
  told.charts = [...page.querySelectorAll("svg[role=img], .bars")].filter(shown).map((e) => {
    const box = e.getBoundingClientRect(), around = e.closest(".plot");
    return [box.left, box.right, around.scrollWidth - around.clientWidth];
  });
  told.wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  told.headline = page.querySelector(".headline").getBoundingClientRect().bottom;
  document.title = JSON.stringify(told);
};
</script></body>
"""

ASK = """
<script>
const heat = document.getElementById("heat"), scale = document.getElementById("scale");
const find = document.getElementById("find"), told = {};
const press = (key) => heat.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
if (heat) {
  told.all = heat.querySelectorAll("[role=option]").length;
  find.value = "19"; find.dispatchEvent(new Event("input"));
  told.found = heat.querySelectorAll("[role=option]").length;
  press("ArrowDown"); told.chosen = heat.getAttribute("aria-activedescendant");
  const before = Number(scale.value); press("ArrowRight"); told.moved = Number(scale.value) - before;
}
told.headline = document.querySelector(".headline").textContent;
told.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.title = JSON.stringify(told);
</script></body>
"""


def seen(page, folder, width):
    return opened(page.replace("</body>", ASK), folder, width)


def opened(page, folder, width):
    path = folder / "page.html"
    path.write_text(page)
    command = [BROWSER, *FLAGS, f"--window-size={width},900", f"--user-data-dir={folder}/browser"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-500:]
    return json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_the_doctors_page_by_keyboard_on_a_phone(tmp_path):
    ill = nasty() | {"headline": "train.py: not healthy: " + "a.very.long.name." * 40}
    told = seen(render_doctor(ill), tmp_path, 500)
    assert told["all"] == 200
    assert 0 < told["found"] < 200
    assert told["chosen"] == "row1"
    assert told["moved"] == 1
    assert told["headline"].startswith("train.py: not healthy")
    assert told["wide"] <= 0


@pytest.mark.parametrize("width", [500, 1400])
def test_the_comparison_is_no_wider_than_the_window(tmp_path, width):
    told = seen(render(document()), tmp_path, width)
    assert told["wide"] <= 0
    assert told["headline"]


def ill():
    """A document whose page draws each of its charts."""
    note = {"scale": 1024.0, "taken": True, "amax": 1.0, "worst": "a"}
    history = [{**note, "step": i, "taken": i != 3, "scale": 1024.0 if i < 4 else 512.0} for i in range(9)]
    return nasty() | {
        "headline": "train.py: not healthy: step 4, a line: a cause; cure: x",
        "history": history,
    }


@pytest.mark.parametrize("page", [render(document()), render_doctor(ill())], ids=["train", "doctor"])
def test_charts_are_legible_on_a_phone_as_they_stand(tmp_path, page):
    framed = json.dumps(page).replace("<", "\\u003c")
    told = opened(PHONE.replace("PAGE", framed), tmp_path, 500)
    assert told["letters"] > 10
    assert told["smallest"] >= 9
    assert len(told["charts"]) >= 2
    assert all(left >= 0 and right <= 400 and hidden <= 0 for left, right, hidden in told["charts"])
    assert told["wide"] <= 0
    assert told["headline"] < 900
