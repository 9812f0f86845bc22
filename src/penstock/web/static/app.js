"use strict";
// The console: asks the server every two seconds and draws what it says. Everything is built as nodes, never as HTML text.
const SVG = "http://www.w3.org/2000/svg";
const PHASES = ["plan", "stage", "apply", "commit", "ack"];
const ENDED = ["stopped", "failed", "dead"];
const EVERY_MS = 2000;
const by = (id) => document.getElementById(id);
let token = sessionStorage.getItem("token") || "";
let writable = false, lockable = true, page = null, turn = 0, history_ = null, view = "", hours = Number(localStorage.getItem("hours")) || 2;

// -- small tools --
function make(name, attributes, ...children) {
  const node = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "on") node.addEventListener("click", value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const cut = (name, most) => name.length > most ? name.slice(0, Math.ceil(most / 2) - 1) + "…" + name.slice(-Math.floor(most / 2)) : name; // ends tell names apart
const many = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;
const count = (n) => n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en-US");
function short(n) {
  if (n === null || n === undefined) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) if (n >= size) return (n / (size === 1e4 ? 1e3 : size)).toFixed(1) + unit;
  return n >= 100 || Number.isInteger(n) ? String(Math.round(n)) : n.toFixed(1);
}
function size(n) {
  if (n === null || n === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) { if (n < 1000) return (unit === "B" ? Math.round(n) : n.toFixed(1)) + " " + unit; n /= 1000; }
  return n.toFixed(1) + " TB";
}
function secs(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return (s && s < .01 ? (s * 1000).toFixed(1) : Math.round(s * 1000)) + " ms";
  if (s < 90) return s.toFixed(s < 10 ? 1 : 0) + " s";
  const minutes = Math.floor(s / 60);
  return minutes < 90 ? minutes + " min" : minutes < 2880 ? (minutes / 60).toFixed(1) + " h" : (minutes / 1440).toFixed(1) + " d";
}
const lag = (s) => s.lag === null ? "–" : s.lag_unit === "bytes" ? size(s.lag) : short(s.lag) + " rows";
function clock(at) { // with the day, if it is another one
  const when = new Date(typeof at === "number" ? at * 1000 : at), day = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" };
  return when.toDateString() === new Date().toDateString() ? when.toLocaleTimeString() : when.toLocaleString([], day);
}
const colour = (state) => ({ running: "good", healthy: "good", active: "good", degraded: "warn", seeding: "warn", unhealthy: "bad",
  failed: "bad", dead: "bad" })[state] || "none";
const words = (text) => text.split("`").map((part, i) => i % 2 ? make("code", {}, part) : part);
const dot = (state) => make("span", { class: "dot " + colour(state) }, "● " + state.replace("_", " "));

const octets = (text) => String.fromCharCode(...new TextEncoder().encode(text)); // a header takes nothing else
async function ask(path, body) {
  const options = { headers: token ? { Authorization: "Bearer " + octets(token) } : {}, cache: "no-store" };
  if (body) { options.method = "POST"; options.body = JSON.stringify(body); options.headers["Content-Type"] = "application/json"; }
  const answer = await fetch(path, options);
  const said = await answer.json().catch(() => ({ error: answer.statusText }));
  if (answer.status === 401) { said.error = "This address needs the token: Unlock actions."; }
  if (!answer.ok) throw new Error(said.error || answer.status);
  return said;
}
function question(title, text, field) {
  by("ask-title").textContent = title;
  by("ask-text").textContent = text;
  by("ask-field").hidden = !field;
  by("ask-input").value = "";
  by("ask").showModal();
  return new Promise((done) => { answered = done; });
}
let answered = () => {}; // not by the event "close", which comes late: it would answer a question that was asked meanwhile
by("ask").addEventListener("click", (event) => { const button = event.target.closest("button"); if (button) answered(button.value === "yes"); });
by("ask").addEventListener("cancel", () => answered(false));
by("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target === by("ask-input")) { event.preventDefault(); by("ask-yes").click(); }
});
function say(text, bad) { by("link").textContent = text; by("link").className = bad ? "bad" : "quiet"; }

