// The confusion matrix, and the images behind a cell of it.

const LONGEST_LIST = 12;

class Confusion {
  constructor() {
    this.view = new MatrixView("confusion", {
      onPair: (i, j) => this.choose(i, j), onClass: (i) => openClass(i), tip: (i, j) => this.tip(i, j),
    });
    byId("confusion-order").addEventListener("change", () => this.draw());
  }

  /** keep: the pair that was chosen before. */
  show(run, keep) {
    this.run = run;
    byId("confusions").hidden = !run.measured || run.classes < 2;
    if (byId("confusions").hidden) return;
    this.list();
    const pair = (keep && this.pair) || run.confusions[0];
    if (pair) this.choose(pair[0], pair[1]);
    else byId("confused").replaceChildren(element("p", { className: "hint" }, "Nothing was confused: every image was classified correctly."));
    this.draw();
  }

  draw() {
    const run = this.run, table = colorTable("count");
    const counts = new Map(run.confusions.map(([i, j, count]) => [i * run.classes + j, count]));
    const share = (i, j) => i === j ? run.accuracy(i) : run.images(i) ? 100 * (counts.get(i * run.classes + j) || 0) / run.images(i) : NaN;
    const high = Math.max(10, ...run.confusions.slice(0, 200).map(([i, j]) => share(i, j)));
    this.view.show({
      order: run.analysis.orders[byId("confusion-order").value], names: run.names, table, low: 0, high, value: share, tone: share,
      text: (value) => value ? fixed(value, 0) : "", points: run.confusions, own: true,
    }, `0\u2009%`, `${fixed(high, 0)}\u2009%`);
    this.view.describe(`Confusion matrix of ${run.classes} classes, ${run.name}`);
    if (this.pair) this.view.matrix.select(this.pair);
  }

  tip(i, j) {
    const { run } = this, count = run.confused(i, j);
    return `${isolated(run.names[i])} taken for ${isolated(run.names[j])}: ${count} of ${run.images(i)}`;
  }

  list() {
    const { run } = this, rows = run.confusions.slice(0, LONGEST_LIST);
    byId("confusion-list").replaceChildren(...rows.map(([i, j, count]) => element("li", {},
      link(`${isolated(run.names[i])} → ${isolated(run.names[j])}`, () => this.choose(i, j, true)),
      element("span", { className: "value" }, String(count)), element("span", { className: "value soft" }, percent(count / run.images(i))))));
    byId("confusion-list-title").hidden = !rows.length;
  }

  /** Show the images of one class that were taken for another. */
  choose(i, j, reveal = false) {
    const { run } = this, count = run.confused(i, j), found = run.mistakesOfPair(i, j);
    this.pair = [i, j];
    this.view.matrix.select([i, j]);
    if (reveal) this.view.matrix.reveal(i, j, true);
    const back = run.confused(j, i);
    byId("confused").replaceChildren(
      element("h3", {}, link(run.names[i], () => openClass(i)), element("span", { className: "and" }, " taken for "), link(run.names[j], () => openClass(j))),
      element("p", { className: "small" }, count ? `${count} of ${plural(run.images(i), "image", "images")}` : `None of ${plural(run.images(i), "image", "images")}`,
        found.length && found.length < count ? `, the ${found.length} most confident are shown` : "", ". ",
        back ? link(`The other way round: ${back}`, () => this.choose(j, i)) : "The other way round: none",
        back ? ". " : ". ", link("Angles between the two", () => openGeometry(i, j))),
      found.length ? gallery(run, found, sureAndInside)
        : count ? element("p", { className: "hint" }, "This page holds none of these images.") : "");
  }
}
