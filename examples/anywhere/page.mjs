/**
 * The page: trains the artifacts, draws the loss as it falls, and reads some digits that were held out.
 *
 * `?artifacts=` names the folder of the artifacts, `out` unless told; `?report=` an address that the result is posted
 * to as JSON, `{ losses, … }` or `{ error }`. The losses are `window.losses` as well.
 */

import * as ort from "onnxruntime-web";

import { predictions, run } from "./run.mjs";

const SHOWN = 12; // digits drawn at the end
const CHART = { left: 44, right: 708, top: 12, bottom: 268 };

const query = new URLSearchParams(location.search);
const folder = query.get("artifacts") ?? "out";
const element = (id) => document.getElementById(id);
const show = (id, text) => (element(id).textContent = text);

ort.env.wasm.numThreads = 1; // threads need headers of their own, and gain nothing in a network this small

async function read(name) {
  const response = await fetch(`${folder}/${name}`);
  if (!response.ok) throw new Error(`${folder}/${name} is not there: run make_artifacts.py first`);
  return new Uint8Array(await response.arrayBuffer());
}

/** Where a loss is drawn: the axis of steps ends at `steps`, that of losses at `top`. */
function scales(steps, top) {
  const x = (step) => CHART.left + ((CHART.right - CHART.left) * step) / Math.max(steps - 1, 1);
  const y = (loss) => CHART.bottom - ((CHART.bottom - CHART.top) * loss) / top;
  const points = (losses) => losses.map((loss, step) => `${x(step).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  return { x, y, points };
}

function drawAxes(steps, top, { x, y }, python) {
  const heights = Array.from({ length: 5 }, (_, i) => (top * i) / 4);
  const lines = heights.map(
    (loss) =>
      `<line x1="${CHART.left}" x2="${CHART.right}" y1="${y(loss)}" y2="${y(loss)}" />` +
      `<text x="${CHART.left - 8}" y="${y(loss) + 4}" text-anchor="end">${loss.toFixed(1)}</text>`,
  );
  const marks = [0, Math.floor((steps - 1) / 2), steps - 1].map(
    (step, i) => `<text x="${x(step)}" y="288" text-anchor="${["start", "middle", "end"][i]}">step ${step + 1}</text>`,
  );
  const curves = `<polyline id="python" points="${python}" /><polyline id="curve" points="" />`;
  element("chart").innerHTML = [...lines, ...marks, curves].join("");
}

/** What is called after each step: the chart grows, the numbers change. */
function watcher() {
  let scale, began, painted;
  return async (losses, { steps, python }) => {
    if (!losses.length) {
      const top = Math.ceil(Math.max(...python.losses) * 2) / 2;
      scale = scales(steps, top);
      drawAxes(steps, top, scale, scale.points(python.losses));
      show("status", "Training …");
      began = painted = performance.now();
      return;
    }
    element("curve").setAttribute("points", scale.points(losses));
    const now = performance.now();
    const apart = losses.map((loss, i) => Math.abs(loss / python.losses[i] - 1));
    show("step", `${losses.length} of ${steps}`);
    show("loss", losses.at(-1).toFixed(4));
    show("difference", Math.max(...apart).toExponential(1));
    show("time", `${((now - began) / losses.length).toFixed(1)} ms`);
    if (now - painted < 16) return;
    await new Promise((resolve) => setTimeout(resolve)); // the browser paints what has changed
    painted = performance.now();
  };
}

/** Some digits with what the network reads. */
function drawDigits({ images, labels, scores }) {
  const read = predictions(scores);
  const [, , height, width] = images.dims;
  for (let i = 0; i < SHOWN; i++) {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const grey = images.data.subarray(i * width * height, (i + 1) * width * height);
    const pixels = Uint8ClampedArray.from({ length: 4 * grey.length }, (_, j) =>
      j % 4 === 3 ? 255 : 255 * (0.5 - grey[j >> 2]),
    );
    canvas.getContext("2d").putImageData(new ImageData(pixels, width, height), 0, 0);
    const figure = document.createElement("div");
    figure.className = read[i] === Number(labels.data[i]) ? "right" : "wrong";
    figure.append(canvas, String(read[i]));
    element("digits").append(figure);
  }
}

async function report(result) {
  if (query.has("report")) await fetch(query.get("report"), { method: "POST", body: JSON.stringify(result) });
}

try {
  const { measured, heldOut } = await run(ort, read, watcher());
  window.losses = measured.losses;
  show("right", `${measured.right} of ${heldOut.labels.dims[0]}`);
  drawDigits(heldOut);
  show("status", "Done. Above are digits that the network had not seen, each with what it reads.");
  await report(measured);
} catch (error) {
  element("status").className = "failed";
  show("status", String(error));
  await report({ error: String(error?.stack ?? error) });
}
