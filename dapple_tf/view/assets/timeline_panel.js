"use strict";
// What stands beside timelines: the details of a span, the summary, the status line.
Object.assign(
  window.dappleLib,
  (() => {
    const lib = window.dappleLib;
    const { element } = lib;
    const { timeText, meanBubble } = lib.timelineTexts;

    /** Gives functions that show the details, the summary and the status of a view; `choose` is called for links. */
    function timelinePanel(view, choose) {
      /** What a device is called, in the first timeline that has it. */
      function deviceLabel(device) {
        const known = view.models.flatMap((model) => model.devices).find((one) => one.device === device);
        return known ? known.label : `device ${device}`;
      }

      const link = (model, index) =>
        element(
          "button",
          { type: "button", class: "link", onclick: () => choose({ model, index }) },
          model.nameOf(index),
        );

      function showDetails() {
        const host = document.getElementById("details");
        if (!view.chosen) {
          host.replaceChildren(
            element("h2", {}, "Details"),
            element("p", { class: "hint" }, "Click a task, or search for one such as 2B3.r1."),
          );
          return;
        }
        const { model, index } = view.chosen;
        host.replaceChildren(
          element("h2", {}, `${model.nameOf(index)} (${model.name})`),
          lib.factTable(facts(model, index)),
          ...elsewhere(model, index),
        );
      }

      function facts(model, index) {
        const {
          kind,
          start,
          end,
          stage,
          micro_batch: number,
          replica,
          target,
          bytes,
          cause,
          reduction,
        } = model.span(index);
        const followers = model.followers(index);
        const rate = bytes && end > start && model.unit === "s" ? ` (${lib.bytes(bytes / (end - start))}/s)` : "";
        const untilText = (one) => ` until ${timeText(model.columns.end[one], model)}`;
        return [
          ["kind", element("span", {}, lib.swatch(kind), ` ${kind}`)],
          ["start", timeText(start, model)],
          ["end", timeText(end, model)],
          ["duration", timeText(end - start, model)],
          ["stage", stage],
          ["micro-batch", number],
          ["replica", reduction === null ? replica : null],
          ["devices", model.devicesOf(index).map(deviceLabel).join("; ")],
          ["to", target === null ? null : deviceLabel(target)],
          ["bytes", bytes ? `${lib.bytes(bytes)}${rate}` : null],
          ["reduction", reduction],
          [
            "waited for",
            model.has(cause) ? element("span", { id: "cause" }, link(model, cause), untilText(cause)) : "nothing",
          ],
          ["waited for it", followers.length ? linkList(model, followers) : null],
        ];
      }

      function linkList(model, indices, most = 12) {
        const links = indices
          .slice(0, most)
          .flatMap((index) => [link(model, index), ", "])
          .slice(0, -1);
        return element("span", {}, ...links, indices.length > most ? ` and ${indices.length - most} more` : null);
      }

      /** The same task in the other timelines. */
      function elsewhere(model, index) {
        const same = view.models
          .filter((other) => other !== model)
          .map((other) => ({ other, found: other.called(model.nameOf(index))[model.nth(index)] }))
          .filter(({ found }) => found !== undefined);
        if (!same.length) return [];
        const row = ({ other, found }) =>
          element(
            "tr",
            {},
            element(
              "td",
              {},
              element(
                "button",
                { type: "button", class: "link", onclick: () => choose({ model: other, index: found }) },
                other.name,
              ),
            ),
            ...[other.columns.start[found], other.columns.end[found] - other.columns.start[found]].map((value) =>
              element("td", { class: "number" }, timeText(value, other)),
            ),
          );
        const head = element(
          "thead",
          {},
          element(
            "tr",
            {},
            element("th", {}, "also in"),
            element("th", { class: "number" }, "start"),
            element("th", { class: "number" }, "duration"),
          ),
        );
        return [element("table", {}, head, element("tbody", {}, ...same.map(row)))];
      }

      function showSummary() {
        const devices = [...new Set(view.models.flatMap((model) => model.devices.map(({ device }) => device)))];
        const of = (model, device) => model.devices.find((one) => one.device === device);
        const cell = (text, over = false) => element("td", { class: over ? "number over" : "number" }, text);
        const row = (name, make) =>
          element("tr", {}, element("th", { scope: "row", title: name }, lib.labelForms(name)[1]), ...view.models.map(make));
        const group = (name) =>
          element(
            "tr",
            { class: "group" },
            element("th", { scope: "rowgroup", colspan: view.models.length + 1 }, name),
          );
        const rows = [row("step time", (model) => cell(timeText(model.data.latency, model)))];
        if (view.models.some(({ data }) => data.untraced)) {
          const untraced = ({ data }) => cell(data.untraced ? lib.time(data.untraced, data.unit) : "");
          rows.push(row("without tracing", untraced));
        }
        if (view.models.some(({ data }) => data.waited !== null)) {
          const waited = ({ data }) => cell(data.waited === null ? "" : lib.time(data.waited, data.unit));
          rows.push(row("waiting for its batch", waited));
        }
        if (view.models.some(({ data }) => data.throughput !== null)) {
          rows.push(row("samples/s", ({ data }) => cell(data.throughput === null ? "" : lib.number(data.throughput))));
        }
        rows.push(
          group("bubble"),
          row("mean", (model) => cell(lib.percent(meanBubble(model)))),
        );
        rows.push(
          ...devices.map((device) =>
            row(deviceLabel(device), (model) => cell(of(model, device) ? lib.percent(of(model, device).bubble) : "")),
          ),
        );
        if (view.models.some((model) => model.devices.some(({ peak }) => peak !== null))) {
          const peak = (model, device) => {
            const found = of(model, device);
            return cell(
              found && found.peak !== null ? lib.bytes(found.peak) : "",
              found && found.limit !== null && found.peak > found.limit,
            );
          };
          rows.push(
            group("peak memory"),
            ...devices.map((device) => row(deviceLabel(device), (model) => peak(model, device))),
          );
        }
        const head = element(
          "thead",
          {},
          element(
            "tr",
            {},
            element("td", {}),
            ...view.models.map(({ name }) => element("th", { scope: "col", class: "number" }, name)),
          ),
        );
        document
          .getElementById("summary")
          .replaceChildren(
            element("h2", {}, "Summary"),
            element("div", { class: "scroll" }, element("table", {}, head, element("tbody", {}, ...rows))),
          );
      }

      function showStatus() {
        const total = view.models.reduce((sum, { count }) => sum + count, 0);
        const shown = view.models.reduce((sum, model) => sum + model.shown.size, 0);
        const apart =
          view.axes.size > 1 ? `  \u00b7  ${[...view.axes.keys()].join(" and ")} have axes of their own` : "";
        const ghosts = shown < total ? `, ${shown.toLocaleString("en")} after filters (others are pale)` : "";
        document.getElementById("status").textContent =
          `${total.toLocaleString("en")} spans in ${view.models.length} timeline${view.models.length > 1 ? "s" : ""}${ghosts}${apart}`;
      }

      return { deviceLabel, showDetails, showSummary, showStatus };
    }

    return { timelinePanel };
  })(),
);
