"use strict";
// Draws the charts, by uPlot, and the tables of statistics. Texts are set by textContent only, here and in uPlot.

const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = 8;
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
const view = { axis: "step", off: new Set(), log: new Set() };
const charts = [];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (index) => css(`--c${index % COLORS}`);
const html = (name, attributes, ...children) => {
  const element = Object.assign(document.createElement(name), attributes);
  element.append(...children);
  return element;
};
const checkbox = (checked, onChange) => {
  const box = html("input", { type: "checkbox", checked });
  box.addEventListener("change", () => onChange(box.checked));
  return box;
};
const text = (value, unit) => {
  if (value == null) return "";
  if (unit === "share") return `${(100 * value).toFixed(1)} %`;
  if (unit === "bytes") {
    const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.abs(value) || 1) / 10)));
    return `${+(value / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  }
  if (unit === "time") return value < 120 ? `${+value.toFixed(1)} s` : `${+(value / 60).toFixed(1)} min`;
  const size = Math.abs(value);
  if (value && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size < 1e4 ? 5 : 8 });
};

// Position of a step on the horizontal axis: tokens and time are interpolated.
const place = (run, step) => {
  if (view.axis === "step") return step;
  const [steps, values] = run.axes[view.axis];
  let high = steps.findIndex((other) => other >= step);
  if (high < 0) high = steps.length - 1;
  const low = Math.max(0, high - 1);
  const share = high === low ? 0 : (step - steps[low]) / (steps[high] - steps[low]);
  return values[low] + share * (values[high] - values[low]);
};

const draw = (chart) => {
  const log = view.log.has(chart);
  const tables = [];
  const series = [{ label: view.axis, value: (_, x) => text(x, view.axis) }];
  const restarts = [];
  const bad = [];
  const add = (steps, values, run, options) => {
    tables.push([steps.map((step) => place(run, step)), log ? values.map((y) => (y > 0 ? y : null)) : values]);
    series.push({ spanGaps: true, value: (_, y) => text(y, chart.unit), ...options });
  };
  data.runs.forEach((run, index) => {
    if (view.off.has(index) || (view.axis !== "step" && !run.axes[view.axis])) return;
    restarts.push(...run.restarts.map((step) => place(run, step)));
    chart.curves.forEach((key, number) => {
      bad.push(...(run.bad[key] || []).map((step) => place(run, step)));
      if (!run.curves[key]) return;
      const [steps, values, means] = run.curves[key];
      const name = data.runs.length > 1 ? `${run.name}: ${key}` : key;
      const style = { stroke: color(index), dash: DASHES[(number + Math.floor(index / COLORS)) % DASHES.length] };
      add(steps, values, run, { label: name, width: means ? 0.4 : 1.5, ...style });
      if (means) add(...means, run, { label: `${name} (mean)`, width: 2, ...style });
    });
  });
  const marks = (plot) => {
    const { ctx, bbox } = plot;
    const lines = (xs, stroke, dash, height) => {
      ctx.save();
      ctx.strokeStyle = stroke;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash(dash);
      for (const value of xs) {
        const x = plot.valToPos(value, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(x, bbox.top + bbox.height - height);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.restore();
    };
    lines(restarts, css("--quiet"), [2, 4], bbox.height);
    lines(bad, css("--bad"), [], 10 * devicePixelRatio);
  };
  const axis = (unit) => ({
    stroke: css("--quiet"),
    grid: { stroke: css("--line"), width: 1 },
    ticks: { stroke: css("--line"), width: 1 },
    values: (_, ticks) => ticks.map((tick) => text(tick, unit)),
  });
  if (chart.plot) chart.plot.destroy();
  chart.box.replaceChildren();
  chart.plot = null;
  if (!tables.length) return;
  const options = {
    width: chart.box.clientWidth,
    height: chart === charts[0] ? 340 : 220,
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [axis(view.axis), { ...axis(chart.unit), size: 74 }],
    cursor: { sync: { key: "charts", scales: ["x", null] } },
    hooks: { draw: [marks] },
    series,
  };
  chart.plot = new uPlot(options, uPlot.join(tables), chart.box);
};
const drawAll = () => charts.forEach(draw);

const buildCharts = () => {
  const grid = document.getElementById("grid");
  if (!data.charts.length) grid.append(html("p", { className: "quiet", textContent: "No step was recorded yet." }));
  for (const chart of data.charts) {
    const box = checkbox(false, (checked) => {
      view.log[checked ? "add" : "delete"](chart);
      draw(chart);
    });
    const caption = html("figcaption", {}, html("span", { textContent: chart.title }), html("label", {}, box, "log"));
    chart.box = html("div", {});
    grid.append(html("figure", { className: "chart" }, caption, chart.box));
    charts.push(chart);
  }
  data.runs.forEach((run, index) => {
    const box = checkbox(true, (checked) => {
      view.off[checked ? "delete" : "add"](index);
      drawAll();
    });
    const swatch = html("span", { className: "swatch" });
    swatch.style.borderTopColor = color(index);
    document.getElementById("runs").append(html("label", {}, box, swatch, run.name));
  });
  for (const radio of document.querySelectorAll("#axis input")) {
    radio.disabled = radio.value !== "step" && !data.runs.some((run) => run.axes[radio.value]);
    radio.addEventListener("change", () => {
      view.axis = radio.value;
      drawAll();
    });
  }
  window.addEventListener("resize", () => {
    for (const { plot, box } of charts) if (plot) plot.setSize({ width: box.clientWidth, height: plot.height });
  });
  drawAll();
};

const drawMap = ({ statistic, rows, columns }, steps, names) => {
  const titles = columns || steps.map((step) => `step ${step.toLocaleString("en")}`);
  const numbers = rows.flatMap((row) => row.slice(1)).filter((cell) => typeof cell === "number");
  const low = numbers.reduce((one, other) => Math.min(one, other), Infinity);
  const high = numbers.reduce((one, other) => Math.max(one, other), -Infinity);
  const log = low > 0 && high / low > 200;
  const scale = (value) => (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
  const paint = (value) => `color-mix(in oklab, #fde725 ${high > low ? 100 * scale(value) : 50}%, #440154)`;
  const table = html("table", { className: "map" });
  for (const [index, ...cells] of rows) {
    const row = html("tr", {}, html("th", { textContent: names[index] }));
    cells.forEach((cell, at) => {
      const value = cell === null ? "not sampled" : cell === "x" ? "not finite" : text(cell, "");
      const square = html("td", { title: `${names[index]}, ${titles[at]}: ${value}` });
      if (cell !== null) square.style.background = cell === "x" ? css("--bad") : paint(cell);
      row.append(square);
    });
    table.append(row);
  }
  const range = numbers.length ? `${text(low, "")} (dark) to ${text(high, "")} (light)${log ? ", logarithmic" : ""}` : "";
  const caption = html("p", { className: "quiet", textContent: `${statistic}: ${range}; red: not finite; ${titles[0]} to ${titles.at(-1)}` });
  document.getElementById("map").replaceChildren(caption, html("div", { className: "wide" }, table));
};

const buildMaps = () => {
  const runs = data.maps.map((_, index) => index).filter((index) => data.maps[index].maps.length);
  if (!runs.length) return;
  const [run, map] = ["run", "statistic"].map((name) => document.getElementById(`map-${name}`));
  const fill = (select, values) => {
    const previous = select.value;
    select.replaceChildren(...values.map(([value, label]) => html("option", { value, textContent: label })));
    if (values.some(([value]) => String(value) === previous)) select.value = previous;
  };
  const choose = () => {
    const { maps, steps, names } = data.maps[Number(run.value)];
    fill(map, maps.map(({ role, statistic }, index) => [index, role ? `${role}: ${statistic}` : statistic]));
    drawMap(maps[Number(map.value)], steps, names);
  };
  document.getElementById("map-controls").hidden = false;
  fill(run, runs.map((index) => [index, data.runs[index].name]));
  for (const select of [run, map]) select.addEventListener("change", choose);
  choose();
};

buildCharts();
buildMaps();
document.documentElement.dataset.drawn = String(charts.length);
