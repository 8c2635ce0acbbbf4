// The charts: curves by step, tokens or time, as SVG that is drawn anew whenever something is chosen.

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

const stepsOf = ([steps, values]) =>
  Array.isArray(steps) ? steps : values.map((_, at) => steps.first + at * steps.apart);

const shownCurves = (chart) => {
  const found = [];
  data.runs.forEach((run, index) => {
    const place = view.off.has(index) ? null : along(run);
    if (!place) return;
    chart.curves.forEach((key, number) => {
      const curve = run.curves[key];
      if (!curve) return;
      const xs = stepsOf(curve).map(place),
        ys = curve[1],
        means = curve[2] && { xs: curve[2][0].map(place), ys: curve[2][1] };
      const name = chart.curves.length > 1 ? `${run.name}: ${key}` : run.name;
      found.push({ index, run, key, number, xs, ys, means, name, place, sparse: ys.length <= 60 });
    });
  });
  return found;
};
const extent = (curves, log) => {
  let [low, high] = view.range || [Infinity, -Infinity];
  if (!view.range)
    for (const curve of curves) {
      low = Math.min(low, curve.xs[0]);
      high = Math.max(high, curve.xs[curve.xs.length - 1]);
    }
  let bottom = Infinity,
    top = -Infinity;
  for (const { xs, ys } of curves) {
    for (let at = 0; at < xs.length; at += 1) {
      if (xs[at] < low || xs[at] > high || (log && ys[at] <= 0)) continue;
      bottom = Math.min(bottom, ys[at]);
      top = Math.max(top, ys[at]);
    }
  }
  if (!(low < high)) {
    low -= 1;
    high += 1;
  }
  if (bottom > top) [bottom, top] = log ? [0.1, 1] : [0, 1];
  if (log) [bottom, top] = [Math.log10(bottom), Math.log10(top)];
  const pad = (top - bottom) * 0.05 || (log ? 0.05 : Math.abs(top) * 0.05 || 1);
  const floor = !log && bottom >= 0 && bottom - pad < 0 ? 0 : bottom - pad;
  return { low, high, bottom: floor, top: top + pad };
};

const draw = (chart) => {
  const width = chart.box.clientWidth,
    height = chart.large ? 320 : 220,
    left = chart.left,
    log = view.log.has(chart.number);
  const curves = shownCurves(chart),
    { low, high, bottom, top } = extent(curves, log);
  const x = (value) => left + ((value - low) / (high - low)) * (width - left - RIGHT);
  const y = (value) =>
    height - BOTTOM - ((log ? Math.log10(value) - bottom : value - bottom) / (top - bottom)) * (height - TOP - BOTTOM);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chart.title });
  const clip = svg("clipPath", { id: `clip-${chart.number}` }, picture);
  svg(
    "rect",
    { x: left, y: TOP - 4, width: Math.max(0, width - left - RIGHT), height: height - TOP - BOTTOM + 4 },
    clip,
  );
  for (const tick of log ? powers(bottom, top) : ticks(bottom, top, 5)) {
    const value = log ? 10 ** tick : tick,
      at = y(value);
    svg("line", { class: "rule", x1: left, x2: width - RIGHT, y1: at, y2: at }, picture);
    svg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, picture).textContent = said(value, chart.unit);
  }
  for (const tick of ticks(low, high, Math.max(3, Math.floor(width / 100)))) {
    svg("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, picture).textContent = saidX(tick);
  }
  const inside = svg("g", { "clip-path": `url(#clip-${chart.number})` }, picture);
  const restarted = new Set(),
    means = [];
  const line = (parent, xs, ys, attributes, index) => {
    let path = "",
      pen = "M";
    ys.forEach((value, at) => {
      if (log && value <= 0) {
        pen = "M";
        return;
      }
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
        const alone = curve.ys.length === 1,
          left = x(curve.xs[at]);
        const dot = svg("circle", { cx: left, cy: y(value), r: alone ? 4 : 2.5 }, inside);
        dot.style.fill = color(curve.index);
        if (!alone) return;
        const before = left > width / 2;
        const place = { x: left + (before ? -9 : 9), y: y(value) + 4, "text-anchor": before ? "end" : "start" };
        svg("text", place, inside).textContent = `${curve.key} ${said(value, chart.unit)} (once)`;
      });
    }
    const dash = DASHES[(curve.number + Math.floor(curve.index / COLORS)) % DASHES.length];
    line(
      inside,
      curve.xs,
      curve.ys,
      { class: curve.means ? "curve noise" : "curve", "stroke-dasharray": dash },
      curve.index,
    );
    if (curve.means) means.push(curve);
  }
  for (const curve of means) line(inside, curve.means.xs, curve.means.ys, { class: "curve mean" }, curve.index);
  chart.cross = svg("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" }, picture);
  chart.chosen = svg("rect", { class: "chosen", y: TOP, height: height - TOP - BOTTOM, visibility: "hidden" }, picture);
  chart.drawn = { curves, x, back: (at) => low + ((at - left) / (width - left - RIGHT)) * (high - low), width };
  if (chart.picture) chart.picture.replaceWith(picture);
  else chart.box.append(picture);
  chart.picture = picture;
  listen(chart);
};
const drawAll = () => {
  charts.forEach(draw);
  document.getElementById("whole").hidden = !view.range;
};

