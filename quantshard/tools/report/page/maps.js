// Maps of tensor x step

const RAMP = [
    [68, 1, 84],
    [59, 82, 139],
    [33, 145, 140],
    [94, 201, 98],
    [253, 231, 37],
  ],
  BAD = [230, 60, 40],
  LABEL = 15; // height of a name, in pixels
const ramp = (share) => {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1),
    index = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[index].map((low, channel) => Math.round(low + (at - index) * (RAMP[index + 1][channel] - low)));
};
const fill = (select, entries, chosen) => {
  select.replaceChildren(...entries.map(([value, text]) => html("option", { value, textContent: text })));
  if (entries.some(([value]) => String(value) === chosen)) select.value = chosen;
};
const drawMap = (found, steps, names) => {
  const finite = found.cells.flat().filter((cell) => typeof cell === "number");
  let low = Math.min(...[Infinity].concat(finite.length < 5e4 ? finite : [])),
    high = -Infinity;
  for (const cell of finite) {
    low = Math.min(low, cell);
    high = Math.max(high, cell);
  }
  const log = low > 0 && high / low > 200,
    place = (cell) => {
      if (!(high > low)) return 0.5;
      return log ? Math.log(cell / low) / Math.log(high / low) : (cell - low) / (high - low);
    };
  const rows = found.rows.length,
    canvas = html("canvas", { width: steps.length, height: rows });
  const pixels = canvas.getContext("2d"),
    image = pixels.createImageData(steps.length, rows);
  found.cells.forEach((row, top) =>
    row.forEach((cell, left) => {
      if (cell === null) return;
      const paint = cell === "x" ? BAD : ramp(place(cell));
      image.data.set([...paint, 255], 4 * (top * steps.length + left));
    }),
  );
  pixels.putImageData(image, 0, 0);
  const tall = rows <= 120 ? LABEL : Math.max(2, Math.floor(1800 / rows)),
    apart = Math.ceil(LABEL / tall); // rows for each name, of which there is room for one in every few
  canvas.style.height = `${rows * tall}px`;
  const tip = html("div", { className: "tip", hidden: true });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const left = Math.min(
      steps.length - 1,
      Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * steps.length)),
    );
    const top = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
    const cell = found.cells[top][left];
    tip.replaceChildren(
      html("div", { textContent: names[found.rows[top]] }),
      html("div", { className: "quiet", textContent: `step ${steps[left].toLocaleString("en")}` }),
      html(
        "div",
        {},
        html("b", { textContent: cell === null ? "not sampled" : cell === "x" ? "not finite" : said(cell, "") }),
      ),
    );
    tip.hidden = false;
    tip.style.top = `${canvas.offsetTop + Math.max(0, (top - 1) * tall)}px`;
    if (left > steps.length / 2) {
      tip.style.right = `${box.right - event.clientX + 16}px`;
      tip.style.left = "";
    } else {
      tip.style.left = `${canvas.offsetLeft + event.clientX - box.left + 16}px`;
      tip.style.right = "";
    }
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  const labels = html("div", { className: "names" });
  found.rows.forEach((at, row) => {
    if (row % apart) return;
    const label = html("div", { title: names[at] }, html("bdi", { textContent: names[at] }));
    label.style.height = `${Math.min(apart, rows - row) * tall}px`;
    labels.append(label);
  });
  const ends = html(
    "div",
    { className: "ends" },
    html("span", { textContent: `step ${steps[0].toLocaleString("en")}` }),
    html("span", { textContent: steps[steps.length - 1].toLocaleString("en") }),
  );
  const key = (name, ...content) => html("span", { className: "key" }, ...content, name);
  const block = (paint) => {
    const made = html("span", { className: "block" });
    made.style.background = paint;
    return made;
  };
  const scale = html("div", { className: "scale" }, html("b", { textContent: found.statistic }));
  if (high > low) scale.append(said(low, ""), html("span", { className: "ramp" }), said(high, ""), log ? "(logarithmic)" : "");
  else if (finite.length) scale.append(key(said(low, ""), block(`rgb(${ramp(0.5)})`)));
  if (found.cells.some((row) => row.includes("x"))) scale.append(key("not finite", block(`rgb(${BAD})`)));
  if (found.cells.some((row) => row.includes(null))) scale.append(key("not sampled", block("var(--panel)")));
  document.getElementById("map").replaceChildren(html("div", { className: "map" }, scale, labels, canvas, ends, tip));
};
const buildMaps = () => {
  const there = data.maps.map((maps, index) => [index, maps]).filter(([, maps]) => maps && maps.maps.length);
  if (!there.length) return;
  const [run, role, statistic] = ["run", "role", "statistic"].map((name) => document.getElementById(`map-${name}`));
  document.getElementById("map-controls").hidden = false;
  fill(
    run,
    there.map(([index]) => [index, data.runs[index].name]),
  );
  const choose = () => {
    const { maps, steps, names } = data.maps[Number(run.value)];
    fill(
      role,
      [...new Set(maps.map((each) => each.role))].map((each) => [each, each || "tensors"]),
      role.value,
    );
    const ofRole = maps.filter((each) => each.role === role.value);
    fill(
      statistic,
      ofRole.map((each) => [each.statistic, each.statistic]),
      statistic.value,
    );
    drawMap(
      ofRole.find((each) => each.statistic === statistic.value),
      steps,
      names,
    );
  };
  for (const select of [run, role, statistic]) select.addEventListener("change", choose);
  choose();
};

build();
buildMaps();
document.documentElement.dataset.drawn = String(charts.length);
