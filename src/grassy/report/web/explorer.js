// Angles between classes: the matrix of one principal angle of one run, or of two, and what is known of a pair.

class Explorer {
  constructor() {
    this.view = new MatrixView("angles", {
      onPair: (i, j) => this.choose(i, j), onClass: (i) => this.choose(i, i), onDiagonal: (i) => this.choose(i, i), tip: (i, j) => this.tip(i, j),
    });
    this.angle = 0;
    this.selected = null; // [i, j], i = j for a class
    this.runs = []; // A and, if there is one, B, with their angles
    byId("view").addEventListener("change", () => this.draw());
    byId("order").addEventListener("change", () => this.draw());
    byId("angle").addEventListener("input", (event) => { this.angle = Number(event.target.value) - 1; this.draw(); });
  }

  /** Unpack the angles of A and B, and show them. */
  async show(a, b) {
    const wanted = [a, b].filter(Boolean);
    this.wanted = wanted;
    let angles;
    try {
      angles = await Promise.all(wanted.map((run) => anglesOf(run.index)));
    } catch (error) {
      byId("notice").textContent = typeof DecompressionStream === "undefined"
        ? "This browser is too old to unpack the angles: it needs DecompressionStream, which browsers have since 2023."
        : `The angles could not be unpacked: ${error.message}`;
      return;
    }
    if (this.wanted !== wanted) return; // something else was chosen meanwhile
    this.runs = wanted.map((run, n) => ({ run, angles: angles[n] }));
    byId("view").disabled = !b;
    if (!b) byId("view").value = "a";
    else if (byId("view").value === "a") byId("view").value = "split";
    this.draw();
    this.describe();
  }

  draw() {
    const [a, b] = this.runs, view = byId("view").value;
    if (!a) return;
    const most = Math.max(...this.runs.map(({ angles }) => angles.k));
    this.angle = Math.min(this.angle, most - 1);
    const slider = byId("angle"), label = angleLabel(this.angle, most, a.run);
    slider.max = most;
    slider.value = this.angle + 1;
    slider.disabled = most === 1;
    byId("angle-label").textContent = label;
    slider.setAttribute("aria-valuetext", label);
    const compared = compareAngles(a, b, view, this.angle, a.run.analysis.orders[byId("order").value]);
    const { range, rangeB } = compared, table = colorTable(compared.scale);
    const ends = (n) => rangeB ? `A ${fixed(range[n], 1)}°, B ${fixed(rangeB[n], 1)}°` : `${fixed(range[n], 1)}°`;
    this.view.show({ ...compared, names: a.run.names, low: range[0], high: range[1], table },
      (compared.scale === "difference" ? "A − B: " : "") + ends(0), ends(1));
    this.view.describe(`Matrix of the angles between ${a.run.classes} classes, ${label}, ${a.run.name}${b ? ` against ${b.run.name}` : ""}`);
    byId("notice").textContent = noticeAbout(a, b, view, rangeB);
    if (this.selected) this.view.matrix.select(this.selected);
  }

  tip(i, j) {
    const [names, degrees] = [this.runs[0].run.names, this.view.matrix.shown.value(i, j)];
    return `${isolated(names[i])} – ${isolated(names[j])}: ${Number.isNaN(degrees) ? "no such angle" : `${fixed(degrees, 2)}°`}`;
  }

  choose(i, j, reveal = false) {
    this.selected = [i, j];
    if (this.view.matrix.shown) {
      this.view.matrix.select([i, j]);
      if (reveal) this.view.matrix.reveal(i, j, true);
    }
    this.describe();
  }

  describe() {
    const [i, j] = this.selected || [], place = byId("details");
    if (!this.runs.length) return;
    if (i === undefined) place.replaceChildren(element("p", { className: "hint" }, "Choose a pair of classes, or a class on the diagonal."));
    else place.replaceChildren(...(i === j ? describeClass(i, this.runs) : describePair(i, j, this.runs)));
    place.dataset.kind = i === undefined ? "" : i === j ? "class" : "pair";
  }
}

/** What the matrix shows: value(i, j) in degrees, a tone to colour it by, its range, and the name of the colour scale. */
function compareAngles(a, b, view, angle, order) {
  const own = ({ angles }) => Math.min(angle, angles.k - 1);
  const valueA = (i, j) => a.angles.degrees(i, j, own(a)), range = a.angles.range(own(a));
  if (!b || view === "a") return { order, value: valueA, tone: valueA, range, rangeB: null, scale: "angle" };
  const valueB = (i, j) => b.angles.degrees(i, j, own(b));
  if (view === "difference") {
    const most = largestDifference(a.angles, b.angles, own(a), own(b)), value = (i, j) => valueA(i, j) - valueB(i, j);
    return { order, value, tone: value, range: [-most, most], rangeB: null, scale: "difference" };
  }
  const place = new Int32Array(order.length);
  order.forEach((index, position) => { place[index] = position; });
  const above = (i, j) => place[i] <= place[j], other = b.angles.range(own(b));
  const value = (i, j) => above(i, j) ? valueA(i, j) : valueB(i, j);
  if (a.angles.limit === b.angles.limit) {
    return { order, value, tone: value, range: [Math.min(range[0], other[0]), Math.max(range[1], other[1])], rangeB: null, scale: "angle" };
  }
  // Subspaces and vectors: on one scale the differences among either would drown.
  const factor = (range[1] - range[0]) / (other[1] - other[0] || 1);
  const tone = (i, j) => above(i, j) ? valueA(i, j) : range[0] + (valueB(i, j) - other[0]) * factor;
  return { order, value, tone, range, rangeB: other, scale: "angle" };
}

function angleLabel(angle, most, run) {
  if (most === 1) return run.subspaces ? "the only one" : "between class vectors";
  const which = angle === 0 ? ", smallest" : angle === most - 1 ? ", largest" : "";
  return `${ordinal(angle + 1)} of ${most}${which}`;
}

/** What to bear in mind when runs with different numbers of angles are compared. */
function noticeAbout(a, b, view, rangeB) {
  if (!b || view === "a" || a.angles.k === b.angles.k) return "";
  const [larger, smaller] = a.angles.k > b.angles.k ? [a, b] : [b, a];
  const parts = [`${larger.run.name} has ${larger.angles.k} angles per pair, ${smaller.run.name} ${smaller.angles.k}; where ${smaller.run.name} has fewer, its last is shown.`,
    `The first angle is the smallest between any two directions of the subspaces, so larger subspaces have a smaller one by construction: it does not mean that ${larger.run.name} separates classes less.`];
  if (rangeB) parts.push("Each half has its own colour scale.");
  return parts.join(" ");
}
