/**
 * Trains the artifacts of onnxtrain with the ordinary onnxruntime, in Node and in browsers. No dependencies:
 * onnxruntime is handed in, `onnxruntime-node` or `onnxruntime-web`.
 *
 *     const training = await Training.create(ort, { trainingModel, optimizerModel, checkpoint });
 *     for (const batch of batches) {
 *       const { loss } = await training.trainStep(batch);
 *       await training.optimizerStep(0.001);
 *       training.lazyResetGrad();
 *     }
 *     const bytes = await training.saveCheckpoint();
 *
 * It goes by the names of inputs and outputs alone: an output `X.out` is what the input X becomes.
 */

import { filled, readCheckpoint, writeCheckpoint } from "./checkpoint.mjs";

const RESET = "lazy_reset_grad";
const RATE = "learning_rate";
const STEP = "step";
const OUT = ".out";
const GRADIENT = "_grad";
const BUFFER = "_grad.accumulation.buffer"; // input: the gradient of a parameter, summed so far
const SUM = "_grad.accumulation.out"; // output: the same after this step

// It removes Dropout in training mode where nobody reads the mask.
const KEEP_DROPOUT = { extra: { optimization: { disable_specified_optimizers: "EliminateDropout" } } };

/** A model in training: weights, gradients and the optimizer's states, and the models that change them. */
export class Training {
  #tensor;
  #sessions;
  #state; // what a checkpoint holds: weights, the optimizer's tensors, the header
  #gradients = {};
  #resets = true;

  /**
   * Load artifacts.
   * @param ort the module onnxruntime-node or onnxruntime-web
   * @param {object} files contents as Uint8Array: `trainingModel` and `checkpoint`; `optimizerModel` and `evalModel`
   *     where they are used
   * @param {object} options of onnxruntime's sessions
   */
  static async create(ort, { trainingModel, evalModel, optimizerModel, checkpoint }, options = {}) {
    const load = (model) => model && ort.InferenceSession.create(model, { ...KEEP_DROPOUT, ...options });
    const sessions = {
      training: await load(trainingModel),
      evaluation: await load(evalModel),
      optimizer: await load(optimizerModel),
    };
    return new Training(ort, sessions, await readCheckpoint(checkpoint));
  }

  /** Used by `create`. */
  constructor(ort, sessions, state) {
    this.#tensor = ({ type, dims, data }) => new ort.Tensor(type, data, dims);
    this.#sessions = sessions;
    this.#state = { ...state, weights: this.#tensors(state.weights), optimizer: this.#tensors(state.optimizer) };
    for (const name of this.parameterNames) this.#gradients[name] = this.#zeros(this.#state.weights[name]);
    if (sessions.optimizer) this.#prepareOptimizer();
  }

  /** Names of the weights that are trained. */
  get parameterNames() {
    const names = this.#sessions.training.inputNames.filter((name) => name.endsWith(BUFFER));
    return names.map((name) => name.slice(0, -BUFFER.length));
  }

  /** Names of the inputs of a step. */
  get inputNames() {
    const isOurs = (name) => name === RESET || name.endsWith(BUFFER) || name in this.#state.weights;
    return this.#sessions.training.inputNames.filter((name) => !isOurs(name));
  }

  /** All weights by name, those that are not trained among them. */
  get weights() {
    return { ...this.#state.weights };
  }

  /** The gradients so far, by name of the parameter. */
  get gradients() {
    return { ...this.#gradients };
  }

  /** Number of updates so far, those before a restart included. */
  get updates() {
    return Number(this.#state.optimizer[STEP]?.data[0] ?? 0);
  }

  /**
   * Run forward and backward, and add to the gradients.
   * @param {object} inputs tensors by name
   * @returns {Promise<object>} outputs by name: a number where it is a scalar, such as the loss, else a tensor
   */
  async trainStep(inputs) {
    const feeds = { ...this.#state.weights, [RESET]: this.#tensor(filled("bool", [], Number(this.#resets))) };
    for (const [name, gradient] of Object.entries(this.#gradients)) feeds[name + BUFFER] = gradient;
    const made = await this.#run("training", { ...feeds, ...this.#tensors(inputs) });
    this.#resets = false;
    const { random } = this.#state.header;
    this.#state.header.random = { seed: 0, ...random, draws: (random.draws ?? 0) + 1 };
    return this.#keep(made, this.#state.weights);
  }

  /** Run the forward pass alone, without dropout; gives what `trainStep` gives. */
  async evalStep(inputs) {
    return this.#keep(await this.#run("evaluation", { ...this.#state.weights, ...this.#tensors(inputs) }), {});
  }

  /** Update the trained weights once; the gradients stay until they are reset. */
  async optimizerStep(rate) {
    const { weights, optimizer, header } = this.#state;
    const feeds = { ...weights, ...optimizer, [RATE]: this.#tensor(filled("float32", [], rate)) };
    for (const [name, gradient] of Object.entries(this.#gradients)) feeds[name + GRADIENT] = gradient;
    for (const [name, tensor] of Object.entries(await this.#run("optimizer", feeds))) {
      const old = name.slice(0, -OUT.length);
      (old in optimizer ? optimizer : weights)[old] = tensor;
    }
    header.settings = { ...header.settings, [RATE]: rate };
  }

  /** Drop the gradients at the next training step, which then begins anew; until then they can be read. */
  lazyResetGrad() {
    this.#resets = true;
  }

  /** The bytes of a checkpoint that goes on from here, in JavaScript or in Python. */
  async saveCheckpoint() {
    return writeCheckpoint(this.#state);
  }

  #tensors(given) {
    return Object.fromEntries(Object.entries(given).map(([name, tensor]) => [name, this.#tensor(tensor)]));
  }

  #zeros({ type, dims }) {
    return this.#tensor(filled(type, dims));
  }

  /** States that the checkpoint does not have begin as zeros. */
  #prepareOptimizer() {
    const { weights, optimizer } = this.#state;
    const { inputMetadata } = this.#sessions.optimizer;
    const isState = ({ name }) => name !== RATE && !(name in weights) && !this.#isGradient(name);
    const states = inputMetadata.filter(isState);
    const names = new Set(states.map(({ name }) => name));
    const odd = Object.keys(optimizer).find((name) => !names.has(name));
    if (odd) throw new Error(`the checkpoint is of another optimizer: this one has no ${odd}`);
    for (const { name, type, shape } of states) optimizer[name] ??= this.#zeros({ type, dims: shape });
  }

  #isGradient(name) {
    return name.endsWith(GRADIENT) && name.slice(0, -GRADIENT.length) in this.#gradients;
  }

  async #run(kind, feeds) {
    const session = this.#sessions[kind];
    if (!session) throw new Error(`there is no ${kind} model: hand it to Training.create`);
    const lost = session.inputNames.find((name) => !(name in feeds));
    if (lost) throw new Error(`the ${kind} model needs ${lost}`);
    return session.run(Object.fromEntries(session.inputNames.map((name) => [name, feeds[name]])));
  }

  /** Take up what gradients and weights become; the rest are the user's outputs. */
  #keep(made, weights) {
    const outputs = {};
    for (const [name, tensor] of Object.entries(made)) {
      const old = name.slice(0, -OUT.length);
      if (name.endsWith(SUM)) this.#gradients[name.slice(0, -SUM.length)] = tensor;
      else if (name.endsWith(OUT) && old in weights) weights[old] = tensor;
      else outputs[name] = tensor.dims.length ? tensor : tensor.data[0];
    }
    return outputs;
  }
}
