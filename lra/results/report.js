"use strict";
// Draws results/report.html from the JSON it holds. All text goes through textContent: a model's name
// is never read as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs.map((values, index) => {
  const run = { index };
  data.fields.forEach((name, i) => { run[name] = data.pooled.includes(name) ? data.pool[values[i]] : values[i]; });
  return run;
});
const SHOWN = 200; // rows of the run list before "show all"
const form = document.querySelector("form");
const dialog = document.querySelector("dialog");

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return node;
}

const percent = (value) => (value === null ? "" : (value + 1e-9).toFixed(2));
const thousands = (value) => (value === null ? "" : value.toLocaleString("en-US"));
const short = (value, unit) => (value === null ? "" : `${Number(value.toPrecision(4)).toLocaleString("en-US")}${unit || ""}`);
const asNumber = (text) => (/^[-+]?[\d,]*\.?\d+/.test(text) ? parseFloat(text.replace(/,/g, "")) : text);

// A column is {title, value: row => sortable, show: row => text or node, number: bool, wide: bool};
// one that is wide is left out on a narrow screen.
function table(caption, columns, rows, limit) {
  let sorted = -1, ascending = true, all = false;
  const body = el("tbody"), headers = [], box = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption });
  const more = el("button", { type: "button", onclick: () => { all = true; fill(); } });
  function fill() {
    let ordered = [...rows];
    if (sorted >= 0) {
      const value = columns[sorted].value;
      ordered.sort((a, b) => {
        const x = value(a), y = value(b);
        const xEmpty = x === "" || x === null || x === undefined, yEmpty = y === "" || y === null || y === undefined;
        if (xEmpty || yEmpty) return xEmpty - yEmpty; // empty cells last, whichever way
        const order = typeof x === "number" && typeof y === "number" ? x - y
          : typeof x !== typeof y ? (typeof x === "number" ? -1 : 1) : String(x).localeCompare(String(y), "en");
        return ascending ? order : -order;
      });
    }
    const shown = all || !limit ? ordered : ordered.slice(0, limit);
    body.replaceChildren(...shown.map((row) => el("tr", null, ...columns.map((column, i) =>
      el(i ? "td" : "th", { ...(i ? {} : { scope: "row" }), class: kind(column) }, column.show(row))))));
    more.textContent = `Show all ${ordered.length} rows`;
    more.hidden = shown.length === ordered.length;
    headers.forEach((th, i) => th.setAttribute("aria-sort", i !== sorted ? "none" : ascending ? "ascending" : "descending"));
  }
  columns.forEach((column, i) => {
    const sort = () => { ascending = sorted === i ? !ascending : !column.number; sorted = i; fill(); };
    headers.push(el("th", { scope: "col", class: kind(column) }, el("button", { type: "button", onclick: sort }, column.title)));
  });
  box.append(el("table", null, el("caption", null, caption), el("thead", null, el("tr", null, ...headers)), body));
  fill();
  return el("div", null, box, limit ? more : null);
}

const kind = (column) => (column.number ? "number" : column.wide ? "wide" : "");

function text(title, read, number) {
  return { title, value: (row) => read(row), show: (row) => read(row), number: Boolean(number) };
}

// On a narrow screen a variant stands under its model, so that numbers come next.
function modelAndVariant(model, variant) {
  return [
    { title: "Model", value: model, show: (row) => el("span", null, model(row), variant(row) ? el("span", { class: "narrow" }, variant(row)) : null) },
    { ...text("Variant", variant), wide: true },
  ];
}

function drawBoard(filter) {
  const tasks = data.tasks.filter((task) => !filter.task || task === filter.task);
  const parts = [];
  for (const recipe of data.recipes.filter((r) => !filter.recipe || r === filter.recipe)) {
    const rows = data.rows.filter((row) => row.recipe === recipe && row.model.toLowerCase().includes(filter.text)
      && (!filter.task || row.cells[filter.task]));
    if (!rows.length) continue;
    const filled = tasks.filter((task) => rows.some((row) => row.cells[task]));
    const empty = tasks.filter((task) => !filled.includes(task)).map((task) => data.titles[task]);
    const cell = (row, task) => {
      const found = row.cells[task];
      if (!found) return "";
      const name = `${row.model} on ${data.titles[task]}`;
      const label = found.best ? el("strong", null, found.text) : found.text;
      return el("div", null, el("button", { type: "button", class: "cell", "aria-haspopup": "dialog",
        onclick: () => open(name, found.runs) }, label), strip(found.strip, name));
    };
    const averages = data.averages.map((title, i) => ({ title, number: true,
      value: (row) => row.averages[i], show: (row) => percent(row.averages[i]) }));
    parts.push(table(`Recipe ${recipe}`, [
      ...modelAndVariant((row) => row.model, (row) => row.variant),
      ...filled.map((task) => ({ title: data.titles[task], number: true, show: (row) => cell(row, task),
        value: (row) => (row.cells[task] ? row.cells[task].value : null) })),
      ...(filter.task ? [] : averages.filter((column) => rows.some((row) => column.value(row) !== null))),
      { title: "Params", number: true, value: (row) => row.params[1],
        show: (row) => [...new Set(row.params)].map(thousands).join(" to ") },
    ], rows), el("ul", { class: "note" }, ...data.footnotes[recipe].map(([mark, note]) => el("li", null, `[${mark}] ${note}`)),
      empty.length ? el("li", null, `No result yet: ${empty.join(", ")}`) : null));
  }
  document.getElementById("board").replaceChildren(...(parts.length ? parts : [el("p", null, "No finished run fits.")]));
}

