// The dashboard. It keeps one document for all jobs and one for the job that is shown, to which the
// event stream sends merge patches, and draws what has changed. Text gets into the page as text only.
"use strict";

const API = "/api/v1";
const TOKEN_KEY = "torchft-token";
const MANY = 60;                 // groups; with more of them, a map shows all, and the table some
const HOUR_S = 3600;
const LABEL_WIDTH = 52;          // pixels that a label of the time axis needs
const RETRY_MS = [1000, 2000, 4000, 8000];
const STATES = ["training", "healing", "waiting", "outside", "left out", "hung", "lost", "missing", "left"];
const URGENT = ["hung", "lost", "left out", "healing"];
const byId = (id) => document.getElementById(id);

// -- elements ------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

/** Make an element; `attrs` with `on...` functions are listeners, and null children are left out. */
function make(tag, attrs = {}, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

function draw(tag, attrs = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attrs, children);
}

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set a text or an attribute only where it changes: a screen reader, and a selection, stay put. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttr(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Not by colour alone: each state has a form of its own.
const FORMS = {
  "training": ["circle", { cx: 6, cy: 6, r: 5 }],
  "healing": ["path", { d: "M6 1a5 5 0 0 1 0 10z" }],
  "waiting": ["circle", { cx: 6, cy: 6, r: 4, fill: "none", "stroke-width": 2 }],
  "outside": ["circle", { cx: 6, cy: 6, r: 2.5 }],
  "left out": ["path", { d: "M6 .5 11.5 6 6 11.5.5 6z" }],
  "hung": ["path", { d: "M6 .8 11.6 11H.4z" }],
  "lost": ["path", { d: "M2 2l8 8M10 2l-8 8", "stroke-width": 2.4 }],
  "left": ["path", { d: "M1.5 6h9", "stroke-width": 2.4 }],
  "ready spare": ["path", { d: "M6 1v10M1 6h10", "stroke-width": 2.4 }],
  "starting spare": ["path", { d: "M1 6h10", "stroke-width": 2.4, "stroke-dasharray": "2 2" }],
};

function stateIcon(state) {
  const [tag, attrs] = FORMS[state] || FORMS.outside;
  return draw("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, draw(tag, attrs));
}

// -- numbers and times -----------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const count = (number, one, many = `${one}s`) => `${whole.format(number)} ${number === 1 ? one : many}`;

function duration(seconds) {
  if (seconds < 0.9995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const rounded = Math.round(seconds);  // first: no "2 min 60 s"
  if (rounded < 120) return `${rounded} s`;
  if (rounded < 7200) return `${Math.floor(rounded / 60)} min ${rounded % 60} s`;
  if (rounded < 172800) return `${Math.floor(rounded / 3600)} h ${Math.floor((rounded % 3600) / 60)} min`;
  return `${Math.floor(rounded / 86400)} days`;
}

const age = (seconds) => (seconds < 2 ? "now" : seconds < 120 ? `${Math.round(seconds)} s` : duration(seconds));

function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${number < 10 && unit ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

const percent = (ratio) => `${(ratio * 100).toFixed(1)} %`;
const stableName = (id) => (id.includes(":") ? id.slice(0, id.lastIndexOf(":")) : id);

// The lighthouse's clock, as far as this browser knows it: ages do not depend on the browser's own.
const clock = {
  at: 0, receivedAt: 0, stoppedAt: null,
  set(at) { this.at = at; this.receivedAt = performance.now(); this.stoppedAt = null; },
  now() { return this.at + ((this.stoppedAt ?? performance.now()) - this.receivedAt) / 1000; },
  /** Without a connection the page shows what was: nothing stands still because of that. */
  stop() { this.stoppedAt ??= performance.now(); },
};

// -- requests ------------------------------------------------------------------------------------

const auth = {
  get token() { return sessionStorage.getItem(TOKEN_KEY) || ""; },
  set token(token) { sessionStorage.setItem(TOKEN_KEY, token); },
  headers() { return this.token ? { Authorization: `Bearer ${this.token}` } : {}; },
};

class Refused extends Error {
  constructor(status, error) {
    super(error.message || `status ${status}`);
    Object.assign(this, { status, code: error.code || "", leader: error.leader || "" });
  }
}

async function request(path, options = {}) {
  const response = await fetch(path, { cache: "no-store", ...options, headers: { ...auth.headers(), ...options.headers } });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Refused(response.status, body.error || {});
  }
  return response;
}

const read = async (path) => (await request(`${API}${path}`)).json();

const command = async (path, body) => (await request(`${API}${path}`, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
})).json();

/** Apply a JSON merge patch (RFC 7396). */
function merge(target, patch) {
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete target[name];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const before = target[name];
      target[name] = merge(typeof before === "object" && before !== null && !Array.isArray(before) ? before : {}, value);
    } else target[name] = value;
  }
  return target;
}

// -- the event stream ----------------------------------------------------------------------------

/** Reads the event stream with the token, which an EventSource could not send. */
class Stream {
  constructor(job, handlers) {
    this.handlers = handlers;
    this.query = job === null ? "" : `?job=${encodeURIComponent(job)}`;
    this.attempt = 0;
    this.isOver = false;
    this.run();
  }

