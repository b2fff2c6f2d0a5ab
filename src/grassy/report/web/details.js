// What is known about a pair of classes, or about one class, in words and bars beside the matrix.

class Details {
  constructor(place, open) {
    this.place = place;
    this.open = open; // {pair(i, j), class(i)}
    this.empty();
  }

  empty() {
    this.place.replaceChildren(element("p", { className: "hint" },
      "Choose a pair of classes or a class in the matrix, or search for one."));
    delete this.place.dataset.kind;
  }

  /** runs: [{name, index, analysis, angles}], of which the first is A. */
  pair(i, j, runs) {
    const names = runs[0].analysis.per_class.name;
    const title = element("h3", {}, this.classButton(i, names), element("span", { className: "and" }, " and "),
      this.classButton(j, names));
    const parts = runs.map((run) => {
      const angles = run.angles.ofPair(i, j);
      const vectors = run.analysis.representation === "vectors";
      const what = vectors ? "Angle between class vectors" : angles.length === 1 ? "Principal angle" : `${angles.length} principal angles`;
      const rows = angles.map((degrees, n) => [vectors ? "θ" : `θ${subscript(n + 1)}`, degrees, `${degrees.toFixed(2)}°`]);
      return this.part(what, run, runs, this.bars(rows, run.angles.limit, "pair-angles"));
    });
    const mistaken = runs.map((run) => this.mistakes(i, j, run, runs)).filter(Boolean);
    this.place.replaceChildren(title, ...parts, ...mistaken);
    this.place.dataset.kind = "pair";
  }

  class(i, runs) {
    const { per_class: first } = runs[0].analysis;
    const title = element("h3", {}, element("span", { className: "and" }, "class "), first.name[i]);
    const parts = [this.images(i, runs)];
    for (const run of runs) {
      const own = run.analysis.per_class, subspaces = run.analysis.representation === "subspaces";
      if (runs.length > 1) parts.push(this.runName(run));
      const facts = [["Index", `${i}`]];
      if (subspaces) facts.push(["Dimension", `${own.dimension[i]}`]);
      if (own.images) facts.push(["Images", `${own.images[i]}`], ["Accuracy", own.accuracy[i] === null ? "–" : `${own.accuracy[i].toFixed(1)} %`]);
      if (own.effective_rank?.[i] != null) facts.push(["Effective rank", own.effective_rank[i].toFixed(2)]);
      parts.push(element("dl", { className: "facts" }, ...facts.map(([term, value]) =>
        element("div", {}, element("dt", {}, term), element("dd", {}, value)))));
      parts.push(element("h4", {}, subspaces ? "Nearest classes, by mean principal angle" : "Nearest classes, by angle"),
        this.links(own.nearest[i].map(([other, degrees]) => [other, `${degrees.toFixed(2)}°`]), own.name,
          (other) => this.open.pair(i, other), "There is no other class."));
      const spectrum = own.spectrum?.[i];
      if (spectrum && spectrum[0] !== null) {
        const inside = spectrum.reduce((sum, share) => sum + share, 0);
        parts.push(element("h4", {}, subspaces ? "Energy along the directions of its subspace" : "Energy along its vector"),
          this.bars(spectrum.slice(0, own.dimension[i]).map((share, n) => [`${n + 1}`, share, `${(100 * share).toFixed(1)} %`]), 1, "spectrum"),
          element("p", { className: "small" }, `${(100 * (1 - inside)).toFixed(1)} % lies outside.`));
      }
      if (own.confusions) {
        parts.push(element("h4", {}, "Most often mistaken for"), this.links(own.confusions[i].map(([other, count]) =>
          [other, `${count} ${count === 1 ? "image" : "images"}`]), own.name, (other) => this.open.class(other), "Nothing."));
      }
    }
    this.place.replaceChildren(title, ...parts.filter(Boolean));
    this.place.dataset.kind = "class";
  }

  // ------------------------------------------------------------------------------------------- pieces

  runName(run) {
    return element("p", { className: "run-name" },
      element("span", { className: "dot", style: `--dot: ${runColor(run.index)}` }), run.name);
  }

  part(title, run, runs, content) {
    return element("div", { className: "part" }, runs.length > 1 ? this.runName(run) : null, element("h4", {}, title), content);
  }

  /** Rows [label, number, text] as bars that end at `limit`. */
  bars(rows, limit, name) {
    return element("ol", { className: `bars ${name}` }, ...rows.map(([label, number, text]) =>
      element("li", {}, element("span", { className: "label" }, label),
        element("span", { className: "track", "aria-hidden": "true" },
          element("span", { className: "fill", style: `width: ${Math.min(100, 100 * number / limit).toFixed(2)}%` })),
        element("span", { className: "value" }, text))));
  }

  links(rows, names, go, none) {
    if (!rows.length) return element("p", { className: "small" }, none);
    return element("ol", { className: "links" }, ...rows.map(([other, text]) => element("li", {},
      element("button", { type: "button", className: "link", onclick: () => go(other) }, names[other]),
      element("span", { className: "value" }, text))));
  }

  classButton(i, names) {
    return element("button", { type: "button", className: "link", title: "show this class", onclick: () => this.open.class(i) }, names[i]);
  }

  mistakes(i, j, run, runs) {
    const { confusions, name } = run.analysis.per_class;
    if (!confusions) return null;
    const count = (from, to) => confusions[from].find(([other]) => other === to)?.[1];
    const lines = [[i, j], [j, i]].filter(([from, to]) => count(from, to)).map(([from, to]) =>
      `${count(from, to)} of ${isolated(name[from])} taken for ${isolated(name[to])}`);
    return lines.length ? element("p", { className: "small" }, runs.length > 1 ? `${run.name}: ` : "", `${lines.join("; ")}.`) : null;
  }

  images(i, runs) {
    const samples = runs.map((run) => data.runs[run.index].samples)
      .map((own) => typeof own === "number" ? data.runs[own].samples : own) // those of an earlier run
      .find((all) => all && all[i] && all[i].length);
    if (!samples) return null;
    const name = runs[0].analysis.per_class.name[i];
    return element("div", { className: "samples" }, ...samples[i].map((uri, n) => {
      const image = element("img", { src: uri, alt: `Sample ${n + 1} of class ${name}` });
      image.onload = () => image.classList.toggle("pixelated", image.naturalWidth <= 32);
      return image;
    }));
  }
}

const subscript = (n) => String(n).replace(/[0-9]/g, (digit) => "₀₁₂₃₄₅₆₇₈₉"[digit]);
