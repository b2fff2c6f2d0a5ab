// What differs between the recipes of runs; and all settings, for those who want them.

function showSettings() {
  const place = byId("settings"), having = allRuns.filter((run) => Object.keys(run.settings || {}).length);
  place.hidden = !having.length;
  if (place.hidden) return;
  const keys = [...new Set(allRuns.flatMap((run) => Object.keys(run.settings)))];
  const several = allRuns.length > 1, different = several ? keys.filter(differs) : [];
  byId("settings-title").textContent = several ? "What differs between the recipes" : "Recipe";
  byId("settings-note").textContent = !several ? ""
    : (different.length ? `${plural(different.length, "setting differs", "settings differ")}; the others are the same, or one run does not record them.` : "All settings that both record are the same.")
      + withoutRecipe();
  byId("differences").replaceChildren(...different.length ? settingRows(different) : []);
  byId("all-settings").replaceChildren(...settingRows(keys.filter((key) => !different.includes(key))));
  byId("all-settings-title").textContent = several ? `The other ${keys.length - different.length} settings` : `All ${keys.length} settings`;
}

/** Whether runs have different values of a setting; what a run does not record, such as its optimizer, is not one. */
function differs(key) {
  const values = allRuns.map((run) => run.settings[key]), known = new Set(values.filter((value) => value !== undefined));
  const owner = { head: "head.name", model_kwargs: "model", opt_kwargs: "opt" }[key.split(".")[0]];
  return known.size > 1 || Boolean(owner && allRuns.some((run, i) => values[i] === undefined && run.settings[owner] !== undefined));
}

function withoutRecipe() {
  const names = allRuns.filter((run) => run.settings.epochs === undefined).map((run) => isolated(run.name));
  return names.length && names.length < allRuns.length ? ` No recipe is recorded with ${names.join(", ")}, only model and head.` : "";
}

function settingRows(keys) {
  const same = keys.every((key) => allRuns.every((run) => run.settings[key] === allRuns[0].settings[key]));
  const runs = same ? allRuns.slice(0, 1) : allRuns;
  const head = element("thead", {}, row(element("th", { scope: "col" }, "Setting"), ...same ? [element("th", { scope: "col", className: "text" }, "Value")]
    : runs.map((run) => element("th", { scope: "col", className: "text" }, ...runLabel(run.index)))));
  return [head, element("tbody", {}, ...keys.map((key) => row(element("th", { scope: "row" }, element("code", {}, key)),
    ...runs.map((run) => element("td", { className: "text", style: `--dot: ${runColor(run.index)}` }, run.settings[key] ?? "–")))))];
}