  close() {
    this.isOver = true;
    this.abort?.abort();
    clearTimeout(this.timer);
  }

  async run() {
    this.abort = new AbortController();
    try {
      const response = await request(`${API}/events${this.query}`, { signal: this.abort.signal });
      await this.readEvents(response.body.getReader());
      throw new Error("the lighthouse has ended the stream");
    } catch (error) {
      if (this.isOver) return;
      this.handlers.broken(error);
      if (error.status === 401) return;
      const pause = RETRY_MS[Math.min(this.attempt, RETRY_MS.length - 1)];
      this.attempt += 1;
      this.timer = setTimeout(() => this.run(), pause);
    }
  }

  async readEvents(reader) {
    const decoder = new TextDecoder();
    let buffer = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += decoder.decode(value, { stream: true });
      const events = buffer.split("\n\n");
      buffer = events.pop();
      for (const text of events) if (text !== ":") this.handle(text);
    }
  }

  handle(text) {
    const fields = Object.fromEntries(text.split("\n").map((line) => {
      const colon = line.indexOf(": ");
      return [line.slice(0, colon), line.slice(colon + 2)];
    }));
    this.attempt = 0;
    this.handlers.event(fields.event, JSON.parse(fields.data));
  }
}

// -- what a job does, in words ---------------------------------------------------------------------

/** The state of a job in one sentence, with its tone, and the reasons. A job whose states have
    differed is not well, whatever it does now. `stepS`: how long its steps take, if known. */
function verdict(job, now, stepS) {
  const { tone, text } = progress(job, now, stepS);
  const waits = tone !== "good" && job.ended_at === undefined ? job.why || "" : "";
  const differed = job.differences ? `states differed: ${job.last_difference}` : "";
  const why = [waits, differed].filter(Boolean).map((each) => `${each[0].toUpperCase()}${each.slice(1)}.`).join(" ");
  return differed ? { tone: "bad", text: `${text}; states differed in ${count(job.differences, "check")}`, why } : { tone, text, why };
}

function progress(job, now, stepS) {
  const states = job.states || {};
  const training = states.training || 0;
  if (job.ended_at !== undefined) {
    return job.finished ? { tone: "calm", text: "Finished" } : { tone: "bad", text: "Ended unfinished" };
  }
  const stalledS = now - (job.moved_at ?? now);
  const patienceS = stepS ? Math.max(10, 5 * stepS) : 60;
  const missing = Math.max(0, job.expected - job.groups);
  if (stalledS > patienceS) return { tone: "bad", text: `Stands still for ${duration(stalledS)}` };
  if (states.hung) return { tone: "bad", text: `${count(states.hung, "group")} ${states.hung === 1 ? "hangs" : "hang"}` };
  if (missing) return { tone: "warn", text: `${training} of ${job.expected} groups train` };
  if (states["left out"]) return { tone: "warn", text: `${count(states["left out"], "group")} left out` };
  if (states.healing) return { tone: "busy", text: `${training} of ${job.expected} groups train, ${states.healing} ${states.healing === 1 ? "heals" : "heal"}` };
  if (!training) return { tone: "busy", text: `Waits for ${job.quorum_id ? "a" : "its first"} quorum` };
  return { tone: "good", text: training === 1 ? "One group trains" : `All ${whole.format(training)} groups train` };
}

function sharesOf(job) {
  const states = { ...(job.states || {}) };
  const missing = Math.max(0, (job.expected || 0) - job.groups);
  if (missing && job.ended_at === undefined) states.missing = missing;  // lost, or never there
  return STATES.filter((state) => states[state]).map((state) => [state, states[state]]);
}

function shareBar(shares, name, label) {
  const whole = total(shares) || 1;
  const bar = make("div", { class: "share", role: "img", "aria-label": label });
  for (const [part, size] of shares) {
    const piece = make("i", { [`data-${name}`]: part });
    piece.style.flexGrow = String(size / whole);
    bar.append(piece);
  }
  return bar;
}

// -- pages ---------------------------------------------------------------------------------------

class OverviewPage {
  constructor(root) {
    this.jobs = make("div", { class: "section" });
    this.runs = make("div", { class: "section" });
    root.replaceChildren(make("h1", { tabindex: -1 }, "Jobs"), this.jobs, this.runs);
    this.drawn = "";
  }

  update(documents) {
    const overview = documents.get("");
    if (!overview) return;
    const now = clock.now();
    const jobs = Object.entries(overview.jobs).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
    const cards = jobs.map(([name, job]) => this.card(name, job, now));
    // Ages go on by themselves; nothing is built anew while all texts are the same.
    const drawn = JSON.stringify([cards.map(([key]) => key), overview.runs]);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const focused = document.activeElement?.getAttribute?.("href");
    this.jobs.replaceChildren(
      cards.length ? make("ul", { class: "cards" }, cards.map(([, card]) => card()))
        : make("p", { class: "empty" }, "No job has a living group."));
    this.runs.replaceChildren(...runsSection(overview.runs, now));
    if (focused?.startsWith("#/job/")) this.jobs.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
  }

