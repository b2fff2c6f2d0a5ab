// Images that stand out among all classes: the surest mistakes, and what no class looks like.

function showNotable() {
  const run = current.a, { examples } = run;
  byId("notable").hidden = !examples;
  if (!examples) return;
  const score = run.subspaces ? "the share of the feature that no class subspace holds" : "one minus the largest probability";
  byId("surest").replaceChildren(element("h3", {}, "Most confident mistakes"),
    element("p", { className: "small" }, "Label → prediction. Look here for wrong labels first."),
    examples.mistakes.length ? gallery(run, examples.mistakes.slice(0, 48), bothNames, 10) : element("p", { className: "hint" }, "There are no mistakes."));
  byId("outliers").replaceChildren(element("h3", {}, "Outliers"),
    element("p", { className: "small" }, `Images that look like no class, by ${score}.`),
    gallery(run, examples.outliers, outlierScore, 10));
}
