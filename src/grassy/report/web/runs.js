// What the page knows of a run, in the form in which its sections ask for it.

class Run {
  constructor(index) {
    const { name, analysis, pictures, curves, settings } = data.runs[index];
    Object.assign(this, { index, name, analysis, pictures, curves, settings });
    this.per = analysis.per_class;
    this.names = this.per.name;
    this.classes = this.names.length;
    this.subspaces = analysis.representation === "subspaces";
    this.examples = analysis.examples || null;
    this.measured = Boolean(this.per.images);
  }

  /** How many images of a class were measured, and how many of them were mistaken. */
  images(i) { return this.per.images ? this.per.images[i] : null; }
  accuracy(i) { return this.per.accuracy ? this.per.accuracy[i] : null; }
  mistakenCount(i) { return this.measured && this.images(i) ? Math.round(this.images(i) * (1 - this.accuracy(i) / 100)) : 0; }

  /** Positions among the examples, surest first. */
  mistakesOf(i) { return this.grouped("label").get(i) || []; }
  takenFor(i) { return this.grouped("predicted").get(i) || []; }
  mistakesOfPair(i, j) { return this.mistakesOf(i).filter((at) => this.examples.predicted[at] === j); }

  grouped(column) {
    this.groups ??= {};
    if (!this.groups[column]) {
      const groups = this.groups[column] = new Map();
      for (const at of this.examples?.mistakes || []) {
        const key = this.examples[column][at];
        if (!groups.has(key)) groups.set(key, []);
        groups.get(key).push(at);
      }
    }
    return this.groups[column];
  }

  /** How many images of one class were taken for another. */
  confused(i, j) { return this.per.confusions?.[i].find(([other]) => other === j)?.[1] || 0; }

  /** All confusions as [true, predicted, count], most frequent first. */
  get confusions() {
    this.sorted ??= (this.per.confusions || []).flatMap((row, i) => row.map(([j, count]) => [i, j, count]))
      .sort((a, b) => b[2] - a[2]);
    return this.sorted;
  }

  /** The class of the lowest accuracy, of several the one with most images; the first class if nothing was measured. */
  get worst() {
    const known = this.names.map((_, i) => i).filter((i) => this.accuracy(i) !== null && this.images(i));
    return known.reduce((worst, i) => this.accuracy(i) < this.accuracy(worst)
      || (this.accuracy(i) === this.accuracy(worst) && this.images(i) > this.images(worst)) ? i : worst, known[0] ?? 0);
  }

  /** The data URI of an example, or null. */
  picture(at) {
    const number = this.pictures[at];
    return number === null || number === undefined ? null : data.pictures[number];
  }

  get splitName() {
    const split = this.analysis.data?.split;
    return ["val", "valid", "validation", "eval", "evaluation"].includes(split) ? "validation" : split || "";
  }
}

const allRuns = data.runs.map((_, index) => new Run(index));

/** Whether two runs tell the same classes apart, so that their classes can be compared. */
function comparable(a, b) {
  const [one, other] = [a, b].map((index) => allRuns[index].names);
  return one.length === other.length && one.every((name, i) => name === other[i]);
}