  card(name, job, now) {
    const { tone, text, why } = verdict(job, now);
    const shares = sharesOf(job);
    const spares = spareText(job, now);
    const step = `Step ${whole.format(job.step)}${job.heals ? `, ${count(job.heals, "heal")}` : ""}${job.discarded ? `, ${count(job.discarded, "step")} discarded` : ""}`;
    const key = [name, tone, text, why, step, shares, spares];
    return [key, () => make("li", {}, make("a", { class: "panel card", href: jobLink(name), "data-tone": tone },
      make("h3", {}, name), make("p", { class: "sum" }, text), make("p", { class: "muted" }, step),
      shares.length ? shareBar(shares, "state", shares.map(([state, size]) => `${size} ${state}`).join(", ")) : null,
      spares ? make("p", { class: "muted" }, spares) : null, why ? make("p", { class: "muted" }, why) : null))];
  }
}

const jobLink = (name) => `#/job/${encodeURIComponent(name)}`;

function runsSection(runs, now) {
  const names = Object.keys(runs || {}).sort();
  if (!names.length) return [];
  return [make("section", { "aria-labelledby": "runs-title" },
    make("header", {}, make("h2", { id: "runs-title" }, "Launched runs")),
    ...names.map((name) => runPanel(name, runs[name], now)))];
}

function runPanel(name, run, now) {
  const nodes = Object.entries(run.nodes).sort(([, a], [, b]) => (a.rank ?? 1e9) - (b.rank ?? 1e9));
  const members = nodes.filter(([, node]) => node.rank !== undefined);
  const workers = members.reduce((sum, [, node]) => sum + node.workers, 0);
  const tone = run.phase === "running" ? "good" : run.why ? "warn" : "calm";
  return make("div", { class: "panel section" },
    make("div", { class: "state", "data-tone": tone },
      make("h3", {}, name),
      make("p", {}, `${run.phase}, round ${run.round}: ${count(members.length, "node")} with ${count(workers, "worker")}; ${run.min_nodes} to ${run.max_nodes} work together`),
      run.why ? make("p", { class: "why" }, run.why) : null),
    make("div", { class: "scroll" }, make("table", { class: "stack" },
      make("thead", {}, make("tr", {}, ["Node", "Rank", "Workers", "State", "Waits", "Restarts", "Last sign", ""].map((text) => make("th", { scope: "col" }, text)))),
      make("tbody", {}, nodes.map(([id, node]) => make("tr", { "data-state": node.state },
        make("td", {}, make("span", { class: "named" }, node.host || id), make("span", { class: "id" }, id)),
        make("td", { "data-label": "rank" }, node.rank === undefined ? "–" : String(node.rank)),
        make("td", { "data-label": "workers" }, String(node.workers)),
        make("td", {}, make("span", { class: "chip" }, stateIcon(node.state === "working" ? "training" : "waiting"), node.state + (node.late ? ", on its way" : ""))),
        make("td", { "data-label": "waits" }, node.waits_since === undefined ? "–" : age(now - node.waits_since)),
        make("td", { "data-label": "restarts" }, String(node.restarts)),
        make("td", { "data-label": "last sign" }, age(now - node.seen_at)),
        make("td", {}, state.acceptsCommands ? make("div", { class: "row-acts" }, make("button", {
          type: "button", class: "quiet", "aria-label": `Drain node ${id}`,
          onclick: () => confirmCommand({
            title: `Drain node ${node.host || id}?`, yes: "Drain it",
            text: "Its launcher ends its workers by SIGTERM, and itself. The other nodes go on without it.",
            path: `/runs/${encodeURIComponent(name)}/nodes/${encodeURIComponent(id)}/drain`,
          }),
        }, "Drain")) : null)))))));
}

class JobPage {
  constructor(root, name) {
    this.name = name;
    this.points = [];
    this.rows = new Map();
    this.cells = new Map();
    this.filter = "";
    this.verdictText = "";
    this.title = make("span", {});
    this.why = make("p", { class: "why", hidden: true });
    this.act = make("p", { class: "act", hidden: true }, make("button", { type: "button", class: "danger", onclick: () => this.acceptLoss() }, "Accept the loss…"));
    this.figures = {};
    const figure = (key, label) => make("div", {}, make("dt", {}, label), this.figures[key] = make("dd", {}, "–"));
    this.state = make("div", { class: "state", "data-tone": "calm" },
      make("h1", { tabindex: -1 }, this.title, make("span", { class: "name" }, name)), this.why, this.act);
    this.timeline = make("figure", { class: "panel" });
    this.groupCount = make("span", { class: "muted" });
    this.map = make("div", { class: "map", "aria-hidden": "true", hidden: true });
    this.search = make("input", { id: "filter", type: "search", autocomplete: "off", oninput: (event) => { this.filter = event.target.value.toLowerCase(); this.update(state.documents); } });
    this.tools = make("div", { class: "tools", hidden: true }, make("label", { for: "filter" }, "Find a group"), this.search);
    this.body = make("tbody");
    this.more = make("p", { class: "empty", hidden: true });
    this.incidents = make("div", { class: "panel" });
    this.goodput = make("div", {});
    const heads = ["Group", "State", "Step", "Phase", "Own work", "Last sign", ""];
    root.replaceChildren(
      make("div", { class: "panel" }, this.state, make("dl", { class: "figures" },
        figure("step", "Committed step"), figure("speed", "Speed"), figure("since", "Last commit"),
        figure("goodput", "Goodput"), figure("heals", "Heals"), figure("discarded", "Steps discarded"), figure("copies", "Copies"), figure("quorum", "Quorum"))),
      section("timeline", "The last hour", this.timeline),
      section("groups", "Groups", make("div", { class: "panel" }, this.map, this.tools,
        make("div", { class: "scroll" }, make("table", { class: "stack" },
          make("thead", {}, make("tr", {}, heads.map((text) => make("th", { scope: "col", class: text === "Step" || text === "Own work" ? "number" : null }, text || make("span", { class: "unseen" }, "Commands"))))),
          this.body)), this.more), this.groupCount),
      section("goodput", "Where the time went", this.goodput),
      section("incidents", "Incidents", this.incidents));
    this.resized = new ResizeObserver(() => this.drawTimeline());
    this.resized.observe(this.timeline);
    this.loadTimeline();
  }

