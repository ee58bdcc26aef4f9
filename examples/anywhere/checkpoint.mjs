/**
 * The files of onnxtrain in any JavaScript: tensors in the safetensors format, and checkpoints, which are such files
 * with all else as JSON in their header and a SHA-256 of everything. No dependencies.
 *
 * A tensor is `{ type, dims, data }`: onnxruntime's name of the element type, the sizes, a typed array.
 * onnxruntime's own tensors are such objects.
 */

/** Element types: the name in safetensors, onnxruntime's, numpy's, and the array that holds them. */
const TYPES = [
  ["F32", "float32", "float32", Float32Array],
  ["F64", "float64", "float64", Float64Array],
  ["F16", "float16", "float16", globalThis.Float16Array ?? Uint16Array],
  ["I64", "int64", "int64", BigInt64Array],
  ["I32", "int32", "int32", Int32Array],
  ["I16", "int16", "int16", Int16Array],
  ["I8", "int8", "int8", Int8Array],
  ["U64", "uint64", "uint64", BigUint64Array],
  ["U32", "uint32", "uint32", Uint32Array],
  ["U16", "uint16", "uint16", Uint16Array],
  ["U8", "uint8", "uint8", Uint8Array],
  ["BOOL", "bool", "bool", Uint8Array],
].map(([file, type, numpy, Holder]) => ({ file, type, numpy, Holder }));

const OPTIMIZER = "optimizer/"; // how names of the optimizer's tensors begin
const KEY = "onnxtrain"; // the entry of the header that makes a file a checkpoint

const encode = (text) => new TextEncoder().encode(text);
const bytesOf = (data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
const product = (dims) => dims.reduce((size, n) => size * n, 1);

function typeWhere(key, name) {
  const found = TYPES.find((t) => t[key] === name);
  if (!found) throw new Error(`the element type ${name} is not known here`);
  return found;
}

/** A tensor of one value throughout; `value` is 0 unless told. */
export function filled(type, dims, value = 0) {
  const { Holder } = typeWhere("type", type);
  const isBig = Holder === BigInt64Array || Holder === BigUint64Array;
  return { type, dims, data: new Holder(product(dims)).fill(isBig ? BigInt(value) : value) };
}

/** Rows `first` to `last` of a tensor. */
export function rows({ type, dims, data }, first, last) {
  const width = product(dims.slice(1));
  return { type, dims: [last - first, ...dims.slice(1)], data: data.slice(first * width, last * width) };
}

/**
 * Read a safetensors file.
 * @param {Uint8Array} bytes its content
 * @returns {{ tensors: Object<string, object>, metadata: Object<string, string> }} tensors by name, and the texts of
 *     the header
 */
export function readTensors(bytes) {
  bytes = bytesOf(bytes); // a plain array even where Node hands over a Buffer, whose slices are no copies
  const start = 8 + Number(new DataView(bytes.buffer, bytes.byteOffset, 8).getBigUint64(0, true));
  const { __metadata__: metadata = {}, ...entries } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [first, last] }] of Object.entries(entries)) {
    const { type, Holder } = typeWhere("file", dtype);
    // a copy, since a typed array begins at a multiple of its elements' size
    tensors[name] = { type, dims: shape, data: new Holder(bytes.slice(start + first, start + last).buffer) };
  }
  return { tensors, metadata };
}

/** The bytes of a safetensors file. */
export function writeTensors(tensors, metadata) {
  const header = { __metadata__: metadata };
  const parts = [];
  let end = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
    const offsets = [end, (end += data.byteLength)];
    header[name] = { dtype: typeWhere("type", type).file, shape: [...dims], data_offsets: offsets };
    parts.push(bytesOf(data));
  }
  const text = encode(JSON.stringify(header));
  const padded = Math.ceil(text.length / 8) * 8;
  const length = new Uint8Array(8);
  new DataView(length.buffer).setBigUint64(0, BigInt(padded), true);
  return joined([length, text, encode(" ".repeat(padded - text.length)), ...parts]);
}

