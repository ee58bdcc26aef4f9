/** What Node and the page have in common: train the artifacts of `make_artifacts.py` as `run.json` says. */

import { readTensors, rows } from "./checkpoint.mjs";
import { Training } from "./training.mjs";

/** The column of the largest score in each row. */
export function predictions({ dims: [count, width], data }) {
  const best = (row) => row.indexOf(Math.max(...row));
  return Array.from({ length: count }, (_, i) => best(data.subarray(i * width, (i + 1) * width)));
}

/**
 * Train, then evaluate the rows that were held out.
 * @param ort the module onnxruntime-node or onnxruntime-web
 * @param {(name: string) => Promise<Uint8Array>} read gives a file's content
 * @param {(losses: number[], run: object) => unknown} watch is called before the first step and after each
 * @returns {{ measured: object, heldOut: object, training: Training }} `measured` is what `run.json` says of Python;
 *     `heldOut` are the tensors of the rows held out and their `scores`
 */
export async function run(ort, read, watch = () => {}) {
  const run = JSON.parse(new TextDecoder().decode(await read("run.json")));
  const { tensors: data } = readTensors(await read("data.safetensors"));
  const training = await Training.create(ort, {
    trainingModel: await read("training_model.onnx"),
    evalModel: await read("eval_model.onnx"),
    optimizerModel: await read("optimizer_model.onnx"),
    checkpoint: await read("checkpoint"),
  });
  const all = data.labels.dims[0];
  const part = (first, last) => ({ images: rows(data.images, first, last), labels: rows(data.labels, first, last) });
  const batches = Math.floor((all - run.heldOut) / run.rows);
  const losses = [];
  await watch(losses, run);
  for (let step = 0; step < run.steps; step++) {
    const first = (step % batches) * run.rows;
    const { loss } = await training.trainStep(part(first, first + run.rows));
    await training.optimizerStep(run.rate);
    training.lazyResetGrad();
    losses.push(loss);
    await watch(losses, run);
  }
  const heldOut = part(all - run.heldOut, all);
  const { loss: heldOutLoss, scores } = await training.evalStep(heldOut);
  const right = predictions(scores).filter((digit, i) => digit === Number(heldOut.labels.data[i])).length;
  return { measured: { losses, heldOutLoss, right }, heldOut: { ...heldOut, scores }, training };
}
