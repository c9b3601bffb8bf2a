// A canvas that fits its box, follows the theme, and can be read with a pointer or the arrow keys.

import { element, onceAFrame, say } from "./dom.js";

/** Returns a colour of the style sheet. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/**
 * A drawing whose things can be picked with a pointer or the keyboard.
 *
 * `size(width)` returns the height for a width; `draw(context, width, height)` draws in CSS pixels;
 * `under(x, y)` returns the thing there or null; `move(thing, key)` returns the thing that an arrow key
 * leads to (`thing` is null at first); `tell(thing)` returns its description and place.
 */
export class Drawing {
  constructor(box, label, { size, draw, under, move, tell }) {
    Object.assign(this, { size, draw, under, move, tell });
    this.picked = null;
    this.canvas = element("canvas", { tabIndex: 0, role: "img", "aria-label": label });
    this.readout = element("p", { className: "readout", "aria-live": "polite" });
    this.tip = element("div", { className: "tip", hidden: true });
    this.frame = element("div", { className: "drawing" }, this.canvas, this.tip);
    box.append(this.frame, this.readout);
    this.redraw = onceAFrame(() => this.#paint());
    new ResizeObserver(this.redraw).observe(this.frame);
    document.addEventListener("themechange", this.redraw);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.pick(null));
    this.canvas.addEventListener("blur", () => this.pick(null));
    this.canvas.addEventListener("keydown", (event) => this.#press(event));
  }

  #paint() {
    const width = Math.floor(this.frame.clientWidth);
    if (width === 0) return;
    const height = Math.ceil(this.size(width));
    const sharp = window.devicePixelRatio || 1;
    const { canvas } = this;
    if (canvas.width !== Math.round(width * sharp) || canvas.height !== Math.round(height * sharp)) {
      canvas.width = Math.round(width * sharp);
      canvas.height = Math.round(height * sharp);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(sharp, 0, 0, sharp, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    this.draw(context, width, height);
    if (this.picked !== null) this.#showTip();
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.pick(this.under(event.clientX - box.left, event.clientY - box.top));
  }

  #press(event) {
    if (!event.key.startsWith("Arrow") && event.key !== "Escape") return;
    event.preventDefault();
    this.pick(event.key === "Escape" ? null : this.move(this.picked, event.key));
  }

  /** Shows the description of a thing, or none if it is null. */
  pick(thing) {
    this.picked = thing;
    this.redraw();
    if (thing === null) {
      this.tip.hidden = true;
      say(this.readout, "");
    } else {
      this.#showTip();
    }
  }

  #showTip() {
    const { text, x, y } = this.tell(this.picked);
    say(this.readout, text);
    say(this.tip, text);
    this.tip.hidden = false;
    const left = Math.max(0, Math.min(x + 12, this.frame.clientWidth - this.tip.offsetWidth));
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${y + 14}px`;
  }
}

/** Cuts a text to a width and adds an ellipsis. */
export function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
