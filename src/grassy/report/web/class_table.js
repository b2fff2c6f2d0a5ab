// The table of classes: sorted by any column, filtered by name, number or accuracy, one row selected.

class ClassTable {
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.table = byId("class-table");
    this.sort = null; // {key, down}
    this.filters = { text: "", accuracy: null };
    this.table.addEventListener("keydown", (event) => this.moved(event));
  }

  columns(a, b) {
    const nearest = (i) => a.per.nearest[i][0];
    const bar = (value) => value === null ? "–" : element("span", { className: "meter", style: `--share: ${value}%` }, fixed(value, 1));
    return [
      { key: "name", title: "Class", text: true, value: (i) => this.place[i], cell: null },
      a.per.training_images && { key: "training", title: "Train", hint: "training images", value: (i) => a.per.training_images[i], cell: String },
      a.measured && { key: "images", title: shortSplit(a), value: (i) => a.images(i), cell: String, hint: `${a.splitName} images` },
      a.measured && { key: "accuracy", title: "Acc.\u2009%", value: (i) => a.accuracy(i), cell: bar, hint: "accuracy" },
      b?.measured && a.measured && { key: "change", title: "A\u2009−\u2009B", value: (i) => a.accuracy(i) === null || b.accuracy(i) === null ? null : a.accuracy(i) - b.accuracy(i),
        cell: (value) => value === null ? "–" : `${value > 0.05 ? "+" : ""}${fixed(value, 1)}`, hint: "difference of the accuracies" },
      a.measured && a.subspaces && { key: "rank", title: "Rank", value: (i) => a.per.effective_rank?.[i] ?? null, cell: (value) => fixed(value, 2),
        hint: "effective rank: how many directions of its subspace the class uses" },
      a.classes > 1 && { key: "nearest", title: "Nearest class", text: true, value: (i) => nearest(i)?.[1] ?? null,
        cell: (_, i) => nearest(i) ? element("span", { className: "near" }, element("span", { className: "near-name" }, a.names[nearest(i)[0]]), element("span", { className: "soft" }, `${nearest(i)[1].toFixed(1)}°`)) : "–",
        hint: a.subspaces ? "by the mean of the principal angles" : "by the angle between class vectors" },
    ].filter(Boolean);
  }

  show(a, b) {
    this.a = a;
    this.place = []; // of each class in the order of names
    a.analysis.orders.name.forEach((label, position) => { this.place[label] = position; });
    this.shown = this.columns(a, b);
    if (!this.shown.some(({ key }) => key === this.sort?.key)) this.sort = { key: a.measured ? "accuracy" : "name", down: false };
    this.heads = this.shown.map((column) => element("th", { scope: "col", className: `${column.text ? "text " : ""}of-${column.key}` },
      element("button", { type: "button", title: `Sort by ${column.hint || "name"}`, "aria-label": `${column.hint || column.title}, sort`, onclick: () => this.sortBy(column.key) }, column.title,
        element("span", { className: "arrow", "aria-hidden": "true" }))));
    this.rows = a.names.map((name, i) => element("tr", { onclick: () => this.onOpen(i) },
      ...this.shown.map((column) => column.key === "name"
        ? element("th", { scope: "row" }, element("button", { type: "button", className: "link", tabIndex: -1, title: name }, name))
        : element("td", { className: `${column.text ? "text " : ""}of-${column.key}` }, column.cell(column.value(i), i)))));
    this.body = element("tbody");
    const widths = { name: 15, training: 4, images: 4, accuracy: 6, change: 4.6, rank: 4.4, nearest: 13 };
    const total = this.shown.reduce((sum, { key }) => sum + widths[key], 0);
    this.table.replaceChildren(element("colgroup", {}, ...this.shown.map(({ key }) => element("col", { className: `of-${key}`, style: `width: ${(100 * widths[key] / total).toFixed(2)}%` }))), element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    this.arrange();
  }

  sortBy(key) {
    this.sort = { key, down: this.sort.key === key ? !this.sort.down : false };
    this.arrange();
  }

  /** Put the rows in order; what has no value comes last either way. */
  arrange() {
    const { key, down } = this.sort, { value } = this.shown.find((column) => column.key === key);
    const values = this.rows.map((_, i) => value(i)), sign = down ? -1 : 1;
    this.order = this.rows.map((_, i) => i).sort((i, j) =>
      (values[i] === null) - (values[j] === null) || sign * (values[i] - values[j]) || this.place[i] - this.place[j]);
    this.body.append(...this.order.map((i) => this.rows[i]));
    this.heads.forEach((head, n) => {
      const own = this.shown[n].key === key;
      head.setAttribute("aria-sort", own ? down ? "descending" : "ascending" : "none");
    });
    this.filter(this.filters);
  }

  filter(filters) {
    this.filters = { ...this.filters, ...filters };
    const { text, accuracy } = this.filters;
    const found = text.trim() ? new Set(findClasses(this.a.names, text)) : null;
    const inside = (i) => accuracy === null || (this.a.accuracy(i) !== null && Math.min(9, Math.floor(this.a.accuracy(i) / 10)) === accuracy / 10);
    this.visible = this.order.filter((i) => (!found || found.has(i)) && inside(i));
    const kept = new Set(this.visible);
    this.rows.forEach((each, i) => { each.hidden = !kept.has(i); });
    const some = this.visible.length < this.rows.length;
    byId("class-count").textContent = !this.visible.length ? `No class is called “${text.trim()}”.`
      : some ? `${this.visible.length} of ${plural(this.rows.length, "class", "classes")}${accuracy === null ? "" : `, accuracy ${accuracy} to ${accuracy + 10}\u2009%`}` : plural(this.rows.length, "class", "classes");
    byId("class-reset").hidden = !some;
    this.reachable();
  }

  select(i, follow = true) {
    this.rows[this.selected]?.removeAttribute("aria-current");
    this.selected = i;
    this.rows[i].setAttribute("aria-current", "true");
    this.reachable();
    if (!follow) return;
    const scroller = this.table.parentElement, each = this.rows[i], head = this.table.tHead.offsetHeight;
    if (each.offsetTop - head < scroller.scrollTop) scroller.scrollTop = each.offsetTop - head;
    else if (each.offsetTop + each.offsetHeight > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = each.offsetTop + each.offsetHeight - scroller.clientHeight;
  }

  /** One row can be reached with the Tab key, and the others from there with the arrows. */
  reachable() {
    if (this.reached) this.reached.tabIndex = -1;
    const i = this.selected !== undefined && !this.rows[this.selected]?.hidden ? this.selected : this.visible?.[0];
    this.reached = this.rows[i]?.querySelector("button") || null;
    if (this.reached) this.reached.tabIndex = 0;
  }

  moved(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !event.target.closest("tbody")) return;
    event.preventDefault();
    const at = this.visible.indexOf(this.rows.indexOf(event.target.closest("tr"))) + steps[event.key];
    const i = this.visible[Math.max(0, Math.min(this.visible.length - 1, at))];
    this.onOpen(i, "stay");
    this.rows[i].querySelector("button").focus({ preventScroll: true });
  }
}

const shortSplit = (run) => run.splitName === "validation" ? "Val" : run.splitName.replace(/^./u, (first) => first.toUpperCase()) || "Images";

/** Classes by a text, the best first: of that name or number, then with names that begin with it, or hold it. */
function findClasses(names, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const lower = names.map((name) => name.toLowerCase());
  const where = (test) => lower.flatMap((name, i) => test(name) ? [i] : []);
  const number = /^[0-9]+$/.test(wanted) && Number(wanted) < names.length ? [Number(wanted)] : [];
  return [...new Set([...where((name) => name === wanted), ...number,
    ...where((name) => name.startsWith(wanted)), ...where((name) => name.includes(wanted))])];
}
