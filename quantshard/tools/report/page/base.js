"use strict";
// The numbers of a report, and what charts and maps are made with. Names are shown by textContent alone.

const data = JSON.parse(document.getElementById("data").textContent);
const NS = document.getElementById("ns").namespaceURI;
const COLORS = 8,
  DASHES = ["", "5 3", "1.5 3", "9 3 2 3", "2 2", "12 4"];
const RIGHT = 12,
  TOP = 10,
  BOTTOM = 24;
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
  while (Math.abs(value) >= base && at < units.length - 1) {
    value /= base;
    at += 1;
  }
  return digits(value, Math.abs(value) >= 100 ? 4 : count) + units[at];
};
const said = (value, unit) => {
  if (unit === "bytes") return scaled(value, [" B", " KiB", " MiB", " GiB", " TiB"], 1024, 3);
  if (unit === "share") return `${digits(100 * value, 3)} %`;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e15)) return value.toExponential(2);
  return Math.abs(value) >= 1e4 ? scaled(value, ["", "k", "M", "G", "T"], 1000) : digits(value, 5);
};
const saidX = (value, exact) => {
  if (view.axis === "time")
    return value < 120
      ? `${digits(value, 3)} s`
      : value < 7200
        ? `${digits(value / 60, 3)} min`
        : `${digits(value / 3600, 3)} h`;
  return exact ? Math.round(value).toLocaleString("en") : scaled(value, ["", "k", "M", "G", "T"], 1000);
};
const ticks = (low, high, count) => {
  const raw = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw) || 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6 && found.length < 50; at += step)
    found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
};
const powers = (low, high) => {
  const found = [];
  for (let at = Math.ceil(low - 1e-9); at <= high; at += 1) found.push(at);
  if (found.length >= 2) return found.filter((_, index) => index % Math.ceil(found.length / 6) === 0);
  return ticks(low, high, 4);
};
const search = (sorted, value) => {
  let low = 0,
    high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
};