function drawRuns(filter) {
  const rows = runs.filter((run) => (!filter.recipe || run.recipe === filter.recipe) && (!filter.task || run.task === filter.task)
    && (!filter.status || run.outcome === filter.status)
    && (run.model.toLowerCase().includes(filter.text) || run.id.toLowerCase().includes(filter.text)));
  document.getElementById("count").textContent = `${rows.length} of ${runs.length} runs`;
  document.getElementById("list").replaceChildren(table("Runs", [
    { title: "Run", value: (run) => run.id, show: (run) => el("button", { type: "button", class: "cell", "aria-haspopup": "dialog",
      onclick: () => open(run.id, [run.index]) }, run.id) },
    { title: "Test", number: true, value: (run) => run.test, show: (run) => percent(run.test) },
    text("Task", (run) => data.titles[run.task] || run.task), text("Model", (run) => run.model), text("Recipe", (run) => run.recipe),
    text("Setting", (run) => [run.overrides, run.inputs].filter(Boolean).join(", ")), text("Seed", (run) => run.seed, true), text("Status", (run) => run.outcome),
    { title: "Steps/s", number: true, value: (run) => run.steps_per_s, show: (run) => short(run.steps_per_s) },
    { title: "Finished", value: (run) => run.finished, show: (run) => run.finished.slice(0, 10) },
  ], rows, SHOWN));
}

function open(title, indices) {
  document.getElementById("dialog-title").textContent = title;
  document.getElementById("details").replaceChildren(...indices.map((i) => describe(runs[i])));
  dialog.showModal();
  history.replaceState(null, "", `#run=${encodeURIComponent(runs[indices[0]].id)}`);
}

function describe(run) {
  const facts = [
    ["Status", run.outcome + (run.message ? `: ${run.message}` : "")],
    ["Test", run.test === null ? "" : `${percent(run.test)} % of ${thousands(run.n_test)} examples, 95 % interval ${run.low.toFixed(1)} to ${run.high.toFixed(1)}`],
    ["Validation", run.val === null ? "" : `${percent(run.val)} % at the selected step ${thousands(run.step)}`],
    ["Protocol", run.protocol], ["Against the recipe", run.why_not], ["Set by hand", run.overrides], ["Inputs", run.inputs],
    ["Parameters", thousands(run.params) + (run.baseline ? `, ${(run.params / run.baseline).toFixed(3)} times softmax` : "")],
    ["Speed", run.steps_per_s === null ? "" : `${short(run.steps_per_s)} steps/s, ${short(run.tokens_per_s)} tokens/s`],
    ["Peak memory", short(run.memory_mb, " MB")], ["Training time", short(run.train_s, " s")],
    ["Hardware", run.hardware], ["Environment", run.environment], ["Data", run.data], ["Finished", run.finished],
  ];
  const list = el("dl");
  for (const [name, value] of facts) if (value) list.append(el("dt", null, name), el("dd", null, value));
  const path = ["runs", run.task, run.model, `${run.id}.json`];
  const command = `python run.py ${run.command}`;
  list.append(el("dt", null, "Command"), el("dd", null, el("code", null, command)),
    el("dt", null, "Record"), el("dd", null, el("a", { href: path.map(encodeURIComponent).join("/") }, path.join("/"))));
  return el("section", null, el("h3", null, run.id), curve(run), list);
}

function draw(tag, attributes, content) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (content !== undefined) node.textContent = content;
  return node;
}

// A figure on a line from 0 to 100 %; the key below the leaderboard has the same marks.
function strip(found, name) {
  const words = `${name}: ${found.words}`;
  const svg = draw("svg", { class: "strip", role: "img", "aria-label": words });
  const line = (kind, from, to, y1, y2) => svg.append(draw("line", { class: kind, x1: `${from}%`, x2: `${to}%`, y1, y2 }));
  svg.append(draw("title", {}, words));
  line("scale", 0, 100, 8, 8);
  for (const [kind, y1, y2] of [["chance", 8, 15], ["rule", 8, 15], ["published", 1, 8]]) {
    if (kind in found) line(kind, found[kind], found[kind], y1, y2);
  }
  line("ends", ...found.ends, 8, 8);
  svg.append(draw("circle", { cx: `${found.score}%`, cy: 8, r: 3 }));
  return svg;
}

