// Elements and text. Whatever comes from the data is set as text or as a property, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
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

const fixed = (value, decimals) =>
  value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(decimals).replace("-", "−");

/** Three significant digits or so, without a train of zeros. */
const short = (value) => {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000 || size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
};

const ordinal = (n) => {
  const tens = n % 100;
  return n + (tens > 10 && tens < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] || "th");
};

/** A colour and a dash for each run: the order of Okabe and Ito, told apart by all kinds of colour vision. */
const RUN_STYLES = [["--run-0", ""], ["--run-1", "7 3"], ["--run-2", "2 3"], ["--run-3", "9 3 2 3"], ["--run-4", "4 2"],
  ["--run-5", "1 4"]];
const runColor = (index) => `var(${RUN_STYLES[index % RUN_STYLES.length][0]})`;
const runDash = (index) => RUN_STYLES[index % RUN_STYLES.length][1];
