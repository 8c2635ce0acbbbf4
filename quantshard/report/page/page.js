"use strict";
// Draws the charts and maps of a report from the JSON in the page. What it shows of names goes through textContent.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = document.getElementById("ns").namespaceURI;
  const COLORS = 8, DASHES = ["", "5 3", "1.5 3", "9 3 2 3", "2 2", "12 4"];
  const RIGHT = 12, TOP = 10, BOTTOM = 24;
  const view = { axis: "step", off: new Set(), log: new Set(), range: null };
  const charts = [];

  const svg = (name, attributes, parent) => {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (parent) parent.append(made);
    return made;
  };
  const html = (name, attributes, ...children) => {
    const made = Object.assign(document.createElement(name), attributes);
    made.append(...children);
    return made;
  };
  const color = (index) => `var(--c${index % COLORS})`;
  const swatch = (index, dash) => {
    const made = html("span", { className: "swatch" });
    made.style.borderTopColor = color(index);
    if (dash) made.style.borderTopStyle = "dashed";
    return made;
  };

  // Numbers

  const digits = (value, count) => Number(value.toPrecision(count)).toString();
  const scaled = (value, units, base, count = 4) => {
    let at = 0;
    while (Math.abs(value) >= base && at < units.length - 1) { value /= base; at += 1; }
    return digits(value, Math.abs(value) >= 100 ? 4 : count) + units[at];
  };
  const said = (value, unit) => {
    if (unit === "bytes") return scaled(value, [" B", " KiB", " MiB", " GiB", " TiB"], 1024, 3);
    if (unit === "share") return `${digits(100 * value, 3)} %`;
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e15)) return value.toExponential(2);
    return Math.abs(value) >= 1e4 ? scaled(value, ["", "k", "M", "G", "T"], 1000) : digits(value, 5);
  };
  const saidX = (value, exact) => {
    if (view.axis === "time") return value < 120 ? `${digits(value, 3)} s` : value < 7200 ? `${digits(value / 60, 3)} min` : `${digits(value / 3600, 3)} h`;
    return exact ? Math.round(value).toLocaleString("en") : scaled(value, ["", "k", "M", "G", "T"], 1000);
  };
  const ticks = (low, high, count) => {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw) || 10 * power;
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6 && found.length < 50; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
    return found;
  };
  const powers = (low, high) => {
    const found = [];
    for (let at = Math.ceil(low - 1e-9); at <= high; at += 1) found.push(at);
    if (found.length >= 2) return found.filter((_, index) => index % Math.ceil(found.length / 6) === 0);
    return ticks(low, high, 4);
  };
  const search = (sorted, value) => {
    let low = 0, high = sorted.length;
    while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
    return low;
  };

  // From steps to the axis that is chosen, between whose points lines are straight

  const along = (run) => {
    if (view.axis === "step") return (step) => step;
    const axis = run.axes[view.axis];
    if (!axis) return null;
    const [steps, values] = axis;
    return (step) => {
      const at = Math.min(Math.max(search(steps, step), 1), steps.length - 1);
      if (steps.length < 2 || step <= steps[0]) return values[0];
      const share = Math.min(1, (step - steps[at - 1]) / (steps[at] - steps[at - 1]));
      return values[at - 1] + share * (values[at] - values[at - 1]);
    };
  };

  // Charts

  const shownCurves = (chart) => {
    const found = [];
    data.runs.forEach((run, index) => {
      const place = view.off.has(index) ? null : along(run);
      if (!place) return;
      chart.curves.forEach((key, number) => {
        const curve = run.curves[key];
        if (!curve) return;
        const xs = curve[0].map(place), ys = curve[1], means = curve[2] && { xs: curve[2][0].map(place), ys: curve[2][1] };
        const name = chart.curves.length > 1 ? `${run.name}: ${key}` : run.name;
        found.push({ index, run, key, number, xs, ys, means, name, place, sparse: ys.length <= 60 });
      });
    });
    return found;
  };
  const extent = (curves, log) => {
    let [low, high] = view.range || [Infinity, -Infinity];
    if (!view.range) for (const curve of curves) { low = Math.min(low, curve.xs[0]); high = Math.max(high, curve.xs[curve.xs.length - 1]); }
    let bottom = Infinity, top = -Infinity;
    for (const { xs, ys } of curves) {
      for (let at = 0; at < xs.length; at += 1) {
        if (xs[at] < low || xs[at] > high || (log && ys[at] <= 0)) continue;
        bottom = Math.min(bottom, ys[at]); top = Math.max(top, ys[at]);
      }
    }
    if (!(low < high)) { low -= 1; high += 1; }
    if (bottom > top) [bottom, top] = log ? [0.1, 1] : [0, 1];
    if (log) [bottom, top] = [Math.log10(bottom), Math.log10(top)];
    const pad = (top - bottom) * 0.05 || (log ? 0.05 : Math.abs(top) * 0.05 || 1);
    const floor = !log && bottom >= 0 && bottom - pad < 0 ? 0 : bottom - pad;
    return { low, high, bottom: floor, top: top + pad };
  };

  const draw = (chart) => {
    const width = chart.box.clientWidth, height = chart.large ? 320 : 220, left = chart.left, log = view.log.has(chart.number);
    const curves = shownCurves(chart), { low, high, bottom, top } = extent(curves, log);
    const x = (value) => left + ((value - low) / (high - low)) * (width - left - RIGHT);
    const y = (value) => height - BOTTOM - ((log ? Math.log10(value) - bottom : value - bottom) / (top - bottom)) * (height - TOP - BOTTOM);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chart.title });
    const clip = svg("clipPath", { id: `clip-${chart.number}` }, picture);
    svg("rect", { x: left, y: TOP - 4, width: Math.max(0, width - left - RIGHT), height: height - TOP - BOTTOM + 4 }, clip);
    for (const tick of log ? powers(bottom, top) : ticks(bottom, top, 5)) {
      const value = log ? 10 ** tick : tick, at = y(value);
      svg("line", { class: "rule", x1: left, x2: width - RIGHT, y1: at, y2: at }, picture);
      svg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, picture).textContent = said(value, chart.unit);
    }
    for (const tick of ticks(low, high, Math.max(3, Math.floor(width / 100)))) {
      svg("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, picture).textContent = saidX(tick);
    }
    const inside = svg("g", { "clip-path": `url(#clip-${chart.number})` }, picture);
    const restarted = new Set(), means = [];
    const line = (parent, xs, ys, attributes, index) => {
      let path = "", pen = "M";
      ys.forEach((value, at) => {
        if (log && value <= 0) { pen = "M"; return; }
        path += `${pen}${x(xs[at]).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      });
      if (path) svg("path", { d: path, ...attributes }, parent).style.stroke = color(index);
    };
    for (const curve of curves) {
      if (!restarted.has(curve.index)) {
        restarted.add(curve.index);
        for (const step of curve.run.restarts) {
          const at = x(curve.place(step));
          svg("line", { class: "restart", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }, inside);
        }
      }
      for (const step of curve.run.bad[curve.key] || []) {
        const at = x(curve.place(step));
        svg("line", { class: "bad", x1: at, x2: at, y1: height - BOTTOM - 8, y2: height - BOTTOM }, inside);
      }
      if (curve.sparse) {
        curve.ys.forEach((value, at) => {
          if (log && value <= 0) return;
          const dot = svg("circle", { cx: x(curve.xs[at]), cy: y(value), r: 2.5 }, inside);
          dot.style.fill = color(curve.index);
        });
      }
      const dash = DASHES[(curve.number + Math.floor(curve.index / COLORS)) % DASHES.length];
      line(inside, curve.xs, curve.ys, { class: curve.means ? "curve noise" : "curve", "stroke-dasharray": dash }, curve.index);
      if (curve.means) means.push(curve);
    }
    for (const curve of means) line(inside, curve.means.xs, curve.means.ys, { class: "curve mean" }, curve.index);
    chart.cross = svg("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" }, picture);
    chart.chosen = svg("rect", { class: "chosen", y: TOP, height: height - TOP - BOTTOM, visibility: "hidden" }, picture);
    chart.drawn = { curves, x, back: (at) => low + ((at - left) / (width - left - RIGHT)) * (high - low), width };
    if (chart.picture) chart.picture.replaceWith(picture); else chart.box.append(picture);
    chart.picture = picture;
    listen(chart);
  };
  const drawAll = () => {
    charts.forEach(draw);
    document.getElementById("whole").hidden = !view.range;
  };

  const tell = (chart, at) => {
    const { curves, x, back, width } = chart.drawn, value = back(at);
    const lines = curves.map((curve) => {
      const after = Math.min(search(curve.xs, value), curve.xs.length - 1), before = Math.max(0, after - 1);
      const nearest = value - curve.xs[before] < curve.xs[after] - value ? before : after;
      return { curve, nearest, far: Math.abs(curve.xs[nearest] - value) };
    });
    if (!lines.length) return;
    const best = lines.reduce((one, other) => (other.far < one.far ? other : one));
    const here = x(best.curve.xs[best.nearest]);
    chart.cross.setAttribute("x1", here); chart.cross.setAttribute("x2", here);
    chart.cross.setAttribute("visibility", "visible");
    const shown = lines.slice(0, 24).map(({ curve, nearest }) =>
      html("div", {}, swatch(curve.index, curve.number), curve.name, html("b", { textContent: said(curve.ys[nearest], chart.unit) })));
    chart.tip.replaceChildren(html("div", { className: "quiet", textContent: `${view.axis} ${saidX(best.curve.xs[best.nearest], true)}` }), ...shown);
    chart.tip.hidden = false;
    chart.tip.style.top = "40px";
    if (here > width / 2) { chart.tip.style.right = `${width - here + 24}px`; chart.tip.style.left = ""; }
    else { chart.tip.style.left = `${here + 24}px`; chart.tip.style.right = ""; }
  };
  const listen = (chart) => {
    let from = null;
    const within = (event) => {
      const box = chart.picture.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - box.left) * (chart.drawn.width / box.width), chart.left), chart.drawn.width - RIGHT);
    };
    const quiet = () => { from = null; chart.tip.hidden = true; chart.cross.setAttribute("visibility", "hidden"); chart.chosen.setAttribute("visibility", "hidden"); };
    chart.picture.addEventListener("pointerdown", (event) => { from = within(event); });
    chart.picture.addEventListener("pointermove", (event) => {
      const at = within(event);
      tell(chart, at);
      if (from === null || Math.abs(at - from) < 4) return;
      chart.chosen.setAttribute("x", Math.min(from, at));
      chart.chosen.setAttribute("width", Math.abs(at - from));
      chart.chosen.setAttribute("visibility", "visible");
    });
    chart.picture.addEventListener("pointerup", (event) => {
      const start = from, at = within(event);
      from = null;
      if (start === null || Math.abs(at - start) < 8) { chart.chosen.setAttribute("visibility", "hidden"); return; }
      view.range = [chart.drawn.back(Math.min(start, at)), chart.drawn.back(Math.max(start, at))];
      chart.tip.hidden = true;
      drawAll();
    });
    chart.picture.addEventListener("pointerleave", quiet);
    chart.picture.addEventListener("pointercancel", quiet);
    chart.picture.addEventListener("dblclick", () => { view.range = null; drawAll(); });
  };

  const build = () => {
    const grid = document.getElementById("grid");
    if (!data.charts.length) grid.append(html("p", { className: "quiet", textContent: "No step was recorded yet." }));
    data.charts.forEach((described, number) => {
      const chart = { ...described, number, large: number === 0, left: described.unit === "bytes" ? 70 : 52 };
      const box = html("input", { type: "checkbox", onchange: () => { if (box.checked) view.log.add(number); else view.log.delete(number); draw(chart); } });
      const caption = html("figcaption", {}, html("span", { textContent: chart.title }), html("label", {}, box, "log"));
      chart.tip = html("div", { className: "tip", hidden: true });
      chart.box = html("div", {});
      const key = html("div", { className: "key" });
      if (chart.curves.length > 1) {
        chart.curves.forEach((name, at) => {
          const mark = html("span", { className: "swatch" });
          mark.style.borderTopStyle = at ? "dashed" : "solid";
          key.append(html("span", {}, mark, name));
        });
      }
      grid.append(html("figure", { className: "chart" }, caption, key, chart.box, chart.tip));
      charts.push(chart);
    });
    const runs = document.getElementById("runs");
    data.runs.forEach((run, index) => {
      const box = html("input", { type: "checkbox", checked: true, onchange: () => { if (box.checked) view.off.delete(index); else view.off.add(index); drawAll(); } });
      runs.append(html("label", {}, box, swatch(index, index >= COLORS), run.name));
    });
    for (const radio of document.querySelectorAll("#axis input")) {
      radio.disabled = radio.value !== "step" && !data.runs.some((run) => run.axes[radio.value]);
      radio.addEventListener("change", () => { view.axis = radio.value; view.range = null; drawAll(); });
    }
    document.getElementById("whole").addEventListener("click", () => { view.range = null; drawAll(); });
    let width = window.innerWidth;
    window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); } });
    drawAll();
  };

  // Maps of tensor x step

  const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], BAD = [230, 60, 40];
  const ramp = (share) => {
    const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1), index = Math.min(Math.floor(at), RAMP.length - 2);
    return RAMP[index].map((low, channel) => Math.round(low + (at - index) * (RAMP[index + 1][channel] - low)));
  };
  const fill = (select, entries, chosen) => {
    select.replaceChildren(...entries.map(([value, text]) => html("option", { value, textContent: text })));
    if (entries.some(([value]) => String(value) === chosen)) select.value = chosen;
  };
  const drawMap = (found, steps, names) => {
    const finite = found.cells.flat().filter((cell) => typeof cell === "number");
    let low = Math.min(...[Infinity].concat(finite.length < 5e4 ? finite : [])), high = -Infinity;
    for (const cell of finite) { low = Math.min(low, cell); high = Math.max(high, cell); }
    const log = low > 0 && high / low > 200, place = (cell) => {
      if (!(high > low)) return 0.5;
      return log ? Math.log(cell / low) / Math.log(high / low) : (cell - low) / (high - low);
    };
    const rows = found.rows.length, canvas = html("canvas", { width: steps.length, height: rows });
    const pixels = canvas.getContext("2d"), image = pixels.createImageData(steps.length, rows);
    found.cells.forEach((row, top) => row.forEach((cell, left) => {
      if (cell === null) return;
      const paint = cell === "x" ? BAD : ramp(place(cell));
      image.data.set([...paint, 255], 4 * (top * steps.length + left));
    }));
    pixels.putImageData(image, 0, 0);
    const labelled = rows <= 120, tall = labelled ? 15 : Math.max(2, Math.floor(1800 / rows));
    canvas.style.height = `${rows * tall}px`;
    const tip = html("div", { className: "tip", hidden: true });
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const left = Math.min(steps.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * steps.length)));
      const top = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
      const cell = found.cells[top][left];
      tip.replaceChildren(html("div", { textContent: names[found.rows[top]] }), html("div", { className: "quiet", textContent: `step ${steps[left].toLocaleString("en")}` }),
        html("div", {}, html("b", { textContent: cell === null ? "not sampled" : cell === "x" ? "not finite" : said(cell, "") })));
      tip.hidden = false;
      tip.style.top = `${Math.max(0, (top - 1) * tall)}px`;
      if (left > steps.length / 2) { tip.style.right = `${box.right - event.clientX + 16}px`; tip.style.left = ""; }
      else { tip.style.left = `${canvas.offsetLeft + event.clientX - box.left + 16}px`; tip.style.right = ""; }
    });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    const labels = html("div", { className: "names" }, ...(labelled ? found.rows.map((at) => html("div", { title: names[at] }, html("bdi", { textContent: names[at] }))) : [`${rows} tensors`]));
    const ends = html("div", { className: "ends" }, html("span", { textContent: `step ${steps[0].toLocaleString("en")}` }), html("span", { textContent: steps[steps.length - 1].toLocaleString("en") }));
    const scale = html("div", { className: "scale" }, ...(finite.length ? [said(low, ""), html("span", { className: "ramp" }), said(high, ""), log ? "(logarithmic)" : ""] : []));
    document.getElementById("map").replaceChildren(html("div", { className: "map" }, labels, canvas, ends, scale, tip));
  };
  const buildMaps = () => {
    const there = data.maps.map((maps, index) => [index, maps]).filter(([, maps]) => maps && maps.maps.length);
    if (!there.length) return;
    const [run, role, statistic] = ["run", "role", "statistic"].map((name) => document.getElementById(`map-${name}`));
    document.getElementById("map-controls").hidden = false;
    fill(run, there.map(([index]) => [index, data.runs[index].name]));
    const choose = () => {
      const { maps, steps, names } = data.maps[Number(run.value)];
      fill(role, [...new Set(maps.map((each) => each.role))].map((each) => [each, each || "tensors"]), role.value);
      const ofRole = maps.filter((each) => each.role === role.value);
      fill(statistic, ofRole.map((each) => [each.statistic, each.statistic]), statistic.value);
      drawMap(ofRole.find((each) => each.statistic === statistic.value), steps, names);
    };
    for (const select of [run, role, statistic]) select.addEventListener("change", choose);
    choose();
  };

  build();
  buildMaps();
  document.documentElement.dataset.drawn = String(charts.length);
})();
