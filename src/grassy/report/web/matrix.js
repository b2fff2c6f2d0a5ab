// A number for each pair of classes as a canvas that can be zoomed and panned. Rows and columns are classes in an order.

class Matrix {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.image = document.createElement("canvas");
    this.shown = null;
    this.selection = null; // classes [i, j]
    this.zoom = 1;
    this.left = 0; // the first visible column and row, in cells, not whole
    this.top = 0;
    this.fits = new Map(); // names as they fit into the margin, for measuring takes time
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  /** What to show: value(i, j), tone(i, j) between low and high to colour it by, the classes in order, their names,
   * text(value) if it is not a plain number, and points, [i, j] of each cell that is not empty, if most are. */
  show(shown) {
    const classes = shown.order.length;
    if (!this.shown || this.shown.order.length !== classes) this.reset();
    this.shown = shown;
    const pixels = new Uint32Array(classes * classes);
    const { order, tone, low, high, table } = shown;
    const absent = pixel("--absent"), own = pixel("--own");
    const scale = 255 / (high - low || 1);
    for (let row = 0, at = 0; row < classes; row++) {
      for (let column = 0; column < classes; column++, at++) {
        const degrees = tone(order[row], order[column]);
        pixels[at] = row === column ? own : degrees !== degrees ? absent
          : table[Math.max(0, Math.min(255, Math.round((degrees - low) * scale)))];
      }
    }
    this.image.width = this.image.height = classes;
    this.image.getContext("2d").putImageData(
      new ImageData(new Uint8ClampedArray(pixels.buffer), classes, classes), 0, 0);
    this.pixels = pixels;
    this.place = new Int32Array(classes);
    order.forEach((label, position) => { this.place[label] = position; });
    this.draw();
  }

  reset() {
    this.zoom = 1;
    this.left = this.top = 0;
  }

  // ------------------------------------------------------------------------------------------- drawing

  layout() {
    const size = Math.max(200, Math.floor(this.canvas.parentElement.clientWidth));
    const longest = Math.min(16, this.shown.names.reduce((most, name) => Math.max(most, name.length), 1));
    const gutter = Math.round(Math.min(size * (size < 420 ? 0.3 : 0.22), 16 + longest * 7));
    const room = size - gutter;
    const classes = this.shown.order.length;
    const visible = classes / this.zoom;
    this.left = Math.max(0, Math.min(classes - visible, this.left));
    this.top = Math.max(0, Math.min(classes - visible, this.top));
    return { size, gutter, room, classes, visible, cell: room / visible };
  }

