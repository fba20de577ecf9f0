"use strict";
// Controls around a drawing: filters, the search box, buttons, keys and the tooltip.
Object.assign(
  window.dappleLib,
  (() => {
    const { element, rangesText, parseRanges, swatch } = window.dappleLib;

    /**
     * Filters of several fields, which combine: something is shown if each field has its value.
     * A field is {key, title, name(value)}; key `kind` is drawn as a legend of buttons, the others as lists.
     */
    class Filters {
      constructor(host, fields, onChange) {
        this.host = host;
        this.fields = fields;
        this.onChange = onChange;
        this.values = new Map(fields.map(({ key }) => [key, []]));
        this.chosen = new Map(fields.map(({ key }) => [key, null]));
        this.refresh = new Map();
        document.addEventListener("pointerdown", (event) => this.closeOthers(event.target));
        document.addEventListener("keydown", (event) => {
          if (event.key === "Escape") this.closeOthers(null);
        });
      }

      closeOthers(target) {
        for (const open of this.host.querySelectorAll("details[open]")) if (!open.contains(target)) open.open = false;
      }

      /** Sets the available values: {key: values}. The selection stays. */
      setValues(values) {
        const texts = (key) => JSON.stringify(this.values.get(key));
        const before = this.fields.map(({ key }) => texts(key)).join();
        this.fields.forEach(({ key }) => this.values.set(key, values[key]));
        if (before === this.fields.map(({ key }) => texts(key)).join() && this.host.childElementCount) return;
        this.host.replaceChildren(
          ...this.fields.filter(({ key }) => values[key].length).flatMap((field) => this.build(field)),
        );
      }

      /** Whether values of a field are shown; null means all. */
      allows(key, value) {
        const chosen = this.chosen.get(key);
        return chosen === null || chosen.has(value);
      }

      /** Chooses values of a field: an iterable, or null for all of them. */
      set(key, chosen, quiet = false) {
        const wanted = chosen === null ? null : new Set(chosen);
        const all =
          wanted !== null &&
          this.values.get(key).length > 0 &&
          this.values.get(key).every((value) => wanted.has(value));
        this.chosen.set(key, all ? null : wanted);
        this.refresh.get(key)?.();
        if (!quiet) this.onChange();
      }

      toggle(key, value) {
        const chosen = new Set(this.chosen.get(key) ?? this.values.get(key));
        if (!chosen.delete(value)) chosen.add(value);
        this.set(key, chosen);
      }

      /** {key: text or null}, for links. */
      state() {
        return Object.fromEntries(this.fields.map(({ key }) => [key, this.text(key)]));
      }

      text(key) {
        const chosen = this.chosen.get(key);
        if (chosen === null) return null;
        return key === "kind" ? [...chosen].join(",") : rangesText(chosen);
      }

      restore(state) {
        for (const { key } of this.fields) {
          const text = state[key];
          const chosen =
            text === undefined
              ? null
              : key === "kind"
                ? text.split(",").filter(Boolean)
                : parseRanges(text, this.values.get(key));
          this.set(key, chosen, true);
        }
      }

      build(field) {
        return field.key === "kind" ? this.buildKinds(field) : [this.buildList(field)];
      }

      buildKinds({ key, title }) {
        const buttons = this.values
          .get(key)
          .map((kind) =>
            element(
              "button",
              { type: "button", class: "kind", onclick: () => this.toggle(key, kind) },
              swatch(kind),
              kind,
            ),
          );
        const all = element("button", { type: "button", onclick: () => this.set(key, null) }, "All");
        const none = element("button", { type: "button", onclick: () => this.set(key, []) }, "None");
        this.refresh.set(key, () =>
          buttons.forEach((button, index) =>
            button.setAttribute("aria-pressed", String(this.allows(key, this.values.get(key)[index]))),
          ),
        );
        this.refresh.get(key)();
        return [element("span", { class: "label" }, title), ...buttons, all, none];
      }

      buildList({ key, title, name }) {
        const values = this.values.get(key);
        const boxes = values.map((value) =>
          element("input", { type: "checkbox", onchange: () => this.toggle(key, value) }),
        );
        const range = element("input", {
          type: "text",
          "aria-label": `${title}: numbers to show`,
          placeholder: "such as 0-3,7",
          onchange: () => this.enterRange(key, range),
        });
        const summary = element("summary");
        const made = element(
          "details",
          { class: "filter", "data-field": key },
          summary,
          element(
            "div",
            {},
            element(
              "div",
              { class: "row" },
              element("button", { type: "button", onclick: () => this.set(key, null) }, "All"),
              element("button", { type: "button", onclick: () => this.set(key, []) }, "None"),
              range,
            ),
            ...values.map((value, index) => element("label", {}, boxes[index], name(value))),
          ),
        );
        const show = () => {
          const count = values.filter((value) => this.allows(key, value)).length;
          summary.textContent = count === values.length ? `${title}: all` : `${title}: ${count} of ${values.length}`;
          made.classList.toggle("active", count !== values.length);
          boxes.forEach((box, index) => {
            box.checked = this.allows(key, values[index]);
          });
          range.value = this.text(key) ?? "";
          range.classList.remove("invalid");
        };
        this.refresh.set(key, show);
        show();
        return made;
      }

      enterRange(key, range) {
        const chosen = range.value.trim() ? parseRanges(range.value, this.values.get(key)) : null;
        const wrong = chosen === null && range.value.trim() !== "";
        range.classList.toggle("invalid", wrong);
        if (!wrong) this.set(key, chosen);
      }
    }

    /** A search box; `find(text)` gives the matches, `show(match)` goes to one. Enter goes on to the next. */
    class Search {
      constructor(find, show, placeholder) {
        this.find = find;
        this.show = show;
        this.matches = [];
        this.at = -1;
        this.box = element("input", {
          type: "search",
          id: "search",
          placeholder,
          "aria-label": "Search",
          spellcheck: "false",
          autocomplete: "off",
          oninput: () => this.look(),
          onkeydown: (event) => this.key(event),
        });
        this.count = element("span", { class: "hint", "aria-live": "polite" });
      }

      look() {
        const text = this.box.value.trim();
        this.matches = text ? this.find(text) : [];
        this.at = -1;
        if (this.matches.length) this.next(1);
        else this.report(text);
      }

      next(step) {
        if (!this.matches.length) return;
        this.at = (this.at + step + this.matches.length) % this.matches.length;
        this.show(this.matches[this.at]);
        this.report(this.box.value);
      }

      report(text) {
        this.count.textContent = this.matches.length
          ? `${this.at + 1} of ${this.matches.length}`
          : text
            ? "nothing found"
            : "";
      }

      key(event) {
        if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
        else if (event.key === "Escape") this.box.blur();
      }
    }

    const button = (text, title, onclick) =>
      element("button", { type: "button", title, "aria-label": title, onclick }, text);

    /** Runs the action of a key, unless the user is typing. */
    function bindKeys(actions) {
      document.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (event.target.closest?.("input[type=text], input[type=search], input[type=number], select, textarea"))
          return;
        const action = actions[event.key];
        if (!action) return;
        event.preventDefault();
        action();
      });
    }

    const viewButtons = (chart) => [
      button("+", "Zoom in (+)", () => chart.zoom(1.5)),
      button("\u2212", "Zoom out (-)", () => chart.zoom(1 / 1.5)),
      button("\u2190", "To the left (left arrow)", () => chart.pan(-0.2)),
      button("\u2192", "To the right (right arrow)", () => chart.pan(0.2)),
      button("Fit", "Show all (0)", () => chart.fit()),
    ];

    const viewKeys = (chart, finder) => ({
      "+": () => chart.zoom(1.5),
      "=": () => chart.zoom(1.5),
      "-": () => chart.zoom(1 / 1.5),
      0: () => chart.fit(),
      ArrowLeft: () => chart.pan(-0.1),
      ArrowRight: () => chart.pan(0.1),
      ArrowUp: () => chart.scroll(-0.2),
      ArrowDown: () => chart.scroll(0.2),
      "/": () => finder.box.focus(),
    });

    const VIEW_HELP = [
      [["wheel"], "zoom at the pointer"],
      [["Shift", "wheel"], "scroll"],
      [["drag"], "move"],
      [["+", "-"], "zoom"],
      [["0"], "show all"],
      [["\u2190", "\u2192", "\u2191", "\u2193"], "move"],
      [["/"], "search; Enter for the next"],
    ];

    function keyHelp(rows) {
      const line = ([keys, meaning]) =>
        element(
          "tr",
          {},
          element("td", {}, ...keys.flatMap((key) => [element("kbd", {}, key), " "])),
          element("td", {}, meaning),
        );
      return element(
        "details",
        {},
        element("summary", {}, "Keys and mouse"),
        element("table", {}, element("tbody", {}, ...rows.map(line))),
      );
    }

    const tip = element("div", { id: "tip", role: "tooltip", hidden: true });
    document.body.append(tip);

    /** Shows a text at the pointer; null hides it. */
    function showTip(text, x, y) {
      tip.hidden = text === null;
      if (text === null) return;
      tip.textContent = text;
      tip.style.left = `${Math.min(x + 14, window.innerWidth - tip.offsetWidth - 6)}px`;
      tip.style.top = `${y + 18 + tip.offsetHeight > window.innerHeight ? y - tip.offsetHeight - 8 : y + 18}px`;
    }

    /** Rows of names and values; values may be elements, null ones are left out. */
    function factTable(rows) {
      const shown = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
      return element(
        "table",
        {},
        element(
          "tbody",
          {},
          ...shown.map(([name, value]) =>
            element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)),
          ),
        ),
      );
    }

    return { Filters, Search, button, viewButtons, bindKeys, viewKeys, VIEW_HELP, keyHelp, showTip, factTable };
  })(),
);
