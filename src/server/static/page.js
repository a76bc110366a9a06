// page.js: the page of `paged serve`: starts chat and map, and shows the figures and tables beside them.

import {getJson, getText, setKey, whenKeyNeeded} from "./api.js";
import * as chat from "./chat.js";
import * as map from "./map.js";

const $ = id => document.getElementById(id);

// ---- theme, key, model ----

const THEMES = ["", "light", "dark"], THEME_NAMES = ["as the system says", "light", "dark"];
let theme = Math.max(0, THEMES.indexOf(localStorage.getItem("paged-theme") ?? ""));

function showTheme() {
  document.documentElement.dataset.theme = THEMES[theme];
  $("theme").setAttribute("aria-label", `Theme: ${THEME_NAMES[theme]}`);
  $("theme").textContent = "◐○●"[theme];
  map.redraw();
}
$("theme").addEventListener("click", () => {
  theme = (theme + 1) % THEMES.length;
  localStorage.setItem("paged-theme", THEMES[theme]);
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => map.redraw());

whenKeyNeeded(() => { document.querySelector(".key").hidden = false; });
$("key").addEventListener("change", e => {
  setKey(e.target.value);
  findModel();
});

async function findModel() {
  try {
    const name = (await getJson("/v1/models")).data[0].id;
    $("model").textContent = name;
    chat.setModel(name);
  } catch (error) {
    $("model").textContent = error.message;
  }
}

// ---- figures ----

const size = bytes => bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
let before = null;

function metricsOf(text) {
  const out = {};
  for (const line of text.split("\n")) {
    const m = line.match(/^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/);
    if (!m) continue;
    const kind = m[2]?.match(/(?:kind|state)="([^"]*)"/)?.[1];
    out[kind ? `${m[1]}.${kind}` : m[1]] = Number(m[3]);
  }
  return out;
}

async function showFigures() {
  if (document.hidden) return;
  try {
    const m = metricsOf(await getText("/metrics")), now = performance.now();
    $("f-used").textContent = size(m["paged_kv_bytes.used"]);
    $("f-cached").textContent = size(m["paged_kv_bytes.cached"]);
    $("f-backed").textContent = `${size(m["paged_kv_bytes.backed"])} of ${size(m["paged_kv_bytes.limit"])}`;
    const asked = m["vllm:prefix_cache_queries_total"];
    $("f-hits").textContent = asked ? `${Math.round(100 * m["vllm:prefix_cache_hits_total"] / asked)} %` : "–";
    const tokens = m.paged_step_tokens_total;
    if (before) $("f-speed").textContent = Math.round((tokens - before.tokens) * 1000 / (now - before.now));
    before = {tokens, now};
  } catch { /* the line below the map says that there is no link */ }
}

// ---- tables ----

const COUNTS = [["used", "uU", "hsl(210 60% var(--lightness))"], ["shared", "sS", "hsl(137 60% var(--lightness))"],
  ["tails", "t", "var(--accent)"], ["cached", "c", "var(--cached)"], ["free", "f", "var(--free)"], ["not taken", ".", "var(--absent)"]];
let shown = 0; // request whose table is open

function row(r) {
  const tr = document.createElement("tr"), id = document.createElement("td"), open = document.createElement("button");
  id.className = "owner";
  id.style.setProperty("--hue", map.hueOf(r.id));
  open.type = "button";
  open.textContent = r.id;
  open.setAttribute("aria-label", `Block table of request ${r.id}`);
  open.addEventListener("click", () => {
    shown = shown === r.id ? 0 : r.id;
    showTables();
  });
  id.append(open);
  tr.append(id, ...[r.wait === "none" ? "runs" : r.wait, `${r.tokens}`, `${r.cached_tokens}`, `${r.blocks.length}`].map(text =>
    Object.assign(document.createElement("td"), {textContent: text})));
  return tr;
}

function blockButtons(blocks) {
  const div = document.createElement("div");
  div.className = "blocks";
  div.append(...blocks.map((b, i) => {
    const e = document.createElement("button");
    e.type = "button";
    e.textContent = b < 0 ? "–" : b;
    e.title = `tokens ${i * map.state.blockSize} to ${(i + 1) * map.state.blockSize - 1}`;
    e.addEventListener("click", () => map.choose(b));
    return e;
  }));
  return div;
}

let due = 0;
function showTables() {
  due ||= setTimeout(() => {
    due = 0;
    const {cells, requests, running, waiting} = map.state;
    $("f-requests").textContent = `${running}, ${waiting}`;
    const n = {};
    for (const c of cells) n[c.state] = (n[c.state] ?? 0) + 1;
    $("legend").replaceChildren(...COUNTS.map(([name, kinds, colour]) => {
      const li = document.createElement("li"), cell = document.createElement("span");
      const count = [...kinds].reduce((sum, k) => sum + (n[k] ?? 0), 0);
      cell.className = "cell";
      cell.style.background = colour;
      if (kinds === ".") cell.style.border = "1px solid var(--line)";
      li.dataset.kind = name;
      li.dataset.count = count;
      li.append(cell, `${count} ${name}`);
      return li;
    }));
    const focused = document.activeElement?.closest("#requests tr")?.dataset.id;
    $("requests").tBodies[0].replaceChildren(...requests.map(r => Object.assign(row(r), {})));
    for (const [i, tr] of [...$("requests").tBodies[0].rows].entries()) tr.dataset.id = requests[i].id;
    if (focused) $("requests").querySelector(`tr[data-id="${focused}"] button`)?.focus();
    const open = requests.find(r => r.id === shown);
    $("table").replaceChildren(...(open ? [`Block table of request ${open.id}, ${map.state.blockSize} tokens a block:`,
      blockButtons(open.blocks)] : []));
    if (shown) map.mark(open ? open.blocks : []);
    document.body.dataset.event = map.state.number;
  }, 100);
}

async function showBlock(b) {
  try {
    const f = await map.blockFacts(b);
    const who = f.requests.length ? `of request${f.requests.length > 1 ? "s" : ""} ${f.requests.join(", ")}` : "of no request";
    const pieces = document.createElement("div");
    pieces.className = "pieces";
    pieces.textContent = f.pieces.join("");
    const head = document.createElement("div");
    head.textContent = `Block ${b}: ${map.KINDS[f.state]}, ${who}, ${f.refs} reference${f.refs === 1 ? "" : "s"}` +
      (f.tokens.length ? `, ${f.tokens.length} tokens` + (f.position >= 0 ? ` from position ${f.position}` : "") : "");
    $("block").replaceChildren(head, ...(f.tokens.length ? [pieces] : []));
  } catch (error) {
    $("block").textContent = error.message;
  }
}

map.whenChanged(showTables);
map.whenChosen(showBlock);
chat.start();
showTheme();
findModel();
showFigures();
setInterval(showFigures, 1000);
map.follow((linked, why) => {
  $("link").textContent = linked ? `event ${map.state.number}` : `no link to the server${why ? `: ${why}` : ""}; trying again`;
});
