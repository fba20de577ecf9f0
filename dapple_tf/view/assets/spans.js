"use strict";
// Timelines as data: spans on the lanes of devices, ordered so that visible ones are found without searching the rest.
Object.assign(
  window.dappleLib,
  (() => {
    const { firstWhere } = window.dappleLib;

    const DEFAULTS = {
      kind: "",
      start: 0,
      end: 0,
      device: null,
      stage: 0,
      micro_batch: null,
      replica: 0,
      target: null,
      bytes: 0,
      cause: null,
      reduction: null,
    };
    const MAX_DEPTH = 6; // Rows of a lane; spans that overlap more than that are drawn over each other.

    /** One timeline of `timeline_data`, with lanes. */
    class TimelineModel {
      constructor(data) {
        this.data = data;
        this.name = data.name;
        this.unit = data.unit;
        this.count = data.count;
        this.columns = Object.fromEntries(
          Object.entries(DEFAULTS).map(([name, value]) => [
            name,
            data.spans[name] ?? new Array(data.count).fill(value),
          ]),
        );
        this.devices = data.devices;
        this.lanes = this.makeLanes();
        this.causesOf = null;
      }

      /** A span as an object. */
      span(index) {
        return Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, this.columns[name][index]]));
      }

      /** `2B3.r1` as in the text form of tasks; of others `2send3 0->1`, `2all_reduce`. */
      nameOf(index) {
        const { kind, stage, micro_batch: number, replica, device, target } = this.columns;
        const where = target[index] === null ? "" : ` ${device[index]}->${target[index]}`;
        return `${stage[index]}${kind[index]}${number[index] ?? ""}${replica[index] ? `.r${replica[index]}` : ""}${where}`;
      }

      devicesOf(index) {
        const { device, reduction } = this.columns;
        if (device[index] !== null) return [device[index]];
        return reduction[index] === null ? [] : (this.data.reduced_on[reduction[index]] ?? []);
      }

      rowOf(index) {
        const kind = this.columns.kind[index];
        return ["send", "all_reduce"].includes(kind) ? kind : "compute";
      }

      makeLanes() {
        const found = new Map();
        for (const { device } of this.devices) {
          for (const row of ["compute", "send", "all_reduce"])
            found.set(`${device} ${row}`, { device, row, indices: [] });
        }
        for (let index = 0; index < this.count; index++) {
          for (const device of this.devicesOf(index)) found.get(`${device} ${this.rowOf(index)}`).indices.push(index);
        }
        return [...found.values()]
          .filter(({ row, indices }) => row === "compute" || indices.length)
          .map((lane) => new SpanLane(this, lane));
      }

      /** Key of the lane of a span; of those with several, the first. */
      laneKey(index) {
        return `${this.devicesOf(index)[0]} ${this.rowOf(index)}`;
      }

      /** The spans with a name, in order. */
      called(name) {
        if (!this.byName) {
          this.byName = new Map();
          for (let index = 0; index < this.count; index++) {
            const own = this.nameOf(index);
            if (!this.byName.has(own)) this.byName.set(own, []);
            this.byName.get(own).push(index);
          }
        }
        return this.byName.get(name) ?? [];
      }

      /** Position of a span among those with its name. */
      nth(index) {
        return this.called(this.nameOf(index)).indexOf(index);
      }

      /** The critical path: each span waited for the one before; the last ends last. To be faster, shorten these. */
      criticalPath() {
        if (!this.count) return new Set();
        const { end } = this.columns;
        let last = 0;
        for (let index = 1; index < this.count; index++) if (end[index] > end[last]) last = index;
        return new Set(this.chain(last));
      }

      /** A span and what it waited for, and what that waited for, and so on. */
      chain(index) {
        const found = new Set();
        for (let at = index; at !== null && this.has(at) && !found.has(at); at = this.columns.cause[at]) found.add(at);
        return [...found];
      }

      has(index) {
        return Number.isInteger(index) && index >= 0 && index < this.count;
      }

      /** The spans that waited for this one last. */
      followers(index) {
        if (!this.causesOf) {
          this.causesOf = new Map();
          this.columns.cause.forEach((cause, follower) => {
            if (!this.has(cause)) return;
            if (!this.causesOf.has(cause)) this.causesOf.set(cause, []);
            this.causesOf.get(cause).push(follower);
          });
        }
        return this.causesOf.get(index) ?? [];
      }
    }

    /** A lane: its spans in rows in which none overlap. */
    class SpanLane {
      constructor(model, { device, row, indices }) {
        Object.assign(this, { model, device, row, indices, key: `${device} ${row}`, rowOf: new Map() });
        const { start, end } = model.columns;
        indices.sort((a, b) => start[a] - start[b] || end[a] - end[b] || a - b);
        this.rows = [];
        this.gaps = [];
        let until = 0;
        for (const index of indices) {
          if (start[index] > until) this.gaps.push([until, start[index]]);
          until = Math.max(until, end[index]);
          this.place(index);
        }
        if (model.data.latency > until) this.gaps.push([until, model.data.latency]);
        this.covered = model.data.latency - this.gaps.reduce((sum, [from, to]) => sum + to - from, 0);
        if (!this.rows.length) this.rows.push({ indices: [], until: 0, ends: [] });
      }

      place(index) {
        const { start, end } = this.model.columns;
        let row = this.rows.find(({ until }) => until <= start[index] + 1e-12 * Math.abs(start[index]));
        if (!row && this.rows.length < MAX_DEPTH) {
          row = { indices: [], until: 0, ends: [] };
          this.rows.push(row);
        }
        row ??= this.rows[MAX_DEPTH - 1];
        row.indices.push(index);
        this.rowOf.set(index, this.rows.indexOf(row));
        row.until = Math.max(row.until, end[index]);
        row.ends.push(row.until); // The latest end so far, which only grows: so it can be searched.
      }

      /** Positions [from, to) in a row of what is within [lo, hi]. */
      within(row, lo, hi) {
        const { start } = this.model.columns;
        return [
          firstWhere(row.ends.length, (position) => row.ends[position] >= lo),
          firstWhere(row.indices.length, (position) => start[row.indices[position]] > hi),
        ];
      }

      /** The span of a row at a time, or one that is at most `near` away; null if there is none. */
      spanAt(row, time, near) {
        const { start, end } = this.model.columns;
        const [from, to] = this.within(row, time - near, time + near);
        let [best, distance] = [null, Infinity];
        for (let position = from; position < to; position++) {
          const index = row.indices[position];
          const away = Math.max(start[index] - time, time - end[index], 0);
          if (away < distance) [best, distance] = [index, away];
          if (away === 0) return index;
        }
        return distance <= near ? best : null;
      }
    }

    /** Bytes in use at a time. */
    function levelAt([times, levels], time) {
      const after = firstWhere(times.length, (position) => times[position] > time);
      return after ? levels[after - 1] : null;
    }

    return { TimelineModel, levelAt };
  })(),
);