function curve(run) {
  const points = run.steps.split(",").map((step, i) => [Number(step), run.curve[i] / 100]);
  if (run.curve.length < 2) return null;
  const W = 480, H = 180, L = 44, B = 30, T = 10, R = 12;
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys), y1 = Math.max(...ys, y0 + 0.1);
  const x = (v) => L + ((v - x0) / (x1 - x0 || 1)) * (W - L - R), y = (v) => H - B - ((v - y0) / (y1 - y0)) * (H - B - T);
  const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, class: "curve", role: "img",
    "aria-label": `Validation accuracy by step, from ${percent(ys[0])} to ${percent(ys[ys.length - 1])} %, best ${percent(y1)} %` });
  svg.append(draw("line", { x1: L, x2: W - R, y1: H - B, y2: H - B }), draw("line", { x1: L, x2: L, y1: T, y2: H - B }),
    draw("text", { x: L - 4, y: y(y1) + 4, "text-anchor": "end" }, y1.toFixed(1)), draw("text", { x: L - 4, y: y(y0) + 2, "text-anchor": "end" }, y0.toFixed(1)),
    draw("text", { x: L, y: H - B + 14 }, thousands(x0)), draw("text", { x: W - R, y: H - B + 14, "text-anchor": "end" }, thousands(x1)),
    draw("text", { x: (L + W) / 2, y: H - 4, "text-anchor": "middle" }, "training step; validation accuracy (%)"),
    draw("path", { d: points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("") }));
  return svg;
}

// Published rows: a table for each family, and a choice of families, of inputs and of names.
function families(title, header, rows, columns) {
  const family = header.indexOf("Family"), inputs = header.indexOf("Inputs"), box = el("div");
  const values = (column, of) => [...new Set(of.map((row) => row[column]))];
  const select = (column) => el("select", null, el("option", { value: "" }, "all"),
    ...values(column, rows).filter(Boolean).map((value) => el("option", { value }, value)));
  const [ofFamily, ofInputs] = [select(family), select(inputs)];
  const words = el("input", { type: "search", autocomplete: "off" });
  function fill() {
    const wanted = words.value.trim().toLowerCase();
    const fits = rows.filter((row) => (!ofFamily.value || row[family] === ofFamily.value)
      && (!ofInputs.value || row[inputs] === ofInputs.value) && `${row[0]} ${row[1]}`.toLowerCase().includes(wanted));
    const tables = values(family, fits).map((name) => table(`${title}: ${name}`, columns.filter((c) => c.title !== "Family"),
      fits.filter((row) => row[family] === name)));
    box.replaceChildren(...(tables.length ? tables : [el("p", null, "No published row fits.")]));
  }
  const filters = el("div", { class: "filters" }, el("label", null, "Family", ofFamily), el("label", null, "Inputs", ofInputs),
    el("label", null, "Model or variant", words));
  filters.addEventListener("input", fill);
  fill();
  return el("div", null, filters, box);
}

function refresh() {
  const filter = Object.fromEntries(["recipe", "task", "status"].map((name) => [name, form.elements[name].value]));
  filter.text = form.elements.text.value.trim().toLowerCase();
  drawBoard(filter);
  drawRuns(filter);
}

function choices(name, pairs) {
  form.elements[name].append(el("option", { value: "" }, "all"), ...pairs.map(([value, title]) => el("option", { value }, title)));
}

choices("recipe", [...new Set(runs.map((run) => run.recipe))].sort().map((r) => [r, r]));
choices("task", data.tasks.map((task) => [task, data.titles[task]]));
choices("status", [...new Set(runs.map((run) => run.outcome))].sort().map((s) => [s, s]));
form.addEventListener("input", refresh);
form.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("close").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
refresh();
for (const [title, header, rows, numeric] of data.tables) {
  const columns = header.map((name, i) => ({ title: name, number: numeric[i], value: (row) => asNumber(row[i]), show: (row) => row[i] }));
  if (header[0] === "Model" && header[1] === "Variant") columns.splice(0, 2, ...modelAndVariant((row) => row[0], (row) => row[1]));
  document.getElementById("tables").append(el("details", null, el("summary", null, title),
    header.includes("Family") ? families(title, header, rows, columns) : table(title, columns, rows)));
}
if (!document.getElementById("pictures").children.length) document.getElementById("pictures").append("No figures yet.");
const wanted = decodeURIComponent((location.hash.match(/^#run=(.*)/) || ["", ""])[1]);
const found = runs.find((run) => run.id === wanted);
if (found) open(found.id, [found.index]);
