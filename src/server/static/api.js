// api.js: talking to the server. Errors are Error objects with the server's own words.

let key = sessionStorage.getItem("paged-key") ?? "";
let onKeyNeeded = () => {};

export function setKey(value) {
  key = value;
  sessionStorage.setItem("paged-key", value);
}
export function whenKeyNeeded(fn) {
  onKeyNeeded = fn;
}

async function call(path, options = {}) {
  const headers = {...options.headers};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (options.body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {...options, headers});
  if (response.ok) return response;
  if (response.status === 401) onKeyNeeded();
  let words = `${response.status} ${response.statusText}`;
  try {
    words = (await response.json()).error.message;
  } catch { /* no JSON: the status says it */ }
  throw new Error(words);
}

export const getJson = async path => (await call(path)).json();
export const getText = async path => (await call(path)).text();
export const deleteJson = async path => (await call(path, {method: "DELETE"})).json();
export const patchJson = async (path, value) => (await call(path, {method: "PATCH", body: JSON.stringify(value)})).json();
export const postJson = async (path, value) => (await call(path, {method: "POST", body: JSON.stringify(value)})).json();

/** Events of a text/event-stream answer as {event, data}. Ends with the stream, or when the signal aborts it. */
export async function* events(path, options = {}) {
  const response = await call(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = {event: "message", data: []};
      for (const line of part.split("\n")) {
        const m = line.match(/^(event|data): ?(.*)$/);
        if (m?.[1] === "event") event.event = m[2];
        if (m?.[1] === "data") event.data.push(m[2]);
      }
      if (event.data.length) yield {event: event.event, data: event.data.join("\n")};
    }
  }
}
