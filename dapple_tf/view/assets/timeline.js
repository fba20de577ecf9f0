"use strict";
/*
 * The page of timelines. For users and tests, window.dapple has (read-only):
 *   data                         what the page came with
 *   controls                     an empty element above the drawing, for controls of your own
 *   showTimelines(data)          shows other timelines in place; zoom, filters and selection stay
 *   timelines()                  names of the timelines, in their order
 *   lanes()                      [{timeline, device, row, total, matching, visible}]: spans of each lane; those that the
 *                                filters let through; those of them that the zoom has in sight
 *   bounds(unit)                 {lo, hi, min, max}: what is in sight and what there is, in that unit (default: the first)
 *   setBounds(lo, hi, unit), zoom(factor), pan(share), fit()
 *   filters(), setFilter(field, values or null)   fields kind, stage, device, micro_batch
 *   select(name, timeline)       selects a task such as "2B3.r1" and brings it into sight; false if there is none
 *   selected()                   {timeline, index, name, ...its span} or null
 *   positionOf(name, timeline)   {x, y} in the window of the middle of its box, or null if it isn't in sight
 *   frame()                      {frames, ms}: frames drawn, and what the last one took
 */
(() => {
  const lib = window.dappleLib;
  const { Axis, Chart, Filters, Search, TimelineModel } = lib;

  const FIELDS = ["kind", "stage", "device", "micro_batch"];
  const view = {
    models: [],
    blocks: [],
    contentHeight: 0,
    memoryTop: 1,
    chosen: null,
    path: null,
    axes: new Map(),
    chart: null,
  };
  const layout = lib.timelineLayout(view);
  const panel = lib.timelinePanel(view, (target) => choose(target));

  // ---- what there is

  function showTimelines(data) {
    const before = view.chosen && {
      name: view.chosen.model.nameOf(view.chosen.index),
      of: view.chosen.model.name,
      nth: view.chosen.model.nth(view.chosen.index),
    };
    view.models = data.timelines.map((timeline) => new TimelineModel(timeline));
    for (const unit of [...view.axes.keys()])
      if (!view.models.some((model) => model.unit === unit)) view.axes.delete(unit);
    for (const unit of new Set(view.models.map((model) => model.unit))) fitAxis(unit);
    view.memoryTop = layout.memoryScale();
    filters.setValues(filterValues());
    view.path = view.path && view.models.map((model) => model.criticalPath());
    view.chosen = before && find(before);
    refresh();
    panel.showDetails();
    panel.showSummary();
  }

  function fitAxis(unit) {
    if (!view.axes.has(unit)) view.axes.set(unit, new Axis(1e-6));
    let [min, max] = [0, 0];
    for (const model of view.models.filter((one) => one.unit === unit)) {
      max = Math.max(max, model.data.latency);
      for (const time of model.columns.start) min = Math.min(min, time);
      for (const time of model.columns.end) max = Math.max(max, time);
    }
    view.axes.get(unit).setRange(min, max * 1.01);
  }

  function filterValues() {
    const found = Object.fromEntries(FIELDS.map((field) => [field, new Set()]));
    for (const model of view.models) {
      for (const field of ["kind", "stage", "micro_batch"])
        model.columns[field].forEach((value) => found[field].add(value));
      model.devices.forEach(({ device }) => found.device.add(device));
    }
    const order = (a, b) => (a === null) - (b === null) || a - b;
    return {
      ...Object.fromEntries(FIELDS.map((field) => [field, [...found[field]].sort(order)])),
      kind: lib.sortedKinds(found.kind),
    };
  }

  const filters = new Filters(
    document.getElementById("filters"),
    [
      { key: "stage", title: "Stages", name: (stage) => `stage ${stage}` },
      { key: "device", title: "Devices", name: (device) => panel.deviceLabel(device) },
      {
        key: "micro_batch",
        title: "Micro-batches",
        name: (number) => (number === null ? "once in a step" : `micro-batch ${number}`),
      },
      { key: "kind", title: "Kinds", name: (kind) => kind },
    ],
    () => refresh(),
  );

  // ---- what is shown where

  /** After the filters or the data have changed. */
  function refresh() {
    for (const model of view.models) {
      const { kind, stage, micro_batch: number } = model.columns;
      model.matches = Uint8Array.from(
        { length: model.count },
        (_, index) =>
          filters.allows("kind", kind[index]) &&
          filters.allows("stage", stage[index]) &&
          filters.allows("micro_batch", number[index]),
      );
      model.shown = new Set();
      for (const lane of model.lanes) {
        lane.allowed = filters.allows("device", lane.device);
        lane.matching = 0;
        if (lane.allowed)
          lane.indices
            .filter((index) => model.matches[index])
            .forEach((index) => (lane.matching++, model.shown.add(index)));
      }
    }
    layout.placeBlocks((device) => filters.allows("device", device));
    view.chart.layout();
    viewChanged();
  }

  // ---- selection

  /** A span by its name, of a timeline or of the first that has it; null if there is none. */
  function find({ name, of, nth = 0 }) {
    for (const model of view.models.filter((one) => of === undefined || one.name === of)) {
      const index = model.called(name)[nth];
      if (index !== undefined) return { model, index };
    }
    return null;
  }

  function choose(target, move = true) {
    view.chosen = target;
    if (view.chosen && move) reveal();
    panel.showDetails();
    viewChanged();
    view.chart.redraw();
  }

  function reveal() {
    const block = view.blocks.find(({ model }) => model === view.chosen.model);
    const box = layout.boxOf(block, view.chosen.index);
    if (!box) return;
    const { start, end } = view.chosen.model.columns;
    view.chart.reveal(box.axis, start[view.chosen.index], end[view.chosen.index], box.top, box.top + box.height);
  }

  /** The next span to be shown on the lane of the selected one. */
  function step(by) {
    if (!view.chosen) return choose(firstShown());
    const { model, index } = view.chosen;
    const lane = model.lanes.find(({ key }) => key === model.laneKey(index));
    const shown = lane.indices.filter((one) => model.matches[one]);
    const next = shown[shown.indexOf(index) + by];
    return next === undefined ? undefined : choose({ model, index: next });
  }

  function firstShown() {
    for (const model of view.models) {
      for (const lane of model.lanes.filter(({ matching }) => matching)) {
        return { model, index: lane.indices.find((index) => model.matches[index]) };
      }
    }
    return null;
  }

  function toCause() {
    const cause = view.chosen?.model.columns.cause[view.chosen.index];
    if (view.chosen?.model.has(cause)) choose({ model: view.chosen.model, index: cause });
  }

  function zoomToChosen() {
    if (!view.chosen) return;
    const { model, index } = view.chosen;
    const { start, end } = model.columns;
    const room = Math.max(end[index] - start[index], (layout.axisOf(model).max - layout.axisOf(model).min) * 1e-5) * 4;
    layout.axisOf(model).set(start[index] - room, end[index] + room);
    view.chart.changed();
    reveal();
  }

  function togglePath() {
    view.path = view.path ? null : view.models.map((model) => model.criticalPath());
    pathButton.setAttribute("aria-pressed", String(view.path !== null));
    view.chart.changed();
  }

  /** Spans whose names have a text: those that are called so first. */
  function search(text) {
    const wanted = text.toLowerCase();
    const [exact, others] = [[], []];
    for (const model of view.models) {
      for (let index = 0; index < model.count; index++) {
        const name = model.nameOf(index).toLowerCase();
        if (name === wanted) exact.push({ model, index });
        else if (name.includes(wanted)) others.push({ model, index });
      }
    }
    return [...exact, ...others];
  }

  // ---- the state that a link carries

  /** Spans of a lane that the filters let through and the zoom has in sight. */
  function visibleCount(model, lane) {
    if (!lane.allowed) return 0;
    const { lo, hi } = layout.axisOf(model);
    const { start, end } = model.columns;
    return lane.indices.filter((index) => model.matches[index] && end[index] >= lo && start[index] <= hi).length;
  }

  function state() {
    const views = [...view.axes]
      .filter(([, axis]) => !axis.fitted)
      .map(([unit, axis]) => [`t.${unit}`, `${Number(axis.lo.toPrecision(9))}~${Number(axis.hi.toPrecision(9))}`]);
    return {
      ...filters.state(),
      ...Object.fromEntries(views),
      name: view.chosen && view.chosen.model.nameOf(view.chosen.index),
      of: view.chosen && view.chosen.model.name,
      nth: (view.chosen && view.chosen.model.nth(view.chosen.index)) || null,
      path: view.path ? 1 : null,
      y: Math.round(view.chart.scrollTop) || null,
    };
  }

  function restore() {
    const wanted = lib.readHash();
    filters.restore(wanted);
    for (const [unit, axis] of view.axes) {
      const [lo, hi] = (wanted[`t.${unit}`] ?? "").split("~").map(Number);
      if (hi > lo) axis.set(lo, hi);
      else axis.fit();
    }
    view.chosen =
      wanted.name === undefined ? null : find({ name: wanted.name, of: wanted.of, nth: Number(wanted.nth ?? 0) });
    if ((view.path !== null) !== (wanted.path === "1")) togglePath();
    refresh();
    document.getElementById("chart").scrollTop = Number(wanted.y ?? 0) || 0;
    panel.showDetails();
    view.chart.redraw();
  }

  function viewChanged() {
    panel.showStatus();
    lib.writeHash(state);
  }

  // ---- the page

  const nothing = new Axis(1); // Moves where there are no timelines.
  const painter = {
    height: () => view.contentHeight,
    axes: () => [...view.axes.values()],
    axisAt: (y) => (view.models.length ? layout.axisOf(layout.blockAt(y).model) : nothing),
    draw: lib.timelineDrawing(view, layout),
    hit: layout.hit,
    tip: layout.tip,
    click: (target) =>
      choose(target?.index === undefined ? null : { model: target.block.model, index: target.index }, false),
    changed: viewChanged,
  };
  view.chart = new Chart(
    document.getElementById("chart"),
    painter,
    "Timelines. Keys: plus, minus and arrows move the view, square brackets go from task to task.",
  );
  view.chart.host.addEventListener("scroll", () => lib.writeHash(state));
  const finder = new Search(search, (target) => choose(target), "Search: 2B3.r1");
  const pathButton = lib.button("critical path", "Mark the tasks that determine the step's time (p)", togglePath);
  pathButton.setAttribute("aria-pressed", "false");

  document.getElementById("tools").append(finder.box, finder.count, pathButton, ...lib.viewButtons(view.chart));
  lib.bindKeys({
    ...lib.viewKeys(view.chart, finder),
    "[": () => step(-1),
    "]": () => step(1),
    c: toCause,
    f: zoomToChosen,
    p: togglePath,
    Escape: () => choose(null),
  });
  document
    .getElementById("help")
    .append(
      lib.keyHelp([
        ...lib.VIEW_HELP,
        [["[", "]"], "previous, next task of the lane"],
        [["c"], "go to what it waited for"],
        [["f"], "zoom to the selected task"],
        [["p"], "critical path"],
        [["Esc"], "select nothing"],
      ]),
    );

  const data = lib.readData();
  showTimelines(data);
  restore();
  lib.onHash(restore);

  const chosenData = () =>
    view.chosen && {
      timeline: view.chosen.model.name,
      index: view.chosen.index,
      name: view.chosen.model.nameOf(view.chosen.index),
      ...view.chosen.model.span(view.chosen.index),
    };

  window.dapple = Object.freeze({
    data,
    controls: document.getElementById("controls"),
    showTimelines,
    timelines: () => view.models.map(({ name }) => name),
    lanes: () =>
      view.models.flatMap((model) =>
        model.lanes.map((lane) => ({
          timeline: model.name,
          device: lane.device,
          row: lane.row,
          total: lane.indices.length,
          matching: lane.matching,
          visible: visibleCount(model, lane),
        })),
      ),
    bounds: (unit = view.models[0]?.unit) =>
      (({ lo, hi, min, max }) => ({ lo, hi, min, max }))(view.axes.get(unit) ?? nothing),
    setBounds: (lo, hi, unit = view.models[0].unit) => {
      view.axes.get(unit).set(lo, hi);
      view.chart.changed();
    },
    zoom: (factor) => view.chart.zoom(factor),
    pan: (share) => view.chart.pan(share),
    fit: () => view.chart.fit(),
    filters: () =>
      Object.fromEntries(FIELDS.map((field) => [field, filters.chosen.get(field) && [...filters.chosen.get(field)]])),
    setFilter: (field, values) => filters.set(field, values),
    select: (name, timeline) => {
      const found = find({ name, of: timeline });
      if (found) choose(found);
      return found !== null;
    },
    selected: chosenData,
    positionOf: (name, timeline) => {
      const found = find({ name, of: timeline });
      const box =
        found &&
        layout.boxOf(
          view.blocks.find(({ model }) => model === found.model),
          found.index,
        );
      if (!box) return null;
      const middle = box.left + box.width / 2;
      const place = view.chart.canvas.getBoundingClientRect();
      if (middle < view.chart.left || middle > view.chart.left + view.chart.plotWidth) return null;
      return { x: place.left + middle, y: place.top + box.top + box.height / 2 - view.chart.scrollTop };
    },
    frame: () => ({ frames: view.chart.frames, ms: view.chart.frameMs }),
  });
  view.chart.begin();
})();
