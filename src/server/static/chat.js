// chat.js: conversations. A conversation is a list of messages in the browser, and what the server has cached of it, it finds by
// itself. Editing, regenerating and forking are changes of the list; a fork is a copy up to a message. One that has an id is kept
// by the server too (kept.js): its turns are said there, and what cuts it short goes on in a copy there.

import {deleteJson, events, postJson} from "./api.js";
import * as kept from "./kept.js";
import {markdown} from "./markdown.js";
import * as map from "./map.js";

const $ = id => document.getElementById(id);
const box = $("messages"), form = $("settings");
let conversations = [], current = null, running = null, model = "";

export const setModel = name => { model = name; };

// ---- the list ----

function open(messages = [], name = `Chat ${conversations.length + 1}`, id = null) {
  current = {name, messages, id, request: 0, table: []};
  conversations.push(current);
  showAll();
}

function save() {
  try {
    localStorage.setItem("paged-chats", JSON.stringify(conversations.map(({name, messages, id}) => ({name, messages, id}))));
  } catch { /* full or forbidden: they live as long as the page */ }
}

function restore() {
  try {
    for (const {name, messages, id} of JSON.parse(localStorage.getItem("paged-chats") ?? "[]"))
      conversations.push({name, messages, id: id ?? null, request: 0, table: []});
  } catch { /* not ours */ }
  current = conversations.at(-1);
  if (current) showAll();
  else open();
}

// ---- drawing ----

function button(text, label, act) {
  const b = document.createElement("button");
  b.type = "button";
  b.textContent = text;
  if (label) b.setAttribute("aria-label", label);
  b.addEventListener("click", act);
  return b;
}

function showTabs() {
  $("tabs").replaceChildren(...conversations.map(c => {
    const tab = button(c.name, null, () => {
      if (running) return;
      current = c;
      showAll();
    });
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-selected", c === current);
    return tab;
  }));
}

function figures(m) {
  const u = m.usage;
  if (!u) return "";
  const cached = u.prompt_tokens_details?.cached_tokens ?? 0;
  const speed = m.seconds > 0 && u.completion_tokens > 1 ? `, ${Math.round((u.completion_tokens - 1) / m.seconds)} tokens/s` : "";
  return `${u.prompt_tokens} tokens read (${cached} from the cache), ${u.completion_tokens} written${speed}` +
    (m.first_ms ? `, first after ${Math.round(m.first_ms)} ms` : "") + (m.finish && m.finish !== "stop" ? `, ended by ${m.finish}` : "");
}

function fill(node, m) {
  const body = node.querySelector(".body");
  body.replaceChildren(...(m.role === "assistant" ? markdown(m.content) : [Object.assign(document.createElement("p"), {
    textContent: m.content, style: "white-space: pre-wrap"})]));
  node.querySelector(".figures").textContent = m.error ?? figures(m);
  node.classList.toggle("failed", Boolean(m.error));
}

function messageNode(m, i) {
  const node = document.createElement("article");
  node.className = `message ${m.role}`;
  node.innerHTML = '<div class="who"></div><div class="body"></div><div class="tools"><span class="figures faint"></span></div>';
  node.querySelector(".who").textContent = {user: "You", assistant: model || "Model"}[m.role] ?? m.role;
  const tools = node.querySelector(".tools"), n = i + 1;
  tools.prepend(button("Copy", `Copy message ${n}`, () => navigator.clipboard?.writeText(m.content)));
  if (m.role === "user") tools.prepend(button("Edit", `Edit message ${n}`, () => edit(i)));
  if (m.role === "assistant") tools.prepend(button("Regenerate", `Regenerate message ${n}`, () => regenerate(i)));
  tools.prepend(button("Fork", `Fork after message ${n}`, () => fork(i)));
  fill(node, m);
  return node;
}

