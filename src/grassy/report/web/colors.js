// Colours of numbers, for either theme: small angles stand out, and the many large ones recede.

const DARK = window.matchMedia("(prefers-color-scheme: dark)");

const SCALES = {
  // From the smallest angle to the largest; viridis turned round on dark, a map of blues on light.
  angle: {
    dark: ["#fde725", "#addc30", "#5ec962", "#28ae80", "#21918c", "#2c728e", "#3b528b", "#423a78", "#2e1a4d"],
    light: ["#081d58", "#1b3a8a", "#225ea8", "#1d91c0", "#41b6c4", "#7fcdbb", "#c0e5c9", "#e8f5dc", "#fbfdf0"],
  },
  // Of mistakes: none recedes, many stand out.
  count: {
    dark: ["#1d232b", "#3b2a2a", "#5c302b", "#82392c", "#a9452e", "#cf5a37", "#ea7d4c", "#f8a774", "#fdd3ad"],
    light: ["#fafbfc", "#fdebdd", "#fbd3b8", "#f8b389", "#f08d5b", "#e0673a", "#c34a24", "#973617", "#64230f"],
  },
  // From A smaller than B to A larger: blue and orange, which all kinds of colour vision tell apart.
  difference: {
    dark: ["#7cc4ff", "#3b8fd6", "#24598c", "#1e2d3f", "#1b1e23", "#402a18", "#8a4b12", "#d97f1f", "#ffc077"],
    light: ["#053061", "#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fee0b6", "#f1a340", "#b35806", "#7f3b08"],
  },
};

/** 256 colours as 32-bit pixels of a canvas. */
function colorTable(name) {
  const stops = SCALES[name][DARK.matches ? "dark" : "light"].map((hex) =>
    [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const table = new Uint32Array(256);
  const bytes = new Uint8Array(table.buffer);
  for (let i = 0; i < 256; i++) {
    const at = i / 255 * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
    for (let c = 0; c < 3; c++) bytes[4 * i + c] = Math.round(stops[low][c] * (1 - part) + stops[low + 1][c] * part);
    bytes[4 * i + 3] = 255;
  }
  return table;
}

/** One pixel from a colour of the style sheet. */
function pixel(variable) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
  const bytes = new Uint8Array([1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).concat(255));
  return new Uint32Array(bytes.buffer)[0];
}
