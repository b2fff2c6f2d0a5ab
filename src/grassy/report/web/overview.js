// The first answers: how good, which class is worst, what is confused most, and how accuracy spreads over the classes.

function showOverview() {
  const a = current.a, b = current.b;
  const place = byId("answers");
  const { scalars } = a.analysis;
  if (!a.measured) {
    place.replaceChildren(element("p", { className: "hint" },
      "Only the weights were measured. Run grassy report with --data-dir for accuracy, mistakes and pictures."));
    byId("spread").hidden = true;
    showRuns();
    return;
  }
  const total = a.per.images.reduce((sum, count) => sum + count, 0);
  const mistakes = Math.round(total * (1 - scalars.top1 / 100));
  const against = (key) => b?.analysis.scalars[key] != null ? difference(scalars[key] - b.analysis.scalars[key], " points") : null;
  const [from, to, count] = a.confusions[0] || [];
  const worst = a.worst;
  place.replaceChildren(
    answer("Top-1 accuracy", `${fixed(scalars.top1, 1)}\u2009%`, against("top1"), true),
    a.classes >= 10 ? answer("Top-5 accuracy", `${fixed(scalars.top5, 1)}\u2009%`, against("top5")) : "",
    answer("Mistakes", mistakes.toLocaleString("en"), `of ${plural(total, "image", "images")}`),
    answer("Worst class", link(a.names[worst], () => openClass(worst)), `${fixed(a.accuracy(worst), 1)}\u2009% correct`),
    count ? answer("Confused most", link(`${isolated(a.names[from])} taken for ${isolated(a.names[to])}`, () => openConfusion(from, to)),
      `${count} of ${a.images(from)} images`) : "");
  showSpread(a);
  showRuns();
}

function answer(term, value, note, large = false) {
  return element("div", { className: large ? "answer large" : "answer" }, element("dt", {}, term),
    element("dd", {}, element("span", { className: typeof value === "string" ? "number" : "words" }, value),
      note ? element("span", { className: "note" }, note) : null));
}

/** A difference of A and B, with its sign. */
const difference = (value, unit = "") => `${value >= 0.05 ? "+" : ""}${fixed(value, 1)}${unit} against B`;

/** How many classes have which accuracy, in steps of ten percent; a click on a bar filters the table. */
function showSpread(run) {
  const bins = Array.from({ length: 10 }, () => 0);
  for (const accuracy of run.per.accuracy) if (accuracy !== null) bins[Math.min(9, Math.floor(accuracy / 10))] += 1;
  const highest = Math.max(...bins, 1);
  byId("spread").hidden = false;
  byId("spread-bars").replaceChildren(...bins.map((count, n) => {
    const range = `${10 * n} to ${10 * (n + 1)}\u2009%`;
    return element("button", { type: "button", className: "bin", disabled: !count, title: `${range}: ${plural(count, "class", "classes")}`,
      "aria-label": `${plural(count, "class", "classes")} with an accuracy of ${range}: list them`,
      onclick: () => filterByAccuracy(10 * n) },
    element("span", { className: "count" }, count ? String(count) : ""),
    element("span", { className: "bar", style: `height: ${(4.2 * count / highest).toFixed(2)}rem` }));
  }));
}

/** All runs, one row each: on a narrow screen, one block each. */
function showRuns() {
  const table = byId("run-table");
  byId("run-note").textContent = "";
  table.hidden = allRuns.length < 2;
  if (table.hidden) return;
  const all = [
    ["Top-1 (%)", (run) => fixed(run.analysis.scalars.top1, 2)],
    ["Top-5 (%)", (run) => fixed(run.analysis.scalars.top5, 2)],
    ["Worst class (%)", (run) => run.measured ? fixed(run.accuracy(run.worst), 1) : "–"],
    ["Effective rank", (run) => fixed(run.analysis.scalars.mean_effective_rank, 2)],
    ["Model", (run) => run.analysis.model ?? "–"],
    ["Head", (run) => describeHead(run.analysis)],
    ["Measured on", (run) => measuredOn(run)],
  ];
  const numbers = 4;
  const same = all.slice(numbers).map(([, of]) => new Set(allRuns.map(of)).size === 1 ? of(allRuns[0]) : null);
  byId("run-note").textContent = same.some(Boolean) ? `All runs: ${same.filter(Boolean).join("; ")}.` : "";
  const columns = all.filter((_, n) => n < numbers || same[n - numbers] === null);
  table.replaceChildren(
    element("thead", {}, row(element("th", { scope: "col", role: "columnheader" }, "Run"),
      ...columns.map(([title], n) => element("th", { scope: "col", role: "columnheader", className: n < numbers ? "" : "text" }, title)))),
    element("tbody", { role: "rowgroup" }, ...allRuns.map((run) => row(
      element("th", { scope: "row", role: "rowheader" }, ...runLabel(run.index)),
      ...columns.map(([title, of], n) => element("td", { role: "cell", className: n < numbers ? "" : "text", "data-title": title }, of(run)))))));
}

const row = (...cells) => element("tr", { role: "row" }, ...cells);

const measuredOn = (run) => run.analysis.data
  ? `${plural(run.analysis.data.images, "image", "images")}, ${run.analysis.data.split}` : "weights alone";