function showAll() {
  showTabs();
  $("keep").ariaPressed = String(Boolean(current.id));
  box.replaceChildren(...current.messages.map(messageNode));
  box.scrollTop = box.scrollHeight;
  if ($("tokens").ariaPressed === "true") showTokens();
}

// ---- changes ----

const stopped = () => !running;

/** What comes after the first i messages goes. The server cannot shorten a conversation at its end: what is left begins another
 * one there, which a turn waits for. */
function cut(i) {
  current.messages.length = i;
  showAll();
  current.ready = current.id ? replace(current) : null;
  return current.ready;
}

async function replace(chat) {
  const old = chat.id;
  try {
    chat.id = (await postJson("/v1/conversations", {messages: asked(), title: chat.name.slice(0, 60)})).id;
    await deleteJson(kept.path(old));
  } catch (error) {
    $("said").textContent = error.message;
  }
  save();
  kept.refresh();
}

function edit(i) {
  if (!stopped()) return;
  $("question").value = current.messages[i].content;
  cut(i);
  $("question").focus();
}

async function regenerate(i) {
  if (!stopped()) return;
  const said = current.messages[i - 1];
  await cut(i - 1);
  current.messages.push(said);
  showAll();
  answer();
}

/** Has the server keep the current one, or not any more. */
async function keep() {
  if (!stopped()) return;
  const chat = current;
  try {
    if (chat.id) await deleteJson(kept.path(chat.id));
    chat.id = chat.id ? null : (await postJson("/v1/conversations", {messages: asked(), title: chat.name.slice(0, 60)})).id;
  } catch (error) {
    $("said").textContent = error.message;
  }
  save();
  showAll();
  kept.refresh();
}

/** Shows one that the server keeps. Its system message is a part of it, and is not among the settings. */
function showKept({id, title, messages}) {
  if (!stopped()) return;
  const here = conversations.find(c => c.id === id);
  const said = messages.map(({role, content}) => ({role, content: typeof content === "string" ? content : content.map(p => p.text ?? "").join("")}));
  if (here) {
    current = Object.assign(here, {messages: said});
    showAll();
  } else {
    open(said, title ?? `Chat ${conversations.length + 1}`, id);
  }
  save();
}

function forget(id) {
  for (const c of conversations) if (c.id === id) c.id = null;
  save();
  showAll();
}

function fork(i) {
  if (!stopped()) return;
  const n = conversations.filter(c => c.name.startsWith(`${current.name} fork`)).length + 1;
  open(structuredClone(current.messages.slice(0, i + 1)), `${current.name} fork ${n}`);
  save();
}

// ---- an answer ----

function settings() {
  const out = {};
  for (const [name, value] of new FormData(form)) {
    if (value === "" || name === "system") continue;
    out[name] = name === "stop" ? value : Number(value);
  }
  return out;
}

function asked() {
  const system = form.elements.system.value.trim();
  const said = current.messages.filter(m => !m.error).map(({role, content}) => ({role, content}));
  return system && said[0]?.role !== "system" ? [{role: "system", content: system}, ...said] : said;
}

/** Where the current one is answered, and with what: a kept one is told only what is new. */
function question(messages) {
  const more = {stream: true, stream_options: {include_usage: true}, ...settings()};
  return current.id ? [`${kept.path(current.id)}/turns`, {content: messages.at(-1).content, ...more}]
    : ["/v1/chat/completions", {model, messages, ...more}];
}

