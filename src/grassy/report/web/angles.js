// The angles of a run, decoded once: k planes of 16-bit numbers over the pairs (i, j) with i < j.

const MISSING = 65535;
const STEPS = 65534;

class Angles {
  constructor(packed, values) {
    this.classes = packed.classes;
    this.k = packed.k;
    this.limit = packed.limit;
    this.pairs = packed.classes * (packed.classes - 1) / 2;
    this.values = values;
    this.ranges = new Map();
  }

  static async decode(packed) {
    const text = atob(packed.data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const plain = new Uint8Array(await new Response(stream).arrayBuffer());
    const count = plain.length / 2;
    const values = new Uint16Array(count);
    for (let i = 0; i < count; i++) values[i] = plain[i] << 8 | plain[count + i];
    return new Angles(packed, values);
  }

  place(i, j) {
    if (i > j) [i, j] = [j, i];
    return i * (2 * this.classes - i - 1) / 2 + j - i - 1;
  }

  /** In degrees; NaN where a pair has fewer angles, 0 between a class and itself. */
  degrees(i, j, angle) {
    if (i === j) return 0;
    const value = this.values[angle * this.pairs + this.place(i, j)];
    return value === MISSING ? NaN : value * this.limit / STEPS;
  }

  ofPair(i, j) {
    return Array.from({ length: this.k }, (_, angle) => this.degrees(i, j, angle)).filter((v) => !Number.isNaN(v));
  }

  /** The smallest and the largest of one angle over all pairs, in degrees. */
  range(angle) {
    if (!this.ranges.has(angle)) {
      let low = STEPS, high = 0;
      for (let p = angle * this.pairs; p < (angle + 1) * this.pairs; p++) {
        const value = this.values[p];
        if (value === MISSING) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
      this.ranges.set(angle, low > high ? [0, this.limit] : [low * this.limit / STEPS, high * this.limit / STEPS]);
    }
    return this.ranges.get(angle);
  }
}

const decoded = new Map();

/** The angles of a run, a promise; of those asked for before, the same one. */
function anglesOf(index) {
  if (!decoded.has(index)) decoded.set(index, Angles.decode(data.runs[index].analysis.angles));
  return decoded.get(index);
}

/** The largest difference of one angle of A and one of B, in degrees, over all pairs. */
function largestDifference(a, b, angleA, angleB) {
  let most = 0;
  for (let p = 0; p < a.pairs; p++) {
    const [one, other] = [a.values[angleA * a.pairs + p], b.values[angleB * b.pairs + p]];
    if (one !== MISSING && other !== MISSING) most = Math.max(most, Math.abs(one * a.limit - other * b.limit) / STEPS);
  }
  return most;
}