  close() { this.resized.disconnect(); }

  async loadTimeline() {
    try {
      this.points = (await read(`/jobs/${encodeURIComponent(this.name)}/timeline`)).points;
      this.drawTimeline();
    } catch (error) { /* the stream shows what is wrong, and its points follow */ }
  }

  stepS() {
    const recent = this.points.slice(-24).filter((point) => point.steps_per_s > 0);
    return recent.length ? recent.length / recent.reduce((sum, point) => sum + point.steps_per_s, 0) : 0;
  }

  update(documents) {
    const job = documents.get(this.name);
    if (!job) return;
    const now = clock.now();
    this.addPoint(job.point);
    this.updateState(job, now);
    this.updateGroups(job, now);
    this.updateGoodput(job);
    this.updateIncidents(job, now);
  }

  addPoint(point) {
    const last = this.points[this.points.length - 1];
    if (!point || (last && point.at <= last.at)) return;
    this.points.push({ goodput: null, ...point });
    this.points = this.points.filter((each) => each.at > point.at - HOUR_S);
    this.drawTimeline();
  }

  updateState(job, now) {
    const { summary } = job;
    const { tone, text, why } = verdict(summary, now, this.stepS());
    setAttr(this.state, "data-tone", tone);
    setText(this.title, text);
    const short = text.replace(/ for .*/, "");
    if (short !== this.verdictText) announce(`${this.name}: ${this.verdictText = short}`);
    this.why.hidden = !why;
    setText(this.why, why);
    this.act.hidden = !(state.acceptsCommands && (summary.why || "").includes("accept-loss"));
    const speed = this.points.slice(-12);
    const passedS = speed.length > 1 ? speed[speed.length - 1].at - speed[0].at : 0;
    const rate = passedS > 0 ? (speed[speed.length - 1].committed_step - speed[0].committed_step) / passedS : null;
    const ended = summary.ended_at !== undefined;
    const set = (key, value, unit) => {
      const node = this.figures[key];
      if (node.textContent !== `${value}${unit ? ` ${unit}` : ""}`) node.replaceChildren(value, ...(unit ? [make("small", {}, ` ${unit}`)] : []));
    };
    set("step", whole.format(summary.step));
    set("speed", rate === null || ended || rate < 0 ? "–" : rate >= 10 ? rate.toFixed(0) : rate.toFixed(2), rate === null || ended ? "" : "steps/s");
    const hasCommitted = !ended && Boolean(summary.step || summary.quorum_id);
    set("since", hasCommitted ? age(now - summary.moved_at) : "–", !hasCommitted || now - summary.moved_at < 2 ? "" : "ago");
    set("goodput", job.goodput?.ratio ? percent(job.goodput.ratio) : "–");
    set("heals", whole.format(summary.heals));
    set("discarded", whole.format(summary.discarded));
    this.figures.copies.parentNode.hidden = summary.copies === undefined;
    if (summary.copies) {
      const held = summary.copies.holders && summary.copies.step;
      const back = Math.max(0, summary.step - summary.copies.step);
      set("copies", held ? whole.format(back) : "none", held ? `step${back === 1 ? "" : "s"} back` : "");
    }
    set("quorum", summary.quorum_id ? `…${String(summary.quorum_id).slice(-6)}` : "none");
    setAttr(this.figures.quorum, "title", summary.quorum_id ? String(summary.quorum_id) : "");
  }

  // -- groups

