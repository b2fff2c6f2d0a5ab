// The table of metrics: a row a measure, a column a run.

function showMetrics() {
  const table = byId("metrics");
  const names = data.runs.map((_, i) => element("th", { scope: "col" }, ...runLabel(i)));
  table.append(element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Measure"), ...names)));
  const body = element("tbody");
  const facts = [
    ["Model", (a) => a.model],
    ["Head", (a) => describeHead(a)],
    ["Measured on", (a) => a.data ? `${a.data.images.toLocaleString("en")} images, ${a.data.split}` : "weights alone"],
  ];
  for (const [title, of] of facts) {
    const cells = data.runs.map((run) => element("td", { className: "fact" }, of(run.analysis) ?? "–"));
    body.append(element("tr", {}, element("th", { scope: "row" }, title), ...cells));
  }
  for (const { key, title, decimals, about } of data.scalars) {
    const values = data.runs.map((run) => run.analysis.scalars[key] ?? null);
    if (values.every((value) => value === null)) continue;
    const cells = values.map((value, i) => {
      const text = value !== null && value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : fixed(value, decimals);
      const reference = data.runs[i].paper?.[key];
      const beside = reference === undefined ? [] : [element("small", {}, `the paper: ${reference}`)];
      return element("td", {}, text, ...beside);
    });
    const name = element("th", { scope: "row" }, title, element("small", {}, about));
    body.append(element("tr", {}, name, ...cells));
    byId("meanings").append(element("dt", {}, title), element("dd", {}, about));
  }
  table.append(body);
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
