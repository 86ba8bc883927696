"use strict";
// What a report's page can do besides being read: the shared parts and the tables. charts.js draws. `data` is as
// tfswap/report/page.py writes it.
const SHOWN = 100, LINES = 12;
const main = document.querySelector("main");
let data = null;

// One unit for all sizes of a table, as tfswap/support/sizes.py's Unit.
function unitOf(largest) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let n = 0;
  while (n < names.length - 1 && largest >= 1024 ** (n + 1)) n++;
  const digits = n === 0 ? 0 : largest >= 100 * 1024 ** n ? 1 : 2, least = 10 ** -digits;
  const text = bytes => {
    const value = bytes / 1024 ** n, shown = bytes === 0 || Math.abs(value) >= least / 2;
    return `${shown ? value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits}) : `<${least.toFixed(digits)}`} ${names[n]}`;
  };
  return text;
}
function time(seconds) {
  return seconds >= 1 ? `${seconds.toFixed(3)} s` : seconds >= 1e-3 ? `${(1e3 * seconds).toFixed(2)} ms` : `${(1e6 * seconds).toFixed(1)} µs`;
}
function made(tag, props, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}
// The tensor that was chosen last, by name; what shows tensors is notified.
const followers = [];
function choose(name, from) { for (const follow of followers) follow(name, from); }
// What the search finds, as a test of a name's number; null for everything. Charts are notified.
const searchers = [];
function pick(name, from) {
  const button = made("button", {className: "pick", title: name}, made("bdi", {}, name));
  button.addEventListener("click", () => choose(name, from));
  return button;
}
function entry(kind, content, amount) {
  const mark = made("i", {});
  mark.style.setProperty("--c", kind === null ? "transparent" : `var(--${data.kinds[kind]})`);
  const text = typeof content === "string" ? made("bdi", {}, content) : content;
  return made("p", {title: text.textContent}, mark, made("span", {}, text), made("b", {}, amount));
}
// Numbers from their differences.
function rising(steps) {
  const found = new Float64Array(steps.length);
  let sum = 0;
  for (let n = 0; n < steps.length; n++) found[n] = sum += steps[n];
  return found;
}
// The index of the last of `numbers`, which rise, that is at or before `at`; 0 where none is.
function last(numbers, at) {
  let low = 0, high = numbers.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (numbers[middle] <= at) low = middle; else high = middle - 1;
  }
  return low;
}

function showTensors() {
  const table = document.querySelector("table.tensors");
  if (!table) return;
  const body = table.tBodies[0], find = document.querySelector("input[type=search]"), more = document.querySelector(".more");
  const found = document.querySelector(".found");
  for (const row of data.rows) {
    row.number = row.name;
    for (const part of ["name", "op", "where", "reason", "source"]) row[part] = data.names[row[part]];
    row.text = `${row.name} ${row.op} ${row.tactic} ${row.source} ${row.where}`.toLowerCase();
  }
  const size = unitOf(data.rows.reduce((most, r) => Math.max(most, r.nbytes), 0));
  const switches = [...document.querySelectorAll(".switch")], tactics = new Set();
  const collator = new Intl.Collator("en", {numeric: true});
  let rows = data.rows, sorted = null, down = true, shown = SHOWN, chosen = null;
  const keys = [r => r.nbytes, r => r.tactic, r => r.name, r => r.reason, r => r.moved, r => r.cost_s];
  function draw() {
    const word = find.value.trim().toLowerCase();
    rows = data.rows.filter(r => (!word || r.text.includes(word)) && (!tactics.size || r.tactic.split(", ").some(tactic => tactics.has(tactic))));
    if (sorted !== null) {
      const key = keys[sorted], order = (a, b) => typeof a === "number" ? a - b : collator.compare(a, b);
      rows.sort((a, b) => down ? order(key(b), key(a)) : order(key(a), key(b)));
    }
    body.replaceChildren(...rows.slice(0, shown).map(r => made("tr", {className: r.name === chosen ? "chosen" : ""},
      made("td", {className: "n"}, size(r.nbytes)),
      made("td", {}, made("span", {className: `tactic ${r.tactic.split(", ").pop()}`}, r.tactic)),
      made("td", {className: "name"}, pick(r.name, "table"), made("br", {}), made("span", {className: "soft"}, [r.op, r.source, r.where && `on ${r.where}`].filter(Boolean).join(" · "))),
      made("td", {className: "why"}, r.reason),
      made("td", {className: "n"}, r.moved ? size(r.moved) : ""),
      made("td", {className: "n"}, r.cost_s ? time(r.cost_s) : ""))));
    more.hidden = rows.length <= shown;
    const all = rows.length === data.rows.length, held = searchers.map(search => search(all ? null : new Set(rows.map(r => r.number))));
    found.textContent = `${rows.length} tensor${rows.length === 1 ? "" : "s"}${all || !held.length ? "" : `, ${unitOf(held.at(-1))(held.at(-1))} at most at the same time`}`;
  }
  table.querySelectorAll("th").forEach((head, n) => head.querySelector("button").addEventListener("click", () => {
    down = sorted === n ? !down : n !== 1 && n !== 2 && n !== 3;
    sorted = n;
    table.querySelectorAll("th").forEach(h => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    draw();
  }));
  function restart() { shown = SHOWN; draw(); }
  searching(find, restart);
  for (const button of switches) button.addEventListener("click", () => {
    const {tactic} = button.dataset, pressed = !tactics.delete(tactic);
    if (pressed) tactics.add(tactic);
    button.setAttribute("aria-pressed", pressed);
    restart();
  });
  followers.push((name, source) => {
    chosen = name;
    if (source === "chart" || source === "line") {
      tactics.clear();
      for (const button of switches) button.setAttribute("aria-pressed", false);
      find.value = name;
      restart();
      if (source === "chart") table.scrollIntoView({block: "center"});
    } else draw();
  });
  more.addEventListener("click", () => { shown += 10 * SHOWN; draw(); });
  draw();
}

// The program's lines by the bytes of their tensors at the peak of the last chart, which is the planned one.
function showLines() {
  const place = document.querySelector(".lines");
  if (!place || !charts.length) return;
  const {alive, total} = charts.at(-1).atPeak(), lines = new Map();
  const sources = new Map(data.rows.filter(r => r.source).map(r => [r.number, r.source]));
  for (const [name, nbytes] of alive) {
    const line = sources.get(name);
    if (!line) continue;
    const [sum, count] = lines.get(line) ?? [0, 0];
    lines.set(line, [sum + nbytes, count + 1]);
  }
  const rows = [...lines].sort((a, b) => b[1][0] - a[1][0]).slice(0, LINES), size = unitOf(rows.length ? rows[0][1][0] : 0);
  place.hidden = !rows.length;
  place.querySelector("tbody").replaceChildren(...rows.map(([line, [sum, count]]) => made("tr", {},
    made("td", {className: "n"}, size(sum)), made("td", {className: "n"}, `${Math.round(100 * sum / total)}%`),
    made("td", {className: "n"}, String(count)), made("td", {className: "name"}, pick(line, "line")))));
}

function start(content) {
  data = content;
  main.classList.add("scripted");
  showCharts();
  showTensors();
  showLines();
}
const store = document.getElementById("data");
function packed() {
  const bytes = Uint8Array.from(atob(store.textContent), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}
// For tests: fulfilled once the page is there.
let ready = Promise.resolve();
if ("packed" in store.dataset) ready = packed().then(start); else start(JSON.parse(store.textContent));