  updateGroups(job, now) {
    const sorted = (some) => Object.keys(some).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const names = [...sorted(job.groups), ...sorted(job.spares || {})];
    const groups = { ...job.groups, ...job.spares };
    const isLarge = names.length > MANY;
    this.map.hidden = this.tools.hidden = !isLarge;
    const counted = sharesOf(job.summary).map(([name, size]) => `${whole.format(size)} ${name}`).join(", ");
    const spares = spareText(job.summary, now);
    if (job.summary.ended_at !== undefined) setText(this.groupCount, spares || "none is left");
    else setText(this.groupCount, `${counted || "none"}; at least ${job.summary.min_replicas} train, ${job.summary.expected} are expected${spares ? `; ${spares}` : ""}`);
    if (isLarge) this.updateMap(names, groups);
    let shown = names;
    if (this.filter) shown = names.filter((name) => name.toLowerCase().includes(this.filter) || (groups[name].id || "").toLowerCase().includes(this.filter));
    else if (isLarge) {
      const urgent = names.filter((name) => URGENT.includes(groups[name].state));
      const rest = names.filter((name) => !URGENT.includes(groups[name].state));
      shown = [...urgent, ...rest];
    }
    const rows = shown.slice(0, MANY);
    const hiddenCount = shown.length - rows.length;
    this.more.hidden = hiddenCount === 0 && rows.length > 0;
    setText(this.more, rows.length ? `and ${whole.format(hiddenCount)} more: find them by name` : this.filter ? "No group has this in its name." : "No group is there.");
    const wanted = new Set(rows);
    for (const [name, row] of this.rows) if (!wanted.has(name)) { row.node.remove(); this.rows.delete(name); }
    let place = this.body.firstElementChild;
    for (const name of rows) {
      let row = this.rows.get(name);
      if (!row) this.rows.set(name, row = new GroupRow(this.name, name));
      if (row.node === place) place = place.nextElementSibling;
      else this.body.insertBefore(row.node, place);
      row.update(groups[name], now, job.summary.step);
    }
  }

  updateMap(names, groups) {
    const wanted = new Set(names);
    for (const [name, cell] of this.cells) if (!wanted.has(name)) { cell.remove(); this.cells.delete(name); }
    const fresh = document.createDocumentFragment();
    for (const name of names) {
      let cell = this.cells.get(name);
      if (!cell) { this.cells.set(name, cell = make("i", { title: name })); fresh.append(cell); }
      setAttr(cell, "data-state", groups[name].state);
    }
    if (fresh.childNodes.length) this.map.append(fresh);
  }

  acceptLoss() {
    confirmCommand({
      title: "Give up the newest steps?", yes: "Accept the loss", hasReason: false,
      text: `Job ${this.name} goes back to what its living groups have. Committed steps are lost, and nothing brings them back. If a group with the newer state can still return, wait for it.`,
      path: `/jobs/${encodeURIComponent(this.name)}/accept-loss`,
    });
  }

  // -- goodput and incidents

  updateGoodput(job) {
    const lost = job.goodput?.lost_s || {};
    const lostS = Object.values(lost).reduce((sum, seconds) => sum + seconds, 0);
    const committedS = job.goodput?.committed_s || 0;
    const parts = [["committed", committedS], ...Object.entries(lost).filter(([, seconds]) => seconds >= 0.05).sort(([, a], [, b]) => b - a)];
    const key = JSON.stringify(parts.map(([name, seconds]) => [name, Math.round(seconds)]));
    if (key === this.goodputKey) return;
    this.goodputKey = key;
    if (!committedS && !lostS) { this.goodput.replaceChildren(make("p", { class: "muted" }, "Nothing is known yet.")); return; }
    const words = parts.map(([name, seconds]) => [name, `${name.replaceAll("_", " ")} ${duration(seconds)}`]);
    this.goodput.replaceChildren(
      shareBar(parts, "part", words.map(([, text]) => text).join(", ")),
      make("ul", { class: "legend" }, words.map(([name, text]) => make("li", { "data-part": name }, make("b", { "aria-hidden": "true" }), text))));
  }

  updateIncidents(job, now) {
    const incidents = Object.values(job.incidents || {}).sort((a, b) => b.number - a.number);
    const records = JSON.stringify(incidents);
    const key = records + Math.floor(now / 20);
    if (key === this.incidentsKey) return;
    const isNew = records !== this.incidentsDrawn;
    const longest = Math.max(0, ...incidents.map((incident) => total(anatomy(incident))));
    this.incidentsKey = key;
    this.incidentsDrawn = records;
    this.incidents.replaceChildren(incidents.length
      ? make("ul", { class: "incidents" }, incidents.map((incident) => incidentItem(incident, now, longest)))
      : make("p", { class: "empty" }, "Nothing has happened."));
    this.marks = incidents;
    if (isNew) this.drawTimeline();
  }

  // -- the timeline

  drawTimeline() {
    const width = Math.round(this.timeline.clientWidth - 40);
    if (width < 100) return;
    const job = state.documents.get(this.name);
    this.timeline.replaceChildren(...timeline(this.points, this.marks || [], job?.summary.expected || 1, width));
  }
}

function section(id, title, content, note = null) {
  return make("section", { class: "section", "aria-labelledby": `${id}-title` },
    make("header", {}, make("h2", { id: `${id}-title` }, title), note), content);
}

// The own work of a group in a step, without waits for others, and how it compares; its phases as a title.
function setPace(cell, paces) {
  const [step, ...phases] = paces || [];
  setText(cell, step ? `${step.seconds} s, ${step.to_best} × best` : "–");
  setAttr(cell, "title", step ? [step, ...phases].map((pace) =>
    `${pace.phase}: ${pace.seconds} s, ${pace.to_best} × the best group, ${pace.to_own_best} × its own best`).join("\n") : "");
}

