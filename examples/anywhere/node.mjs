/**
 * Trains the artifacts in a folder with onnxruntime-node and prints the losses as JSON.
 *
 *     node node.mjs [folder [checkpoint to write]]
 */

import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import * as ort from "onnxruntime-node";

import { run } from "./run.mjs";

const [folder = fileURLToPath(new URL("out", import.meta.url)), written] = process.argv.slice(2);
const { measured, training } = await run(ort, (name) => readFile(join(folder, name)));
if (written) await writeFile(written, await training.saveCheckpoint());
console.log(JSON.stringify(measured));
