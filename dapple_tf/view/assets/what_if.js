"use strict";
/*
 * The what-if page: settings above the timelines of the base and of what would be. Every change asks the server.
 * For tests, window.whatIf has
 *   question()      the settings as they are asked about
 *   answer()        the last answer
 *   asked(), busy() how many questions have been asked, and whether one is open
 */
(() => {
  const lib = window.dappleLib;
  const { element } = lib;
  const start = window.dapple.data.what_if;
  const BASE = "base";
  const CHANGED = "what if";
  const PAUSE_MS = 120;

  let base = { ...start.question };
  let answer = window.dapple.data;
  let asked = 0;
  let open = false; // Whether a question is on its way; the latest one waits for it.
  let again = false;
  let timer = null;
  let seen = "both";

  // ---- settings

  const plain = { read: (text) => whole(text), show: (value) => String(value) };
  const amount = (factor) => ({
    read: (text) => (text.trim() === "" ? null : Number((real(text) * factor).toPrecision(12))),
    show: (value) => (value === null ? "" : lib.number(value / factor, 6)),
  });

  /** A whole number, or the text as it is: the server says what is wrong with it. */
  const whole = (text) => (/^\s*\d{1,9}\s*$/.test(text) ? Number(text) : text);
  const real = (text) => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : NaN);

  const FIELDS = [
    { name: "micro_batches", title: "micro-batches", ...plain },
    { name: "global_batch_size", title: "global batch", ...plain },
    { name: "schedule", title: "schedule", options: start.schedules },
    { name: "recompute", title: "recompute", options: start.recompute },
    { name: "speed", title: "devices' speed", ...amount(1), unit: "\u00d7" },
    { name: "intra_bandwidth", title: "within a server", ...amount(1e9), unit: "GB/s", cluster: true },
    { name: "intra_latency", title: "\u2026 latency", ...amount(1e-6), unit: "\u00b5s", cluster: true },
    { name: "inter_bandwidth", title: "between servers", ...amount(1e9), unit: "GB/s", cluster: true },
    { name: "inter_latency", title: "\u2026 latency", ...amount(1e-6), unit: "\u00b5s", cluster: true },
  ];

  const unknown = (field) => (field.name.endsWith("latency") ? "none" : "unlimited");

  /** A value of the base, as a person reads it. */
  function shown(field, value) {
    if (field.options) return value;
    if (field.cluster && value === null) value = start.cluster[field.name];
    if (value === null) return unknown(field);
    return field.show(value) + (field.unit ? ` ${field.unit}` : "");
  }

  function makeInput(field) {
    if (field.options) {
      return element("select", { id: `set-${field.name}`, onchange: ask }, ...field.options.map((name) => element("option", { value: name }, name)));
    }
    const known = field.cluster ? start.cluster[field.name] : null;
    const placeholder = field.cluster ? (known === null ? unknown(field) : field.show(known)) : "";
    const attributes = { id: `set-${field.name}`, oninput: ask, placeholder, autocomplete: "off", spellcheck: "false" };
    return element("input", { ...attributes, type: "text", inputmode: "decimal" });
  }

  const rows = FIELDS.map((field) => {
    const input = makeInput(field);
    const before = element("td", { class: "base" });
    const label = element("label", { for: input.id }, field.title, field.unit ? element("span", { class: "hint" }, ` ${field.unit}`) : null);
    return { field, input, before, row: element("tr", {}, element("th", { scope: "row" }, label), before, element("td", {}, input)) };
  });

  function settingsTable(some) {
    const head = element("thead", {}, element("tr", {}, element("th"), element("th", {}, BASE), element("th", {}, CHANGED)));
    return element("table", {}, head, element("tbody", {}, ...some.map(({ row }) => row)));
  }

  const stages = element("textarea", { id: "set-stages", oninput: ask, spellcheck: "false", "aria-describedby": "stages-hint" });
  const stagesHint = element(
    "span", { class: "heading", id: "stages-hint", title: `Layers: ${start.layers.join(", ")}` }, "stages \u2014 last layer: devices"
  );

  function fill(question) {
    for (const { field, input } of rows) input.value = field.options ? question[field.name] : field.show(question[field.name]);
    stages.value = question.stages;
  }

  function question() {
    const found = Object.fromEntries(rows.map(({ field, input }) => [field.name, field.options ? input.value : field.read(input.value)]));
    if (found.speed === null) found.speed = 1;
    return { ...found, stages: stages.value };
  }

  const same = (one, other) => JSON.stringify(Object.entries(one).sort()) === JSON.stringify(Object.entries(other).sort());

  // ---- results

  const results = element("tbody");
  const RESULTS = [
    { title: "step time", value: (n) => n.latency, text: (v) => lib.time(v, "s"), better: -1 },
    { title: "samples/s", value: (n) => n.throughput, text: (v) => lib.number(v), better: 1 },
    { title: "bubble", value: (n) => n.bubble, text: (v) => lib.percent(v), better: -1, points: true },
    { title: "peak memory", value: (n) => n.peak_bytes, text: (v) => lib.bytes(v), better: -1 },
    { title: "fits", text: (n) => (n.limit === null ? "no limit known" : n.fits ? `yes (${lib.bytes(n.limit)})` : `no (${lib.bytes(n.limit)})`) },
  ];

  const caseOf = (name) => answer.cases.find((one) => one.name === name) ?? null;

  function change(result, before, after) {
    if (!before || !after || !result.value) return element("td", { class: "number" });
    const [old, now] = [result.value(before), result.value(after)];
    if (old === null || now === null) return element("td", { class: "number" });
    const share = result.points ? now - old : old ? now / old - 1 : 0;
    const text = result.points ? `${(share * 100).toFixed(1)} points` : `${(share * 100).toFixed(1)}%`;
    if (Math.abs(share) < 0.0005) return element("td", { class: "number hint" }, "same");
    const kind = Math.sign(share) === result.better ? "better" : "worse";
    return element("td", { class: `number ${kind}` }, share > 0 ? `+${text}` : text.replace("-", "\u2212"));
  }

  function showAnswer() {
    const [before, after] = [caseOf(BASE)?.numbers, (caseOf(CHANGED) ?? caseOf(BASE))?.numbers];
    const text = (result, numbers) => {
      if (!numbers) return "\u2014";
      const value = result.value ? result.value(numbers) : numbers;
      return value === null ? "\u2014" : result.text(value);
    };
    results.replaceChildren(...RESULTS.map((result) => element(
      "tr", {}, element("th", { scope: "row" }, result.title),
      element("td", { class: "number" }, text(result, before)), element("td", { class: "number" }, text(result, after)),
      change(result, before, after)
    )));
    const wrong = answer.cases.filter(({ error }) => error);
    error.textContent = wrong.map((one) => (one.name === BASE ? `base: ${one.error}` : one.error)).join("\n");
    for (const button of [copyPlan, copyCommand, useAsBase]) button.disabled = !(caseOf(CHANGED) ?? caseOf(BASE))?.plan;
  }

  function markChanges() {
    const now = question();
    for (const { field, before, row } of rows) {
      before.textContent = shown(field, base[field.name]);
      row.classList.toggle("changed", now[field.name] !== base[field.name]);
    }
    stages.classList.toggle("changed", now.stages.trim() !== base.stages.trim());
    reset.disabled = same(now, start.question) && same(base, start.question);
  }

  /** Draws the timelines that are to be seen: what would be above what is. */
  function draw() {
    const wanted = answer.timelines.filter(({ name }) => seen === "both" || name === seen);
    const timelines = (wanted.length ? wanted : answer.timelines).toReversed();
    if (timelines.length) window.dapple.showTimelines({ timelines });
    for (const button of views.children) button.setAttribute("aria-pressed", button.dataset.seen === seen);
  }

  // ---- asking

  function ask() {
    markChanges();
    panel.classList.add("waiting");
    clearTimeout(timer);
    timer = setTimeout(send, PAUSE_MS);
  }

  async function send() {
    timer = null;
    if (open) {
      again = true;
      return;
    }
    open = true;
    asked++;
    const now = question();
    const body = same(now, base) ? { [BASE]: base } : { [BASE]: base, [CHANGED]: now };
    try {
      const response = await fetch("/answer", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body, (_, value) => (Number.isNaN(value) ? "not a number" : value)),
      });
      const found = await response.json();
      if (!response.ok) throw new Error(found.error);
      answer = found;
      showAnswer();
      draw();
      status.textContent = `simulated in ${lib.time(found.seconds, "s", 2)}`;
    } catch (problem) {
      const away = problem instanceof TypeError; // What fetch throws when nobody is there.
      error.textContent = away ? "The server doesn't answer; is the program that opened this page still running?" : problem.message;
    } finally {
      open = false;
      if (again) {
        again = false;
        send();
      } else if (timer === null) {
        panel.classList.remove("waiting");
      }
    }
  }

  async function copy(button, text) {
    const title = button.textContent;
    await navigator.clipboard.writeText(text).then(() => "copied", () => "not allowed").then((word) => { button.textContent = word; });
    setTimeout(() => { button.textContent = title; }, 1200);
  }

  const shownCase = () => caseOf(CHANGED) ?? caseOf(BASE);
  const copyPlan = element("button", { type: "button", id: "copy-plan", onclick: () => copy(copyPlan, shownCase().plan) }, "Copy plan (JSON)");
  const copyCommand = element("button", { type: "button", id: "copy-command", onclick: () => copy(copyCommand, shownCase().command) }, "Copy command");
  const useAsBase = element("button", {
    type: "button", id: "use-as-base", onclick: () => {
      base = question();
      ask();
    },
  }, "Use as base");
  const reset = element("button", {
    type: "button", id: "reset", onclick: () => {
      base = { ...start.question };
      fill(base);
      ask();
    },
  }, "Start over");
  const views = element("div", { class: "views", role: "group", "aria-label": "Timelines" }, ...["both", BASE, CHANGED].map((name) => element("button", {
    type: "button", id: `see-${name.replace(" ", "-")}`, "data-seen": name, onclick: () => {
      seen = name;
      draw();
    },
  }, name)));
  const error = element("p", { id: "what-if-error", role: "alert" });
  const status = element("span", { class: "hint", role: "status" });

  const several = start.servers > 1;
  const shownRows = rows.filter(({ field }) => several || !field.name.startsWith("inter_"));
  const head = element("thead", {}, element("tr", {}, element("th"), ...[BASE, CHANGED, "change"].map((title) => element("th", { class: "number" }, title))));
  const panel = element(
    "div", { id: "what-if" },
    settingsTable(shownRows.slice(0, 5)), settingsTable(shownRows.slice(5)),
    element("div", { class: "stages" }, stagesHint, stages),
    element("table", { class: "results" }, head, results),
    element("div", { class: "buttons" }, views, useAsBase, reset, copyPlan, copyCommand, status)
  );
  window.dapple.controls.append(panel, error);
  fill(base);
  markChanges();
  showAnswer();
  draw();

  window.whatIf = { question, answer: () => answer, asked: () => asked, busy: () => open || timer !== null };
})();
