// The whole: which runs and which class are chosen, and how one section leads to another.

const current = { a: allRuns[0], b: null, selected: null };
const classTable = new ClassTable((i, view) => openClass(i, view));
const confusion = new Confusion();
const explorer = new Explorer();
let searched = ""; // what was searched for last

/** Bring a part of the page into view, unless its top is already there; on a phone the answer to a click lies below. */
function bringIntoView(place) {
  const top = place.getBoundingClientRect().top, bar = byId("sections").offsetHeight;
  if (top >= bar && top < window.innerHeight * 0.6) return;
  place.scrollIntoView({ block: "start" });
}

/** Show a class; view: "go" to it, or "stay" where the reader is. */
function openClass(i, view = "go") {
  selectClass(i);
  explorer.choose(i, i);
  if (view === "go") bringIntoView(byId("class-panel"));
}

function selectClass(i) {
  current.selected = i;
  classTable.select(i);
  showClass(i);
}

function openConfusion(i, j) {
  confusion.choose(i, j, true);
  bringIntoView(byId("confused"));
}

function openGeometry(i, j) {
  explorer.choose(i, j, true);
  bringIntoView(byId("geometry"));
}

function filterByAccuracy(accuracy) {
  byId("search").value = "";
  classTable.filter({ text: "", accuracy: classTable.filters.accuracy === accuracy ? null : accuracy });
  bringIntoView(byId("classes"));
}

/** Open the class that is searched for; the same search again opens the next one. */
function search(text) {
  const found = findClasses(current.a.names, text);
  const at = text === searched ? (found.indexOf(current.selected) + 1) % found.length : 0;
  searched = text;
  classTable.filter({ text, accuracy: null });
  if (!found.length) return;
  openClass(found[at]);
  if (found.length > 1) byId("class-count").textContent = `${at + 1} of ${found.length}; Enter again for the next`;
}

// ------------------------------------------------------------------------------------------------ runs

/** Show all sections for the chosen runs; keep: what is selected is to stay, for the classes are the same. */
function showRunsChosen(keep) {
  const { a, b } = current;
  classTable.show(a, b);
  showOverview();
  selectClass(keep ? current.selected : a.worst);
  if (!keep) explorer.selected = [a.worst, a.worst];
  confusion.show(a, keep);
  showNotable();
  return explorer.show(a, b);
}

function fillControls() {
  const several = allRuns.length > 1;
  byId("title").textContent = data.title || (several ? `${allRuns.length} runs side by side` : allRuns[0].name);
  byId("subtitle").textContent = several ? "" : [allRuns[0].analysis.model, describeHead(allRuns[0].analysis), measuredOn(allRuns[0])].filter(Boolean).join(" · ");
  byId("footer").textContent = `Made by grassy ${data.version}. This file holds all of its data and fetches nothing.`;
  byId("run-choice").hidden = !several;
  for (const part of document.querySelectorAll(".several")) part.hidden = !several;
  byId("run-a").append(...allRuns.map((run) => element("option", { value: String(run.index) }, run.name)));
  fillB();
}

/** Runs that A can be compared with. */
function fillB() {
  const others = allRuns.filter((run) => run !== current.a && comparable(current.a.index, run.index));
  byId("run-b").replaceChildren(element("option", { value: "" }, others.length ? "none" : "none has the same classes"),
    ...others.map((run) => element("option", { value: String(run.index) }, run.name)));
  if (!others.includes(current.b)) current.b = null;
  byId("run-b").value = current.b ? String(current.b.index) : "";
  byId("run-b").disabled = !others.length;
}

function listen() {
  byId("run-a").addEventListener("change", (event) => {
    const before = current.a;
    current.a = allRuns[Number(event.target.value)];
    fillB();
    showRunsChosen(comparable(before.index, current.a.index));
  });
  byId("run-b").addEventListener("change", (event) => {
    current.b = event.target.value === "" ? null : allRuns[Number(event.target.value)];
    showRunsChosen(true);
  });
  byId("search-form").addEventListener("submit", (event) => {
    event.preventDefault();
    search(byId("search").value);
  });
  byId("search").addEventListener("input", (event) => { searched = ""; classTable.filter({ text: event.target.value, accuracy: null }); });
  byId("class-reset").addEventListener("click", () => { byId("search").value = ""; classTable.filter({ text: "", accuracy: null }); });
  byId("picture-close").addEventListener("click", () => byId("picture").close());
  byId("picture").addEventListener("click", (event) => { if (event.target === byId("picture")) event.target.close(); });
  DARK.addEventListener("change", () => { if (current.a.measured) confusion.draw(); explorer.draw(); });
}

/** Links to the sections that there are. */
function fillSections() {
  byId("sections").replaceChildren(...[...document.querySelectorAll("main > section")].filter((section) => !section.hidden)
    .map((section) => element("a", { href: `#${section.id}` }, section.dataset.short)));
}

fillControls();
listen();
const geometryShown = showRunsChosen(false);
showMetrics();
showCurves();
showSettings();
fillSections();
const sinceOpened = () => String(Math.round(performance.now()));
document.documentElement.dataset.readable = sinceOpened(); // in milliseconds, for benchmarks
geometryShown.then(() => Object.assign(document.documentElement.dataset, { drawn: sinceOpened(), ready: "yes" }));
