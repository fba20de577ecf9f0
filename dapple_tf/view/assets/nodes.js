"use strict";
// A task graph as data: nodes on the lanes of devices at their columns, in rows in which none share a column; edges.
Object.assign(
  window.dappleLib,
  (() => {
    const { firstWhere } = window.dappleLib;

    const PHASES = new Set(["F", "B", "Bx", "Bw"]);

    class GraphModel {
      constructor(data) {
        const { devices } = data;
        this.nodes = rowsOf(data.nodes).map((node) => ({
          ...node,
          layers: data.layers[node.layers],
          outputs: data.outputs[node.outputs],
        }));
        this.edges = rowsOf(data.edges).map((edge) => ({ ...edge, tensors: data.tensors[edge.tensors] }));
        const { nodes, edges } = this;
        const host = nodes.some(({ device }) => device === null) ? [{ device: null, label: "host" }] : [];
        this.lanes = [...host, ...devices].map((lane) => ({ ...lane, indices: [], rows: [] }));
        this.laneOf = new Map(this.lanes.map((lane) => [lane.device, lane]));
        nodes.forEach(({ device }, index) => this.laneOf.get(device).indices.push(index));
        this.rowOf = new Int32Array(nodes.length);
        this.lanes.forEach((lane) => this.placeRows(lane));
        this.columns = nodes.reduce((most, { column }) => Math.max(most, column + 1), 1);
        [this.inputs, this.outputs] = ["target", "source"].map((end) => adjacency(nodes.length, edges, end));
        this.byName = this.named();
      }

      /** Tasks go to the first row, what stands around them below. */
      placeRows(lane) {
        const { nodes } = this;
        lane.indices.sort((a, b) => nodes[a].column - nodes[b].column || a - b);
        const tasks = lane.indices.some((index) => PHASES.has(nodes[index].kind));
        const last = []; // The last column that is taken in each row.
        for (const index of lane.indices) {
          let row = tasks && !PHASES.has(nodes[index].kind) ? 1 : 0;
          while ((last[row] ?? -1) >= nodes[index].column) row++;
          last[row] = nodes[index].column;
          this.rowOf[index] = row;
          while (lane.rows.length <= row) lane.rows.push([]);
          lane.rows[row].push(index);
        }
        if (!lane.rows.length) lane.rows.push([]);
      }

      /** Nodes by their names and labels; a name is one node's, a label may be several's. */
      named() {
        const found = new Map();
        const add = (text, index) => (found.has(text) ? found.get(text).push(index) : found.set(text, [index]));
        this.nodes.forEach(({ name }, index) => add(name, index));
        this.nodes.forEach(({ name, label }, index) => (label !== name ? add(label, index) : null));
        return found;
      }

      /** Positions [from, to) in a row of the nodes of columns within [lo, hi]. */
      within(row, lo, hi) {
        return [
          firstWhere(row.length, (position) => this.nodes[row[position]].column >= lo),
          firstWhere(row.length, (position) => this.nodes[row[position]].column > hi),
        ];
      }
    }

    /** The objects of which these are the columns. */
    function rowsOf(columns) {
      const names = Object.keys(columns);
      return columns[names[0]].map((_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]])));
    }

    /** For each node the positions of the edges that have it at one end, `source` or `target`. */
    function adjacency(count, edges, end) {
      const found = Array.from({ length: count }, () => []);
      edges.forEach((edge, position) => found[edge[end]].push(position));
      return found;
    }

    return { GraphModel };
  })(),
);