/**
 * Read a checkpoint.
 * @param {Uint8Array} bytes the content of the file
 * @returns `{ weights, optimizer, header }`: tensors by name, and what the header says
 * @throws where it is no checkpoint, or was changed since it was written
 */
export async function readCheckpoint(bytes) {
  const { tensors, metadata } = readTensors(bytes);
  if (!(KEY in metadata)) throw new Error("this is no checkpoint of onnxtrain");
  const { sha256, ...header } = parse(metadata[KEY]);
  if (sha256 !== (await digest(header, tensors))) throw new Error("the checkpoint is damaged: use an earlier one");
  if (header.format !== 1) throw new Error(`the checkpoint has format ${header.format}, this program reads 1`);
  const all = Object.entries(tensors);
  const optimizer = all.filter(([name]) => name.startsWith(OPTIMIZER));
  return {
    weights: Object.fromEntries(all.filter(([name]) => !name.startsWith(OPTIMIZER))),
    optimizer: Object.fromEntries(optimizer.map(([name, tensor]) => [name.slice(OPTIMIZER.length), tensor])),
    header,
  };
}

/** The bytes of a checkpoint, which Python reads as well; the argument is what `readCheckpoint` gives. */
export async function writeCheckpoint({ weights, optimizer, header }) {
  const tensors = { ...weights };
  for (const [name, tensor] of Object.entries(optimizer)) tensors[OPTIMIZER + name] = tensor;
  const sha256 = await digest(header, tensors);
  return writeTensors(tensors, { [KEY]: toText({ ...header, sha256 }) });
}

/** SHA-256 of the header's JSON with sorted keys, then of form and content of each tensor by name. */
async function digest(header, tensors) {
  const parts = [encode(toText(header, sorted))];
  for (const [name, { type, dims, data }] of sorted(Object.entries(tensors))) {
    parts.push(encode(toText([name, typeWhere("type", type).numpy, [...dims]])), bytesOf(data));
  }
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", joined(parts)));
  return Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A number as the file has it: JavaScript would make 1 of 1.0, Python keeps them apart. */
class Literal {
  constructor(text) {
    this.text = text;
  }
}

/** The value of JSON; numbers that JavaScript does not keep as they are stay literal. */
function parse(text) {
  const literals = [];
  const marked = text.replace(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g, (token) =>
    token[0] === '"' || String(Number(token)) === token ? token : `{"literal": ${literals.push(token) - 1}}`,
  );
  const isMark = (value) => value && typeof value === "object" && "literal" in value;
  return JSON.parse(marked, (_, value) => (isMark(value) ? new Literal(literals[value.literal]) : value));
}

/** JSON as Python writes it, with keys in the order that `arrange` gives a list of entries. */
function toText(value, arrange = (entries) => entries) {
  if (value instanceof Literal) return value.text;
  if (Array.isArray(value)) return `[${value.map((item) => toText(item, arrange)).join(", ")}]`;
  if (typeof value === "number") return numberText(value);
  if (value === null || typeof value !== "object") {
    const escaped = (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`;
    return JSON.stringify(value).replace(/[^ -~]/g, escaped);
  }
  const entries = arrange(Object.entries(value));
  return `{${entries.map(([key, item]) => `${toText(key)}: ${toText(item, arrange)}`).join(", ")}}`;
}

/** A number as Python prints it: below 1e-4 with an exponent of two digits. */
function numberText(value) {
  if (value === 0 || Math.abs(value) >= 1e-4) return String(value);
  return value.toExponential().replace(/e-(\d)$/, "e-0$1");
}

const sorted = (entries) => entries.sort(([a], [b]) => (a < b ? -1 : Number(a > b)));

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let end = 0;
  for (const part of parts) {
    whole.set(part, end);
    end += part.length;
  }
  return whole;
}