  draw() {
    if (!this.shown || this.canvas.parentElement.clientWidth === 0) return;
    const { size, gutter, room, visible, cell } = this.layout();
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(size * ratio)) {
      this.canvas.width = this.canvas.height = Math.round(size * ratio);
      this.canvas.style.height = `${size}px`;
      this.fits.clear();
    }
    const pen = this.context;
    const style = getComputedStyle(this.canvas);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, size, size);
    pen.imageSmoothingEnabled = cell * ratio < 1;
    pen.drawImage(this.image, this.left, this.top, visible, visible, gutter, gutter, room, room);
    if (this.shown.points && cell * ratio < 2.5) this.drawPoints(pen, gutter, cell);
    this.drawValues(pen, gutter, cell, style);
    this.drawLabels(pen, gutter, room, cell, style);
    this.drawSelection(pen, gutter, room, cell, style);
    this.canvas.style.touchAction = this.zoom > 1 ? "none" : "pan-x pan-y";
  }

  /** Few cells among a million empty ones would vanish: they are drawn larger than they are. */
  drawPoints(pen, gutter, cell) {
    const { points, table, tone, low, high } = this.shown, size = Math.max(cell, 1.6);
    for (const [i, j] of points.toReversed()) { // the most frequent on top
      const x = gutter + (this.place[j] - this.left) * cell, y = gutter + (this.place[i] - this.top) * cell;
      if (x < gutter || y < gutter) continue;
      const strength = Math.max(90, Math.min(255, Math.round(255 * (tone(i, j) - low) / (high - low || 1))));
      const color = table[strength];
      pen.fillStyle = `rgb(${color & 255} ${color >> 8 & 255} ${color >> 16 & 255})`;
      pen.fillRect(x, y, size, size);
    }
  }

  /** Numbers inside of cells that are large enough. */
  drawValues(pen, gutter, cell, style) {
    const { text, own } = this.shown;
    if (cell < (text ? 17 : 34)) return;
    const usual = Math.min(14, cell / (text ? 1.7 : 3));
    pen.font = `${usual}px ${style.fontFamily}`;
    const written = text || ((end) => fixed(end, 1));
    const widest = Math.max(...[this.shown.low, this.shown.high].map((end) => pen.measureText(written(end)).width));
    const fitting = Math.min(usual, usual * (cell - 8) / widest); // smaller before shorter
    const decimals = fitting >= 11 ? 1 : 0;
    if (decimals) pen.font = `${fitting}px ${style.fontFamily}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const classes = this.shown.order.length;
    const last = (start) => Math.min(classes, Math.ceil(start + classes / this.zoom));
    for (let row = Math.floor(this.top); row < last(this.top); row++) {
      for (let column = Math.floor(this.left); column < last(this.left); column++) {
        const x = gutter + (column + 0.5 - this.left) * cell, y = gutter + (row + 0.5 - this.top) * cell;
        if ((row === column && !own) || x < gutter || y < gutter) continue;
        const degrees = this.shown.value(this.shown.order[row], this.shown.order[column]);
        if (degrees !== degrees) continue;
        const color = this.pixels[row * classes + column];
        const light = 0.3 * (color & 255) + 0.59 * (color >> 8 & 255) + 0.11 * (color >> 16 & 255);
        pen.fillStyle = light > 105 ? "#10151c" : "#f4f7fa";
        pen.fillText(text ? text(degrees) : fixed(degrees, decimals), x, y);
      }
    }
  }

  drawLabels(pen, gutter, room, cell, style) {
    const { order, names } = this.shown;
    pen.clearRect(0, 0, gutter, gutter + room);
    pen.clearRect(0, 0, gutter + room, gutter);
    const step = cell >= 13 ? 1 : Math.ceil(20 / cell);
    const chosen = this.selection ? new Set(this.selection.map((label) => this.place[label])) : new Set();
    const upright = names.every((name) => name.length < 4);
    const write = (position, along, column) => {
      const name = names[order[position]];
      pen.font = `${chosen.has(position) ? "bold " : ""}12px ${style.fontFamily}`;
      const text = this.fitted(pen, name, gutter - 8);
      pen.fillStyle = chosen.has(position) ? style.getPropertyValue("--accent") : style.color;
      pen.textBaseline = "middle";
      pen.save();
      if (column) {
        pen.translate(along, gutter - 5);
        if (upright) { pen.textAlign = "center"; pen.textBaseline = "bottom"; } else { pen.rotate(-Math.PI / 2); pen.textAlign = "left"; }
      } else {
        pen.translate(gutter - 6, along);
        pen.textAlign = "right";
      }
      pen.fillText(text, 0, 0);
      pen.restore();
    };
    for (const [start, column] of [[this.top, false], [this.left, true]]) {
      for (let position = 0; position < order.length; position++) {
        const along = gutter + (position + 0.5 - start) * cell;
        if (along < gutter || along > gutter + room) continue;
        const inside = Math.min(along, gutter + room - 6);
        if (inside < along && !chosen.has(position)) continue; // of a cell that is cut off
        const near = !chosen.has(position) && [...chosen].some((other) => Math.abs(other - position) * cell < 14);
        if (chosen.has(position) || (position % step === 0 && !near)) write(position, inside, column);
      }
    }
  }

  /** A name as long as there is room, else without its middle: names differ at the end as often as at the beginning. */
  fitted(pen, name, width) {
    const key = `${pen.font} ${width} ${name}`;
    if (!this.fits.has(key)) {
      const letters = [...name]; // whole ones: half of a pair of surrogates is none
      let text = name;
      for (let kept = Math.min(letters.length - 1, 40); kept > 0 && pen.measureText(text).width > width; kept--) {
        const end = Math.floor(kept / 2);
        text = `${letters.slice(0, kept - end).join("").trimEnd()}…${letters.slice(letters.length - end).join("").trimStart()}`;
      }
      this.fits.set(key, text);
    }
    return this.fits.get(key);
  }

  drawSelection(pen, gutter, room, cell, style) {
    if (!this.selection) return;
    const [row, column] = this.selection.map((label) => this.place[label]);
    const x = gutter + (column - this.left) * cell, y = gutter + (row - this.top) * cell;
    pen.save();
    pen.beginPath();
    pen.rect(gutter, gutter, room, room);
    pen.clip();
    pen.strokeStyle = style.getPropertyValue("--accent");
    pen.globalAlpha = 0.75;
    pen.lineWidth = 1;
    pen.strokeRect(gutter - 2, y, room + 4, cell);
    pen.strokeRect(x, gutter - 2, cell, room + 4);
    pen.globalAlpha = 1;
    pen.lineWidth = 2.5;
    const box = Math.max(cell, 7);
    pen.strokeRect(x + (cell - box) / 2, y + (cell - box) / 2, box, box);
    pen.restore();
  }

  // ------------------------------------------------------------------------------------------- moving about

  /** Zoom by a factor, keeping what is under a point of the canvas where it is. */
  zoomBy(factor, x, y) {
    if (!this.shown) return;
    const { gutter, room, classes, cell } = this.layout();
    const px = x === undefined ? room / 2 : Math.max(0, x - gutter), py = y === undefined ? room / 2 : Math.max(0, y - gutter);
    const column = this.left + px / cell, row = this.top + py / cell;
    this.zoom = Math.max(1, Math.min(Math.max(1, classes / 4), this.zoom * factor));
    const now = room * this.zoom / classes;
    this.left = column - px / now;
    this.top = row - py / now;
    this.draw();
  }

  showAll() {
    this.reset();
    this.draw();
  }

  select(pair) {
    this.selection = pair;
    this.draw();
  }

  /** Move the view so that a pair of classes is in it; with closer, zoom in if its names would not be legible. */
  reveal(i, j, closer) {
    const { classes, room, visible } = this.layout();
    const column = this.place[j], row = this.place[i];
    const inside = (at, start) => at >= start && at + 1 <= start + visible;
    if (closer && room * this.zoom / classes < 4) {
      this.zoom = Math.min(classes / 4, classes * 14 / room);
      const span = classes / this.zoom;
      [this.left, this.top] = [column + 0.5 - span / 2, row + 0.5 - span / 2];
    } else {
      if (!inside(column, this.left)) this.left = column + 0.5 - visible / 2;
      if (!inside(row, this.top)) this.top = row + 0.5 - visible / 2;
    }
    this.draw();
  }

  /** The classes under a point: {row, column}, either of them null in the margins. */
  hit(x, y) {
    if (!this.shown) return null;
    const { gutter, classes, cell } = this.layout();
    const at = (position, start) => {
      const index = Math.floor(start + (position - gutter) / cell);
      return position < gutter || index < 0 || index >= classes ? null : this.shown.order[index];
    };
    return { row: at(y, this.top), column: at(x, this.left) };
  }
}
