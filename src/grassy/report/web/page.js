// The whole: what is chosen, and what follows from it.

const state = { a: 0, b: null, view: "a", order: "cluster", angle: 0, selected: null }; // selected: [i, j], i = j for a class
const open = { pair: (i, j) => choose(i, j), class: (i) => choose(i, i) };
const details = new Details(byId("details"), open);
const matrix = new Matrix(byId("matrix"), {
  onPair: (i, j) => choose(i, j, "stay"), onClass: (i) => choose(i, i, "stay"), onHover: hover,
});
let runs = []; // A and, if there is one, B, with their angles decoded
let searched = ""; // what was searched for last
let described = ""; // what the details are about

/** Whether two runs tell the same classes apart, so that their pairs can be compared. */
function comparable(a, b) {
  const [one, other] = [a, b].map((index) => data.runs[index].analysis.per_class.name);
  return one.length === other.length && one.every((name, i) => name === other[i]);
}

async function refresh() {
  const wanted = [state.a, state.b].filter((index) => index !== null);
  let angles;
  try {
    angles = await Promise.all(wanted.map(anglesOf));
  } catch (error) {
    byId("notice").textContent = typeof DecompressionStream === "undefined"
      ? "This browser is too old to unpack the angles: it needs DecompressionStream, which browsers have since 2023."
      : `The angles could not be unpacked: ${error.message}`;
    return;
  }
  if (wanted[0] !== state.a || (wanted[1] ?? null) !== state.b) return; // something else was chosen meanwhile
  runs = wanted.map((index, n) => ({ index, name: data.runs[index].name, analysis: data.runs[index].analysis, angles: angles[n] }));
  const [a, b] = runs;
  const most = Math.max(...runs.map((run) => run.angles.k));
  state.angle = Math.min(state.angle, most - 1);
  const slider = byId("angle");
  slider.max = most;
  slider.value = state.angle + 1;
  slider.disabled = most === 1;
  const own = (run) => Math.min(state.angle, run.angles.k - 1);
  const label = angleLabel(most, a);
  byId("angle-label").textContent = label;
  slider.setAttribute("aria-valuetext", label);
  const [angleA, angleB] = [own(a), b ? own(b) : 0];
  const valueA = (i, j) => a.angles.degrees(i, j, angleA), valueB = (i, j) => b.angles.degrees(i, j, angleB);
  const order = a.analysis.orders[state.order];
  let value = valueA, tone = null, range = a.angles.range(angleA), rangeB = null, scale = "angle";
  if (b && state.view === "split") {
    const place = new Int32Array(order.length);
    order.forEach((index, position) => { place[index] = position; });
    value = (i, j) => place[i] <= place[j] ? valueA(i, j) : valueB(i, j);
    const other = b.angles.range(angleB);
    if (a.angles.limit === b.angles.limit) {
      range = [Math.min(range[0], other[0]), Math.max(range[1], other[1])];
    } else { // subspaces and vectors: on one scale the differences among either would drown
      rangeB = other;
      const factor = (range[1] - range[0]) / (other[1] - other[0] || 1), low = range[0];
      tone = (i, j) => place[i] <= place[j] ? valueA(i, j) : low + (valueB(i, j) - other[0]) * factor;
    }
  } else if (b && state.view === "difference") {
    value = (i, j) => valueA(i, j) - valueB(i, j);
    let most = 0;
    for (let p = 0; p < a.angles.pairs; p++) {
      const [one, other] = [a.angles.values[angleA * a.angles.pairs + p], b.angles.values[angleB * a.angles.pairs + p]];
      if (one !== MISSING && other !== MISSING) most = Math.max(most, Math.abs(one * a.angles.limit - other * b.angles.limit) / STEPS);
    }
    range = [-most, most];
    scale = "difference";
  }
  const table = colorTable(scale);
  matrix.show({ order, value, tone: tone || value, names: a.analysis.per_class.name, low: range[0], high: range[1], table });
  showLegend(table, range, rangeB, scale);
  byId("matrix").setAttribute("aria-label", `Matrix of the angles between ${order.length} classes, ${label}, ${a.name}` +
    (b ? ` against ${b.name}` : ""));
  byId("notice").textContent = b && b.angles.k !== a.angles.k
    ? `${a.name} has ${a.angles.k} ${a.angles.k === 1 ? "angle" : "angles"} a pair, ${b.name} ${b.angles.k}: of the one with fewer, its last is shown.${rangeB ? " Either half has its own scale." : ""}` : "";
  showSelection();
}

