// map.js: the block map. Follows /paged/events; draws every physical block as a cell of a canvas.
//
// `state.cells[b]` is {state, refs, owner} of block b at event `state.number`: what /paged/blocks says at that number. A change
// draws its cell and no other, so ten thousand blocks cost no more than what happens to them.

import {events, getJson} from "./api.js";

export const KINDS = {
  ".": "free, not taken from the system", "f": "free", "u": "of one request", "s": "shared", "U": "last of a request",
  "S": "last, shared", "c": "cached", "t": "tails of several requests",
};
const GLOW_MS = 700;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export const hueOf = owner => (Number(owner) * 137.508) % 360;

export const state = {number: 0, blockSize: 16, cells: [], requests: [], running: 0, waiting: 0};
const canvas = document.getElementById("map");
const pen = canvas.getContext("2d");
const watchers = [];
let columns = 1, side = 8, selected = -1, marked = new Set(), glow = new Map(), drawing = false, onChoose = () => {};

export function whenChanged(fn) {
  watchers.push(fn);
}
export function whenChosen(fn) {
  onChoose = fn;
}

// ---- drawing ----

function colours() {
  const css = getComputedStyle(document.documentElement);
  const get = name => css.getPropertyValue(name).trim();
  return {free: get("--free"), absent: get("--absent"), line: get("--line"), cached: get("--cached"), text: get("--text"),
    accent: get("--accent"), mark: get("--mark"), lightness: get("--lightness")};
}
let palette = colours();

function drawCell(b, now) {
  const x = b % columns * side, y = Math.floor(b / columns) * side, gap = side > 5 ? 1 : 0, size = side - gap;
  const cell = state.cells[b], kind = cell.state, owned = `hsl(${hueOf(cell.owner)} 60% ${palette.lightness})`;
  pen.clearRect(x, y, side, side);
  pen.fillStyle = kind === "." ? palette.absent : kind === "f" ? palette.free : kind === "c" ? palette.cached : owned;
  if (kind === "t") pen.fillStyle = palette.accent;
  pen.fillRect(x, y, size, size);
  if (kind === "." && side > 3) {
    pen.strokeStyle = palette.line;
    pen.strokeRect(x + .5, y + .5, size - 1, size - 1);
  }
  if (kind === "U" || kind === "S") { // partly filled: its upper half is empty
    pen.fillStyle = palette.free;
    pen.fillRect(x, y, size, Math.floor(size / 2));
  }
  if (kind === "s" || kind === "S" || kind === "t") { // a corner: of several
    pen.fillStyle = palette.text;
    pen.beginPath();
    pen.moveTo(x + size, y + size);
    pen.lineTo(x + size, y + size / 2);
    pen.lineTo(x + size / 2, y + size);
    pen.fill();
  }
  const since = glow.get(b);
  if (since !== undefined && !still.matches) {
    const left = 1 - (now - since) / GLOW_MS;
    if (left > 0) {
      pen.fillStyle = palette.text;
      pen.globalAlpha = left * .5;
      pen.fillRect(x, y, size, size);
      pen.globalAlpha = 1;
    } else {
      glow.delete(b);
    }
  }
  if (marked.has(b) || b === selected) {
    pen.strokeStyle = b === selected ? palette.mark : palette.accent;
    pen.lineWidth = 2;
    pen.strokeRect(x + 1, y + 1, size - 2, size - 2);
    pen.lineWidth = 1;
  }
}

function drawAll() {
  palette = colours();
  const width = Math.max(1, canvas.clientWidth), n = state.cells.length;
  side = Math.max(3, Math.min(18, Math.floor(Math.sqrt(width * 360 / Math.max(n, 1)))));
  columns = Math.max(1, Math.floor(width / side));
  const height = Math.ceil(n / columns) * side, scale = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  const now = performance.now();
  for (let b = 0; b < n; b++) drawCell(b, now);
}

function fade(now) {
  for (const b of [...glow.keys()]) drawCell(b, now);
  drawing = glow.size > 0;
  if (drawing) requestAnimationFrame(fade);
}

function draw(changed) {
  const now = performance.now();
  for (const b of changed) {
    if (!still.matches) glow.set(b, now);
    drawCell(b, now);
  }
  if (!drawing && glow.size) {
    drawing = true;
    requestAnimationFrame(fade);
  }
}

export function mark(blocks) {
  const before = marked;
  marked = new Set(blocks.filter(b => b >= 0 && b < state.cells.length));
  for (const b of new Set([...before, ...marked])) if (b < state.cells.length) drawCell(b, performance.now());
}

export function choose(b) {
  if (b < 0 || b >= state.cells.length) return;
  const before = selected;
  selected = b;
  if (before >= 0 && before < state.cells.length) drawCell(before, performance.now());
  drawCell(b, performance.now());
  canvas.setAttribute("aria-label", `Block map: block ${b}, ${KINDS[state.cells[b].state]}`);
  onChoose(b);
}

canvas.addEventListener("click", e => choose(Math.floor(e.offsetY / side) * columns + Math.floor(e.offsetX / side)));
canvas.addEventListener("keydown", e => {
  const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns}[e.key];
  if (e.key === "Enter") choose(Math.max(0, selected));
  if (!step && e.key !== "Enter") return;
  if (step) choose(Math.min(state.cells.length - 1, Math.max(0, selected + step)));
  e.preventDefault();
});
new ResizeObserver(drawAll).observe(canvas.parentElement);
export const redraw = drawAll;

// ---- following the server ----

function take(news) {
  for (const key of ["running", "waiting", "requests"]) if (key in news) state[key] = news[key];
  state.number = news.event;
}

export function takeMap(map) {
  state.blockSize = map.block_size;
  state.cells = [...map.states].map((kind, b) => ({state: kind, refs: map.refs[b], owner: map.owners[b]}));
  take(map);
  drawAll();
}

function takeChanges(news) {
  const changed = [];
  for (const [b, kind, refs, owner] of news.changes) {
    if (state.cells[b].state !== kind) changed.push(b);
    else requestAnimationFrame(now => drawCell(b, now));
    state.cells[b] = {state: kind, refs, owner};
  }
  take(news);
  draw(changed);
}

/** For ever: a stream that ends is opened again. */
export async function follow(onLink) {
  for (let pause = 500;; pause = Math.min(8000, pause * 2)) {
    try {
      for await (const {event, data} of events("/paged/events")) {
        if (event === "map") takeMap(JSON.parse(data));
        else if (event === "changes") takeChanges(JSON.parse(data));
        else continue;
        pause = 500;
        onLink(true);
        for (const fn of watchers) fn();
      }
    } catch (error) {
      onLink(false, error.message);
    }
    onLink(false);
    await new Promise(done => setTimeout(done, pause));
  }
}

export const blockFacts = b => getJson(`/paged/blocks/${b}`);
