// All measures in groups, each with a sentence that says what to read from it: a row for a measure, a column for a run.

const GROUPS = [
  ["Accuracy", ["top1", "top5"], "Compare runs by accuracy first; the other measures help to explain it."],
  ["Features", ["variability", "class_separation", "energy_inside"],
    "A larger variability and a smaller R² mean that features keep more differences within a class, which often helps transfer."],
  ["Classes", ["mean_effective_rank", "smallest_angle", "mean_smallest_angle", "orthonormality_error"],
    "An effective rank near 1 means that subspaces are used like vectors: a smaller k is enough. A very small angle marks two classes that the head hardly separates."],
  ["Neural collapse", ["nc1", "nc2_norms", "nc2_angles", "nc2_simplex", "nc3"],
    "Near 0, the features of each class have collapsed to one point, and the points are evenly spaced: good for these classes, often bad for transfer."],
];

function showMetrics() {
  const about = new Map(data.scalars.map((scalar) => [scalar.key, scalar]));
  const names = allRuns.map((run) => element("th", { scope: "col", role: "columnheader" }, ...runLabel(run.index)));
  const bodies = GROUPS.map(([title, keys, reading]) => {
    const rows = keys.filter((key) => about.has(key)).map((key) => measureRow(about.get(key))).filter(Boolean);
    return rows.length ? element("tbody", { role: "rowgroup" }, element("tr", { role: "row", className: "group" },
      element("th", { scope: "rowgroup", role: "rowheader", colSpan: 1 + allRuns.length }, title, element("small", {}, reading))), ...rows) : null;
  });
  byId("metrics").replaceChildren(element("thead", { role: "rowgroup" }, row(element("th", { scope: "col", role: "columnheader" }, "Measure"), ...names)),
    ...bodies.filter(Boolean));
}

function measureRow({ key, title, decimals, about }) {
  const values = allRuns.map((run) => run.analysis.scalars[key] ?? null);
  if (values.every((value) => value === null)) return null;
  const cells = values.map((value, i) => {
    const text = value !== null && value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : fixed(value, decimals);
    const reference = data.runs[i].paper?.[key];
    const beside = reference === undefined ? [] : [element("small", {}, `the paper: ${reference}`)];
    return element("td", { role: "cell", style: `--dot: ${runColor(i)}` }, text, ...beside);
  });
  return row(element("th", { scope: "row", role: "rowheader" }, title, element("small", {}, about)), ...cells);
}

function describeHead(analysis) {
  const what = analysis.representation === "subspaces"
    ? `subspaces, k\u00a0${spread(analysis.per_class.dimension)}` : "class vectors";
  return analysis.head ? `${analysis.head.name} (${what})` : what;
}

function spread(numbers) {
  const low = numbers.reduce((a, b) => Math.min(a, b)), high = numbers.reduce((a, b) => Math.max(a, b));
  return low === high ? `=\u00a0${low}` : `from ${low} to ${high}`;
}
