"use strict";
// Where timelines are on the page: their lanes from top to bottom, what is at a place, and where a span's box is.
Object.assign(
  window.dappleLib,
  (() => {
    const lib = window.dappleLib;
    const { levelAt } = lib;

    const HEADER = 48; // Name and axis of a timeline.
    const MEMORY = 42;
    const ROWS = { compute: [26, 14], send: [11, 8], all_reduce: [12, 9] }; // Pixels of a lane's only row, and of each of several.
    const ROW_NAMES = { compute: "compute", send: "send", all_reduce: "all-reduce" };

    // ---- texts

    /** A time of a timeline, in its unit. */
    const timeText = (value, model) => lib.time(value, model.unit);

    function laneText(model, lane, device) {
      if (!lane) return memoryText(device);
      if (lane.row === "compute") return device.bubble === null ? "launches" : `bubble ${lib.percent(device.bubble)}`;
      return `${ROW_NAMES[lane.row]} ${lib.percent(model.data.latency ? lane.covered / model.data.latency : 0)}`;
    }

    const memoryText = ({ peak, limit }) => `peak ${lib.bytes(peak)}${limit === null ? "" : ` of ${lib.bytes(limit)}`}`;

    /** The mean bubble of all devices; null for launches, which have none. */
    const meanBubble = ({ devices }) =>
      devices.some(({ bubble }) => bubble === null)
        ? null
        : devices.reduce((sum, { bubble }) => sum + bubble, 0) / Math.max(1, devices.length);

    // ---- places

    /**
     * @param {Object} view - what the page shows: models, axes by unit, blocks (where each timeline is), contentHeight, memoryTop (bytes at
     *   the upper edge of memory curves), chosen ({model, index} or null), path (per model, the critical path, or null) and its chart.
     */
    function timelineLayout(view) {
      /** Limits are in sight unless they are far above all peaks. */
      function memoryScale() {
        const devices = view.models.flatMap((model) => model.devices);
        const peak = Math.max(1, ...devices.map(({ peak: most }) => most ?? 0));
        const limits = devices.map(({ limit }) => limit ?? 0).filter((limit) => limit < 2.5 * peak);
        return Math.max(peak, ...limits) * 1.08;
      }

      /** Places the lanes of the devices that are allowed. */
      function placeBlocks(allowed) {
        let y = 0;
        view.blocks = view.models.map((model, position) => {
          const block = { model, position, top: y, parts: [], partOf: new Map() };
          y += HEADER;
          for (const device of model.devices.filter((one) => allowed(one.device))) {
            for (const lane of model.lanes.filter((one) => one.device === device.device)) {
              const [single, several] = ROWS[lane.row];
              const rowHeight = lane.rows.length === 1 ? single : several;
              const part = { lane, device, top: y, rowHeight, bottom: y + rowHeight * lane.rows.length };
              block.parts.push(part);
              block.partOf.set(lane.key, part);
              y += rowHeight * lane.rows.length + 3;
            }
            if (device.memory[0].length) {
              block.parts.push({ lane: null, device, top: y, bottom: y + MEMORY });
              y += MEMORY + 3;
            }
            y += 6;
          }
          y += 14;
          block.bottom = y;
          return block;
        });
        view.contentHeight = y;
      }

      const blockAt = (y) => view.blocks.find(({ bottom }) => y < bottom) ?? view.blocks[view.blocks.length - 1];
      const axisOf = (model) => view.axes.get(model.unit);

      /** Top of a timeline's header: it stays in sight while any of its lanes are. */
      const headerTop = (block) => Math.max(block.top, Math.min(view.chart.scrollTop, block.bottom - HEADER - 14));

      /** What is at a place: a span, a time on a memory curve, or a label. */
      function hit(x, y) {
        const block = blockAt(y);
        if (!block || y < headerTop(block) + HEADER) return null;
        const part = block.parts.find(({ top, bottom }) => y >= top && y < bottom);
        if (!part) return null;
        if (x < view.chart.left) return { block, part, label: true };
        const axis = axisOf(block.model);
        const time = view.chart.at(axis, x);
        if (!part.lane) return { block, part, time };
        const row = part.lane.rows[Math.floor((y - part.top) / part.rowHeight)];
        const index = part.lane.spanAt(row, time, (2 / view.chart.plotWidth) * (axis.hi - axis.lo));
        return index === null || !block.model.matches[index] ? null : { block, part, index };
      }

      function tip({ block: { model }, part: { lane, device }, label, time, index }) {
        if (label) return `${device.label}\n${laneText(model, lane, device)}`;
        if (index !== undefined) {
          const { start, end, bytes } = model.span(index);
          const size = bytes ? `\n${lib.bytes(bytes)}` : "";
          return `${model.nameOf(index)}  (${model.name})\n${timeText(start, model)} to ${timeText(end, model)}: ${timeText(end - start, model)}${size}`;
        }
        const level = levelAt(device.memory, time);
        return level === null ? null : `${device.label}\n${lib.bytes(level)} in use at ${timeText(time, model)}`;
      }

      /** Where a span's box is, in the content; null if a filter hides its lane. */
      function boxOf(block, index) {
        const { model, partOf } = block;
        const part = partOf.get(model.laneKey(index));
        if (!part) return null;
        const row = part.lane.rowOf.get(index);
        const axis = axisOf(model);
        const left = view.chart.x(axis, model.columns.start[index]);
        const width = view.chart.x(axis, model.columns.end[index]) - left;
        return { left, width, top: part.top + row * part.rowHeight, height: part.rowHeight, axis };
      }

      return { memoryScale, placeBlocks, blockAt, axisOf, headerTop, hit, tip, boxOf };
    }

    return { timelineLayout, timelineTexts: { timeText, laneText, meanBubble, HEADER } };
  })(),
);
