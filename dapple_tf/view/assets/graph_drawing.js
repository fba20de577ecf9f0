"use strict";
// Draws a task graph: lanes with boxes, data edges solid, control edges dotted.
Object.assign(
  window.dappleLib,
  (() => {
    const { theme, kindColour, fillText, fillLabel, inkOn, FONT } = window.dappleLib;
    const { ROW, BOX, PAD } = window.dappleLib.graphSizes;

    const EDGE_BUDGET = 2500; // Maximum number of drawn edges; beyond it, edges that would cover each other are left out.
    const BESIDE = 3; // Pixels by which a control edge runs beside a data edge between the same nodes.
    const BATCH = 200; // Edges per path: very long paths are slow to draw.

    /** Gives the function that draws a view (see graphLayout). */
    function graphDrawing(view, { pitch, boxWidth, column }) {
      function draw(_, context) {
        context.textBaseline = "middle";
        const [from, to] = [view.chart.scrollTop, view.chart.scrollTop + view.chart.height];
        const inSight = view.lanes.filter(({ top, bottom }) => bottom > from && top < to);
        for (const lane of inSight) {
          context.fillStyle = theme().lane;
          context.fillRect(view.chart.left, lane.top, view.chart.plotWidth, lane.bottom - lane.top);
        }
        context.save();
        context.beginPath();
        context.rect(view.chart.left, from, view.chart.plotWidth, view.chart.height);
        context.clip();
        context.globalAlpha = dimmed() ? 0.3 : 0.7;
        drawEdges(context, from, to);
        context.globalAlpha = 1;
        for (const lane of inSight) lane.rows.forEach((row) => drawRow(context, row));
        drawChosen(context);
        context.restore();
        inSight.forEach((lane) => drawLabel(context, lane));
      }

      function drawLabel(context, lane) {
        const middle = lane.rows.length === 1 ? (lane.top + lane.bottom) / 2 : lane.top + PAD[0] + ROW / 2;
        context.fillStyle = theme().fg;
        context.textAlign = "left";
        context.font = `600 12px ${FONT}`;
        fillLabel(context, lane.label, 8, middle, view.chart.left - 16);
        context.fillStyle = theme().muted;
        context.font = `10px ${FONT}`;
        fillText(context, `${lane.matching} of ${lane.indices.length} nodes`, 8, middle + 15, view.chart.left - 16);
      }

      /** Edges in sight; of those that would lie on each other only one, where there are too many. */
      function drawEdges(context, top, bottom) {
        const { lo, hi } = view.axis;
        const inSight = view.edgesShown.filter(({ source, target }) => {
          const [from, to] = [view.centre[source], view.centre[target]];
          return (
            column(target) >= lo &&
            column(source) <= hi &&
            Math.max(from, to) >= top - PAD[0] &&
            Math.min(from, to) <= bottom + PAD[0]
          );
        });
        const some = inSight.length > EDGE_BUDGET ? sparse(inSight) : inSight;
        const fine = some.length <= 1200 && pitch() >= 14;
        const alpha = context.globalAlpha;
        for (const control of [0, 1]) {
          context.strokeStyle = control ? theme()["control-edge"] : theme()["data-edge"];
          context.lineWidth = fine ? 1 : 0.5;
          context.setLineDash(control && fine ? [2, 3] : []);
          const own = some.filter((edge) => edge.control === control);
          for (const [strength, edges] of byStrength(own)) {
            context.globalAlpha = alpha * strength;
            strokeEdges(context, edges, fine);
          }
        }
        context.globalAlpha = alpha;
        context.setLineDash([]);
        Object.assign(view.drawn, { inSight: inSight.length, drawn: some.length });
      }

      /** Edges that differ by some pixels, and as many of them as are drawn at most. */
      function sparse(edges) {
        const cell = pitch() / 5;
        const found = new Map();
        for (const edge of edges) {
          const { source, target, control } = edge;
          const key = `${Math.round(column(source) * cell)} ${view.centre[source]} ${Math.round(column(target) * cell)} ${view.centre[target]} ${control}`;
          if (!found.has(key)) found.set(key, edge);
        }
        const every = Math.ceil(found.size / EDGE_BUDGET);
        return [...found.values()].filter((_, position) => position % every === 0);
      }

      /** [strength, edges]: those are faint that are long or that have neither end in sight, as many lie on each other. */
      function byStrength(edges) {
        const { lo, hi } = view.axis;
        const groups = new Map([
          [1, []],
          [0.35, []],
          [0.1, []],
        ]);
        for (const edge of edges) {
          const [from, to] = [column(edge.source), column(edge.target)];
          const strength = from < lo && to > hi ? 0.1 : (to - from) * pitch() > 700 ? 0.35 : 1;
          groups.get(strength).push(edge);
        }
        return groups;
      }

      function strokeEdges(context, edges, fine) {
        const half = boxWidth() / 2;
        for (let begin = 0; begin < edges.length; begin += BATCH) {
          context.beginPath();
          for (const edge of edges.slice(begin, begin + BATCH)) traceEdge(context, edge, half, fine);
          context.stroke();
          if (fine && half > 10) drawHeads(context, edges.slice(begin, begin + BATCH), half);
        }
      }

      /** From the right side of one box to the left side of the other; over the boxes between, where they are in one row. */
      function traceEdge(context, { source, target, control }, half, fine) {
        const beside = control * BESIDE;
        const [x1, y1] = [view.chart.x(view.axis, column(source)) + half, view.centre[source] + beside];
        const [x2, y2] = [view.chart.x(view.axis, column(target)) - half, view.centre[target] + beside];
        context.moveTo(x1, y1);
        if (y1 === y2 && column(target) - column(source) > 1) {
          const lift = BOX / 2 + 2 + 2 * beside + Math.min(14, 3 * Math.log2(column(target) - column(source)));
          const bend = Math.min(pitch(), (x2 - x1) / 3);
          context.bezierCurveTo(x1 + bend * 0.3, y1 - lift * 1.1, x1 + bend * 0.7, y1 - lift, x1 + bend, y1 - lift);
          context.lineTo(x2 - bend, y1 - lift);
          context.bezierCurveTo(x2 - bend * 0.7, y1 - lift, x2 - bend * 0.3, y2 - lift * 1.1, x2, y2);
        } else if (fine) {
          const bend = Math.max(8, Math.min(80, Math.abs(x2 - x1) / 2));
          context.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
        } else {
          context.lineTo(x2, y2);
        }
      }

      function drawHeads(context, edges, half) {
        context.fillStyle = context.strokeStyle;
        context.beginPath();
        for (const { source, target, control } of edges) {
          const [x, y] = [view.chart.x(view.axis, column(target)) - half, view.centre[target] + control * BESIDE];
          const steep = view.centre[source] === view.centre[target] && column(target) - column(source) > 1;
          context.moveTo(x, y);
          context.lineTo(x - 6, y - (steep ? 6 : 3));
          context.lineTo(x - (steep ? 1.5 : 6), y - (steep ? 7 : -3));
        }
        context.fill();
      }

      /** A row of boxes; of those that share a pixel, one. */
      function drawRow(context, row) {
        const [from, to] = view.model.within(row, view.axis.lo - 1, view.axis.hi + 1);
        const width = boxWidth();
        const dim = dimmed();
        let last = -Infinity;
        for (let position = from; position < to; position++) {
          const index = row[position];
          if (!view.matches[index]) continue;
          const left = view.chart.x(view.axis, column(index)) - width / 2;
          if (width < 2 && left < last + 1) continue;
          last = left;
          context.globalAlpha = !dim || index === view.chosen || view.near.has(index) ? 1 : 0.5;
          drawBox(context, index, left, width);
        }
        context.globalAlpha = 1;
      }

      function drawBox(context, index, left, width) {
        const { kind, label, micro_batch: number } = view.model.nodes[index];
        const colour = kindColour(kind);
        const top = view.centre[index] - BOX / 2;
        context.fillStyle = colour;
        if (width > 8) {
          context.beginPath();
          context.roundRect(left, top, width, BOX, 4);
          context.fill();
          context.strokeStyle = theme()["box-edge"];
          context.lineWidth = 0.75;
          context.stroke();
        } else {
          context.fillRect(left, top, width, BOX);
        }
        const room = (width - 4) / 6.3;
        const text =
          label.length <= room
            ? label
            : number !== null && String(number).length <= room
              ? String(number)
              : room >= 4
                ? `${label.slice(0, room - 1)}\u2026`
                : "";
        if (!text) return;
        context.font = `11px ${FONT}`;
        context.textAlign = "center";
        context.fillStyle = inkOn(colour);
        context.fillText(text, left + width / 2, view.centre[index]);
      }

      /** Whether all nodes except the selected one and its neighbours are pale. */
      const dimmed = () => view.chosen !== null && view.matches[view.chosen] === 1;

      function drawChosen(context) {
        if (!dimmed()) return;
        const own = ({ source, target, control }) =>
          view.matches[source] && view.matches[target] && (control ? view.edgeKinds.control : view.edgeKinds.data);
        for (const control of [0, 1]) {
          const edges = [...view.model.inputs[view.chosen], ...view.model.outputs[view.chosen]]
            .map((position) => view.model.edges[position])
            .filter((edge) => edge.control === control && own(edge));
          context.strokeStyle = control ? theme()["control-edge"] : theme()["data-edge"];
          context.lineWidth = 2;
          context.setLineDash(control ? [2, 3] : []);
          strokeEdges(context, edges.slice(0, EDGE_BUDGET), true);
        }
        context.setLineDash([]);
        for (const index of view.near) if (view.matches[index]) outline(context, index, theme().accent, 1.5);
        outline(context, view.chosen, theme().select, 2.5);
      }

      function outline(context, index, colour, thick) {
        const width = boxWidth();
        context.strokeStyle = colour;
        context.lineWidth = thick;
        context.strokeRect(
          view.chart.x(view.axis, column(index)) - width / 2 - 1,
          view.centre[index] - BOX / 2 - 1,
          width + 2,
          BOX + 2,
        );
      }

      return draw;
    }

    return { graphDrawing };
  })(),
);