async function answer() {
  const messages = asked(), m = {role: "assistant", content: ""}, chat = current;
  const node = messageNode(m, chat.messages.push(m) - 1), start = performance.now();
  let first = 0, last = 0, frame = 0;
  box.append(node);
  running = new AbortController();
  show();
  const repaint = () => {
    frame ||= requestAnimationFrame(() => {
      const follow = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
      frame = 0;
      fill(node, m);
      if (follow) box.scrollTop = box.scrollHeight;
    });
  };
  try {
    await chat.ready;
    const [path, value] = question(messages), body = JSON.stringify(value);
    for await (const {data} of events(path, {method: "POST", body, signal: running.signal})) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      chat.request = parseInt(chunk.id.slice(-8), 16);
      m.usage = chunk.usage ?? m.usage;
      const choice = chunk.choices?.[0];
      m.finish = choice?.finish_reason ?? m.finish;
      if (!choice?.delta?.content) continue;
      last = performance.now();
      first ||= last;
      m.content += choice.delta.content;
      repaint();
    }
  } catch (error) {
    if (error.name === "AbortError") m.finish = "you";
    else m.error = error.message;
  }
  m.first_ms = first ? first - start : 0;
  m.seconds = (last - first) / 1000;
  running = null;
  cancelAnimationFrame(frame);
  fill(node, m);
  show();
  save();
  kept.refresh();
  $("said").textContent = m.error ?? (m.finish === "you" ? "Stopped." : "The answer is complete.");
  if ($("tokens").ariaPressed === "true") showTokens();
}

function show() {
  $("send").disabled = Boolean(running);
  $("stop").hidden = !running;
}

// ---- tokens and their blocks ----

/** The table of this conversation's request, as long as there is one. */
map.whenChanged(() => {
  const mine = current && map.state.requests.find(r => r.id === current.request);
  if (mine) current.table = mine.blocks;
});

function tokenNode(piece, i) {
  const at = Math.floor(i / map.state.blockSize), block = current.table[at];
  const t = button(piece === "" ? "·" : piece, `Token ${i}: ${piece.trim() || "blank"}`, () => {
    for (const other of box.querySelectorAll(".token.here")) other.classList.remove("here");
    t.classList.add("here");
    if (block >= 0) map.choose(block);
  });
  t.className = "token";
  t.style.setProperty("--hue", map.hueOf(at + 1));
  t.title = block >= 0 ? `token ${i}, block ${block}` : `token ${i}, block ${at} of the request`;
  return t;
}

async function showTokens() {
  const chat = current;
  try {
    const {token_strs} = await postJson("/tokenize", {messages: asked(), add_generation_prompt: false, return_token_strs: true});
    if (chat !== current) return;
    box.replaceChildren(...token_strs.map(tokenNode));
    map.mark(chat.table);
  } catch (error) {
    box.textContent = error.message;
  }
}

// ---- export ----

function download(name, type, text) {
  const a = document.createElement("a");
  a.href = URL.createObjectURL(new Blob([text], {type}));
  a.download = name;
  a.click();
  URL.revokeObjectURL(a.href);
}

export function start() {
  $("ask").addEventListener("submit", e => {
    e.preventDefault();
    const text = $("question").value.trim();
    if (!text || running) return;
    $("question").value = "";
    current.messages.push({role: "user", content: text});
    $("tokens").ariaPressed = "false";
    showAll();
    answer();
  });
  $("question").addEventListener("keydown", e => {
    if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
    e.preventDefault();
    $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", () => stopped() && open());
  $("keep").addEventListener("click", keep);
  kept.start(showKept, forget);
  $("tokens").addEventListener("click", e => {
    if (running) return;
    const on = e.currentTarget.ariaPressed !== "true";
    e.currentTarget.ariaPressed = String(on);
    if (!on) map.mark([]);
    showAll();
  });
  $("settings-open").addEventListener("click", e => {
    form.hidden = !form.hidden;
    e.currentTarget.ariaExpanded = String(!form.hidden);
  });
  form.addEventListener("submit", e => e.preventDefault());
  $("export-json").addEventListener("click", () => download(`${current.name}.json`, "application/json",
    JSON.stringify({model, settings: settings(), messages: asked()}, null, 2)));
  $("export-md").addEventListener("click", () => download(`${current.name}.md`, "text/markdown",
    current.messages.map(m => `**${m.role}**\n\n${m.content}\n`).join("\n")));
  restore();
}
