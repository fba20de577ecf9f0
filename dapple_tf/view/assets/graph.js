"use strict";
/*
 * The page of a task graph. For users and tests, window.dapple has (read-only):
 *   data                         what the page came with
 *   controls                     an empty element above the drawing, for controls of your own
 *   showGraph(data)              shows another graph in place; zoom, filters and selection stay
 *   lanes()                      [{device, label, total, matching, visible}]: nodes of each lane; those that the filters let
 *                                through; those of them that the zoom has in sight
 *   edges()                      {total, matching, inSight, drawn, data, control, host}: edges; those between nodes that the
 *                                filters let through; of these, those in sight; those drawn of them; kinds that are shown,
 *                                of which the host's edges aren't at first
 *   bounds()                     {lo, hi, min, max}: columns in sight and all that there are
 *   setBounds(lo, hi), zoom(factor), pan(share), fit()
 *   filters(), setFilter(field, values or null)   fields kind, stage, device, micro_batch
 *   select(name)                 selects a node by its name or label and brings it into sight; false if there is none
 *   selected()                   {index, name, inputs, outputs, ...the node} or null; inputs and outputs are names
 *   positionOf(name)             {x, y} in the window of the middle of its box, or null if it isn't in sight
 *   frame()                      {frames, ms}: frames drawn, and what the last one took
 */
