/** The page: trains, and shows again and again what the network reads in what is being drawn. */

import * as ort from "onnxruntime-web";

import { Lesson } from "./lesson.mjs";
import { Pad } from "./pad.mjs";

const STEPS = 400; // until it rests
const MORE = 40; // steps for a drawing that is taught
const EXAMINED = 20; // steps between two looks at the unseen digits
const FRAME = 30; // milliseconds of training until the page is painted again
const CHART = { left: 36, right: 712, top: 8, bottom: 136 };

const element = (id) => document.getElementById(id);
const show = (id, text) => (element(id).textContent = text);
const pause = (milliseconds = 0) => new Promise((resolve) => setTimeout(resolve, milliseconds));

ort.env.wasm.numThreads = 1; // threads need headers of their own, and gain nothing in a network this small

let lesson, losses, goal;
let isPaused = false;
let isAsked = false; // whether the drawing is new since it was last read
let asked = []; // what buttons want done between two steps: sessions run one at a time

const pad = new Pad(element("pad"), () => (isAsked = true));

async function read(name) {
  const response = await fetch(`artifacts/${name}`);
  if (!response.ok) throw new Error(`artifacts/${name} is not there: publish.py makes it`);
  return new Uint8Array(await response.arrayBuffer());
}

function drawLosses() {
  const top = Math.max(2.5, ...losses);
  const last = Math.max(goal, losses.length) - 1;
  const x = (step) => CHART.left + ((CHART.right - CHART.left) * step) / last;
  const y = (loss) => CHART.bottom - ((CHART.bottom - CHART.top) * loss) / top;
  const heights = [0, top / 2, top].map(
    (loss) =>
      `<line x1="${CHART.left}" x2="${CHART.right}" y1="${y(loss)}" y2="${y(loss)}" />` +
      `<text x="${CHART.left - 6}" y="${y(loss) + 4}" text-anchor="end">${loss.toFixed(1)}</text>`,
  );
  const points = losses.map((loss, step) => `${x(step).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  const end = `<text x="${CHART.right}" y="154" text-anchor="end">step ${last + 1}</text>`;
  element("chart").innerHTML = `${heights.join("")}${end}<polyline id="curve" points="${points}" />`;
}

function drawScores(scores) {
  const best = scores ? scores.indexOf(Math.max(...scores)) : -1;
  show("answer", scores ? best : "–");
  [...element("scores").children].forEach((row, digit) => {
    const score = scores?.[digit] ?? 0;
    row.className = digit === best ? "best" : "";
    row.querySelector("i").style.transform = `scaleX(${score})`;
    row.querySelector("b").textContent = scores ? `${Math.round(100 * score)} %` : "";
  });
}

function drawSeen(image) {
  const ink = getComputedStyle(element("pad")).color.match(/\d+/g).map(Number);
  const pixels = new ImageData(8, 8);
  image?.forEach((grey, i) => pixels.data.set([...ink.slice(0, 3), 255 * (grey + 0.5)], 4 * i));
  element("seen").getContext("2d").putImageData(pixels, 0, 0);
}

async function readDrawing() {
  isAsked = false;
  const image = pad.isEmpty ? null : pad.image();
  drawSeen(image);
  drawScores(image && (await lesson.read(image)));
}

function drawNumbers(time) {
  show("step", `${losses.length} of ${goal}`);
  show("loss", losses.length ? losses.at(-1).toFixed(3) : "–");
  if (time) show("time", `${time.toFixed(1)} ms`);
  drawLosses();
}

async function examine() {
  const { right, of } = await lesson.examine();
  show("right", `${right} of ${of}`);
}

/** Train for one frame: as many steps as there is time for. */
async function trainForAFrame() {
  const began = performance.now();
  let steps = 0;
  while (losses.length < goal && performance.now() - began < FRAME) {
    losses.push(await lesson.step());
    steps += 1;
    if (losses.length % EXAMINED === 0) await examine();
  }
  drawNumbers((performance.now() - began) / steps);
}

async function work() {
  for (;;) {
    for (const wish of asked.splice(0)) await wish();
    const isLearning = !isPaused && losses.length < goal;
    if (isLearning) await trainForAFrame();
    if (isLearning || isAsked) await readDrawing();
    element("pause").disabled = losses.length >= goal;
    if (isPaused) show("status", "Paused: it reads what you draw, and learns nothing.");
    else show("status", losses.length < goal ? "Training …" : "It rests. A drawing that you name lets it go on.");
    await pause(isLearning || isAsked ? 0 : FRAME);
  }
}

function teach(digit) {
  if (pad.isEmpty) return show("status", "Draw a digit first.");
  show("taught", lesson.teach(pad.image(), digit));
  goal = Math.max(goal, losses.length) + MORE;
  isPaused = false;
  show("pause", "Pause");
}

async function begin() {
  losses = [];
  goal = STEPS;
  show("taught", 0);
  drawNumbers();
  isAsked = true;
  await examine();
}

async function save() {
  const bytes = await lesson.checkpoint();
  const address = URL.createObjectURL(new Blob([bytes]));
  Object.assign(document.createElement("a"), { href: address, download: "checkpoint" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function prepare() {
  for (let digit = 0; digit < 10; digit++) {
    element("scores").insertAdjacentHTML("beforeend", `<li><span>${digit}</span><i></i><b></b></li>`);
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: digit });
    button.setAttribute("aria-label", `It is a ${digit}`);
    button.addEventListener("click", () => asked.push(() => teach(digit)));
    element("teach").append(button);
  }
  element("clear").addEventListener("click", () => pad.clear());
  element("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    show("pause", isPaused ? "Go on" : "Pause");
  });
  element("restart").addEventListener("click", () => asked.push(() => lesson.restart().then(begin)));
  element("save").addEventListener("click", () => asked.push(save));
}

try {
  prepare();
  lesson = await Lesson.load(ort, read);
  await begin();
  await work();
} catch (error) {
  element("status").className = "failed";
  show("status", String(error));
  throw error;
}