function angleLabel(most, a) {
  if (most === 1) return a.analysis.representation === "vectors" ? "between class vectors" : "the only one";
  const which = state.angle === 0 ? ", smallest" : state.angle === most - 1 ? ", largest" : "";
  return `${ordinal(state.angle + 1)} of ${most}${which}`;
}

function showLegend(table, [low, high], rangeB, scale) {
  const legend = byId("legend");
  legend.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(table.slice().buffer), 256, 1), 0, 0);
  const sign = scale === "difference" ? "A − B: " : "";
  const both = (one, other) => rangeB ? `A ${fixed(one, 1)}°, B ${fixed(other, 1)}°` : `${fixed(one, 1)}°`;
  byId("legend-low").textContent = sign + both(low, rangeB?.[0]);
  byId("legend-high").textContent = both(high, rangeB?.[1]);
}

// ------------------------------------------------------------------------------------------------ selection

/** Select a pair, or a class if both are the same. The view stays, follows ("move"), or zooms in too ("zoom"). */
function choose(i, j, view = "zoom") {
  state.selected = [i, j];
  showSelection();
  if (view !== "stay") matrix.reveal(i, j, view === "zoom");
}

function showSelection() {
  const [i, j] = state.selected || [];
  matrix.select(i === undefined ? null : [i, j]);
  const what = [i, j, ...runs.map((run) => run.index)].join();
  if (what === described) return; // a screen reader would read the same again
  described = what;
  if (i === undefined) details.empty();
  else if (i === j) details.class(i, runs);
  else details.pair(i, j, runs);
}

function hover(cell, event) {
  const tip = byId("tip");
  tip.hidden = !cell || (cell.row === null && cell.column === null) || event.pointerType === "touch";
  if (tip.hidden) return;
  const names = runs[0].analysis.per_class.name;
  const both = cell.row !== null && cell.column !== null && cell.row !== cell.column;
  const degrees = both ? matrix.shown.value(cell.row, cell.column) : NaN;
  tip.textContent = both
    ? `${isolated(names[cell.row])} – ${isolated(names[cell.column])}: ${Number.isNaN(degrees) ? "no such angle" : `${fixed(degrees, 2)}°`}`
    : names[cell.row ?? cell.column];
  const stage = tip.parentElement.getBoundingClientRect();
  tip.style.left = `${Math.min(event.offsetX + 14, stage.width - tip.offsetWidth - 4)}px`;
  tip.style.top = `${Math.min(event.offsetY + 14, stage.height - tip.offsetHeight - 4)}px`;
}

/** Classes by a text, the best first: of that name or number, then with names that begin with it, or hold it. */
function find(text) {
  const names = data.runs[state.a].analysis.per_class.name;
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const lower = names.map((name) => name.toLowerCase());
  const where = (test) => lower.flatMap((name, i) => test(name) ? [i] : []);
  const number = /^[0-9]+$/.test(wanted) && Number(wanted) < names.length ? [Number(wanted)] : [];
  return [...new Set([...where((name) => name === wanted), ...number,
    ...where((name) => name.startsWith(wanted)), ...where((name) => name.includes(wanted))])];
}

/** Show the class that is searched for; the same search again shows the next one. */
function search(text) {
  const found = find(text);
  const before = found.indexOf(state.selected?.[0] === state.selected?.[1] ? state.selected?.[0] : -1);
  const at = text === searched ? (before + 1) % found.length : 0;
  searched = text;
  if (found.length) choose(found[at], found[at]);
  byId("found").textContent = !found.length ? `No class is called “${text}”.`
    : found.length > 1 ? `${at + 1} of ${found.length}, Find again for the next` : "";
}

