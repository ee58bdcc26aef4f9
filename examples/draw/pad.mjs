/**
 * A canvas that one draws on, and what a network of 8 by 8 pixels sees of it.
 *
 * The data set counts the dark pixels of each 4 by 4 block in a digit that fills a bitmap of 32 by 32; so does this.
 */

const PEN = 0.07; // width of a stroke on the canvas, of its side
const BITMAP = 32;
const BITMAP_PEN = 5; // pixels of the bitmap
const BLOCK = 4;
const STEP = 1 / 16; // how far an arrow key moves the pen

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Strokes are lists of points `[x, y]`, 0 to 1; `onChange` is called after each new point. */
export class Pad {
  #canvas;
  #onChange;
  #strokes = [];
  #isDown = false;
  #pen = null; // where the keyboard's pen is; null until a key was pressed

  constructor(canvas, onChange) {
    this.#canvas = canvas;
    this.#onChange = onChange;
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#isDown && this.#add(this.#place(event)));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (this.#isDown = false));
    canvas.addEventListener("keydown", (event) => this.#press(event));
    canvas.addEventListener("blur", () => this.#lift());
  }

  get isEmpty() {
    return !this.#strokes.length;
  }

  clear() {
    this.#strokes = [];
    this.#isDown = false;
    this.#changed();
  }

  /** The digit as the data set has it: 64 numbers from -0.5 (paper) to 0.5 (ink). */
  image() {
    const canvas = new OffscreenCanvas(BITMAP, BITMAP);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    stroke(context, this.#filling(), BITMAP_PEN);
    const alpha = context.getImageData(0, 0, BITMAP, BITMAP).data.filter((_, i) => i % 4 === 3);
    const side = BITMAP / BLOCK;
    const image = new Float32Array(side * side).fill(-0.5);
    alpha.forEach((a, i) => {
      const row = Math.floor(i / BITMAP / BLOCK);
      const column = Math.floor((i % BITMAP) / BLOCK);
      image[row * side + column] += a > 127 ? 1 / BLOCK ** 2 : 0;
    });
    return image;
  }

  /** The strokes, moved and scaled so that they fill the bitmap. */
  #filling() {
    const points = this.#strokes.flat();
    const bounds = [0, 1].map((axis) => {
      const values = points.map((point) => point[axis]);
      return [Math.min(...values), Math.max(...values)];
    });
    const size = Math.max(...bounds.map(([low, high]) => high - low), 0.2); // a dot stays small
    const scale = (BITMAP - BITMAP_PEN) / size;
    const moved = (point) => point.map((at, axis) => (at - (bounds[axis][0] + bounds[axis][1]) / 2) * scale + BITMAP / 2);
    return this.#strokes.map((points) => points.map(moved));
  }

  #place(event) {
    const box = this.#canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  #begin(event) {
    event.preventDefault(); // no selection of text, no scrolling
    this.#canvas.focus();
    this.#pen = null;
    this.#isDown = true;
    this.#strokes.push([]);
    this.#add(this.#place(event));
  }

  #add(point) {
    this.#strokes.at(-1).push(point);
    this.#changed();
  }

  #press(event) {
    const move = ARROWS[event.key];
    if (!move && event.key !== " ") return;
    event.preventDefault();
    this.#pen ??= [0.5, 0.25];
    if (move) this.#pen = this.#pen.map((at, axis) => Math.min(1, Math.max(0, at + move[axis] * STEP)));
    else if (this.#isDown) this.#isDown = false;
    else this.#strokes.push([]), (this.#isDown = true);
    if (this.#isDown) this.#add(this.#pen);
    else this.#paint();
  }

  #lift() {
    this.#pen = null;
    this.#isDown = false;
    this.#paint();
  }

  #changed() {
    this.#paint();
    this.#onChange();
  }

  #paint() {
    const { width, height } = this.#canvas;
    const context = this.#canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    context.strokeStyle = context.fillStyle = getComputedStyle(this.#canvas).color;
    stroke(context, this.#strokes.map((points) => points.map(([x, y]) => [x * width, y * height])), PEN * width);
    if (!this.#pen) return;
    context.globalAlpha = this.#isDown ? 1 : 0.4;
    context.beginPath();
    context.arc(this.#pen[0] * width, this.#pen[1] * height, 0.04 * width, 0, 2 * Math.PI);
    context.fill();
    context.globalAlpha = 1;
  }
}

function stroke(context, strokes, width) {
  Object.assign(context, { lineWidth: width, lineCap: "round", lineJoin: "round" });
  for (const points of strokes) {
    context.beginPath();
    context.moveTo(...points[0]);
    for (const point of points) context.lineTo(...point);
    context.stroke();
  }
}