const tell = (chart, at) => {
  const { curves, x, back, width } = chart.drawn,
    value = back(at);
  const lines = curves.map((curve) => {
    const after = Math.min(search(curve.xs, value), curve.xs.length - 1),
      before = Math.max(0, after - 1);
    const nearest = value - curve.xs[before] < curve.xs[after] - value ? before : after;
    return { curve, nearest, far: Math.abs(curve.xs[nearest] - value) };
  });
  if (!lines.length) return;
  const best = lines.reduce((one, other) => (other.far < one.far ? other : one));
  const here = x(best.curve.xs[best.nearest]);
  chart.cross.setAttribute("x1", here);
  chart.cross.setAttribute("x2", here);
  chart.cross.setAttribute("visibility", "visible");
  const shown = lines
    .slice(0, 24)
    .map(({ curve, nearest }) =>
      html(
        "div",
        {},
        swatch(curve.index, curve.number),
        curve.name,
        html("b", { textContent: said(curve.ys[nearest], chart.unit) }),
      ),
    );
  chart.tip.replaceChildren(
    html("div", { className: "quiet", textContent: `${view.axis} ${saidX(best.curve.xs[best.nearest], true)}` }),
    ...shown,
  );
  chart.tip.hidden = false;
  chart.tip.style.top = "40px";
  if (here > width / 2) {
    chart.tip.style.right = `${width - here + 24}px`;
    chart.tip.style.left = "";
  } else {
    chart.tip.style.left = `${here + 24}px`;
    chart.tip.style.right = "";
  }
};
const listen = (chart) => {
  let from = null;
  const within = (event) => {
    const box = chart.picture.getBoundingClientRect();
    return Math.min(
      Math.max((event.clientX - box.left) * (chart.drawn.width / box.width), chart.left),
      chart.drawn.width - RIGHT,
    );
  };
  const quiet = () => {
    from = null;
    chart.tip.hidden = true;
    chart.cross.setAttribute("visibility", "hidden");
    chart.chosen.setAttribute("visibility", "hidden");
  };
  chart.picture.addEventListener("pointerdown", (event) => {
    from = within(event);
  });
  chart.picture.addEventListener("pointermove", (event) => {
    const at = within(event);
    tell(chart, at);
    if (from === null || Math.abs(at - from) < 4) return;
    chart.chosen.setAttribute("x", Math.min(from, at));
    chart.chosen.setAttribute("width", Math.abs(at - from));
    chart.chosen.setAttribute("visibility", "visible");
  });
  chart.picture.addEventListener("pointerup", (event) => {
    const start = from,
      at = within(event);
    from = null;
    if (start === null || Math.abs(at - start) < 8) {
      chart.chosen.setAttribute("visibility", "hidden");
      return;
    }
    view.range = [chart.drawn.back(Math.min(start, at)), chart.drawn.back(Math.max(start, at))];
    chart.tip.hidden = true;
    drawAll();
  });
  chart.picture.addEventListener("pointerleave", quiet);
  chart.picture.addEventListener("pointercancel", quiet);
  chart.picture.addEventListener("dblclick", () => {
    view.range = null;
    drawAll();
  });
};

const build = () => {
  const grid = document.getElementById("grid");
  if (!data.charts.length) grid.append(html("p", { className: "quiet", textContent: "No step was recorded yet." }));
  data.charts.forEach((described, number) => {
    const chart = { ...described, number, large: number === 0, left: described.unit === "bytes" ? 70 : 52 };
    const box = html("input", {
      type: "checkbox",
      onchange: () => {
        if (box.checked) view.log.add(number);
        else view.log.delete(number);
        draw(chart);
      },
    });
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
    const box = html("input", {
      type: "checkbox",
      checked: true,
      onchange: () => {
        if (box.checked) view.off.delete(index);
        else view.off.add(index);
        drawAll();
      },
    });
    runs.append(html("label", {}, box, swatch(index, index >= COLORS), run.name));
  });
  for (const radio of document.querySelectorAll("#axis input")) {
    radio.disabled = radio.value !== "step" && !data.runs.some((run) => run.axes[radio.value]);
    radio.addEventListener("change", () => {
      view.axis = radio.value;
      view.range = null;
      drawAll();
    });
  }
  document.getElementById("whole").addEventListener("click", () => {
    view.range = null;
    drawAll();
  });
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) {
      width = window.innerWidth;
      drawAll();
    }
  });
  drawAll();
};