// -- panels: each is drawn again only when what it shows has changed, and the focus stays where it was --
function panel(id, title, kind, data, draw, now) {
  let node = by("panel-" + id);
  if (!node) {
    node = make("section", { class: "panel " + kind, id: "panel-" + id, "aria-labelledby": "title-" + id },
      make("h2", {}, make("span", { id: "title-" + id }, title), make("span", { class: "now" })), make("div", { class: "body" }));
    by("panels").append(node);
  }
  node.querySelector(".now").textContent = now || "";
  const sign = JSON.stringify(data === undefined ? null : data) + writable + narrow() + hours;
  if (node.dataset.sign === sign) return;
  node.dataset.sign = sign;
  const body = node.querySelector(".body"), focused = document.activeElement && document.activeElement.dataset.key;
  const open = new Set([...body.querySelectorAll("details[open]")].map((each) => each.dataset.key));
  const scrolled = body.querySelector(".scroll")?.scrollTop;
  body.replaceChildren(...[draw(data)].flat(3).filter(Boolean));
  for (const each of body.querySelectorAll("details")) if (open.has(each.dataset.key)) each.open = true;
  if (scrolled && body.querySelector(".scroll")) body.querySelector(".scroll").scrollTop = scrolled;
  if (focused) [...body.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)?.focus();
  const caret = document.activeElement.dataset.key === "seek" && document.activeElement;
  if (caret) caret.setSelectionRange(caret.value.length, caret.value.length);
}
const scroll = (name, ...inside) => make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, inside);
function table(head, rows, empty) {
  if (!rows.length) return make("p", { class: "quiet" }, empty || "None.");
  const plain = (each) => each instanceof Node || typeof each === "string", names = head.map((h) => h.n || h);
  const cell = (tag, more, each) => make(tag, { class: plain(each) ? "" : "n", ...more }, plain(each) ? each : each.n);
  // The roles stay when a phone lays rows out as cards, each value after the name of its column.
  return scroll(names.join(", "), make("table", { role: "table", class: head.length > 3 ? "cards" : "" },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, head.map((each) => cell("th", { scope: "col", role: "columnheader" }, each)))),
    make("tbody", { role: "rowgroup" }, rows.map((row) => make("tr", { role: "row" }, row.map((each, i) => cell("td", { role: "cell", "data-head": names[i] }, each)))))));
}
const position = (name, text) => text.length > 120 ? make("details", { "data-key": "position" + name }, make("summary", {}, make("code", {}, text.slice(0, 60) + "…")), make("code", { class: "long" }, text))
  : make("code", { class: text ? "long" : "" }, text || "–");
const numbers = (pairs) => make("div", { class: "numbers" }, pairs.map(([name, value, kind]) =>
  make("div", {}, make("span", {}, name), make("b", { class: kind || "" }, value))));

