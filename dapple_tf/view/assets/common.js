"use strict";
// Shared by all pages: elements, numbers as text, lists of numbers as text, and the state that a link carries.
window.dappleLib = (() => {
  /**
   * Makes an element. Texts become text nodes, never markup.
   * @param {string} tag
   * @param {Object} attributes - "on..." are listeners; true and false set or leave out an attribute.
   * @param {...(Node|string|number|null)} children
   */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
    }
    made.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
    return made;
  }

  const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

  /** The data of the page, frozen. */
  function readData() {
    return deepFreeze(JSON.parse(document.getElementById("data").textContent));
  }

  function deepFreeze(value) {
    if (value === null || typeof value !== "object") return value;
    Object.values(value).forEach(deepFreeze);
    return Object.freeze(value);
  }

  // ---- numbers as text

  /** A number with at most `digits` significant digits, without an exponent where that reads well. */
  function number(value, digits = 4) {
    if (!Number.isFinite(value)) return String(value);
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e9 || size < 1e-6)) return value.toExponential(digits - 1);
    if (size >= 10 ** digits) return String(Math.round(value));
    return String(Number(value.toPrecision(digits)));
  }

  const TIME_SCALES = [
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "\u00b5s"],
    [1e-9, "ns"],
  ];

  /** The largest unit of which `size` seconds are at least one. */
  function timeScale(size, unit) {
    if (unit !== "s") return [1, unit];
    return (
      TIME_SCALES.find(([scale]) => Math.abs(size) >= scale * 0.9995) ?? (size === 0 ? TIME_SCALES[1] : TIME_SCALES[3])
    );
  }

  function time(value, unit, digits = 4) {
    const [scale, name] = timeScale(value, unit);
    return `${number(value / scale, digits)} ${name}`;
  }

  function bytes(value) {
    const names = ["B", "KiB", "MiB", "GiB", "TiB"];
    const step = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, Math.abs(value))) / 10)));
    return `${number(value / 1024 ** step, 3)} ${names[step]}`;
  }

  const percent = (share) => share === null ? "" : `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;

  // ---- lists of numbers: "0-3,7,once"

  /** Text of a set; null values, which stand for "none", are written as `-`. */
  function rangesText(values) {
    const numbers = [...values].filter((value) => typeof value === "number").sort((a, b) => a - b);
    const parts = [];
    for (let from = 0; from < numbers.length;) {
      let to = from;
      while (numbers[to + 1] === numbers[to] + 1) to++;
      parts.push(to === from ? `${numbers[from]}` : `${numbers[from]}-${numbers[to]}`);
      from = to + 1;
    }
    if (values.has(null)) parts.push("-");
    return parts.join(",");
  }

  /** The set that prints as `text`, of those of `allowed`; null if it isn't such a list. */
  function parseRanges(text, allowed) {
    const found = new Set();
    for (const part of text
      .split(",")
      .map((piece) => piece.trim())
      .filter(Boolean)) {
      if (part === "-") {
        found.add(null);
        continue;
      }
      const match = /^(\d{1,9})(?:\s*-\s*(\d{1,9}))?$/.exec(part);
      if (!match) return null;
      const [low, high] = [Number(match[1]), Number(match[2] ?? match[1])];
      for (const value of allowed) if (typeof value === "number" && value >= low && value <= high) found.add(value);
    }
    return found;
  }

  // ---- the state that a link carries

  /** Reads the state after the # of the address: {name: text}. */
  function readHash() {
    return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  }

  let waiting = null;
  let written = null;

  /** Puts the state into the address, soon; browsers refuse to do it too often. */
  function writeHash(makeState) {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      const entries = Object.entries(makeState()).filter(([, value]) => value !== null && value !== undefined);
      written = new URLSearchParams(entries).toString();
      history.replaceState(null, "", `#${written}`);
    }, 200);
  }

  /** Calls `listener` when the part after the # is changed from outside. */
  function onHash(listener) {
    window.addEventListener("hashchange", () => {
      if (location.hash.slice(1) !== written) listener();
    });
  }

  // ---- searching in sorted columns

  /** The first position in [0, count) for which `test` is true, count if there is none; it must stay true after. */
  function firstWhere(count, test) {
    let [low, high] = [0, count];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (test(middle)) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // ---- colours

  let colours = null;

  /** Colours by their names in the style sheet, `theme()["kind-F"]`; of the scheme that is on. */
  function theme() {
    if (colours) return colours;
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    colours = new Proxy(
      {},
      {
        get: (cache, name) => (cache[name] ??= read(name) || read("kind-other")),
      },
    );
    return colours;
  }

  /** The custom property of a kind; whatever it is called, it's one that can be written in CSS. */
  const kindProperty = (kind) => `kind-${kind.replace(/[^a-zA-Z_]/g, "")}`;
  const kindColours = new Map();

  function kindColour(kind) {
    if (!kindColours.has(kind)) kindColours.set(kind, theme()[kindProperty(kind)]);
    return kindColours.get(kind);
  }

  const scheme = window.matchMedia("(prefers-color-scheme: dark)");

  function onScheme(listener) {
    scheme.addEventListener("change", () => {
      colours = null;
      kindColours.clear();
      listener();
    });
  }

  const swatch = (kind) => {
    const made = element("span", { class: "swatch", "aria-hidden": "true" });
    made.style.background = `var(--${kindProperty(kind)}, var(--kind-other))`;
    return made;
  };

  const KIND_ORDER = [
    "F",
    "B",
    "Bx",
    "Bw",
    "accumulate",
    "apply",
    "all_reduce",
    "send",
    "read",
    "split",
    "concat",
    "metrics",
    "other",
  ];

  /** Kinds in the order in which a step meets them; unknown ones last. */
  function sortedKinds(kinds) {
    const place = (kind) => (KIND_ORDER.indexOf(kind) + KIND_ORDER.length + 1) % (KIND_ORDER.length + 1);
    return [...kinds].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
  }

  return {
    element,
    readData,
    number,
    time,
    timeScale,
    bytes,
    percent,
    rangesText,
    parseRanges,
    readHash,
    writeHash,
    onHash,
    firstWhere,
    theme,
    kindColour,
    onScheme,
    swatch,
    sortedKinds,
  };
})();
