/** A network in training: batches of the data set, with what was drawn among them. */

import { filled, readTensors } from "./checkpoint.mjs";
import { predictions } from "./run.mjs";
import { Training } from "./training.mjs";

const RATE = 2e-3;
const ROWS = 64;
const DRAWN = 16; // of the rows of a batch, once something was taught
const HELD_OUT = 197; // rows of the data set that are not trained on
const MODELS = { trainingModel: "training_model.onnx", evalModel: "eval_model.onnx", optimizerModel: "optimizer_model.onnx" };

const anyOf = (items) => items[Math.floor(Math.random() * items.length)];

export class Lesson {
  #ort;
  #files;
  #training;
  #examples; // of the data set: { image, digit }
  #taught = [];

  /**
   * @param ort the module onnxruntime-web
   * @param {(name: string) => Promise<Uint8Array>} read gives the content of a file of the artifacts
   */
  static async load(ort, read) {
    const files = { checkpoint: await read("checkpoint") };
    for (const [kind, name] of Object.entries(MODELS)) files[kind] = await read(name);
    const { tensors } = readTensors(await read("data.safetensors"));
    const lesson = new Lesson(ort, files, tensors);
    await lesson.restart();
    return lesson;
  }

  /** Used by `load`. */
  constructor(ort, files, { images, labels }) {
    this.#ort = ort;
    this.#files = files;
    const size = images.data.length / labels.data.length;
    const image = (i) => images.data.subarray(i * size, (i + 1) * size);
    this.#examples = Array.from(labels.data, (digit, i) => ({ image: image(i), digit: Number(digit) }));
  }

  /** The random weights that it began with; what was taught is forgotten. */
  async restart() {
    this.#training = await Training.create(this.#ort, this.#files);
    this.#taught = [];
  }

  /** One step; gives its loss. */
  async step() {
    const seen = this.#examples.slice(0, -HELD_OUT);
    const drawn = this.#taught.length ? DRAWN : 0;
    const batch = Array.from({ length: ROWS }, (_, i) => anyOf(i < drawn ? this.#taught : seen));
    const { loss } = await this.#training.trainStep(tensorsOf(batch));
    await this.#training.optimizerStep(RATE);
    this.#training.lazyResetGrad();
    return loss;
  }

  /** What it reads in an image: the probability of each digit. */
  async read(image) {
    const { scores } = await this.#training.evalStep(tensorsOf([{ image, digit: 0 }]));
    const highest = Math.max(...scores.data);
    const powers = Array.from(scores.data, (score) => Math.exp(score - highest));
    const sum = powers.reduce((a, b) => a + b);
    return powers.map((power) => power / sum);
  }

  /** How many of the digits that it is never trained on it reads right, and of how many. */
  async examine() {
    const unseen = this.#examples.slice(-HELD_OUT);
    const { scores } = await this.#training.evalStep(tensorsOf(unseen));
    const right = predictions(scores).filter((digit, i) => digit === unseen[i].digit).length;
    return { right, of: unseen.length };
  }

  /** From now on batches hold this image too; gives how many images were taught. */
  teach(image, digit) {
    return this.#taught.push({ image, digit });
  }

  /** The bytes of a checkpoint, from which Python goes on. */
  async checkpoint() {
    return this.#training.saveCheckpoint();
  }
}

function tensorsOf(examples) {
  const side = Math.sqrt(examples[0].image.length);
  const images = filled("float32", [examples.length, 1, side, side]);
  examples.forEach(({ image }, i) => images.data.set(image, i * image.length));
  const labels = filled("int64", [examples.length]);
  labels.data.set(examples.map(({ digit }) => BigInt(digit)));
  return { images, labels };
}