class GroupRow {
  constructor(job, name) {
    Object.assign(this, { job, name });
    this.id = make("span", { class: "id" });
    this.chip = make("span", { class: "chip" });
    this.reason = make("span", { class: "reason" });
    this.step = make("td", { class: "number", "data-label": "step" });
    this.phase = make("span");
    this.pace = make("td", { class: "number", "data-label": "own work" });
    this.bar = make("progress", { "aria-label": "Heal", max: 1, hidden: true });
    this.seen = make("td", { "data-label": "last sign" });
    this.acts = make("div", { class: "row-acts" });
    this.node = make("tr", {},
      make("td", {}, make("span", { class: "named" }, name), this.id), make("td", {}, this.chip, this.reason),
      this.step, make("td", { "data-label": "phase" }, this.phase, " ", this.bar), this.pace, this.seen, make("td", {}, this.acts));
  }

  // What a group that trains as it should leaves out: it is at the job's step, and was seen just now.
  update(group, now, jobStep) {
    const isGone = group.state === "lost" || group.state === "left";
    const standsBy = group.state.endsWith(" spare");
    setAttr(this.node, "data-state", group.state);
    setText(this.id, group.id + (group.address ? ` at ${group.address}` : ""));
    if (this.shown !== group.state) this.chip.replaceChildren(stateIcon(this.shown = group.state), group.state);
    setText(this.reason, group.reason || (group.slow ? `slow, group rank ${group.slowest_rank || 0}` : ""));
    setPace(this.pace, group.paces);
    setText(this.step, isGone || standsBy ? "–" : whole.format(group.step === undefined ? jobStep : group.step));
    const size = group.state_bytes ? `${bytes(group.received_bytes)} of ${bytes(group.state_bytes)}` : "";
    const since = group.phase && age(now - group.phase_at) !== "now" ? age(now - group.phase_at) : "";
    const usual = group.state === "training" ? "short steps" : "–";
    setText(this.phase, [group.phase || usual, since, size].filter(Boolean).join(" "));
    this.bar.hidden = !size;
    if (size) this.bar.value = group.received_bytes / group.state_bytes;
    setText(this.seen, isGone ? `${age(now - group.gone_at)} ago`.replace("now ago", "just now") : age(now - (group.seen_at || now)));
    const commands = state.acceptsCommands && !isGone && !standsBy;
    if (this.hasCommands !== commands) {
      this.hasCommands = commands;
      this.acts.replaceChildren(...(commands ? [this.button("drain"), this.button("kill")] : []));
    }
  }

  button(what) {
    const label = what === "kill" ? "Kill" : "Drain";
    return make("button", { type: "button", class: "quiet", "aria-label": `${label} group ${this.name}`, onclick: () => confirmCommand({
      title: `${label} group ${this.name}?`, yes: `${label} it`,
      text: what === "kill"
        ? "Its processes end at once. The others discard at most the step under way, and go on without it."
        : "It finishes its step, leaves, and ends. The others lose nothing.",
      path: `/jobs/${encodeURIComponent(this.job)}/groups/${encodeURIComponent(this.name)}/${what}`,
    }) }, label);
  }
}

// The parts of an incident in the order in which they happen.
function anatomy(incident) {
  const parts = [];
  const add = (name, seconds) => { if (seconds > 0.0005) parts.push([name, seconds]); };
  add("unnoticed", incident.detected_after_s);
  add("deciding", incident.decided_after_s);
  add("rebuilding", incident.reconfigured_s);
  add("healing", incident.healed_s);
  const known = (incident.decided_after_s || 0) + (incident.reconfigured_s || 0) + (incident.healed_s || 0);
  add("first step", (incident.first_commit_after_s || 0) - known);
  return parts;
}

const GOOD = ["joined", "left", "drained", "run_changed"];
const BAD = ["lost", "killed", "hung", "heal_failed", "manager_died", "state_differs", "loss_accepted"];
const toneOf = (kind) => (GOOD.includes(kind) ? "training" : BAD.includes(kind) ? "lost" : "left out");

const total = (parts) => parts.reduce((sum, [, seconds]) => sum + seconds, 0);

/** One record; its bar is as long, beside that of the `longest` one, as what it shows took. */
function incidentItem(incident, now, longest) {
  const parts = anatomy(incident);
  const words = parts.map(([name, seconds]) => [name, `${name} ${duration(seconds)}`]);
  const cost = [
    incident.paused_s ? `the others stood still for ${duration(incident.paused_s)}` : "",
    incident.steps_discarded ? `${count(incident.steps_discarded, "step")} discarded` : "",
    incident.healed_bytes ? `${bytes(incident.healed_bytes)} healed` : "",
  ].filter(Boolean).join(", ");
  const groups = (incident.groups || []).map(stableName);
  return make("li", { "data-state": toneOf(incident.kind) },
    make("div", { class: "incident-head" },
      make("b", {}, incident.kind.replaceAll("_", " ")),
      make("span", {}, groups.slice(0, 6).join(", ") + (groups.length > 6 ? ` and ${groups.length - 6} more` : "")),
      incident.is_open ? make("span", { class: "muted" }, "still under way") : null,
      make("time", { datetime: new Date(incident.at * 1000).toISOString() }, `${duration(Math.max(0, now - incident.at)).replace(/ \d+ s$/, "")} ago, step ${whole.format(incident.step)}`)),
    make("p", { class: "incident-cause" }, incident.cause),
    parts.length ? make("div", { class: "anatomy-track" }, anatomyBar(parts, words, longest),
      make("ul", { class: "legend" }, words.map(([name, text]) => make("li", { "data-part": name }, make("b", { "aria-hidden": "true" }), text)))) : null,
    cost ? make("p", { class: "muted" }, cost[0].toUpperCase() + cost.slice(1) + ".") : null);
}