// -- pictures: on a phone they have fewer units, so that letters stay as large as they are --
const narrow = () => innerWidth < 600;
function chart(series, format, label) {
  const points = series.flatMap((each) => each.points).filter((p) => p[1] !== null);
  if (new Set(points.map((p) => p[0])).size < 2) return make("p", { class: "quiet" }, "Not enough data yet.");
  const W = narrow() ? 360 : 600, H = 150, left = 46, from = Math.min(...points.map((p) => p[0])), to = Math.max(...points.map((p) => p[0]), from + 1);
  const top = Math.max(...points.map((p) => p[1]), 1e-9) * 1.1;
  const x = (at) => left + (at - from) / (to - from) * (W - left - 4), y = (v) => H - 18 - v / top * (H - 28);
  const svg = make("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
  for (const share of [0, .5, 1]) svg.append(make("svg:line", { class: "grid", x1: left, x2: W - 4, y1: y(top * share / 1.1), y2: y(top * share / 1.1) }),
    make("svg:text", { x: left - 6, y: y(top * share / 1.1) + 4, "text-anchor": "end" }, format(top * share / 1.1)));
  for (const share of narrow() ? [0, 1] : [0, .5, 1]) svg.append(make("svg:text", { x: x(from + (to - from) * share), y: H - 2,
    "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, clock(from + (to - from) * share)));
  for (const each of series) {
    let path = "", pen = false;
    for (const [at, v] of each.points) { if (v === null) { pen = false; continue; } path += `${pen ? "L" : "M"}${x(at).toFixed(1)} ${y(v).toFixed(1)}${pen ? "" : "h0"}`; pen = true; }
    svg.append(make("svg:path", { class: each.kind, d: path }));
  }
  const names = series.filter((each) => each.name);
  return [svg, names.length ? legend(names.map((each) => [each.kind, each.name])) : null];
}
const legend = (entries) => make("div", { class: "legend" }, entries.map(([kind, name]) => make("span", {},
  make("svg:svg", { viewBox: "0 0 11 11", "aria-hidden": "true" }, PHASES.includes(kind) ? make("svg:rect", { class: kind, width: 11, height: 11 })
    : make("svg:line", { class: kind, x1: 0, x2: 11, y1: 6, y2: 6 })), name)));

function flow(status) {
  const topics = {}, links = [];
  for (const [sink, part] of Object.entries(status.sinks)) for (const [topic, written] of Object.entries(part.topics)) {
    topics[topic] = Math.max(topics[topic] || 0, written.rows_per_sec);
    links.push([1, topic, sink, written.rows_per_sec, part.state]);
  }
  for (const [source, topic, sink] of status.flows) {
    if (!(topic in topics)) topics[topic] = 0;
    if (source && status.sources[source] && !links.some((l) => l[0] === 0 && l[1] === source && l[2] === topic))
      links.push([0, source, topic, topics[topic], status.sources[source].state]);
    if (!links.some((l) => l[0] === 1 && l[1] === topic && l[2] === sink) && status.sinks[sink])
      links.push([1, topic, sink, 0, status.sinks[sink].state]);
  }
  const shown = Object.keys(topics).sort((a, b) => topics[b] - topics[a]).slice(0, 12), rest = Object.keys(topics).length - shown.length;
  const columns = [Object.keys(status.sources), shown, Object.keys(status.sinks)];
  const rows = Math.max(...columns.map((each) => each.length), 1), small = narrow();
  const W = small ? 372 : 900, H = Math.max(90, rows * 44 + 14), wide = small ? 108 : 210, most = small ? 15 : 27;
  const place = columns.map((names, i) => Object.fromEntries(names.map((name, j) =>
    [name, { x: i * (W - wide) / 2, y: (j + .5) * H / names.length }])));
  const fastest = Math.max(...links.map((each) => each[3]), 1), inset = small ? 6 : 10;
  const svg = make("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "Sources, topics and sinks; the width is the rate, the colour is the health" });
  for (const [step, from, to, rate, state] of links) {
    const a = place[step][from], b = place[step + 1][to];
    if (!a || !b) continue;
    const x1 = a.x + wide, mid = (x1 + b.x) / 2, width = 1.5 + 14 * Math.sqrt(rate / fastest);
    svg.append(make("svg:path", { class: "flow " + colour(state === "unknown" && !ENDED.includes(status.state) ? "healthy" : state), "stroke-width": width.toFixed(1),
      d: `M${x1} ${a.y}C${mid} ${a.y} ${mid} ${b.y} ${b.x} ${b.y}` }, make("svg:title", {}, `${from} → ${to}: ${short(rate)} rows/s`)));
  }
  columns.forEach((names, i) => names.forEach((name) => {
    const at = place[i][name], part = [status.sources, {}, status.sinks][i][name];
    const rate = i === 0 ? part.rows_per_sec : i === 1 ? topics[name] : Object.values(part.topics).reduce((sum, t) => sum + t.rows_per_sec, 0);
    const state = part ? (part.state === "unknown" ? "none" : part.state) : "none";
    const text = cut(name, most);
    svg.append(make("svg:g", {}, make("svg:rect", { class: "node " + (part ? colour(state) : "none"), x: at.x, y: at.y - 18, width: wide, height: 36, rx: 6 }),
      make("svg:text", { class: "name", x: at.x + inset, y: at.y - 2 }, text),
      make("svg:text", { x: at.x + inset, y: at.y + 13 }, `${short(rate)} rows/s` + (part && part.lag && !small ? ` · lag ${lag(part)}` : "")),
      make("svg:title", {}, name + (part ? `: ${part.state} ${part.reason}` : ""))));
  }));
  return [svg, rest > 0 ? make("p", { class: "quiet" }, `and ${rest} more topics`) : null];
}
function timeline(epochs) {
  if (!epochs.length) return make("p", { class: "quiet" }, "No epoch yet.");
  const shown = narrow() ? 30 : 60, last = epochs.slice(-shown), W = narrow() ? 360 : 900, H = 150, left = 46, slot = (W - left) / shown;
  const total = (e) => PHASES.reduce((sum, p) => sum + (e[p] || 0), 0), top = Math.max(...last.map(total), 1e-3) * 1.05;
  const svg = make("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "The last epochs, each with the time of its phases" });
  for (const share of [0, .5, 1]) { const y = H - 18 - share / 1.05 * (H - 28);
    svg.append(make("svg:line", { class: "grid", x1: left, x2: W, y1: y, y2: y }), make("svg:text", { x: left - 6, y: y + 4, "text-anchor": "end" }, secs(top * share / 1.05))); }
  last.forEach((e, i) => {
    let y = H - 18;
    const bar = make("svg:g", {}, make("svg:title", {}, `epoch ${e.number}, ${clock(e.at)}: ${count(e.rows_out)} rows, ` +
      PHASES.map((p) => `${p} ${secs(e[p] || 0)}`).join(", ")));
    for (const p of PHASES) { const h = (e[p] || 0) / top * (H - 28); y -= h;
      bar.append(make("svg:rect", { class: p, x: left + i * slot, y: y, width: Math.max(1, slot - 2), height: h })); }
    svg.append(bar);
  });
  const end = left + last.length * slot;
  svg.append(make("svg:text", { x: left, y: H - 2 }, "epoch " + last[0].number), end > left + 160 ? make("svg:text", { x: end, y: H - 2, "text-anchor": "end" }, "epoch " + last[last.length - 1].number) : "");
  return [svg, legend(PHASES.map((p) => [p, p]))];
}

// -- actions: each asks once, and does what the command line does --
function action(id, name, title, text, body, kind) {
  return make("button", { type: "button", class: kind || "", "data-key": name + JSON.stringify(body), disabled: !writable,
    title: writable ? "" : lockable ? "Read-only: unlock with the token first" : "Read-only: this console was given no token", on: async () => {
      if (!await question(title, text)) return;
      try { say((await ask(`api/p/${id}/actions`, body)).said.join(" · ")); } catch (error) { say(error.message, true); }
      refresh();
    } }, name);
}
const TABLE_VERBS = { pause: "Its changes are dropped from now on.", resume: "It is cleared, copied again, and followed.",
  skip: "It is left out until a resync.", resync: "It is cleared and copied again now." };

// -- the page of one pipeline --
function once(id, data, draw) { // drawn again only when it has changed, so that the focus stays and nothing is read out twice
  const node = by(id), sign = JSON.stringify(data);
  if (node.dataset.sign === sign) return;
  node.dataset.sign = sign;
  node.replaceChildren(...draw());
}
function spans() {
  const select = make("select", { id: "span" }, [[.25, "15 minutes"], [2, "2 hours"], [24, "a day"]].map(([h, name]) => make("option", { value: h, selected: h === hours }, name)));
  select.addEventListener("change", () => { hours = Number(select.value); localStorage.setItem("hours", hours); refresh(); });
  return make("label", { class: "quiet" }, "Charts show ", select);
}
function draw(id, status, detail) {
  const fields = history_.fields, epochs = history_.epochs.map((row) => Object.fromEntries(history_.epoch_fields.map((f, i) => [f, row[i]])));
  const first = history_.fine.length ? history_.fine[0][0] : Infinity, older = history_.coarse.filter((row) => row[0] < first - history_.coarse_secs);
  const all = [...older, ...history_.fine], since = Math.max(0, ...all.map((row) => row[0])) - hours * 3600; // of what has ended, the hours before
  const kept = older.filter((row) => row[0] > since).length, rows = all.filter((row) => row[0] > since);
  const step = (i) => i < kept ? history_.coarse_secs : history_.fine_secs;
  const points = (field, share) => rows.flatMap((row, i) => { // a line ends where nothing ran
    const v = row[fields.indexOf(field)], point = [row[0], v === null || !share ? v : v / step(i)];
    return i && row[0] - rows[i - 1][0] > 4 * step(i - 1) ? [[row[0], null], point] : [point]; });
  const sources = Object.entries(status.sources), sinks = Object.entries(status.sinks), ended = ENDED.includes(status.state);
  by("state").replaceChildren(dot(status.state), " ", make("span", { class: "quiet" }, [`${ended ? "after" : "up"} ${secs(status.uptime_secs)}`, `pid ${status.pid} on ${status.host}`, status.engine,
    ...(status.waits || []).map((w) => `waits for ${w.for}, ${secs(w.secs)}`)].filter(Boolean).join(" · ")));
  once("problems", [status.problems, status.state], () => status.problems.map((text) => make("p", { class: "problem " + colour(status.state), role: "alert" }, text)));
  once("ends", [ended, writable], () => [spans(), ...(ended ? [] : [
    action(id, "Drain", "Drain " + status.pipeline + "?", "All that is there now is committed, then it ends.", { action: "drain" }),
    action(id, "Stop", "Stop " + status.pipeline + "?", "The epoch in hand is finished, then it ends.", { action: "stop" })])]);

  panel("flow", "Flow", "wide", [status.sources, status.sinks, status.flows, ended], () => flow(status), ended ? "" : `${short(status.rows.in_per_sec)} rows/s in · ${short(status.rows.out_per_sec)} out`);
  panel("totals", "This run", "wide", [status.rows.in, status.rows.out, status.bytes, status.epochs, status.retries, status.skipped, status.dead_letters, status.discarded, status.recovered, status.last_epoch], () => numbers([
    ["rows in", count(status.rows.in)], ["rows out", count(status.rows.out)], ["written", size(status.bytes.out)], ["epochs", count(status.epochs)],
    ["last epoch", status.last_epoch ? count(status.last_epoch.number) : "–"], ["recovered", count(status.recovered)],
    ["retries", count(Object.values(status.retries).reduce((a, b) => a + b, 0))], ["skipped", count(status.skipped), status.skipped ? "warn" : ""],
    ["discarded", count(status.discarded), status.discarded ? "warn" : ""], ["dead letters", count(status.dead_letters), status.dead_letters ? "warn" : ""]]));
  panel("rates", "Rows per second", "", rows.length && rows[rows.length - 1], () => chart([{ name: "out", kind: "one", points: points("rows_out", true) }, { name: "in", kind: "two", points: points("rows_in", true) }], short, "Rows per second over time"));
  panel("bytes", "Bytes per second", "", rows.length && rows[rows.length - 1], () => chart([{ kind: "one", points: points("bytes_out", true) }], size, "Bytes per second over time"));
  panel("lag", "Lag", "", rows.length && rows[rows.length - 1], () => {
    const units = [["lag_rows", short, "rows"], ["lag_bytes", size, "bytes"]].map(([field, format, unit]) => [points(field), format, unit]).filter(([p]) => p.some((each) => each[1] !== null));
    return units.length ? units.map(([p, format, unit]) => chart([{ name: units.length > 1 || unit === "rows" ? unit + " behind" : "", kind: "one", points: p }], format, `Lag over time, in ${unit}`)) : make("p", { class: "quiet" }, "No source of this pipeline tells its lag.");
  }, sources.filter(([, s]) => s.lag !== null).map(([n, s]) => `${n} ${lag(s)}`).join(" · "));
  panel("latency", "Commit to visible, oldest row", "", rows.length && rows[rows.length - 1], () => points("latency").some((p) => p[1] !== null) ? chart([{ kind: "one", points: points("latency") }], secs, "Latency over time") : make("p", { class: "quiet" }, "No row has told its time yet: copied and generated rows carry none."), secs(status.latency_secs));
  panel("epochs", "Epochs", "wide", epochs.slice(-60), () => timeline(epochs), status.epoch ? `epoch ${status.epoch.number}: ${status.epoch.phase} for ${secs(status.epoch.secs)}` : ended ? "" : "idle");

  const journals = sources.filter(([, s]) => "journal_bytes" in s.own);
  panel("journal", "Journal", "", journals.map(([n, s]) => [n, s.own]), () => journals.length ? [table(["source", "fill", { n: "held" }, { n: "oldest" }, { n: "fsync" }], journals.map(([n, s]) => [n,
    make("progress", { max: s.own.journal_limit_bytes, value: s.own.journal_bytes, "aria-label": `journal of ${n}` }), { n: `${size(s.own.journal_bytes)} of ${size(s.own.journal_limit_bytes)}` },
    { n: secs(s.own.journal_oldest_seconds) }, { n: s.own.journal_fsyncs_total ? secs(s.own.journal_fsync_seconds_total / s.own.journal_fsyncs_total) : "–" }])),
    chart([{ kind: "one", points: points("journal") }], size, "Bytes in the journal over time")] : make("p", { class: "quiet" }, "No source of this pipeline needs a journal: each can be read again."));
  panel("retries", "Restarts and retries", "", [status.retries, status.started_at, detail.runs], () => [
    make("p", {}, `${ENDED.includes(status.state) ? "Started" : "Running since"} ${new Date(status.started_at).toLocaleString()}.` + (status.recovered ? ` It finished ${status.recovered === 1 ? "an epoch" : count(status.recovered) + " epochs"} of the run before.` : "")),
    table(["component", { n: "retries" }], Object.entries(status.retries).map(([n, c]) => [n, { n: count(c) }]), "No retries in this run."),
    detail.runs.length ? [make("h3", {}, "Runs before"), table(["started", "ended", "how", { n: "epochs" }, { n: "rows out" }], detail.runs.map((run) => [new Date(run.started_at).toLocaleString(), new Date(run.ended_at).toLocaleString(),
      make("span", {}, dot(run.state), run.reason ? make("div", { class: "quiet" }, run.reason) : null), { n: count(run.epochs) }, { n: count(run.rows_out) }]))] : null]);
  panel("parts", "Sources and sinks", "wide", [status.sources, status.sinks], () => table(["kind", "name", "state", { n: "rows" }, { n: "rows/s" }, { n: "lag" }, { n: "unacked" }, "read up to", "remarks"], [
    ...sources.map(([n, s]) => ["source", n, dot(s.state), { n: count(s.rows) }, { n: short(s.rows_per_sec) }, { n: lag(s) }, { n: secs(s.unacked_secs) }, position(n, s.position), s.reason || ""]),
    ...sinks.map(([n, s]) => ["sink", n, dot(s.state), { n: count(s.rows) }, { n: short(Object.values(s.topics).reduce((a, t) => a + t.rows_per_sec, 0)) }, { n: "" }, { n: "" }, many(Object.keys(s.topics).length, "topic"), s.reason || ""])]));
  const slots = sources.filter(([, s]) => Object.keys(s.own).some((key) => key.startsWith("slot_")));
  panel("slots", "Replication slots", "", [slots.map(([n, s]) => [n, s.own]), ended], () => table(["source", "state", { n: "held" }, { n: "until it may be lost" }], slots.map(([n, s]) => {
    const state = ["reserved", "extended", "unreserved", "lost", "missing", "not_made"].find((each) => s.own["slot_" + each]) || "?";
    if (ended) return [n, make("span", { class: "dot none" }, "● was " + state.replace("_", " ")), { n: size(s.own.slot_held_bytes) }, { n: "" }];
    return [n, make("span", { class: "dot " + (state === "reserved" ? "good" : state === "not_made" ? "" : state === "extended" ? "warn" : "bad") }, "● " + (state === "not_made" ? "not made yet" : state)), { n: size(s.own.slot_held_bytes) }, { n: s.own.slot_safe_bytes === undefined ? "no limit" : size(s.own.slot_safe_bytes) }]; }), "No source of this pipeline has a slot."));
  drawTables(id, sources);
  panel("schemas", "Columns of topics", "", detail.schemas, () => Object.keys(detail.schemas.topics).length ? scroll("Columns of topics", Object.entries(detail.schemas.topics).map(([topic, columns]) => {
    const changes = detail.schemas.changes.filter((c) => c.topic === topic);
    return make("details", { "data-key": "schema" + topic }, make("summary", {}, `${topic}: ${many(Object.keys(columns).length, "column")}, ${many(changes.filter((c) => !c.first).length, "change")}`),
      table(["column", "type"], Object.entries(columns)), table(["when", { n: "epoch" }, "what changed"], changes.slice().reverse().map((c) => [new Date(c.at * 1000).toLocaleString(), { n: c.epoch ?? "–" },
        c.first ? "first seen" : [...Object.entries(c.added).map(([n, t]) => `+ ${n} ${t}`), ...Object.keys(c.removed).map((n) => `− ${n}`), ...Object.entries(c.retyped).map(([n, [a, b]]) => `${n}: ${a} → ${b}`)].join(", ")]))); }))
    : make("p", { class: "quiet" }, "Not known yet."));
  panel("errors", "Last errors", "wide", status.errors, () => table(["when", "where", "code", "what, and what to do"], status.errors.slice().reverse().map((e) => [clock(e.at), e.component,
    make("a", { href: "#/errors/" + e.code }, e.code), make("span", { class: "long" }, e.text, e.hint ? make("div", { class: "quiet" }, "→ ", words(e.hint)) : null)]), "None in this run."));
  drawLetters(id, detail.letters);
  panel("file", "Pipeline file", "", detail.file, () => detail.file ? scroll("Pipeline file", make("pre", {}, detail.file)) : make("p", { class: "quiet" }, "It was not started from a file, or the file cannot be read here."));
  panel("about", "Versions and ports", "", [status.versions, status.ports], () => [table(["what", "version"], Object.entries(status.versions)),
    table(["listens on", "program"], status.ports.map((p) => [make("code", {}, `${p.address}:${p.port}`), p.program]), "No open port is known.")]);
  panel("audit", "Audit", "wide", detail.audit, () => table(["when", "who", "what", "outcome", "answer"], detail.audit.map((a) => [new Date(a.at).toLocaleString(), a.who, a.action + (a.detail && a.detail.length ? " " + a.detail.join(", ") : ""), a.outcome, a.said]), "Nobody has asked for anything yet."));
}
let sought = "";
function search(all) {
  const input = make("input", { type: "search", "data-key": "seek", value: sought });
  input.addEventListener("input", () => { sought = input.value; refresh(); });
  return all.length > 20 ? make("label", { class: "seek quiet" }, "Find a table ", input) : null;
}
function drawTables(id, sources) {
  const all = sources.flatMap(([source, s]) => Object.entries(s.tables.states).map(([name, state]) => ({ source, name, state, copy: s.tables.copying[name], failed: s.tables.failed[name], rows: s.tables.rows[name], note: s.tables.notes[name] })));
  const several = new Set(all.map((t) => t.source)).size > 1;
  const shown = all.filter((t) => t.name.toLowerCase().includes(sought.toLowerCase()) || t.state.includes(sought)).sort((a, b) => (b.state === "failed") - (a.state === "failed") || (b.state === "seeding") - (a.state === "seeding")).slice(0, 300);
  panel("tables", "Tables", "wide", shown, () => [search(all), table([...(several ? ["source"] : []), "table", "state", "copy", { n: "rows copied" }, { n: "ends in" }, "remarks", "actions"], shown.map((t) => [...(several ? [t.source] : []), t.name, dot(t.state),
    t.copy && t.copy.estimate ? make("progress", { max: Math.max(t.copy.estimate, t.copy.rows), value: t.copy.rows, "aria-label": "copy of " + t.name }) : "", { n: count(t.rows) + (t.copy && t.copy.estimate ? " of " + count(t.copy.estimate) : "") },
    { n: t.copy ? secs(t.copy.eta_secs) : "" }, t.failed ? make("span", {}, make("a", { href: "#/errors/" + t.failed.code }, t.failed.code), ` ${t.failed.error} → ${t.failed.hint}`) : t.note || "",
    make("div", { class: "buttons" }, Object.entries(TABLE_VERBS).map(([verb, text]) => action(id, verb, `${verb} ${t.name}${several ? " of " + t.source : ""}?`, text, { action: verb, tables: [t.name], source: t.source })))]), all.length ? "No table has this in its name or state." : "No source of this pipeline copies tables.")],
    all.length > shown.length ? `${shown.length} of ${all.length}` : "");
}
function drawLetters(id, letters) {
  panel("letters", "Dead letters", "wide", letters, () => letters.counting ? make("p", { class: "quiet" }, "Being counted …") : letters.error ? make("p", {}, letters.error, letters.hint ? make("span", { class: "quiet" }, " → " + letters.hint) : null) : !letters.open ? make("p", { class: "quiet" }, "No open dead letters.") : [
    make("div", { class: "buttons" }, action(id, "Replay all", "Replay all dead letters?", "They go through the pipeline again, exactly once. One that fails again has one more attempt.", { action: "replay", where: {} }, "act"),
      action(id, "Drop all", "Drop all dead letters?", "They are not shown and not replayed any more.", { action: "drop", where: {} })),
    table([{ n: "letters" }, "topic", "code", "rule", "refused by", { n: "attempt" }, "actions"], letters.groups.map((g) => [{ n: count(g.count) }, g.topic, make("a", { href: "#/errors/" + g.code }, g.code), g.rule, g.sinks.join(", "), { n: g.attempt },
      make("div", { class: "buttons" }, action(id, "replay", `Replay ${many(g.count, "letter")} of ${g.topic || "no topic"}?`, `Those with ${g.code} ${g.rule} go through the pipeline again.`, { action: "replay", where: { topic: g.topic, code: g.code, rule: g.rule } }),
        action(id, "drop", `Drop ${many(g.count, "letter")} of ${g.topic || "no topic"}?`, `Those with ${g.code} ${g.rule} are not shown and not replayed any more.`, { action: "drop", where: { topic: g.topic, code: g.code, rule: g.rule } }))])),
    make("h3", {}, "Samples"), letters.samples.map((s, i) => make("details", { "data-key": "letter" + i }, make("summary", {}, `${s.source}/${s.stream}${s.topic ? " → " + s.topic : ""}${s.offset ? " at " + s.offset.partition + "@" + s.offset.value : ""}, epoch ${s.epoch}: ${s.reason}`), make("pre", {}, typeof s.payload === "string" ? s.payload : JSON.stringify(s.payload, null, 1))))],
    letters.open ? count(letters.open) : "");
}

// -- pages --
async function showPipeline(id) {
  const [status, detail, more] = await Promise.all([ask(`api/p/${id}/status`), ask(`api/p/${id}/detail`),
    ask(`api/p/${id}/history?since=${history_ && view === id ? history_.newest : 0}`)]);
  if (page !== id) return;
  if (view !== id || !history_) {
    view = id;
    history_ = more;
    document.title = status.pipeline + " · Penstock";
    by("main").replaceChildren(make("div", { class: "top" }, make("h1", {}, status.pipeline), make("span", { id: "state" }), make("span", { class: "grow" }), make("div", { id: "ends", class: "buttons" })),
      make("div", { id: "problems" }), make("div", { id: "panels", class: "panels" }));
  } else for (const key of ["fine", "coarse", "epochs"]) {
    const secs = history_[key + "_secs"], slot = (row) => secs ? Math.floor(row[0] / secs) : row[0]; // a later sample of the same minute replaces it
    const fresh = new Set(more[key].map(slot));
    history_[key] = [...history_[key].filter((row) => !fresh.has(slot(row))), ...more[key]].slice(-1440);
  }
  const times = [...history_.fine, ...history_.epochs].map((row) => row[0]);
  history_.newest = times.length ? Math.max(...times) - 90 : 0;
  draw(id, status, detail);
}
async function showAll() {
  const { pipelines } = await ask("api/pipelines");
  if (page !== "") return;
  if (pipelines.length === 1 && !location.hash) { location.hash = "#/p/" + pipelines[0].id; return; }
  document.title = "Penstock";
  if (view !== "all") { view = "all"; by("main").replaceChildren(make("div", { class: "top" }, make("h1", {}, "Pipelines")), make("div", { id: "panels", class: "panels" })); }
  panel("all", "On this machine", "wide whole", pipelines, () => table(["pipeline", "state", { n: "rows/s in" }, { n: "rows/s out" }, { n: "lag" }, { n: "latency" }, { n: "dead letters" }, { n: "epochs" }, { n: "up" }, "remarks"],
    pipelines.map((p) => [make("a", { href: "#/p/" + p.id, "data-key": p.id }, p.pipeline), dot(p.state), { n: short(p.in_per_sec) }, { n: short(p.out_per_sec) }, { n: [p.lag_rows === null ? "" : short(p.lag_rows) + " rows", p.lag_bytes === null ? "" : size(p.lag_bytes)].filter(Boolean).join(" · ") || "–" }, { n: secs(p.latency_secs) },
      { n: count(p.dead_letters) }, { n: count(p.epochs) }, { n: secs(p.uptime_secs) }, p.reason]), "No pipeline has left a status here yet."));
}
const DOES = { refuse: "refuses to start", retry: "tries again", restage: "stages it again", policy: "as on_error says", stop: "stops" };
async function showErrors(code) {
  const { codes } = await ask("api/codes");
  if (!page.startsWith("errors")) return;
  if (view === page) return;
  view = page;
  document.title = "Error codes · Penstock";
  by("main").replaceChildren(make("div", { class: "top" }, make("h1", {}, "Error codes")), make("section", { class: "panel whole" },
    make("p", {}, "An error says itself what to do, after an arrow, and knows better than this list. The same is docs/errors.md."),
    table(["code", "meaning", "what the runtime does", "what to do"], codes.map((c) => [make("code", { id: c.code }, c.code), c.meaning, DOES[c.action], make("span", {}, words(c.fix))]))));
  by(code)?.closest("tr").classList.add("warn");
  if (code) by(code)?.scrollIntoView({ block: "center" });
}
async function refresh() {
  const mine = ++turn;
  try {
    const me = await ask("api/me");
    writable = me.writable;
    lockable = me.token;
    by("unlock").hidden = !lockable;
    by("unlock").textContent = writable ? "Lock" : "Unlock actions";
    await (page === "" ? showAll() : page.startsWith("errors") ? showErrors(page.split("/")[1]) : showPipeline(page));
    document.body.classList.remove("lost");
    if (by("link").dataset.lost) { delete by("link").dataset.lost; say("connected again"); }
  } catch (error) {
    by("link").dataset.lost = "1";
    document.body.classList.add("lost");
    if (!view) by("main").replaceChildren(make("p", { class: "quiet" }, error.message));
    say(error.message === "Failed to fetch" ? "not reachable: what you see is the last that was known" : error.message, true);
  }
  if (mine === turn) setTimeout(() => { if (mine === turn) document.hidden ? wait() : refresh(); }, EVERY_MS);
}
const wait = () => document.addEventListener("visibilitychange", refresh, { once: true });
function route() {
  const words = location.hash.replace(/^#\/?/, "").split("/");
  page = words[0] === "p" ? words[1] : words[0] === "errors" ? words.join("/") : "";
  history_ = null; view = "";
  refresh();
}
by("unlock").addEventListener("click", async () => {
  if (writable) token = "";
  else { if (!await question("Unlock actions", "Enter the token of `console_token`. It is kept until this tab is closed.", true)) return; token = by("ask-input").value; }
  sessionStorage.setItem("token", token);
  await refresh();
  say(writable ? "unlocked" : token ? "this is not the token, or the server has none" : "locked", !writable && token !== "");
});
by("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
});
if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");
addEventListener("hashchange", route);
route();
