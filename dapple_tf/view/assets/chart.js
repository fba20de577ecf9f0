"use strict";
// A canvas with a gutter for labels, scrolled vertically, zoomed and panned horizontally. Only what is in sight is drawn.
Object.assign(
  window.dappleLib,
  (() => {
    const { element, theme, onScheme, showTip } = window.dappleLib;

    /** The visible part [lo, hi] of [min, max]. */
    class Axis {
      constructor(least) {
        this.least = least; // The smallest part of [min, max] that may fill the view.
        [this.min, this.max, this.lo, this.hi] = [0, 1, 0, 1];
      }

      get fitted() {
        return this.lo === this.min && this.hi === this.max;
      }

      /** Sets the whole; what showed everything does so again, other views stay. */
      setRange(min, max) {
        const fitted = this.fitted;
        this.min = min;
        this.max = max > min ? max : min + 1;
        if (fitted) this.fit();
        else this.set(this.lo, this.hi);
      }

      fit() {
        this.set(this.min, this.max);
      }

      set(lo, hi) {
        const whole = this.max - this.min;
        const width = Math.min(whole, Math.max(hi - lo, whole * this.least));
        if (!(width > 0)) return;
        if (width === whole) {
          [this.lo, this.hi] = [this.min, this.max];
        } else {
          this.lo = Math.min(Math.max((lo + hi - width) / 2, this.min), this.max - width);
          this.hi = this.lo + width;
        }
      }

      /** Narrows the view by `factor` around `at`, which stays in place. */
      zoom(factor, at = (this.lo + this.hi) / 2) {
        const whole = this.max - this.min;
        const width = Math.min(whole, Math.max((this.hi - this.lo) / factor, whole * this.least));
        const share = (at - this.lo) / (this.hi - this.lo);
        this.set(at - share * width, at + (1 - share) * width);
      }

      /** Moves the view by a part of its width. */
      pan(share) {
        const by = share * (this.hi - this.lo);
        const moved = Math.min(Math.max(by, this.min - this.lo), this.max - this.hi);
        this.set(this.lo + moved, this.hi + moved);
      }
    }

    /**
     * The drawing area. The painter tells what is on it:
     *   height() in pixels; axes(); axisAt(y); draw(chart, context); hit(x, y) -> anything or null; tip(hit) -> text;
     *   click(hit or null); changed(), when the view has changed.
     * y counts from the top of the content, wherever it is scrolled to.
     */
    class Chart {
      constructor(host, painter, label) {
        this.host = host;
        this.painter = painter;
        this.frames = 0;
        this.frameMs = 0;
        this.waiting = false;
        this.canvas = element("canvas", { tabindex: 0, role: "application", "aria-label": label });
        this.spacer = element("div", { "aria-hidden": "true" });
        host.append(this.canvas, this.spacer);
        this.context = this.canvas.getContext("2d");
        this.listen();
        this.resize();
      }

      get scrollTop() {
        return this.host.scrollTop;
      }

      /** Where the plot begins, right of the labels. */
      get left() {
        return this.width < 600 ? 110 : this.width < 900 ? 210 : 245;
      }

      get plotWidth() {
        return Math.max(50, this.width - this.left - 10);
      }

      x(axis, at) {
        return this.left + ((at - axis.lo) / (axis.hi - axis.lo)) * this.plotWidth;
      }

      at(axis, x) {
        return axis.lo + ((x - this.left) / this.plotWidth) * (axis.hi - axis.lo);
      }

      /** Draws with the next frame; further calls until then are free. */
      redraw() {
        if (this.waiting) return;
        this.waiting = true;
        requestAnimationFrame(() => {
          this.waiting = false;
          this.drawNow();
        });
      }

      drawNow() {
        const begin = performance.now();
        const { context } = this;
        context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
        context.fillStyle = theme().bg;
        context.fillRect(0, 0, this.width, this.height);
        context.translate(0, -this.scrollTop);
        this.painter.draw(this, context);
        this.frames++;
        this.frameMs = performance.now() - begin;
      }

      /** After the content's height has changed. */
      layout() {
        this.spacer.style.height = `${Math.max(0, this.painter.height() - this.height)}px`;
        this.redraw();
      }

      /** The first drawing, when all is there to be drawn: pages that aren't in sight get no frames. */
      begin() {
        this.resize();
        this.drawNow();
      }

      /** Setting a canvas' size empties it: it is drawn at once, not with the next frame, which may come after a picture. */
      resize() {
        if (this.frames && this.fits) return;
        this.width = this.host.clientWidth;
        this.height = this.host.clientHeight;
        this.scale = window.devicePixelRatio || 1;
        this.canvas.width = Math.round(this.width * this.scale);
        this.canvas.height = Math.round(this.height * this.scale);
        this.canvas.style.width = `${this.width}px`;
        this.canvas.style.height = `${this.height}px`;
        this.layout();
        if (this.frames) this.drawNow();
      }

      /** Whether the canvas has the size of its element. */
      get fits() {
        const { host, width, height, scale } = this;
        return width === host.clientWidth && height === host.clientHeight && scale === (window.devicePixelRatio || 1);
      }

      listen() {
        const { canvas } = this;
        new ResizeObserver(() => this.resize()).observe(this.host);
        onScheme(() => this.redraw());
        this.host.addEventListener("scroll", () => this.redraw());
        canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
        canvas.addEventListener("pointerdown", (event) => this.press(event));
        canvas.addEventListener("pointermove", (event) => this.move(event));
        canvas.addEventListener("pointerup", (event) => this.release(event));
        canvas.addEventListener("pointercancel", () => this.letGo());
        canvas.addEventListener("pointerleave", () => showTip(null));
      }

      /** Where an event is: x from the left of the canvas, y from the top of the content. */
      place(event) {
        const box = this.canvas.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top + this.scrollTop];
      }

      wheel(event) {
        if (event.shiftKey) return; // Scrolls.
        event.preventDefault();
        const [x, y] = this.place(event);
        const axis = this.painter.axisAt(y);
        const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 30 : 1;
        if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) axis.pan((event.deltaX * lines) / this.plotWidth);
        else axis.zoom(Math.exp((-event.deltaY * lines) / 400), this.at(axis, Math.max(x, this.left)));
        this.changed();
      }

      press(event) {
        if (event.button !== 0) return;
        this.canvas.focus({ preventScroll: true });
        this.canvas.setPointerCapture(event.pointerId);
        this.drag = {
          x: event.clientX,
          y: event.clientY,
          moved: false,
          axis: this.painter.axisAt(this.place(event)[1]),
        };
      }

      move(event) {
        if (!this.drag) return this.hover(event);
        const [dx, dy] = [event.clientX - this.drag.x, event.clientY - this.drag.y];
        if (!this.drag.moved && Math.hypot(dx, dy) < 4) return undefined;
        Object.assign(this.drag, { x: event.clientX, y: event.clientY, moved: true });
        this.canvas.classList.add("dragging");
        showTip(null);
        this.drag.axis.pan(-dx / this.plotWidth);
        this.host.scrollTop -= dy;
        return this.changed();
      }

      release(event) {
        const clicked = this.drag && !this.drag.moved;
        this.letGo();
        if (clicked) this.painter.click(this.painter.hit(...this.place(event)));
      }

      letGo() {
        this.drag = null;
        this.canvas.classList.remove("dragging");
      }

      hover(event) {
        const hit = this.painter.hit(...this.place(event));
        this.canvas.classList.toggle("pointing", hit !== null);
        showTip(hit === null ? null : this.painter.tip(hit), event.clientX, event.clientY);
      }

      changed() {
        this.painter.changed();
        this.redraw();
      }

      zoom(factor) {
        this.painter.axes().forEach((axis) => axis.zoom(factor));
        this.changed();
      }

      pan(share) {
        this.painter.axes().forEach((axis) => axis.pan(share));
        this.changed();
      }

      fit() {
        this.painter.axes().forEach((axis) => axis.fit());
        this.changed();
      }

      scroll(share) {
        this.host.scrollTop += share * this.height;
      }

      /** Moves the view so that [from, to] and the pixels [top, bottom] are in sight, not more than needed. */
      reveal(axis, from, to, top, bottom) {
        const margin = (axis.hi - axis.lo) * 0.05;
        if (to - from > axis.hi - axis.lo) axis.set(from, to);
        else if (from < axis.lo || to > axis.hi) {
          const shift = from < axis.lo ? from - axis.lo - margin : to - axis.hi + margin;
          axis.pan(shift / (axis.hi - axis.lo));
        }
        if (top < this.scrollTop + 50) this.host.scrollTop = Math.max(0, top - 60);
        else if (bottom > this.scrollTop + this.height) this.host.scrollTop = bottom - this.height + 20;
        this.changed();
      }
    }

    /** Positions for about `count` lines on [lo, hi], at round numbers. */
    function ticks(lo, hi, count) {
      const raw = (hi - lo) / Math.max(1, count);
      const power = 10 ** Math.floor(Math.log10(raw));
      const step = power * ([1, 2, 5].find((factor) => factor * power >= raw) ?? 10);
      const found = [];
      for (let index = Math.ceil(lo / step); index * step <= hi; index++) found.push(index * step);
      return found;
    }

    /** Draws a text that ends with an ellipsis where it is wider than `width`. */
    function fillText(context, text, x, y, width) {
      if (context.measureText(text).width <= width) return context.fillText(text, x, y);
      const fits = (length) => context.measureText(`${text.slice(0, length)}\u2026`).width <= width;
      const length = window.dappleLib.firstWhere(text.length, (size) => !fits(size + 1));
      return length ? context.fillText(`${text.slice(0, length)}\u2026`, x, y) : undefined;
    }

    /** Shorter labels of a device, the longest first; each still identifies it. */
    function labelForms(text) {
      const bare = text.replace(/^device (?=\d)/, "");
      return [text, bare, bare.replace(/: stages? /, ": ")];
    }

    /** Draws the longest form of a device's label that fits; finally without its middle. */
    function fillLabel(context, text, x, y, width) {
      const fits = (form) => context.measureText(form).width <= width;
      const forms = labelForms(text);
      let shown = forms.find(fits);
      const last = forms[forms.length - 1];
      for (let length = last.length - 1; shown === undefined && length > 1; length--) {
        const end = Math.floor(length / 2);
        const cut = `${last.slice(0, length - end)}\u2026${last.slice(last.length - end)}`;
        if (fits(cut)) shown = cut;
      }
      if (shown !== undefined) context.fillText(shown, x, y);
    }

    const inks = new Map();

    /** Dark or light, whichever is easier to read on a colour of the form #rrggbb. */
    function inkOn(colour) {
      if (!inks.has(colour)) {
        const [red, green, blue] = [1, 3, 5].map((from) => parseInt(colour.slice(from, from + 2), 16));
        inks.set(colour, 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#1f2328" : "#ffffff");
      }
      return inks.get(colour);
    }

    const FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif';

    return { Axis, Chart, ticks, fillText, fillLabel, labelForms, inkOn, FONT };
  })(),
);
