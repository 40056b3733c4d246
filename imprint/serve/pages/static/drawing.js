// Lets somebody draw a small grey picture, with a pointer or with the arrow keys and space; it fills the list of numbers.
"use strict";
for (const place of document.querySelectorAll(".drawing")) {
  const { width, height, black, white } = Object.fromEntries(Object.entries(place.dataset).map(([k, v]) => [k, Number(v)]));
  const list = document.getElementById("values");
  const own = document.getElementById("own");
  const pixels = list.value.trim().split(/[\s,]+/).map(Number);
  if (pixels.length !== width * height || pixels.some(Number.isNaN)) pixels.splice(0, Infinity, ...Array(width * height).fill(black));
  const grid = document.createElement("div");
  grid.className = width > 16 ? "pixels fine" : "pixels";
  grid.setAttribute("role", "grid");
  grid.setAttribute("aria-label", "Drawing: arrow keys move, space paints or clears a pixel");
  const cells = [];
  for (let y = 0; y < height; y++) {
    const row = document.createElement("div");
    row.setAttribute("role", "row");
    for (let x = 0; x < width; x++) {
      const cell = document.createElement("div");
      cell.setAttribute("role", "gridcell");
      cell.tabIndex = y || x ? -1 : 0;
      cells.push(cell);
      row.append(cell);
    }
    grid.append(row);
  }
  const show = (at) => {
    const part = Math.min(1, Math.max(0, (pixels[at] - black) / (white - black)));
    const grey = Math.round(255 * part);
    cells[at].style.backgroundColor = `rgb(${grey},${grey},${grey})`;
    cells[at].setAttribute("aria-label", `row ${1 + Math.floor(at / width)}, column ${1 + (at % width)}: ${Math.round(100 * part)}% white`);
  };
  const keep = () => {
    list.value = pixels.map((value) => Number(value.toPrecision(6))).join(" ");
    if (own) own.checked = true;
  };
  const set = (at, value) => { pixels[at] = value; show(at); };
  const paint = (at) => { // a soft brush, as a pen leaves it
    const x = at % width, y = Math.floor(at / width), half = black + 0.45 * (white - black);
    set(at, white);
    for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
      const [u, v] = [x + dx, y + dy];
      if (u >= 0 && u < width && v >= 0 && v < height && pixels[v * width + u] < half) set(v * width + u, half);
    }
    keep();
  };
  let drawing = false;
  const under = (event) => cells.indexOf(document.elementFromPoint(event.clientX, event.clientY));
  grid.addEventListener("pointerdown", (event) => { drawing = true; const at = under(event); if (at >= 0) paint(at); event.preventDefault(); });
  grid.addEventListener("pointermove", (event) => { const at = drawing ? under(event) : -1; if (at >= 0) paint(at); });
  window.addEventListener("pointerup", () => { drawing = false; });
  grid.addEventListener("keydown", (event) => {
    const at = cells.indexOf(document.activeElement);
    if (at < 0) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width };
    if (event.key in steps) {
      const sideways = Math.abs(steps[event.key]) === 1 && Math.floor((at + steps[event.key]) / width) !== Math.floor(at / width);
      const to = at + steps[event.key];
      if (!sideways && to >= 0 && to < cells.length) { cells[at].tabIndex = -1; cells[to].tabIndex = 0; cells[to].focus(); }
    } else if (event.key === " ") {
      set(at, pixels[at] > black ? black : white);
      keep();
    } else return;
    event.preventDefault();
  });
  const clear = document.createElement("button");
  clear.type = "button";
  clear.className = "second";
  clear.textContent = "Clear";
  clear.addEventListener("click", () => { pixels.forEach((_, at) => set(at, black)); keep(); });
  pixels.forEach((_, at) => show(at));
  const under_grid = document.createElement("p");
  under_grid.append(clear);
  place.append(grid, under_grid);
}
