// Elements and text. Whatever comes from the data is set as text or as a property, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
for (const { analysis } of data.runs) analysis.per_class.name = distinct(analysis.per_class.name);
const byId = (id) => document.getElementById(id);
const SVG = byId("svg-namespace").namespaceURI;

/** An element with properties (or attributes, where there is no such property) and children; strings become text. */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const fixed = (value, decimals) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const text = value.toFixed(decimals);
  return text.replace("-", Number(text) === 0 ? "" : "−"); // a proper minus, and none before a nought
};

/** Three significant digits or so, without a train of zeros; more where a scale has finer steps than those would tell. */
const short = (value, step = Infinity) => {
  if (value === 0) return "0";
  const size = Math.abs(value), power = (x) => Math.floor(Math.log10(x) + 1e-9);
  const digits = Math.min(9, Math.max(3, power(size) - power(step) + 2));
  if (size >= 1e5 || size < 0.001) return value.toExponential(Math.max(1, digits - 2));
  return String(Number(value.toPrecision(digits)));
};

/** A text that may be broken after the marks that join words in names of files and classes. */
const breakable = (text) => text.split(/(?<=[_/.\-])(?=.)/u).flatMap((part, i) => i ? [document.createElement("wbr"), part] : [part]);

/** A button that looks like a link. */
const link = (text, go) => element("button", { type: "button", className: "link", onclick: go }, ...breakable(text));

const plural = (count, one, many) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

/** A name in the midst of other text, which must not change its order whatever direction the name is written in. */
const isolated = (name) => `\u2068${name}\u2069`;

const ordinal = (n) => {
  const tens = n % 100;
  return n + (tens > 10 && tens < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] || "th");
};

/** A colour and a dash for each run: the order of Okabe and Ito, told apart by all kinds of colour vision. */
const RUN_STYLES = [["--run-0", ""], ["--run-1", "7 3"], ["--run-2", "2 3"], ["--run-3", "9 3 2 3"], ["--run-4", "4 2"],
  ["--run-5", "1 4"]];
const runColor = (index) => `var(${RUN_STYLES[index % RUN_STYLES.length][0]})`;
const runDash = (index) => RUN_STYLES[index % RUN_STYLES.length][1];

/** Names of classes that no two share: those that do, and empty ones, are followed by the number of the class. */
function distinct(names) {
  const seen = new Map();
  for (const name of names) seen.set(name, (seen.get(name) || 0) + 1);
  return names.map((name, i) => seen.get(name) > 1 || !name.trim() ? `${name} (${i})`.trim() : name);
}

/** The name of a run beside its dot, which may be broken. */
function runLabel(index) {
  return [element("span", { className: "dot", style: `--dot: ${runColor(index)}` }), "\u2060", ...breakable(data.runs[index].name)];
}
