"use strict";
(() => {
  const data = JSON.parse(document.getElementById("numbers").textContent);
  const heat = document.getElementById("heat");
  if (!heat) return;
  const at = (id) => document.getElementById(id);
  const kind = at("kind"), format = at("format"), scale = at("scale"), find = at("find");
  let rows = [], low = -40, high = 20, chosen = 0;
  const scaled = (k) => k === "gradient" || k === "activation_grad";
  // Gradients were counted with the loss scale of their step in them; it is taken out here.
  const first = (r) => r.first - Math.round(r.scale);
  const span = () => high - low + 1;

  function choose() {
    const word = find.value.trim().toLowerCase();
    const all = data.rows[kind.value] || [];
    rows = all.filter((r) => r.path.toLowerCase().includes(word));
    const used = all.filter((r) => r.counts.length);
    const ends = data.formats[format.value];
    low = Math.min(-28, ends.low < -60 ? -28 : ends.low - 4, ...used.map(first)) - 1;
    high = Math.max(17, ...used.map((r) => first(r) + r.counts.length)) + 1;
    low = Math.max(low, -80); high = Math.min(high, 60);
    chosen = 0;
    build();
  }

  function shares(r, name, k) {
    const f = data.formats[name];
    let lost = 0, over = 0, nonzero = 0;
    r.counts.forEach((n, i) => {
      const e = first(r) + i + k;
      nonzero += n;
      if (e < f.low - 1) lost += n;
      if (e > f.high) over += n;
    });
    return { lost: nonzero ? lost / nonzero : 0, over: nonzero ? over / nonzero : 0, nonzero };
  }

  const raised = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const power = (e) => "2" + String(e).split("").map((c) => raised[c]).join("");
  const percent = (x) => (x === 0 ? "0" : x < 0.001 ? "<0.1%" : (100 * x).toFixed(1) + "%");

  function build() {
    heat.textContent = "";
    const head = document.createElement("div");
    head.className = "head";
    head.append(line("", "→ 0", "→ ∞", "inf, NaN"));
    heat.append(head);
    rows.forEach((r, i) => {
      const row = line(r.path, "", "", r.bad ? String(r.bad) : "");
      row.id = "row" + i;
      row.setAttribute("role", "option");
      row.addEventListener("click", () => select(i, false));
      heat.append(row);
    });
    paint();
    if (rows.length) select(0, false);
    else at("detail").textContent = "no tensor of that name";
  }

  function line(path, left, right, bad) {
    const row = document.createElement("div");
    row.className = "row";
    const name = document.createElement("span");
    name.className = "name";
    // The column runs right to left so that the start of a long path is what gets cut off.
    const text = document.createElement("bdi");
    text.dir = "ltr";
    text.textContent = path;
    name.append(text);
    name.title = path;
    const canvas = document.createElement("canvas");
    row.append(name, canvas);
    for (const share of [left, right, bad]) {
      const cell = document.createElement("span");
      cell.className = "share";
      cell.textContent = share;
      row.append(cell);
    }
    return row;
  }

  function sized(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || 300;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    return [pen, width];
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function axis(canvas, k) {
    const names = Object.keys(data.formats), height = 22 + 13 * names.length;
    const [pen, width] = sized(canvas, height);
    const x = (e) => ((e - low) / span()) * width;
    pen.font = "11px system-ui, sans-serif";
    names.forEach((name, i) => {
      const f = data.formats[name], y = 4 + 13 * i, mine = name === format.value;
      const begin = Math.max(0, x(f.low - k)), normal = Math.max(0, x(f.normal - k));
      const end = Math.min(width, x(f.high + 1 - k));
      pen.globalAlpha = mine ? 1 : 0.45;
      pen.fillStyle = colour("--quiet");
      if (end > begin) {
        pen.fillRect(begin, y + 4, Math.max(0, normal - begin), 2);
        pen.fillRect(Math.min(normal, end), y + 2, Math.max(0, end - normal), 6);
      }
      pen.fillStyle = colour("--ink");
      const label = Math.min(Math.max(begin, 2) + 4, width - 46);
      const wide = pen.measureText(name).width;
      pen.clearRect(label - 2, y, wide + 4, 11);
      pen.fillText(name, label, y + 9);
      pen.globalAlpha = 1;
    });
    pen.fillStyle = colour("--quiet");
    pen.textAlign = "center";
    const every = [5, 10, 20].find((n) => (n / span()) * width > 34) || 40;
    for (let e = Math.ceil(low / every) * every; e <= high; e += every) {
      const middle = x(e + 0.5);
      if (middle > 12 && middle < width - 12) pen.fillText(power(e), middle, height - 5);
    }
  }

  function bars(canvas, r, k) {
    const [pen, width] = sized(canvas, 17);
    const f = data.formats[format.value], cell = width / span();
    const x = (e) => (e - low) * cell;
    const most = Math.max(1, ...r.counts);
    r.counts.forEach((n, i) => {
      if (!n) return;
      const depth = 0.12 + 0.88 * Math.pow(n / most, 0.45);
      pen.fillStyle = `rgba(${colour("--heat")}, ${depth})`;
      pen.fillRect(x(first(r) + i) + 0.5, 1.5, Math.max(1, cell - 1), 14);
    });
    pen.fillStyle = colour("--shade");
    if (!r.counts.some((n) => n)) {
      pen.fillStyle = colour("--quiet");
      pen.font = "11px system-ui, sans-serif";
      pen.fillText(r.bad ? "no finite value but zeros" : "all zeros", 6, 12);
      return;
    }
    const begin = Math.max(0, Math.min(width, x(f.low - k)));
    const end = Math.max(0, Math.min(width, x(f.high + 1 - k)));
    pen.fillRect(0, 0, begin, 17);
    pen.fillRect(end, 0, width - end, 17);
    pen.fillStyle = colour("--quiet");
    if (begin > 0) pen.fillRect(begin, 0, 1, 17);
    if (end < width) pen.fillRect(end - 1, 0, 1, 17);
  }

  function paint() {
    const k = Number(scale.value);
    at("power").textContent = String(k);
    const all = heat.querySelectorAll(".row");
    if (!all.length) return;
    axis(all[0].querySelector("canvas"), k);
    let lost = 0, over = 0, nonzero = 0;
    rows.forEach((r, i) => {
      const row = all[i + 1], s = shares(r, format.value, k);
      bars(row.querySelector("canvas"), r, k);
      const cells = row.querySelectorAll(".share");
      [s.lost, s.over].forEach((value, j) => {
        cells[j].textContent = percent(value);
        cells[j].classList.toggle("much", value > (j ? 0 : 0.05));
      });
      cells[2].classList.toggle("much", r.bad > 0);
      row.setAttribute("aria-label", `${r.path}: ${percent(s.lost)} to zero, ${percent(s.over)} overflow, ${r.bad} inf or NaN`);
      lost += s.lost * s.nonzero; over += s.over * s.nonzero; nonzero += s.nonzero;
    });
    const share = (v) => percent(nonzero ? v / nonzero : 0);
    at("counted").textContent = `${rows.length} tensors at scale ${power(k)} in ${format.value}: ` +
      `${share(lost)} of the nonzero values become zero, ${share(over)} overflow. ` +
      "Values within one power of two of an edge may go either way.";
    detail();
  }

  function select(i, scroll) {
    chosen = Math.max(0, Math.min(rows.length - 1, i));
    heat.querySelectorAll("[role=option]").forEach((row, j) => {
      row.setAttribute("aria-selected", String(j === chosen));
    });
    const row = at("row" + chosen);
    if (row) {
      heat.setAttribute("aria-activedescendant", row.id);
      if (scroll) {
        const head = heat.querySelector(".head").offsetHeight;
        if (row.offsetTop < heat.scrollTop + head) heat.scrollTop = row.offsetTop - head;
        const bottom = row.offsetTop + row.offsetHeight;
        if (bottom > heat.scrollTop + heat.clientHeight) heat.scrollTop = bottom - heat.clientHeight;
      }
    }
    detail();
  }

  function detail() {
    const r = rows[chosen];
    if (!r) return;
    const k = Number(scale.value);
    const each = Object.keys(data.formats).map((name) => {
      const s = shares(r, name, k);
      return `${name} ${percent(s.lost)} to zero, ${percent(s.over)} overflow`;
    });
    const range = r.counts.length
      ? `from ${power(first(r))} to ${power(first(r) + r.counts.length - 1)}` : "nothing but zeros";
    const zeros = r.zeros + r.counts.reduce((a, b) => a + b, 0) + r.bad;
    at("detail").textContent = `${r.path} (${r.dtype}): ${range}; ` +
      `${percent(r.zeros / Math.max(1, zeros))} zeros${r.bad ? `, ${r.bad} inf or NaN` : ""}. ` +
      `At scale ${power(k)}: ${each.join("; ")}.`;
  }

  function best() {
    let found = 0, least = Infinity;
    for (let k = -32; k <= 32; k += 1) {
      let cost = 0;
      for (const r of data.rows[kind.value]) {
        const s = shares(r, format.value, k);
        cost += (s.lost + 1000 * s.over) * s.nonzero;
      }
      if (cost < least - 1e-9 || (Math.abs(cost - least) < 1e-9 && Math.abs(k) < Math.abs(found))) {
        least = cost; found = k;
      }
    }
    scale.value = String(found);
    paint();
  }

  function startScale() {
    const all = data.rows[kind.value] || [];
    scale.value = String(scaled(kind.value) && all.length ? Math.round(all[0].scale) : 0);
  }

  heat.addEventListener("keydown", (event) => {
    const one = heat.querySelector("[role=option]");
    const page = Math.max(1, Math.floor(heat.clientHeight / ((one && one.offsetHeight) || 18)) - 5);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e6, End: 1e6 };
    if (event.key in steps) {
      select(chosen + steps[event.key], true);
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      scale.value = String(Number(scale.value) + (event.key === "ArrowRight" ? 1 : -1));
      paint();
    } else {
      return;
    }
    event.preventDefault();
  });
  kind.addEventListener("change", () => { startScale(); choose(); });
  format.addEventListener("change", choose);
  scale.addEventListener("input", paint);
  find.addEventListener("input", choose);
  at("best").addEventListener("click", best);
  window.addEventListener("resize", paint);
  startScale();
  choose();
})();
