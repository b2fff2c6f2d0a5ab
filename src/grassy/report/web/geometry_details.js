// What is known of the angles of a pair of classes, or of one class: words and bars beside the matrix.

const subscript = (n) => String(n).replace(/[0-9]/g, (digit) => "₀₁₂₃₄₅₆₇₈₉"[digit]);

/** runs: [{run, angles}], of which the first is A. */
function describePair(i, j, runs) {
  const { names } = runs[0].run, show = (c) => link(names[c], () => openGeometry(c, c));
  const title = element("h3", {}, show(i), element("span", { className: "and" }, " and "), show(j));
  const parts = runs.map(({ run, angles }) => {
    const degrees = angles.ofPair(i, j);
    const what = !run.subspaces ? "Angle between class vectors" : degrees.length === 1 ? "Principal angle" : `${degrees.length} principal angles`;
    const rows = degrees.map((value, n) => [run.subspaces ? `θ${subscript(n + 1)}` : "θ", value / angles.limit, `${value.toFixed(2)}°`]);
    return element("div", { className: "part" }, runs.length > 1 ? runName(run) : null, element("h4", {}, what), bars(rows, "pair-angles"));
  });
  const mistaken = runs.map(({ run }) => mistakesBetween(i, j, run, runs.length > 1)).filter(Boolean);
  return [title, ...parts, ...mistaken];
}

function describeClass(i, runs) {
  const parts = [element("h3", {}, element("span", { className: "and" }, "class "), ...breakable(runs[0].run.names[i]))];
  for (const { run } of runs) {
    const { per, subspaces } = run;
    if (runs.length > 1) parts.push(runName(run));
    parts.push(element("h4", {}, subspaces ? "Nearest classes, by mean principal angle" : "Nearest classes, by angle"),
      per.nearest[i].length ? element("ol", { className: "links" }, ...per.nearest[i].map(([other, degrees]) => element("li", {},
        link(run.names[other], () => openGeometry(i, other)), element("span", { className: "value" }, `${degrees.toFixed(2)}°`))))
        : element("p", { className: "small" }, "There is no other class."));
    const spectrum = per.spectrum?.[i];
    if (spectrum && spectrum[0] !== null) {
      const inside = spectrum.reduce((sum, share) => sum + share, 0), shown = spectrum.slice(0, per.dimension[i]);
      parts.push(element("h4", {}, subspaces ? "Energy along the directions of its subspace" : "Energy along its vector"),
        bars(shown.map((share, n) => [`${n + 1}`, share, percent(share, 1)]), "spectrum"),
        element("p", { className: "small" }, `${percent(1 - inside, 1)} lies outside. `,
          subspaces && shown.length > 1 ? "Bars of similar length mean that the class uses all of its directions. One long bar means that a vector would be enough." : ""));
    }
  }
  if (runs[0].run.measured) parts.push(element("p", { className: "onwards" }, link("Images and mistakes of this class", () => openClass(i))));
  return parts;
}

const runName = (run) => element("p", { className: "run-name" }, ...runLabel(run.index));

/** Rows [label, share, text] as bars. */
const bars = (rows, name) => element("ol", { className: `bars ${name}` }, ...rows.map(([label, share, text]) => element("li", {},
  element("span", { className: "label" }, label), track(share), element("span", { className: "value" }, text))));

function mistakesBetween(i, j, run, named) {
  const lines = [[i, j], [j, i]].filter(([from, to]) => run.confused(from, to)).map(([from, to]) =>
    link(`${run.confused(from, to)} of ${isolated(run.names[from])} taken for ${isolated(run.names[to])}`, () => openConfusion(from, to)));
  return lines.length ? element("p", { className: "small" }, named ? `${run.name}: ` : "", ...lines.flatMap((line, n) => n ? ["; ", line] : [line])) : null;
}