function anatomyBar(parts, words, longest) {
  const bar = make("div", { class: "anatomy", role: "img", "aria-label": words.map(([, text]) => text).join(", ") });
  for (const [name, seconds] of parts) {
    const piece = make("i", { "data-part": name });
    piece.style.width = `${(100 * seconds) / longest}%`;
    bar.append(piece);
  }
  return bar;
}

// What stands by, how many of these could take a place now, and a silence that is long.
function spareText(summary, now) {
  if (!summary.spares) return "";
  const silence = summary.spares_seen_at === undefined ? "" : `, one silent for ${duration(Math.max(0, now - summary.spares_seen_at))}`;
  return `${whole.format(summary.spares)} ${summary.spares === 1 ? "spare stands" : "spares stand"} by, ${whole.format(summary.spares_ready || 0)} ready${silence}`;
}

function timeline(points, incidents, expected, width) {
  if (points.length < 2) return [make("p", { class: "empty" }, "The timeline begins with the second sample, some seconds from now.")];
  const end = points[points.length - 1].at;
  const span = Math.min(HOUR_S, Math.max(60, end - points[0].at));
  const [left, top, height, lane] = [36, 8, 120, 150];
  const x = (at) => left + (width - left) * (1 - (end - at) / span);
  const highest = niceCeiling(Math.max(...points.map((point) => point.steps_per_s)) || 1);
  const y = (rate) => top + height * (1 - rate / highest);
  const svg = draw("svg", { viewBox: `0 0 ${width} 188`, role: "img", "aria-labelledby": "timeline-words" });
  for (const share of [0, 0.5, 1]) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width, y1: y(highest * share), y2: y(highest * share) }),
      draw("text", { class: "axis", x: left - 6, y: y(highest * share) + 4, "text-anchor": "end" }, String(+(highest * share).toPrecision(2))));
  }
  const minutes = [1, 2, 5, 10, 20, 30].find((each) => (each * 60 * (width - left)) / span >= LABEL_WIDTH) || 60;
  for (let minute = 0; minute * 60 < span - 20; minute += minutes) {
    svg.append(draw("text", { class: "axis", x: x(end - minute * 60), y: 184, "text-anchor": minute ? "middle" : "end" }, minute ? `−${minute} min` : "now"));
  }
  const within = points.filter((point) => point.at >= end - span);
  const line = within.slice(1).map((point) => `${x(point.at).toFixed(1)},${y(point.steps_per_s).toFixed(1)}`).join(" L");
  if (within.length > 2) {
    svg.append(draw("path", { class: "speed-area", d: `M${x(within[1].at).toFixed(1)},${y(0)} L${line} L${x(end).toFixed(1)},${y(0)}Z` }), draw("path", { class: "speed", d: `M${line}` }));
    const good = within.filter((point) => point.goodput !== null).map((point) => `${x(point.at).toFixed(1)},${(top + height * (1 - point.goodput)).toFixed(1)}`);
    if (good.length > 1) svg.append(draw("path", { class: "goodput-line", d: `M${good.join(" L")}` }));
  }
  svg.append(draw("rect", { class: "lane", x: left, y: lane, width: width - left, height: 6, rx: 2 }));
  for (let index = 1; index < within.length; index += 1) {
    const there = within[index].num_in_quorum;
    const kind = there >= expected ? "full" : there ? "part" : "none";
    const begin = x(within[index - 1].at);
    svg.append(draw("rect", { class: `lane-${kind}`, x: begin, y: lane, width: Math.max(0.5, x(within[index].at) - begin + 0.3), height: 6 }));
  }
  const seen = incidents.filter((incident) => incident.at >= end - span && incident.at <= end + 5);
  for (const incident of seen) svg.append(mark(incident, Math.min(x(incident.at), width - 5), lane - 7));
  const rates = within.map((point) => point.steps_per_s);
  const text = `Up to ${Math.max(...rates).toFixed(1)} steps a second, now ${rates[rates.length - 1].toFixed(1)}; ${count(seen.length, "incident")} in ${count(Math.round(span / 60), "minute")}.`;
  return [svg, make("figcaption", {}, make("ul", { class: "legend" },
    make("li", { id: "timeline-words" }, text), make("li", { "data-part": "rebuilding" }, make("b", { "aria-hidden": "true" }), "steps a second"),
    make("li", { "data-part": "committed" }, make("b", { "aria-hidden": "true" }), "goodput (dashed), all groups (bar)"),
    make("li", {}, "▲ joined, ✕ lost, ◆ other")))];
}

