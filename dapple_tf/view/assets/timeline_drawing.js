"use strict";
// Draws timelines: lanes with their boxes, bubbles, memory curves, axes.
Object.assign(
  window.dappleLib,
  (() => {
    const lib = window.dappleLib;
    const { element, theme, kindColour, fillText, fillLabel, inkOn, FONT } = lib;
    const { timeText, laneText, meanBubble, HEADER } = lib.timelineTexts;

    /** Gives the function that draws a view (see timelineLayout). */
    function timelineDrawing(view, { axisOf, headerTop, boxOf }) {
      function draw(_, context) {
        context.textBaseline = "middle";
        const [from, to] = [view.chart.scrollTop, view.chart.scrollTop + view.chart.height];
        for (const block of view.blocks.filter(({ top, bottom }) => bottom > from && top < to)) {
          context.save();
          drawGrid(context, block);
          for (const part of block.parts.filter(({ top, bottom }) => bottom > from && top < to))
            drawPart(context, block, part);
          drawCauses(context, block);
          drawHeader(context, block);
          context.restore();
        }
      }

      function clipPlot(context, top, bottom) {
        context.save();
        context.beginPath();
        context.rect(view.chart.left, top, view.chart.plotWidth, bottom - top);
        context.clip();
      }

      function drawGrid(context, { model, top, bottom }) {
        const axis = axisOf(model);
        context.fillStyle = theme().grid;
        for (const at of lib.ticks(axis.lo, axis.hi, view.chart.plotWidth / 90))
          context.fillRect(Math.round(view.chart.x(axis, at)), top, 1, bottom - top - 14);
        const end = view.chart.x(axis, model.data.latency);
        if (end < view.chart.left || end > view.chart.left + view.chart.plotWidth) return;
        context.fillStyle = theme().muted;
        context.fillRect(Math.round(end), top + HEADER - 4, 1, bottom - top - HEADER - 12);
      }

      function drawPart(context, block, part) {
        const { lane, device, top, bottom } = part;
        clipPlot(context, top, bottom);
        if (lane) {
          if (lane.row === "compute") drawGaps(context, block.model, lane, top, bottom);
          lane.rows.forEach((row, number) =>
            drawRow(context, block, lane, row, top + number * part.rowHeight, part.rowHeight),
          );
        } else {
          drawMemory(context, block.model, device, top, bottom);
        }
        context.restore();
        drawLabel(context, block.model, part);
      }

      function drawLabel(context, model, { lane, device, top, bottom }) {
        const first = lane?.row === "compute";
        const middle = (top + bottom) / 2;
        const share = laneText(model, lane, device);
        context.fillStyle = theme().muted;
        context.textAlign = "right";
        context.font = `${first ? 11 : 10}px ${FONT}`;
        const wide = view.chart.left > 150;
        const shareWidth = wide || !first ? context.measureText(share).width : 0;
        if (shareWidth) context.fillText(share, view.chart.left - 8, middle);
        context.textAlign = "left";
        if (!first) return;
        context.fillStyle = theme().fg;
        context.font = `600 12px ${FONT}`;
        fillLabel(context, device.label, 8, middle, view.chart.left - shareWidth - 24);
      }

      /** Bubbles: hatched, with their length where there is room. */
      function drawGaps(context, model, lane, top, bottom) {
        const axis = axisOf(model);
        context.fillStyle = theme().lane;
        context.fillRect(
          view.chart.x(axis, 0),
          top,
          view.chart.x(axis, model.data.latency) - view.chart.x(axis, 0),
          bottom - top,
        );
        const first = lib.firstWhere(lane.gaps.length, (position) => lane.gaps[position][1] >= axis.lo);
        context.font = `10px ${FONT}`;
        context.textAlign = "center";
        const hatch = hatchPattern(context);
        for (let position = first; position < lane.gaps.length && lane.gaps[position][0] <= axis.hi; position++) {
          const [from, to] = lane.gaps[position].map((at) => view.chart.x(axis, at));
          if (to - from < 1) continue;
          context.fillStyle = hatch;
          context.fillRect(from, top, to - from, bottom - top);
          if (to - from < 90) continue;
          const text = timeText(lane.gaps[position][1] - lane.gaps[position][0], model);
          const middle = (Math.max(from, view.chart.left) + Math.min(to, view.chart.left + view.chart.plotWidth)) / 2;
          const half = context.measureText(text).width / 2 + 4;
          if (middle - half < from || middle + half > to) continue;
          context.fillStyle = theme().lane;
          context.fillRect(middle - half, top + 6, 2 * half, bottom - top - 12);
          context.fillStyle = theme().muted;
          context.fillText(text, middle, (top + bottom) / 2);
        }
      }

      let hatched = null;

      function hatchPattern(context) {
        const colour = theme().bubble;
        if (hatched?.colour === colour) return hatched.pattern;
        const tile = element("canvas", { width: 6, height: 6 });
        const pen = tile.getContext("2d");
        pen.strokeStyle = colour;
        pen.beginPath();
        for (const shift of [-6, 0, 6]) {
          pen.moveTo(shift - 1, 7);
          pen.lineTo(shift + 7, -1);
        }
        pen.stroke();
        hatched = { colour, pattern: context.createPattern(tile, "repeat") };
        return hatched.pattern;
      }

      /** A row of boxes. What is narrower than a pixel and a half shares a mark with its neighbours. */
      function drawRow(context, { model, position: number }, lane, row, top, height) {
        const axis = axisOf(model);
        const { start, end, kind } = model.columns;
        const [from, to] = lane.within(row, axis.lo, axis.hi);
        const scale = view.chart.plotWidth / (axis.hi - axis.lo);
        const x = (at) => view.chart.left + (at - axis.lo) * scale;
        for (let position = from; position < to; position++) {
          let index = row.indices[position];
          const left = x(start[index]);
          const width = x(end[index]) - left;
          if (width >= 1.5) {
            drawBox(context, model, index, left, top, width, height);
            if (view.path?.[number].has(index)) outline(context, left, top, width, height, theme().match);
            continue;
          }
          const pixel = Math.floor(left);
          while (!model.matches[index] && position + 1 < to && x(end[row.indices[position + 1]]) <= pixel + 1.5)
            index = row.indices[++position];
          context.fillStyle = model.matches[index] ? kindColour(kind[index]) : theme().ghost;
          context.fillRect(pixel, top, 1.5, height - 1);
          while (position + 1 < to && x(end[row.indices[position + 1]]) <= pixel + 1) position++;
        }
      }

      function drawBox(context, model, index, left, top, width, height) {
        const match = model.matches[index];
        const colour = match ? kindColour(model.columns.kind[index]) : theme().ghost;
        const gap = width > 4 ? 1 : 0;
        context.fillStyle = colour;
        context.fillRect(left, top, width - gap, height - 1);
        if (!match || width < 9) return;
        const [from, to] = [
          Math.max(left, view.chart.left),
          Math.min(left + width - gap, view.chart.left + view.chart.plotWidth),
        ];
        const size = height > 20 ? 11 : height > 11 ? 10 : 8;
        const text = boxText(model, index, (to - from - 4) / (size * 0.62));
        if (!text) return;
        context.font = `${size}px ${FONT}`;
        context.textAlign = "center";
        context.fillStyle = inkOn(colour);
        context.fillText(text, (from + to) / 2, top + height / 2);
      }

      /** The task, its micro-batch, or nothing, in at most so many characters. */
      function boxText(model, index, room) {
        const number = model.columns.micro_batch[index];
        if (room >= 4) {
          const name = model.nameOf(index);
          if (name.length <= room) return name;
        }
        const text = number === null ? "" : String(number);
        return text.length <= room ? text : "";
      }

      function outline(context, left, top, width, height, colour, thick = 2) {
        context.strokeStyle = colour;
        context.lineWidth = thick;
        context.strokeRect(left + 1, top + 1, Math.max(1, width - 3), height - 3);
      }

      function drawMemory(context, model, { memory: [times, levels], limit, peak }, top, bottom) {
        const axis = axisOf(model);
        const y = (level) => bottom - ((bottom - top) * level) / view.memoryTop;
        const first = Math.max(0, lib.firstWhere(times.length, (position) => times[position] > axis.lo) - 1);
        const last = lib.firstWhere(times.length, (position) => times[position] > axis.hi);
        const until = Math.max(model.data.latency, times[times.length - 1]);
        context.beginPath();
        context.moveTo(view.chart.x(axis, times[first]), bottom);
        for (let position = first; position < last;) {
          const x = view.chart.x(axis, times[position]);
          let most = levels[position];
          let next = position + 1;
          for (; next < last && view.chart.x(axis, times[next]) < x + 0.5; next++) most = Math.max(most, levels[next]);
          const end = next < times.length ? view.chart.x(axis, times[next]) : view.chart.x(axis, until);
          context.lineTo(x, y(most));
          context.lineTo(x, y(levels[next - 1]));
          context.lineTo(Math.min(end, view.chart.left + view.chart.plotWidth + 2), y(levels[next - 1]));
          position = next;
        }
        context.lineTo(view.chart.x(axis, Math.min(until, axis.hi + (axis.hi - axis.lo))), bottom);
        context.closePath();
        context.fillStyle = theme()["memory-fill"];
        context.fill();
        context.strokeStyle = theme().memory;
        context.lineWidth = 1;
        context.stroke();
        markPeak(context, axis, times[levels.indexOf(peak)], y(peak));
        if (limit !== null && limit <= view.memoryTop) drawLimit(context, y(limit), peak > limit);
      }

      function markPeak(context, axis, time, y) {
        context.fillStyle = theme().memory;
        context.beginPath();
        context.arc(view.chart.x(axis, time), y, 3, 0, 7);
        context.fill();
      }

      function drawLimit(context, y, over) {
        context.strokeStyle = theme().warn;
        context.lineWidth = over ? 2 : 1;
        context.setLineDash([6, 4]);
        context.beginPath();
        context.moveTo(view.chart.left, Math.round(y) + 0.5);
        context.lineTo(view.chart.left + view.chart.plotWidth, Math.round(y) + 0.5);
        context.stroke();
        context.setLineDash([]);
      }

      function drawHeader(context, block) {
        const { model } = block;
        const top = headerTop(block);
        context.fillStyle = theme().bg;
        context.fillRect(0, top, view.chart.width, HEADER - 4);
        context.fillStyle = theme().line;
        context.fillRect(0, top + HEADER - 5, view.chart.width, 1);
        if (top > 0 && top === block.top) context.fillRect(0, top, view.chart.width, 1);
        context.fillStyle = theme().fg;
        context.textAlign = "left";
        context.font = `600 13px ${FONT}`;
        fillText(context, model.name, 8, top + 14, view.chart.left - 16);
        context.fillStyle = theme().muted;
        context.font = `12px ${FONT}`;
        fillText(context, headerText(model), view.chart.left, top + 14, view.chart.plotWidth);
        drawTicks(context, model, top + 32);
      }

      /** How much tracing slows a measured step. */
      function tracedText({ data }) {
        if (!data.untraced) return "";
        const factor = lib.number(data.latency / data.untraced, 3);
        return ` traced, ${factor}x the ${lib.time(data.untraced, data.unit)} without tracing`;
      }

      function headerText(model) {
        const { latency, throughput, waited } = model.data;
        const parts = [`step ${timeText(latency, model)}${tracedText(model)}`];
        if (waited !== null) parts.push(`after ${lib.time(waited, model.unit)} of waiting for its batch`);
        if (throughput !== null) parts.push(`${lib.number(throughput)} samples/s`);
        if (meanBubble(model) !== null) parts.push(`mean bubble ${lib.percent(meanBubble(model))}`);
        if (model.unit === "F") parts.push("1 F: the time of a forward task");
        if (view.axes.size > 1) parts.push(`axis of its own, in ${model.unit}`);
        return parts.join("  \u00b7  ");
      }

      function drawTicks(context, model, middle) {
        const axis = axisOf(model);
        const [scale, unit] = lib.timeScale(axis.hi, model.unit);
        const found = lib.ticks(axis.lo, axis.hi, view.chart.plotWidth / 90);
        const digits = Math.max(0, -Math.floor(Math.log10((found[1] - found[0]) / scale) + 1e-9));
        context.font = `11px ${FONT}`;
        context.textAlign = "center";
        for (const at of found)
          context.fillText((at / scale).toFixed(Math.min(digits, 12)), view.chart.x(axis, at), middle);
        context.textAlign = "right";
        context.fillText(unit, view.chart.left - 14, middle);
      }

      /** What the selected span waited for, and that for, as a line back to the beginning. */
      function drawCauses(context, block) {
        if (view.chosen?.model !== block.model) return;
        clipPlot(context, block.top, block.bottom);
        const chain = view.chosen.model
          .chain(view.chosen.index)
          .map((index) => boxOf(block, index))
          .filter(Boolean);
        context.strokeStyle = theme().accent;
        context.lineWidth = 1.5;
        context.beginPath();
        chain.forEach((box, position) => {
          const before = chain[position + 1];
          if (!before) return;
          context.moveTo(before.left + before.width, before.top + before.height - 4);
          context.lineTo(box.left, box.top + box.height - 4);
          context.lineTo(box.left + box.width, box.top + box.height - 4);
        });
        context.stroke();
        const box = boxOf(block, view.chosen.index);
        if (box)
          outline(context, box.left - 1, box.top - 1, Math.max(box.width + 2, 5), box.height + 2, theme().select, 2.5);
        context.restore();
      }

      return draw;
    }

    return { timelineDrawing };
  })(),
);