function moveBy(rows, columns) {
  const { order } = matrix.shown;
  const [i, j] = (state.selected || [order[0], order[0]]).map((label) => matrix.place[label]);
  const inside = (at) => order[Math.max(0, Math.min(order.length - 1, at))];
  choose(inside(i + rows), inside(j + columns), "move");
}

// ------------------------------------------------------------------------------------------------ controls

function fillControls() {
  byId("title").textContent = data.title || (data.runs.length === 1 ? data.runs[0].name : `${data.runs.length} runs side by side`);
  byId("runs").hidden = data.runs.length === 1 && !data.title;
  byId("footer").textContent = `Made by grassy ${data.version}. This file holds all of its data and fetches nothing.`;
  byId("runs").append(...data.runs.map((_, i) => element("li", {}, ...runLabel(i))));
  byId("run-a").append(...data.runs.map((run, i) => element("option", { value: String(i) }, run.name)));
  for (const part of document.querySelectorAll(".several")) part.hidden = data.runs.length < 2;
  fillB();
  fillNames();
}

/** Runs that A can be compared with. */
function fillB() {
  const others = data.runs.map((run, i) => [i, run]).filter(([i]) => i !== state.a && comparable(state.a, i));
  byId("run-b").replaceChildren(element("option", { value: "" }, others.length ? "none" : "none has the same classes"),
    ...others.map(([i, run]) => element("option", { value: String(i) }, run.name)));
  if (!others.some(([i]) => i === state.b)) state.b = null;
  byId("run-b").value = state.b === null ? "" : String(state.b);
  byId("run-b").disabled = !others.length;
  fillView();
}

function fillView() {
  if (state.b === null) state.view = "a";
  byId("view").value = state.view;
  byId("view").disabled = state.b === null;
}

function fillNames() {
  byId("class-names").replaceChildren(...data.runs[state.a].analysis.per_class.name.map((name) => element("option", { value: name })));
}

function listen() {
  byId("run-a").addEventListener("change", (event) => {
    const same = comparable(state.a, Number(event.target.value));
    state.a = Number(event.target.value);
    if (!same) state.selected = null;
    searched = byId("found").textContent = "";
    fillB();
    fillNames();
    refresh();
  });
  byId("run-b").addEventListener("change", (event) => {
    state.b = event.target.value === "" ? null : Number(event.target.value);
    if (state.b !== null && state.view === "a") state.view = "split";
    fillView();
    refresh();
  });
  byId("view").addEventListener("change", (event) => { state.view = event.target.value; refresh(); });
  byId("order").addEventListener("change", (event) => { state.order = event.target.value; refresh(); });
  byId("angle").addEventListener("input", (event) => { state.angle = Number(event.target.value) - 1; refresh(); });
  byId("search-form").addEventListener("submit", (event) => {
    event.preventDefault();
    search(byId("search").value);
  });
  byId("zoom-in").addEventListener("click", () => matrix.zoomBy(1.6));
  byId("zoom-out").addEventListener("click", () => matrix.zoomBy(1 / 1.6));
  byId("zoom-reset").addEventListener("click", () => matrix.showAll());
  byId("matrix").addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.ctrlKey || event.metaKey || event.altKey || !matrix.shown) return;
    if (moves[event.key]) moveBy(...moves[event.key]);
    else if (event.key === "Enter" && state.selected) open.class(state.selected[0]);
    else if (event.key === "+" || event.key === "=") matrix.zoomBy(1.6);
    else if (event.key === "-") matrix.zoomBy(1 / 1.6);
    else if (event.key === "0") matrix.showAll();
    else return;
    event.preventDefault();
  });
  DARK.addEventListener("change", refresh);
}

fillControls();
showMetrics();
showCurves();
listen();
refresh().then(() => { document.documentElement.dataset.ready = "yes"; });
