// A matrix with what one needs to use it: pointer, wheel, fingers and keys, a tip, a legend and buttons to zoom.

class MatrixView {
  /** prefix: of the ids of its parts. handlers: onPair(i, j), onClass(i), tip(i, j) -> text. */
  constructor(prefix, handlers) {
    this.prefix = prefix;
    this.handlers = handlers;
    this.canvas = byId(`${prefix}-matrix`);
    this.tip = byId(`${prefix}-tip`);
    this.matrix = new Matrix(this.canvas);
    this.pointers = new Map();
    byId(`${prefix}-in`).addEventListener("click", () => this.matrix.zoomBy(1.6));
    byId(`${prefix}-out`).addEventListener("click", () => this.matrix.zoomBy(1 / 1.6));
    byId(`${prefix}-all`).addEventListener("click", () => this.matrix.showAll());
    this.listen();
  }

  show(shown, low, high) {
    this.canvas.closest(".picture").style.maxWidth = `${Math.max(480, 120 + 56 * shown.order.length)}px`; // of few classes, no giant cells
    this.matrix.show(shown);
    byId(`${this.prefix}-low`).textContent = low;
    byId(`${this.prefix}-high`).textContent = high;
    const pixels = new ImageData(new Uint8ClampedArray(shown.table.slice().buffer), 256, 1);
    byId(`${this.prefix}-legend`).getContext("2d").putImageData(pixels, 0, 0);
  }

  describe(text) { this.canvas.setAttribute("aria-label", text); }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
      if (this.pointers.size === 1) this.travelled = 0;
    });
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("pointerup", (event) => {
      const known = this.pointers.delete(event.pointerId);
      if (known && this.pointers.size === 0 && this.travelled < 5) this.clicked(event.offsetX, event.offsetY);
    });
    for (const name of ["pointercancel", "pointerleave"]) {
      canvas.addEventListener(name, (event) => {
        this.pointers.delete(event.pointerId);
        this.hover(null, event);
      });
    }
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls
      event.preventDefault();
      this.matrix.zoomBy(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.002)), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.pressed(event));
  }

  moved(event) {
    const before = this.pointers.get(event.pointerId);
    const now = { x: event.offsetX, y: event.offsetY };
    if (!before) return this.hover(this.matrix.hit(now.x, now.y), event);
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    const dx = now.x - before.x, dy = now.y - before.y;
    this.travelled += Math.hypot(dx, dy);
    if (other) {
      const distance = (p) => Math.max(1, Math.hypot(p.x - other.x, p.y - other.y));
      this.matrix.zoomBy(distance(now) / distance(before), (now.x + other.x) / 2, (now.y + other.y) / 2);
    } else if (this.travelled >= 5) {
      if (!this.canvas.hasPointerCapture(event.pointerId)) this.canvas.setPointerCapture(event.pointerId);
      const { cell } = this.matrix.layout();
      this.matrix.left -= dx / cell;
      this.matrix.top -= dy / cell;
      this.matrix.draw();
    }
    this.pointers.set(event.pointerId, now);
  }

  clicked(x, y) {
    const cell = this.matrix.hit(x, y);
    if (!cell || (cell.row === null && cell.column === null)) return;
    if (cell.row === null || cell.column === null) this.handlers.onClass(cell.row ?? cell.column);
    else if (cell.row === cell.column) this.handlers.onClass(cell.row);
    else this.handlers.onPair(cell.row, cell.column);
  }

  hover(cell, event) {
    const { tip } = this, { names } = this.matrix.shown || {};
    tip.hidden = !cell || (cell.row === null && cell.column === null) || event.pointerType === "touch";
    if (tip.hidden) return;
    const both = cell.row !== null && cell.column !== null && cell.row !== cell.column;
    tip.textContent = both ? this.handlers.tip(cell.row, cell.column) : names[cell.row ?? cell.column];
    const stage = tip.parentElement.getBoundingClientRect();
    tip.style.left = `${Math.min(event.offsetX + 14, stage.width - tip.offsetWidth - 4)}px`;
    tip.style.top = `${Math.min(event.offsetY + 14, stage.height - tip.offsetHeight - 4)}px`;
  }

  pressed(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const { matrix } = this;
    if (event.ctrlKey || event.metaKey || event.altKey || !matrix.shown) return;
    if (moves[event.key]) this.moveBy(...moves[event.key]);
    else if (event.key === "Enter" && matrix.selection) this.handlers.onClass(matrix.selection[0]);
    else if (event.key === "+" || event.key === "=") matrix.zoomBy(1.6);
    else if (event.key === "-") matrix.zoomBy(1 / 1.6);
    else if (event.key === "0") matrix.showAll();
    else return;
    event.preventDefault();
  }

  /** Select the cell beside the one that is selected; on the diagonal that is a class. */
  moveBy(rows, columns) {
    const { matrix } = this, { order } = matrix.shown;
    const [i, j] = (matrix.selection || [order[0], order[0]]).map((label) => matrix.place[label]);
    const inside = (at) => order[Math.max(0, Math.min(order.length - 1, at))];
    const [row, column] = [inside(i + rows), inside(j + columns)];
    if (row === column && this.handlers.onDiagonal) this.handlers.onDiagonal(row);
    else this.handlers.onPair(row, column);
    matrix.reveal(row, column, false);
  }
}
