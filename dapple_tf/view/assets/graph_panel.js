"use strict";
// Panels beside a task graph: the details of a node, the summary, the status line.
Object.assign(
  window.dappleLib,
  (() => {
    const lib = window.dappleLib;
    const { element, shortList } = lib;

    /** Gives functions that show the details, the summary and the status of a view; `choose` is called for links. */
    function graphPanel(view, choose) {
      const laneLabel = (device) => view.model.laneOf.get(device).label;

      const link = (index) =>
        element(
          "button",
          { type: "button", class: "link", title: view.model.nodes[index].name, onclick: () => choose(index) },
          view.model.nodes[index].label,
        );

      function showDetails() {
        const host = document.getElementById("details");
        if (view.chosen === null) {
          host.replaceChildren(
            element("h2", {}, "Details"),
            element("p", { class: "hint" }, "Click a node, or search for a name, a task such as 1F0, or a layer."),
          );
          return;
        }
        const node = view.model.nodes[view.chosen];
        const facts = [
          ["name", node.name],
          ["kind", element("span", {}, lib.swatch(node.kind), ` ${node.kind}`)],
          ["device", laneLabel(node.device)],
          ["stage", node.stage],
          ["micro-batch", node.micro_batch],
          ["replica", node.replica],
          ["stands for", node.stands_for > 1 ? `${node.stands_for} nodes` : null],
          ["layers", node.layers.length ? listOf(node.layers, (layer) => layer) : null],
        ];
        host.replaceChildren(
          element("h2", {}, node.label),
          lib.factTable(facts),
          ...outputTable(node.outputs),
          ...neighbours("Inputs", view.model.inputs[view.chosen], "source"),
          ...neighbours("Outputs", view.model.outputs[view.chosen], "target"),
        );
      }

      function listOf(things, make, most = 40) {
        const rest = things.length > most ? [element("li", { class: "hint" }, `and ${things.length - most} more`)] : [];
        return element("ul", {}, ...things.slice(0, most).map((thing) => element("li", {}, make(thing))), ...rest);
      }

      function outputTable(outputs, most = 40) {
        if (!outputs.length) return [];
        const total = outputs.reduce((sum, [, , , bytes]) => sum + (bytes ?? 0), 0);
        const head = ["tensor", "dtype", "shape", "bytes"].map((name) =>
          element("th", { scope: "col", class: name === "bytes" ? "number" : null }, name),
        );
        const rows = outputs
          .slice(0, most)
          .map(([name, dtype, shape, bytes]) =>
            element(
              "tr",
              {},
              element("td", {}, name),
              element("td", { class: "short" }, dtype),
              element("td", { class: "short" }, shape),
              element("td", { class: "number" }, bytes === null ? "" : lib.bytes(bytes)),
            ),
          );
        return [
          element("h2", {}, `Results: ${outputs.length}${total ? `, ${lib.bytes(total)}` : ""}`),
          element(
            "div",
            { class: "scroll" },
            element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
          ),
          outputs.length > most ? element("p", { class: "hint" }, `and ${outputs.length - most} more`) : "",
        ];
      }

      function neighbours(title, positions, end) {
        if (!positions.length) return [];
        const describe = (position) => {
          const edge = view.model.edges[position];
          const { control, tensors, bytes } = edge;
          const what = control
            ? "control"
            : [shortList(tensors, 3), bytes === null ? "" : lib.bytes(bytes)].filter(Boolean).join("; ");
          return element("span", {}, link(edge[end]), what ? element("span", { class: "hint" }, ` ${what}`) : null);
        };
        return [element("h2", {}, `${title}: ${positions.length}`), listOf(positions, describe)];
      }

      function showSummary() {
        const counts = new Map();
        view.model.nodes.forEach(({ kind }) => counts.set(kind, (counts.get(kind) ?? 0) + 1));
        const control = view.model.edges.filter((edge) => edge.control).length;
        const rows = lib.sortedKinds(counts.keys()).map((kind) => [kind, counts.get(kind)]);
        document
          .getElementById("summary")
          .replaceChildren(
            element("h2", {}, "Summary"),
            lib.factTable([
              ["nodes", view.model.nodes.length],
              ["data edges", view.model.edges.length - control],
              ["control edges", control],
              ["devices", view.model.lanes.length],
              ...rows,
            ]),
          );
      }

      function showStatus() {
        const count = (number) => number.toLocaleString("en");
        const matching = view.lanes.reduce((sum, lane) => sum + lane.matching, 0);
        const parts = [
          `${count(matching)} of ${count(view.model.nodes.length)} nodes, ${count(view.edgesShown.length)} of ${count(view.model.edges.length)} edges after filters`,
        ];
        if (view.drawn.drawn < view.drawn.inSight)
          parts.push(
            `${count(view.drawn.drawn)} of the ${count(view.drawn.inSight)} edges in sight are drawn: zoom in or filter for all`,
          );
        const text = parts.join("  \u00b7  ");
        const host = document.getElementById("status");
        if (host.textContent !== text) host.textContent = text;
      }

      return { laneLabel, showDetails, showSummary, showStatus };
    }

    return { graphPanel };
  })(),
);
