"use strict";
// Where a task graph is on the page: its lanes from top to bottom, its columns from left to right, what is at a place.
Object.assign(
  window.dappleLib,
  (() => {
    const lib = window.dappleLib;

    const ROW = 32;
    const BOX = 22;
    const PAD = [22, 8]; // Above and below the rows of a lane; edges within a lane run above.

    /** The first of some texts. */
    const shortList = (texts, most = 6) =>
      texts.slice(0, most).join(", ") + (texts.length > most ? ` and ${texts.length - most} more` : "");

    /**
     * @param {Object} view - what the page shows: model; matches, of each node whether the filters let it through; lanes that are shown;
     *   contentHeight; centre, of each node from the top of the content; edgesShown; edgeKinds, {data, control, host}; chosen, a node or null;
     *   near, its neighbours; drawn, what was drawn last; axis, of columns; chart.
     */
    function graphLayout(view) {
      /** Places the lanes of the devices that are allowed. */
      function place(allowed) {
        let y = 4;
        view.lanes = view.model.lanes.filter(({ device }) => allowed(device));
        for (const lane of view.lanes) {
          lane.top = y;
          y += PAD[0] + lane.rows.length * ROW + PAD[1];
          lane.bottom = y;
          for (const index of lane.indices)
            view.centre[index] = lane.top + PAD[0] + (view.model.rowOf[index] + 0.5) * ROW;
          y += 4;
        }
        view.contentHeight = y;
      }

      const pitch = () => view.chart.plotWidth / (view.axis.hi - view.axis.lo);
      const boxWidth = () => Math.max(1, Math.min(120, pitch() * 0.7));
      const laneAt = (y) => view.lanes.find(({ top, bottom }) => y >= top && y < bottom);

      function hit(x, y) {
        const lane = laneAt(y);
        if (!lane) return null;
        if (x < view.chart.left) return { lane };
        const row = lane.rows[Math.floor((y - lane.top - PAD[0]) / ROW)];
        if (!row) return null;
        const at = view.chart.at(view.axis, x);
        const reach = (boxWidth() / 2 + 2) / pitch();
        const [from, to] = view.model.within(row, at - reach, at + reach);
        let best = null;
        for (let position = from; position < to; position++) {
          const index = row[position];
          if (view.matches[index] && (best === null || Math.abs(column(index) - at) < Math.abs(column(best) - at)))
            best = index;
        }
        return best === null || Math.abs(y - view.centre[best]) > BOX / 2 ? null : { lane, index: best };
      }

      const column = (index) => view.model.nodes[index].column;

      function tip({ lane, index }) {
        if (index === undefined) return `${lane.label}\n${lane.matching} of ${lane.indices.length} nodes`;
        const { label, name, kind, layers, outputs } = view.model.nodes[index];
        const lines = [label === name ? label : `${label}\n${name}`, kind];
        if (layers.length) lines.push(`layers: ${shortList(layers)}`);
        const size = outputs.reduce((sum, [, , , bytes]) => sum + (bytes ?? 0), 0);
        if (size) lines.push(`${outputs.length} outputs, ${lib.bytes(size)}`);
        return lines.join("\n");
      }

      return { place, pitch, boxWidth, column, hit, tip };
    }

    return { graphLayout, graphSizes: { ROW, BOX, PAD }, shortList };
  })(),
);
