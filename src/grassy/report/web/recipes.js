// What differs between the recipes of runs; and all settings, for those who want them.

function showSettings() {
  const place = byId("settings"), having = allRuns.filter((run) => Object.keys(run.settings || {}).length);
  place.hidden = !having.length;
  if (place.hidden) return;
  const keys = [...new Set(allRuns.flatMap((run) => Object.keys(run.settings)))];
  const differs = (key) => new Set(allRuns.map((run) => run.settings[key])).size > 1;
  const several = allRuns.length > 1, different = several ? keys.filter(differs) : [];
  byId("settings-title").textContent = several ? "What differs between the recipes" : "Recipe";
  byId("settings-note").textContent = !several ? ""
    : different.length ? `${plural(different.length, "setting differs", "settings differ")}, ${keys.length - different.length} are the same.` : "All settings are the same.";
  byId("differences").replaceChildren(...different.length ? settingRows(different) : []);
  byId("all-settings").replaceChildren(...settingRows(keys.filter((key) => !different.includes(key))));
  byId("all-settings-title").textContent = several ? "Settings that are the same" : `All ${keys.length} settings`;
}

function settingRows(keys) {
  const same = !keys.some((key) => new Set(allRuns.map((run) => run.settings[key])).size > 1);
  const runs = same ? allRuns.slice(0, 1) : allRuns;
  const head = element("thead", {}, row(element("th", { scope: "col" }, "Setting"), ...same ? [element("th", { scope: "col", className: "text" }, "Value")]
    : runs.map((run) => element("th", { scope: "col", className: "text" }, ...runLabel(run.index)))));
  return [head, element("tbody", {}, ...keys.map((key) => row(element("th", { scope: "row" }, element("code", {}, key)),
    ...runs.map((run) => element("td", { className: "text", style: `--dot: ${runColor(run.index)}` }, run.settings[key] ?? "–")))))];
}
