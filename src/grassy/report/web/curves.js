// Training curves of all runs together: one small drawing for each column of numbers that a run recorded.

const CURVES = [["eval_top1", "Top-1 accuracy (%)"], ["train_loss", "Training loss"], ["eval_loss", "Validation loss"],
  ["eval_top5", "Top-5 accuracy (%)"], ["eval_effective_rank", "Effective rank"], ["lr", "Learning rate"],
  ["head_lr", "Learning rate of the head"]];
const NOT_CURVES = ["epoch", "step", "seconds"];
const MOST_CURVES = 24;

function showCurves() {
  const titles = new Map(CURVES);
  const others = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))]
    .filter((key) => !titles.has(key) && !NOT_CURVES.includes(key)); // of a loop of one's own, under their own names
  const drawn = [];
  for (const key of [...titles.keys(), ...others].slice(0, MOST_CURVES)) {
    for (const axis of ["epoch", "step"]) {
      const lines = data.runs.map((run, index) => ({ index, at: placesOf(run.curves, axis), values: run.curves[key] }))
        .filter((line) => line.at && line.values && line.values.some((v) => v !== null));
      if (lines.length) drawn.push(drawCurve(titles.get(key) || key, axis, lines));
    }
  }
  byId("curves").replaceChildren(...drawn);
  byId("curve-runs").replaceChildren(...allRuns.filter((run) => Object.keys(run.curves).length)
    .map((run) => element("span", {}, ...runLabel(run.index))));
  byId("training").hidden = !drawn.length;
  byId("training-note").textContent = "Look for a validation loss that rises while the training loss falls (overfitting), and for curves that still improve at the end (train longer).";
}

/** Where the values of a run belong on an axis, or null if they belong on another; epochs are counted from 1. */
function placesOf(curves, axis) {
  const own = curves.epoch ? "epoch" : "step";
  if (own !== axis) return null;
  const places = curves[own] || Object.values(curves)[0]?.map((_, i) => i);
  return places && axis === "epoch" && places[0] === 0 ? places.map((x) => x + 1) : places;
}

function drawCurve(title, axis, lines) {
  const width = 340, height = 200, left = 46, right = 10, top = 10, bottom = 28;
  const points = lines.map((line) => line.values
    .map((y, i) => [line.at[i], y]).filter(([, y]) => y !== null));
  const xs = points.flat().map(([x]) => x), ys = points.flat().map(([, y]) => y);
  const xTicks = ticks(Math.min(...xs), Math.max(...xs), 5, true), yTicks = ticks(Math.min(...ys), Math.max(...ys), 4);
  const [x0, x1] = [Math.min(...xs), Math.max(Math.max(...xs), Math.min(...xs) + 1)];
  const [y0, y1] = [Math.min(yTicks[0], ...ys), Math.max(yTicks[yTicks.length - 1], ...ys)];
  const px = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  const py = (y) => height - bottom - (y - y0) / (y1 - y0 || 1) * (height - top - bottom);
  const step = yTicks.length > 1 ? yTicks[1] - yTicks[0] : Infinity;
  const last = lines.map((line, n) => `${data.runs[line.index].name} ends at ${short(points[n].at(-1)[1], step)}`);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${last.join("; ")}` });
  for (const y of yTicks) {
    picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }),
      svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, short(y, step)));
  }
  for (const x of xTicks) if (px(x) < width - right - 40) picture.append(svg("text", { x: px(x), y: height - 9, "text-anchor": "middle" }, x >= 1e4 ? `${short(x / 1000)}k` : String(x)));
  picture.append(svg("text", { x: width - right, y: height - 9, "text-anchor": "end" }, axis));
  lines.forEach((line, n) => {
    const style = `stroke: ${runColor(line.index)}; fill: ${runColor(line.index)}`;
    picture.append(svg("polyline", { class: "curve", style, "stroke-dasharray": runDash(line.index),
      points: points[n].map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ") }));
    if (points[n].length === 1) picture.append(svg("circle", { style, r: 3, cx: px(points[n][0][0]), cy: py(points[n][0][1]) }));
  });
  const marker = svg("line", { class: "marker", y1: top, y2: height - bottom, visibility: "hidden" });
  picture.append(marker);
  const readout = element("p", { className: "readout" });
  const say = (x) => {
    marker.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) { marker.setAttribute("x1", px(x)); marker.setAttribute("x2", px(x)); }
    readout.replaceChildren(...lines.map((line, n) => {
      const at = x === null ? points[n].at(-1) : points[n].find((p) => p[0] === x);
      return element("span", { className: "entry" },
        element("span", { className: "dot", style: `--dot: ${runColor(line.index)}` }), at ? short(at[1], step) : "–");
    }), x === null ? " at the end" : axis === "epoch" ? ` after epoch ${x}` : ` at step ${x.toLocaleString("en")}`);
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (x1 - x0);
    say(xs.reduce((best, other) => Math.abs(other - x) < Math.abs(best - x) ? other : best));
  });
  picture.addEventListener("pointerleave", () => say(null));
  say(null);
  return element("figure", {}, element("figcaption", {}, title), picture, readout);
}

/** Round numbers that cover a range. */
function ticks(low, high, count, whole = false) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  const start = whole ? Math.ceil(low / step) : Math.floor(low / step);
  for (let n = start; found.length < 12; n++) {
    const value = Number((n * step).toPrecision(12));
    if (whole && value > high) break;
    found.push(value);
    if (!whole && value >= high) break;
  }
  return found;
}