(() => {
  const lib = window.dappleLib;
  const { element, Axis, Chart, Filters, Search, GraphModel } = lib;

  const FIELDS = ["kind", "stage", "device", "micro_batch"];
  /** Kinds of edges, and whether they are shown at first: the host's lead to nearly all nodes. */
  const EDGES = { data: true, control: true, host: false };
  const view = {
    model: null,
    lanes: [],
    contentHeight: 0,
    matches: new Uint8Array(0),
    centre: new Float64Array(0),
    edgesShown: [],
    chosen: null,
    near: new Set(),
    edgeKinds: { ...EDGES },
    drawn: { inSight: 0, drawn: 0 },
    axis: new Axis(1),
    chart: null,
  };
  const layout = lib.graphLayout(view);
  const panel = lib.graphPanel(view, (index) => choose(index));
  const draw = lib.graphDrawing(view, layout);

  // ---- what there is

  function showGraph(data) {
    const before = view.chosen === null ? null : view.model.nodes[view.chosen].name;
    view.model = new GraphModel(data.graph);
    view.centre = new Float64Array(view.model.nodes.length);
    view.axis.least = Math.min(1, 4 / view.model.columns);
    view.axis.setRange(-0.5, view.model.columns - 0.5);
    filters.setValues(filterValues());
    showEdgeKinds();
    view.chosen = before === null ? null : find(before);
    refresh();
    choose(view.chosen, false);
  }

  function filterValues() {
    const order = (a, b) => (a === null) - (b === null) || a - b;
    const of = (field) => [...new Set(view.model.nodes.map((node) => node[field]))];
    return {
      stage: of("stage").sort(order),
      micro_batch: of("micro_batch").sort(order),
      device: view.model.lanes.map(({ device }) => device),
      kind: lib.sortedKinds(of("kind")),
    };
  }

  const filters = new Filters(
    document.getElementById("filters"),
    [
      { key: "stage", title: "Stages", name: (stage) => (stage === null ? "no stage" : `stage ${stage}`) },
      { key: "device", title: "Devices", name: (device) => panel.laneLabel(device) },
      {
        key: "micro_batch",
        title: "Micro-batches",
        name: (number) => (number === null ? "once in a step" : `micro-batch ${number}`),
      },
      { key: "kind", title: "Kinds", name: (kind) => kind },
    ],
    () => refresh(),
  );

  /** The legend of edges; its buttons show and hide them. */
  function showEdgeKinds() {
    document.getElementById("edge-kinds")?.remove();
    const make = (kind) => {
      const line = element("span", {
        class: kind === "control" ? "swatch line dotted" : "swatch line",
        "aria-hidden": "true",
      });
      line.style.borderColor = `var(--${kind === "control" ? kind : "data"}-edge)`;
      return element(
        "button",
        {
          type: "button",
          class: "kind",
          "aria-pressed": String(view.edgeKinds[kind]),
          onclick: () => toggleEdges(kind),
        },
        line,
        kind,
      );
    };
    document
      .getElementById("filters")
      .append(
        element(
          "span",
          { id: "edge-kinds", role: "group" },
          element("span", { class: "label" }, "Edges "),
          ...Object.keys(EDGES).flatMap((kind) => [make(kind), " "]),
        ),
      );
  }

  function toggleEdges(kind) {
    view.edgeKinds[kind] = !view.edgeKinds[kind];
    showEdgeKinds();
    refresh();
  }

  // ---- what is shown where

  /** After the filters or the data have changed. */
  function refresh() {
    view.matches = Uint8Array.from(view.model.nodes, (node) =>
      FIELDS.every((field) => filters.allows(field, node[field])),
    );
    const onHost = (index) => view.model.nodes[index].device === null;
    view.edgesShown = view.model.edges.filter(
      ({ source, target, control }) =>
        view.matches[source] &&
        view.matches[target] &&
        (control ? view.edgeKinds.control : view.edgeKinds.data) &&
        (view.edgeKinds.host || !(onHost(source) || onHost(target))),
    );
    for (const lane of view.model.lanes) lane.matching = lane.indices.filter((index) => view.matches[index]).length;
    layout.place((device) => filters.allows("device", device));
    view.chart.layout();
    viewChanged();
  }

  // ---- selection

  /** A node by its name or label; null if there is none. */
  const find = (text) => view.model.byName.get(text)?.[0] ?? null;

  function choose(index, move = true) {
    view.chosen = index;
    view.near = new Set(
      view.chosen === null
        ? []
        : [
            ...view.model.inputs[view.chosen].map((position) => view.model.edges[position].source),
            ...view.model.outputs[view.chosen].map((position) => view.model.edges[position].target),
          ],
    );
    view.near.delete(view.chosen);
    if (
      view.chosen !== null &&
      move &&
      view.lanes.includes(view.model.laneOf.get(view.model.nodes[view.chosen].device))
    ) {
      view.chart.reveal(
        view.axis,
        layout.column(view.chosen) - 0.5,
        layout.column(view.chosen) + 0.5,
        view.centre[view.chosen] - lib.graphSizes.ROW,
        view.centre[view.chosen] + lib.graphSizes.ROW,
      );
    }
    panel.showDetails();
    viewChanged();
    view.chart.redraw();
  }

  /** The next node to be shown on the lane of the selected one. */
  function step(by) {
    const lane =
      view.chosen === null
        ? view.lanes.find(({ matching }) => matching)
        : view.model.laneOf.get(view.model.nodes[view.chosen].device);
    const shown = lane?.indices.filter((index) => view.matches[index]) ?? [];
    const next = view.chosen === null ? shown[0] : shown[shown.indexOf(view.chosen) + by];
    if (next !== undefined) choose(next);
  }

  function zoomToChosen() {
    if (view.chosen === null) return;
    view.axis.set(layout.column(view.chosen) - 6, layout.column(view.chosen) + 6);
    choose(view.chosen);
  }

  /** Nodes whose name or label has a text: those that are called so first. */
  function search(text) {
    const wanted = text.toLowerCase();
    const [exact, others] = [[], []];
    view.model.nodes.forEach(({ name, label, layers }, index) => {
      const texts = [name, label, ...layers].map((one) => one.toLowerCase());
      if (texts[0] === wanted || texts[1] === wanted) exact.push(index);
      else if (texts.some((one) => one.includes(wanted))) others.push(index);
    });
    return [...exact, ...others];
  }

  // ---- the state that a link carries

  function state() {
    const shownEdges = Object.keys(view.edgeKinds).filter((kind) => view.edgeKinds[kind]);
    return {
      ...filters.state(),
      x: view.axis.fitted ? "all" : `${Number(view.axis.lo.toFixed(3))}~${Number(view.axis.hi.toFixed(3))}`,
      edges: shownEdges.every((kind) => EDGES[kind]) && shownEdges.length === 2 ? null : shownEdges.join(","),
      name: view.chosen === null ? null : view.model.nodes[view.chosen].name,
      y: Math.round(view.chart.scrollTop) || null,
    };
  }

  function restore() {
    const wanted = lib.readHash();
    filters.restore(wanted);
    for (const kind of Object.keys(view.edgeKinds))
      view.edgeKinds[kind] = wanted.edges === undefined ? EDGES[kind] : wanted.edges.split(",").includes(kind);
    showEdgeKinds();
    const [lo, hi] = (wanted.x ?? "").split("~").map(Number);
    if (hi > lo) view.axis.set(lo, hi);
    else if (wanted.x === "all" || layout.pitch() * (view.axis.hi - view.axis.lo) >= view.model.columns * 44)
      view.axis.fit();
    else view.axis.set(-0.5, view.chart.plotWidth / 64 - 0.5); // So that labels can be read.
    refresh();
    choose(wanted.name === undefined ? null : find(wanted.name), false);
    document.getElementById("chart").scrollTop = Number(wanted.y ?? 0) || 0;
  }

  const viewChanged = () => lib.writeHash(state);

  // ---- the page

  function drawAll(...given) {
    draw(...given);
    panel.showStatus();
  }

  const painter = {
    height: () => view.contentHeight,
    axes: () => [view.axis],
    axisAt: () => view.axis,
    draw: drawAll,
    hit: layout.hit,
    tip: layout.tip,
    click: (target) => choose(target?.index ?? null, false),
    changed: viewChanged,
  };
  view.chart = new Chart(
    document.getElementById("chart"),
    painter,
    "Task graph. Keys: plus, minus and arrows move the view, square brackets go from node to node.",
  );
  view.chart.host.addEventListener("scroll", viewChanged);
  const finder = new Search(search, (index) => choose(index), "Search: 1F0, a name or a layer");
  document.getElementById("tools").append(finder.box, finder.count, ...lib.viewButtons(view.chart));
  lib.bindKeys({
    ...lib.viewKeys(view.chart, finder),
    "[": () => step(-1),
    "]": () => step(1),
    f: zoomToChosen,
    Escape: () => choose(null),
  });
  document
    .getElementById("help")
    .append(
      lib.keyHelp([
        ...lib.VIEW_HELP,
        [["[", "]"], "previous, next node of the lane"],
        [["f"], "zoom to the selected node"],
        [["Esc"], "select nothing"],
      ]),
    );

  const data = lib.readData();
  showGraph(data);
  panel.showSummary();
  restore();
  lib.onHash(restore);

  const ends = (positions, end) => positions.map((position) => view.model.nodes[view.model.edges[position][end]].name);

  window.dapple = Object.freeze({
    data,
    controls: document.getElementById("controls"),
    showGraph: (shown) => {
      showGraph(shown);
      panel.showSummary();
    },
    lanes: () =>
      view.model.lanes.map((lane) => ({
        device: lane.device,
        label: lane.label,
        total: lane.indices.length,
        matching: lane.matching,
        visible: lane.indices.filter(
          (index) =>
            view.matches[index] && layout.column(index) >= view.axis.lo && layout.column(index) <= view.axis.hi,
        ).length,
      })),
    edges: () => ({
      total: view.model.edges.length,
      matching: view.edgesShown.length,
      ...view.drawn,
      ...view.edgeKinds,
    }),
    bounds: () => (({ lo, hi, min, max }) => ({ lo, hi, min, max }))(view.axis),
    setBounds: (lo, hi) => {
      view.axis.set(lo, hi);
      view.chart.changed();
    },
    zoom: (factor) => view.chart.zoom(factor),
    pan: (share) => view.chart.pan(share),
    fit: () => view.chart.fit(),
    filters: () =>
      Object.fromEntries(FIELDS.map((field) => [field, filters.chosen.get(field) && [...filters.chosen.get(field)]])),
    setFilter: (field, values) => filters.set(field, values),
    select: (name) => {
      const found = find(name);
      if (found !== null) choose(found);
      return found !== null;
    },
    selected: () =>
      view.chosen === null
        ? null
        : {
            index: view.chosen,
            ...view.model.nodes[view.chosen],
            inputs: ends(view.model.inputs[view.chosen], "source"),
            outputs: ends(view.model.outputs[view.chosen], "target"),
          },
    positionOf: (name) => {
      const index = find(name);
      if (
        index === null ||
        !view.matches[index] ||
        layout.column(index) < view.axis.lo ||
        layout.column(index) > view.axis.hi
      )
        return null;
      const place = view.chart.canvas.getBoundingClientRect();
      return {
        x: place.left + view.chart.x(view.axis, layout.column(index)),
        y: place.top + view.centre[index] - view.chart.scrollTop,
      };
    },
    frame: () => ({ frames: view.chart.frames, ms: view.chart.frameMs }),
  });
  view.chart.begin();
})();
