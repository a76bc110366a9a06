// kept.js: the conversations that the server keeps: their list, to open, rename, pin and delete. chat.js says what opening means.

import {deleteJson, getJson, patchJson} from "./api.js";

const $ = id => document.getElementById(id);
const PAGE = 50;
let onOpen = () => {}, onGone = () => {}, rows = [], more = false;

export const path = id => `/v1/conversations/${id}`;
const nameOf = c => c.title ?? "Without a title";

function tell(words) {
  $("kept-said").textContent = words;
}

async function attempt(work, words) {
  try {
    await work();
    tell(words);
  } catch (error) {
    tell(error.message);
  }
}

function button(text, label, act) {
  const b = Object.assign(document.createElement("button"), {type: "button", textContent: text});
  if (label) b.setAttribute("aria-label", label);
  b.addEventListener("click", act);
  return b;
}

function change(c, fields, words) {
  return attempt(async () => {
    Object.assign(c, await patchJson(path(c.id), fields));
    draw();
  }, words);
}

/** The row's name becomes a field; Enter takes it, Escape leaves it. */
function rename(c, row) {
  const input = document.createElement("input");
  input.value = c.title ?? "";
  input.maxLength = 60;
  input.setAttribute("aria-label", `New name of ${nameOf(c)}`);
  input.addEventListener("keydown", e => {
    if (e.key === "Enter") change(c, {title: input.value.trim() || null}, "Renamed.");
    if (e.key === "Escape") draw();
  });
  row.querySelector(".name").replaceWith(input);
  input.focus();
}

function remove(c) {
  return attempt(async () => {
    await deleteJson(path(c.id));
    rows = rows.filter(r => r !== c);
    onGone(c.id);
    draw();
  }, `${nameOf(c)} is deleted.`);
}

function rowOf(c) {
  const row = document.createElement("li"), name = nameOf(c);
  const open = button(name, `Open ${name}`, () => attempt(async () => onOpen(await getJson(path(c.id))), `${name} is open.`));
  const pin = button("Pin", `Pin ${name}`, () => change(c, {pinned: !c.pinned}, c.pinned ? "Not pinned any more." : "Pinned: it stays."));
  open.classList.add("name");
  pin.setAttribute("aria-pressed", c.pinned);
  const facts = document.createElement("span");
  facts.className = "faint";
  facts.textContent = `${c.n_messages} messages, ${new Date(c.updated_at * 1000).toLocaleString()}`;
  row.append(open, facts, pin, button("Rename", `Rename ${name}`, () => rename(c, row)), button("Delete", `Delete ${name}`, () => remove(c)));
  return row;
}

function draw() {
  const sorted = [...rows].sort((a, b) => b.pinned - a.pinned || b.updated_at - a.updated_at);
  $("kept-list").replaceChildren(...sorted.map(rowOf));
  if (more) $("kept-list").append(button("More", "More conversations", () => load(rows.at(-1).id)));
  if (!rows.length) $("kept-list").textContent = "None yet: Keep keeps the one that is open.";
}

function load(after) {
  return attempt(async () => {
    const list = await getJson(`/v1/conversations?limit=${PAGE}${after ? `&after=${after}` : ""}`);
    rows = after ? [...rows, ...list.data] : list.data;
    more = list.has_more;
    draw();
  }, "");
}

/** The list again, if it is open. */
export function refresh() {
  if (!$("kept").hidden) load();
}

/** opened: gets a conversation with its messages; gone: the id of one that is deleted. */
export function start(opened, gone) {
  onOpen = opened;
  onGone = gone;
  $("kept-open").addEventListener("click", e => {
    $("kept").hidden = !$("kept").hidden;
    e.currentTarget.ariaExpanded = String(!$("kept").hidden);
    refresh();
  });
}
