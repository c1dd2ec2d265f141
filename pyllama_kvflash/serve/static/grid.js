// The squares: one for each chunk, drawn on a canvas, because there may be thousands.

const GAP = 0.16; // between squares, as a share of a cell
const ABOVE = 3; // pixels for the marks around the first row
const STYLES = ["cold", "hot", "out", "kept", "pinned", "back", "mark", "ink", "quiet", "panel"];

export function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(STYLES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// Lay out n squares in a box of a width: as few rows as possible, with squares large enough to point at.
export function layout(n, width, chunk) {
  const left = 40; // margin for the position at which each row begins
  const found = [16, 32, 48, 64].map((columns) => {
    const cell = Math.max(3, Math.min(26, Math.floor((width - left) / columns)));
    return { columns, cell, left, chunk, n, rows: Math.ceil(n / columns) };
  }).filter(({ columns, cell }) => cell >= 6 || columns === 16);
  return found.find(({ rows, cell }) => rows * cell <= 300) ?? found.at(-1);
}

export function chunkAt(place, x, y) {
  const column = Math.floor((x - place.left) / place.cell);
  const chunk = Math.floor((y - ABOVE) / place.cell) * place.columns + column;
  return column >= 0 && column < place.columns && chunk >= 0 && chunk < place.n ? chunk : null;
}

export const corner = (place, chunk) => [
  place.left + (chunk % place.columns) * place.cell, Math.floor(chunk / place.columns) * place.cell,
];

// Draw one square. what: state "0" (out) or "1" (in the pool), kind "p", "s", "t" or "-", heat 0 to 1 or null, share: of the
// layers that hold the chunk, 0 to 1, if not all do (policy fresh), back, left: it has just come back, or left. Each kind and
// move has a shape of its own, not just a colour.
export function square(g, c, x, y, cell, what) {
  const gap = Math.max(1, Math.round(cell * GAP));
  const size = cell - gap;
  const inner = Math.max(2, Math.round(size * 0.34));
  const middle = (size - inner) / 2;
  const { state, kind, heat } = what;
  if (state === "1") {
    g.fillStyle = kind === "p" ? c.pinned : kind === "-" ? mix(c.cold, c.hot, heat ?? 0.4) : c.kept;
    g.fillRect(x, y, size, size);
  } else {
    g.strokeStyle = kind === "p" ? c.pinned : c.out;
    g.lineWidth = 1;
    g.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  }
  if (what.share && state === "0") { // filled from below
    const height = Math.max(1, Math.round(size * what.share));
    g.fillStyle = c.cold;
    g.fillRect(x, y + size - height, size, height);
  }
  if (kind === "p" && state === "1") { // a hole
    g.fillStyle = c.mark;
    g.fillRect(x + middle, y + middle, inner, inner);
  } else if (kind !== "-" && kind !== "p" && size >= 7) { // a bar
    g.fillStyle = c.mark;
    g.fillRect(x + middle / 2, y + (size - 2) / 2, size - middle, 2);
  }
  if (what.back) {
    g.strokeStyle = c.back;
    g.lineWidth = size >= 8 ? 2 : 1;
    g.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
  } else if (what.left && state === "0") { // a cross
    g.strokeStyle = c.back;
    g.lineWidth = 1;
    g.beginPath();
    for (const [from, to] of [[0, size], [size, 0]]) {
      g.moveTo(x + from * 0.5 + size * 0.25, y + size * 0.25);
      g.lineTo(x + to * 0.5 + size * 0.25, y + size * 0.75);
    }
    g.stroke();
  }
}

// Draw all squares. focus: the chunk with a frame, or null.
export function draw(canvas, place, whats, focus) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [place.left + place.columns * place.cell, place.rows * place.cell + 2 * ABOVE];
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const [g, c] = [canvas.getContext("2d"), colours()];
  g.scale(scale, scale);
  g.translate(0, ABOVE);
  g.font = "10px system-ui, sans-serif";
  g.textAlign = "right";
  g.textBaseline = "top";
  g.fillStyle = c.quiet;
  const step = Math.ceil(12 / place.cell); // rows between two positions, far enough apart to read
  for (let row = 0; row < place.rows; row += step) {
    g.fillText(position(row * place.columns * place.chunk), place.left - 7, row * place.cell + Math.max(0, (place.cell - 12) / 2));
  }
  whats.forEach((what, chunk) => square(g, c, ...corner(place, chunk), place.cell, what));
  if (focus !== null && focus < place.n) {
    const [x, y] = corner(place, focus);
    const size = place.cell - Math.max(1, Math.round(place.cell * GAP));
    // outside the square, with a light gap, to be visible on any colour
    for (const [colour, width, by] of [[c.panel, 4, 1], [c.ink, 2, 2]]) {
      g.strokeStyle = colour;
      g.lineWidth = width;
      g.strokeRect(x - by, y - by, size + 2 * by, size + 2 * by);
    }
  }
}

const position = (n) => (n && n % 1024 === 0 ? `${n / 1024}K` : String(n));

function mix(a, b, share) {
  const [from, to] = [a, b].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  return `rgb(${from.map((x, i) => Math.round(x + (to[i] - x) * share)).join(" ")})`;
}