function mark(incident, cx, cy) {
  const tone = toneOf(incident.kind);
  const label = draw("title", {}, `${incident.kind.replaceAll("_", " ")}: ${incident.cause}`);
  if (tone === "training") return draw("path", { class: "mark-joined", d: `M${cx} ${cy - 4}l4.5 8h-9z` }, label);
  if (tone === "lost") return draw("path", { class: "mark-lost", d: `M${cx - 4} ${cy - 3}l1.4-1.4L${cx} ${cy - 1.8}l2.6-2.6L${cx + 4} ${cy - 3}l-2.6 2.6 2.6 2.6L${cx + 2.6} ${cy + 3.6}L${cx} ${cy + 1}l-2.6 2.6L${cx - 4} ${cy + 2.2}l2.6-2.6z` }, label);
  return draw("path", { class: "mark-other", d: `M${cx} ${cy - 4}l4 4-4 4-4-4z` }, label);
}

function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((each) => each * power).find((each) => each >= value) || value;
}

// -- dialogs ---------------------------------------------------------------------------------------

/** Ask before a command is sent; what is wrong with it is shown where it was given. */
function confirmCommand({ title, text, yes, path, hasReason = true }) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), yes);
  setText(byId("confirm-error"), "");
  byId("confirm-why").hidden = !hasReason;
  byId("reason").value = "";
  byId("confirm-yes").disabled = false;
  byId("confirm-form").onsubmit = async (event) => {
    event.preventDefault();
    byId("confirm-yes").disabled = true;
    const reason = byId("reason").value.trim();
    try {
      const answer = await command(path, hasReason && reason ? { reason } : {});
      dialog.close();
      announce(answer.message || "The loss is accepted.");
    } catch (error) {
      setText(byId("confirm-error"), error.message);
      byId("confirm-yes").disabled = false;
    }
  };
  dialog.showModal();
}

function askToken(why) {
  const dialog = byId("ask-token");
  setText(byId("token-error"), why);
  if (!dialog.open) dialog.showModal();
  byId("token").select();
}

function announce(text) { setText(byId("announce"), text); }

function notice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

function link(tone, text) {
  setAttr(byId("link"), "data-tone", tone);
  setText(byId("link-text"), text);
}

// -- the whole -------------------------------------------------------------------------------------

const state = { documents: new Map(), page: null, stream: null, acceptsCommands: false, isDrawing: false, brokenSince: null };

function redraw() {
  if (state.isDrawing) return;
  state.isDrawing = true;
  requestAnimationFrame(() => {
    state.isDrawing = false;
    state.page?.update(state.documents);
  });
}

const handlers = {
  event(kind, content) {
    clock.set(content.at);
    state.brokenSince = null;
    link("live", "live");
    if (kind === "document") {
      state.documents.set(content.channel, content.document);
      setBlank(false);
      notice("");
    } else if (kind === "patch") merge(state.documents.get(content.channel), content.patch);
    else if (kind === "gone") notice(content.message);
    else if (kind === "leader") notice(leaderNotice(content.leader));
    redraw();
  },
  broken(error) {
    clock.stop();
    state.brokenSince ??= new Date().toLocaleTimeString("en-GB");
    link("broken", error.status ? "refused" : `no connection since ${state.brokenSince}, trying again`);
    if (error.status === 401) askToken(auth.token ? error.message : "");
    else if (error.code === "not_leader") notice(leaderNotice(error.leader));
    else if (error.status) notice(error.message[0].toUpperCase() + error.message.slice(1));
    if (error.status === 404) setBlank(true);
  },
};

/** Hide the frame of a page about a job that is not there: it would show dashes and empty tables. */
const setBlank = (isBlank) => byId("main").toggleAttribute("data-blank", isBlank);

const leaderNotice = (leader) => `This lighthouse does not lead, so it knows of no jobs. ${leader ? `The leader answers gRPC at ${leader}: open its dashboard.` : "No leader is known yet."}`;

function showRoute() {
  const found = location.hash.match(/^#\/job\/(.+)$/);
  let job = null;
  try { job = found ? decodeURIComponent(found[1]) : null; } catch { /* a broken address is the first page */ }
  state.stream?.close();
  state.page?.close?.();
  state.documents = new Map();
  const root = byId("main");
  setBlank(false);
  state.page = job === null ? new OverviewPage(root) : new JobPage(root, job);
  byId("path").replaceChildren(...(job === null ? [] : [make("li", { "aria-current": "page" }, job)]));
  document.title = job === null ? "Lighthouse" : `${job} · Lighthouse`;
  notice("");
  link("idle", "connecting");
  state.stream = new Stream(job, handlers);
  return root;
}

async function loadAbout() {
  try {
    const about = await read("/about");
    state.acceptsCommands = about.accepts_commands;
    byId("token-button").hidden = !about.needs_token;
    setText(byId("version"), `torchft-svc ${about.version}${about.accepts_commands ? "" : ". Commands are off: this lighthouse has no token."}`);
    redraw();
  } catch (error) { /* the stream shows what is wrong */ }
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  auth.token = byId("token").value.trim();
  byId("token").value = "";
  byId("ask-token").close();
  loadAbout();
  showRoute();
});
byId("token-cancel").addEventListener("click", () => byId("ask-token").close());
byId("confirm-no").addEventListener("click", () => byId("confirm").close());
byId("token-button").addEventListener("click", () => askToken(""));
addEventListener("hashchange", () => showRoute().querySelector("h1")?.focus());
setInterval(redraw, 1000);  // ages go on
loadAbout();
showRoute();
