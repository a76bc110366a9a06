// markdown.js: a small Markdown, straight into DOM nodes. No HTML passes through: every piece of text becomes a text node, and
// links are made for http, https and mailto only.

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*|\*(\S(?:[^*]*?\S)?)\*|\[([^\]\n]+)\]\(((?:https?:|mailto:)[^\s)]+)\)/;

function element(name, ...children) {
  const e = document.createElement(name);
  e.append(...children);
  return e;
}

function inline(text) {
  const out = [];
  for (let m; (m = INLINE.exec(text)); text = text.slice(m.index + m[0].length)) {
    if (m.index) out.push(text.slice(0, m.index));
    if (m[1]) out.push(element("code", m[2]));
    else if (m[3]) out.push(element("strong", ...inline(m[3])));
    else if (m[4]) out.push(element("em", ...inline(m[4])));
    else {
      const a = element("a", ...inline(m[5]));
      a.href = m[6];
      a.rel = "noopener noreferrer";
      a.target = "_blank";
      out.push(a);
    }
  }
  if (text) out.push(text);
  return out;
}

function codeBlock(lines, language) {
  const code = element("code", lines.join("\n"));
  if (language) code.dataset.language = language;
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", () => navigator.clipboard?.writeText(code.textContent));
  return element("pre", code, copy);
}

const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(c => c.trim());

function table(rows) {
  const head = element("tr", ...cells(rows[0]).map(c => element("th", ...inline(c))));
  const body = rows.slice(2).map(r => element("tr", ...cells(r).map(c => element("td", ...inline(c)))));
  return element("table", element("thead", head), element("tbody", ...body));
}

function list(items, ordered) {
  const e = element(ordered ? "ol" : "ul", ...items.map(i => element("li", ...inline(i.text))));
  if (ordered && items[0].number !== 1) e.start = items[0].number;
  return e;
}

/** Nodes for a text that may still grow: an open code fence is a code block. */
export function markdown(text) {
  const lines = text.split("\n"), out = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) out.push(element("p", ...paragraph.flatMap((l, i) => i ? [element("br"), ...inline(l)] : inline(l))));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i], fence = line.match(/^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/);
    const item = line.match(/^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)/), heading = line.match(/^(#{1,6})\s+(.*)/);
    if (fence) {
      flush();
      const code = [];
      while (++i < lines.length && !lines[i].trim().startsWith(fence[1])) code.push(lines[i]);
      out.push(codeBlock(code, fence[2]));
    } else if (heading) {
      flush();
      out.push(element("h" + Math.min(6, heading[1].length + 2), ...inline(heading[2])));
    } else if (item && (paragraph.length === 0 || item[1] || item[2] === "1")) {
      flush();
      const items = [], ordered = !item[1];
      for (let m; i < lines.length && (m = lines[i].match(/^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)/)) && !m[1] === ordered; i++)
        items.push({text: m[3], number: Number(m[2] ?? 1)});
      i--;
      out.push(list(items, ordered));
    } else if (line.includes("|") && /^\s*\|?[\s:|-]*-[\s:|-]*$/.test(lines[i + 1] ?? "") && lines[i + 1].includes("|")) {
      flush();
      const rows = [];
      while (i < lines.length && lines[i].includes("|")) rows.push(lines[i++]);
      i--;
      out.push(table(rows));
    } else if (/^\s*>\s?/.test(line)) {
      flush();
      const quoted = [];
      while (i < lines.length && /^\s*>\s?/.test(lines[i])) quoted.push(lines[i++].replace(/^\s*>\s?/, ""));
      i--;
      out.push(element("blockquote", ...markdown(quoted.join("\n"))));
    } else if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      flush();
      out.push(element("hr"));
    } else if (line.trim() === "") {
      flush();
    } else {
      paragraph.push(line);
    }
  }
  flush();
  return out;
}
