// Runs mainline llama.cpp, as wllama's compatibility build holds it, for another process.
//
//   node mainline.mjs NODE_MODULES        then one JSON object a line in, one a line out
//
// One process compiles the module once; every model gets an instance of its own, so an abort in one
// leaves the others alone. Answers are {ok: ...}, {refused: lines}, {died: lines} or {wrong: text}.

import fs from 'node:fs';
import path from 'node:path';
import readline from 'node:readline';
import { createRequire } from 'node:module';
import { withExports } from './doors.mjs';
import { decode, encode, readPrototypes } from './glue.mjs';

const packages = path.join(process.argv[2], '@wllama');
const script = path.join(packages, 'wllama-compat/wasm/wllama.js');
const prototypes = readPrototypes(path.join(packages, 'wllama/src/glue/messages.ts'));

const FUNCTIONS = [
  'emscripten_builtin_malloc', 'emscripten_builtin_free',
  'llama_model_load_from_file', 'llama_model_get_vocab', 'llama_model_n_params', 'llama_model_size',
  'llama_context_default_params', 'llama_init_from_model', 'llama_get_memory', 'llama_memory_clear',
  'llama_decode', 'llama_get_logits_ith', 'llama_tokenize', 'llama_detokenize',
  'llama_vocab::n_tokens()', 'llama_vocab::is_eog',
];

// Byte offsets of the C structures of b12211 with 32-bit pointers (include/llama.h).
const MODEL_PARAMS = { nbytes: 52, splitMode: 12, vocabOnly: 44, useExtraBuffers: 46 };
const CONTEXT_PARAMS = {
  nbytes: 140, nCtx: 0, nBatch: 4, nUbatch: 8, nOutputsMax: 20, nOutputsMaxPerSequence: 24,
  nThreads: 28, nThreadsBatch: 32, flashAttention: 52, typeK: 96, typeV: 100, flags: 120,
};
const DEFAULT_FLAGS = [0, 1, 1, 1, 1, 0]; // where they stand proves the layout
const BATCH = { nbytes: 28, nTokens: 0, tokens: 4, wantsLogits: 24 };
// Where wllama keeps its `common_params` (common/common.h), and what `--spec-type draft-dspark` sets.
const SERVER_OPTIONS = { at: 2213528, nBatch: 8, nUbatch: 12, draftTypes: 2016 };
const NO_DRAFTING = 0;
const DRAFTING_BY_DSPARK = 5;
const SPLIT_BY_LAYER = 1;
const F32 = 0;
const FOLDERS = { model: '/model', draft: '/draft' };
const OFF = 0;

// The module asks for a GPU by the browser's way.
globalThis.navigator ??= {};
Object.defineProperty(globalThis.navigator, 'gpu', {
  value: { requestAdapter: async () => null }, configurable: true,
});

const wasm = fs.readFileSync(path.join(packages, 'wllama-compat/wasm/wllama.wasm'));
const compiled = await WebAssembly.compile(withExports(wasm, FUNCTIONS));
const start = new Function('Module', 'require', '__filename', '__dirname', 'Atomics',
  `${fs.readFileSync(script, 'utf8')}\n;return Module;`);

// A module that waits for messages of other threads is never collected; here it has no others.
const patience = Object.create(Atomics, { waitAsync: { value: undefined } });

class Wrong extends Error {}
class Refusal extends Error {}

/** One instance of the module, with the files it reads and the lines it logs. */
class Instance {
  static async open() {
    const self = new Instance();
    self.log = [];
    const say = line => self.log.push(String(line));
    await new Promise(resolve => {
      self.module = start({
        noInitialRun: true, print: say, printErr: say, onRuntimeInitialized: resolve,
        instantiateWasm: (imports, done) => WebAssembly.instantiate(compiled, imports).then(
          instance => {
            self.calls = instance.exports;
            done(instance, compiled);
          }),
      }, createRequire(import.meta.url), script, `${path.dirname(script)}/`, patience);
    });
    await self.module.cwrap('wllama_start', 'string', [], { async: true })();
    self.log.length = 0; // it has looked for a GPU
    self.action = self.module.cwrap('wllama_action', 'number', ['string', 'number'], { async: true });
    Object.values(FOLDERS).forEach(folder => self.module.FS.mkdir(folder));
    return self;
  }

  bytes() { return new Uint8Array(this.module.wasmMemory.buffer); }
  integers() { return new Int32Array(this.module.wasmMemory.buffer); }
  floats() { return new Float32Array(this.module.wasmMemory.buffer); }

  /** Address of `nbytes` zeroed bytes. */
  zeros(nbytes) {
    const at = this.calls.emscripten_builtin_malloc(Math.max(nbytes, 4));
    this.bytes().fill(0, at, at + nbytes);
    return at;
  }

  put(bytes) {
    const at = this.zeros(bytes.length + 1);
    this.bytes().set(bytes, at);
    return at;
  }

  putIntegers(values) {
    const at = this.zeros(4 * values.length);
    this.integers().set(values, at / 4);
    return at;
  }

  /** A structure with 32-bit `fields` set by offset. */
  set(at, fields) {
    for (const [offset, value] of fields) this.integers()[(at + offset) / 4] = value;
    return at;
  }

  free(...addresses) { addresses.forEach(at => this.calls.emscripten_builtin_free(at)); }

  /** Copies files into a folder of the instance, under their own names; the path of the first. */
  addFiles(files, folder) {
    const targets = files.map(file => `${folder}/${path.basename(file)}`);
    targets.forEach((target, i) =>
      this.module.FS.writeFile(target, fs.readFileSync(files[i]), { canOwn: true }));
    return targets[0];
  }

  removeFiles() {
    const { FS } = this.module;
    for (const folder of Object.values(FOLDERS)) {
      FS.readdir(folder).slice(2).forEach(name => FS.unlink(`${folder}/${name}`)); // all but . and ..
    }
  }

  /** wllama's own way in: a named action with a message, answered by a message. */
  async ask(action, name, values) {
    const message = encode(prototypes, name, values);
    const at = this.module._wllama_malloc(message.length, 0);
    this.bytes().set(message, at);
    const reply = Number(await this.action(action, at));
    if (!reply) throw new Refusal(`${action} was not answered`);
    return decode(prototypes, Buffer.from(this.bytes().slice(reply, reply + this.integers()[at / 4])));
  }
}

/** A loaded model: C functions for numbers, and with a draft wllama's server for completions. */
class Model {
  static async open(self, { files, draft, n_ctx: nCtx, vocab_only: vocabOnly }) {
    if (draft) self.server = await openServer(self, files, draft, nCtx);
    self.instances.push(self.engine = await Instance.open());
    const { calls } = self.engine;
    self.model = self.loadModel(files, vocabOnly);
    self.vocab = calls.llama_model_get_vocab(self.model);
    self.nVocab = calls['llama_vocab::n_tokens()'](self.vocab);
    if (!vocabOnly) self.context = self.openContext(self.nCtx = nCtx);
    return self;
  }

  constructor() { this.instances = []; }

  lines() { return this.instances.flatMap(({ log }) => log); }

  loadModel(files, vocabOnly) {
    const { engine } = this;
    const file = engine.addFiles(files, FOLDERS.model);
    const params = engine.set(engine.zeros(MODEL_PARAMS.nbytes), [[MODEL_PARAMS.splitMode, SPLIT_BY_LAYER]]);
    engine.bytes()[params + MODEL_PARAMS.useExtraBuffers] = 1;
    engine.bytes()[params + MODEL_PARAMS.vocabOnly] = vocabOnly ? 1 : 0;
    const model = engine.calls.llama_model_load_from_file(engine.put(Buffer.from(file)), params);
    if (!model) throw new Refusal('the model was not loaded');
    engine.removeFiles();
    return model;
  }

  openContext(nCtx) {
    const { engine } = this;
    const p = CONTEXT_PARAMS;
    const params = engine.zeros(p.nbytes);
    engine.calls.llama_context_default_params(params);
    if (DEFAULT_FLAGS.some((flag, i) => engine.bytes()[params + p.flags + i] !== flag)) {
      throw new Error('llama_context_params has another layout than the pinned build');
    }
    engine.set(params, [
      [p.nCtx, nCtx], [p.nBatch, nCtx], [p.nUbatch, Math.min(nCtx, 512)],
      [p.nOutputsMax, 0], [p.nOutputsMaxPerSequence, 0], // as many as asked for
      [p.nThreads, 1], [p.nThreadsBatch, 1],
      [p.flashAttention, OFF], [p.typeK, F32], [p.typeV, F32],
    ]);
    const context = engine.calls.llama_init_from_model(this.model, params);
    if (!context) throw new Refusal('no context was made');
    return context;
  }

  tokenize({ text, special }) {
    const { engine } = this;
    const bytes = Buffer.from(text);
    const room = bytes.length + 8;
    const from = engine.put(bytes);
    const to = engine.zeros(4 * room);
    const n = engine.calls.llama_tokenize(this.vocab, from, bytes.length, to, room, 0, special ? 1 : 0);
    const tokens = [...engine.integers().subarray(to / 4, to / 4 + n)];
    engine.free(from, to);
    return tokens;
  }

  /** Bytes that `tokens` stand for; control tokens only with `special`. */
  piece(tokens, special) {
    const { engine } = this;
    const room = 256 * tokens.length;
    const from = engine.putIntegers(tokens);
    const to = engine.zeros(room);
    const n = engine.calls.llama_detokenize(this.vocab, from, tokens.length, to, room, 0, special ? 1 : 0);
    const text = Buffer.from(engine.bytes().slice(to, to + n));
    engine.free(from, to);
    return text;
  }

  forget() {
    this.engine.calls.llama_memory_clear(this.engine.calls.llama_get_memory(this.context), 1);
  }

  /** Decodes `tokens` after what is in the cache; logits of each position, one after the other. */
  decode(tokens) {
    const { engine, context, nVocab } = this;
    const ids = engine.putIntegers(tokens);
    const wants = engine.put(Buffer.alloc(tokens.length, 1));
    const batch = engine.set(engine.zeros(BATCH.nbytes),
      [[BATCH.nTokens, tokens.length], [BATCH.tokens, ids], [BATCH.wantsLogits, wants]]);
    const code = engine.calls.llama_decode(context, batch);
    if (code !== 0) throw new Refusal(`llama_decode returned ${code}`);
    engine.free(ids, wants, batch);
    const logits = new Float32Array(tokens.length * nVocab);
    for (let i = 0; i < tokens.length; i++) {
      const at = engine.calls.llama_get_logits_ith(context, i) / 4;
      logits.set(engine.floats().subarray(at, at + nVocab), i * nVocab);
    }
    return logits;
  }

  logits({ tokens }) {
    this.check(tokens, 0);
    this.forget();
    return Buffer.from(this.decode(tokens).buffer).toString('base64');
  }

  check(tokens, nMore) {
    if (!this.context) throw new Wrong('only the vocabulary is loaded');
    if (!tokens.length) throw new Wrong('no tokens are given');
    if (tokens.length + nMore > this.nCtx) throw new Wrong(`more tokens than the context of ${this.nCtx}`);
    if (tokens.some(t => !(t >= 0 && t < this.nVocab))) throw new Wrong('a token is not in the vocabulary');
  }

  /** Tokens that may be generated: those that spell printable ASCII. */
  printable() {
    return this.plain ??= Array.from({ length: this.nVocab }, (_, token) =>
      /^[\x20-\x7e]+$/.test(this.piece([token], false).toString('latin1'))
      && !this.engine.calls['llama_vocab::is_eog'](this.vocab, token));
  }

  async generate({ tokens, n }) {
    this.check(tokens, n);
    return this.server ? this.complete(tokens, n) : this.follow(tokens, n);
  }

  /** The best printable token, n times. */
  follow(tokens, n) {
    const allowed = this.printable();
    const generated = [];
    this.forget();
    let logits = this.decode(tokens).slice(-this.nVocab);
    for (;;) {
      let best = -1;
      logits.forEach((value, token) => {
        if (allowed[token] && (best < 0 || value > logits[best])) best = token;
      });
      generated.push(best);
      if (generated.length === n) return { tokens: generated, n_drafted: 0, n_accepted: 0 };
      logits = this.decode([best]);
    }
  }

  /** The same by the server, whose prompts are texts and whose sampler drafts. */
  async complete(tokens, n) {
    const prompt = this.piece(tokens, true).toString();
    const again = this.tokenize({ text: prompt, special: true });
    if (again.join() !== tokens.join()) {
      throw new Wrong('with a draft, the prompt must be what tokenizing its own text gives');
    }
    const banned = this.printable().flatMap((may, token) => (may ? [] : [[token, false]]));
    const body = {
      prompt, n_predict: n, temperature: 0, logit_bias: banned, ignore_eos: true,
      return_tokens: true, verbose: true, stream: false, cache_prompt: false,
    };
    const { req_id: id } = await this.server.ask('completion', 'cmpl_req',
      { is_chat: false, is_asr: false, files: [], data_json: JSON.stringify(body) });
    for (;;) {
      const part = await this.server.ask('get_result', 'gres_req', { req_id: id });
      if (part.is_error) throw new Refusal(part.data_json);
      if (part.data_json) {
        const { __verbose: whole, timings } = JSON.parse(part.data_json);
        return {
          tokens: whole.tokens,
          n_drafted: timings.draft_n ?? 0,
          n_accepted: timings.draft_n_accepted ?? 0,
        };
      }
      if (!part.has_more) throw new Refusal('the completion ended without a result');
    }
  }
}

/** Turns drafting on in the server's options, which wllama's message has no field for. */
function chooseDrafting(server) {
  const p = SERVER_OPTIONS;
  const read = offset => server.integers()[(p.at + offset) / 4];
  const [types, end] = [read(p.draftTypes), read(p.draftTypes + 4)];
  const stands = read(p.nBatch) === 2048 && read(p.nUbatch) === 512 && end - types === 4
    && server.integers()[types / 4] === NO_DRAFTING;
  if (!stands) throw new Error('the options of the server are not where the pinned build has them');
  server.integers()[types / 4] = DRAFTING_BY_DSPARK;
}

/** The package's server with a target and a draft. */
async function openServer(model, files, draft, nCtx) {
  const server = await Instance.open();
  model.instances.push(server);
  chooseDrafting(server);
  const { success } = await server.ask('load', 'load_req', {
    model_paths: [server.addFiles(files, FOLDERS.model)],
    spec_draft_model: server.addFiles([draft], FOLDERS.draft),
    spec_draft_n_max: 5, spec_draft_p_min: 0,
    n_ctx: nCtx, n_ctx_auto: false, n_parallel: 1, kv_unified: true, n_threads: 1, n_gpu_layers: 0,
    use_mmap: false, use_mlock: false, warmup: false, log_level: 2,
    cache_type_k: 'f32', cache_type_v: 'f32', flash_attn: false,
  });
  if (!success) throw new Refusal('the model was not loaded');
  server.removeFiles();
  return server;
}

const models = new Map();
let loads = 0;

const OPERATIONS = {
  async load(request) {
    const model = new Model();
    try {
      await Model.open(model, request);
    } catch (error) {
      error.lines = model.lines();
      throw error;
    }
    models.set(++loads, model);
    const { calls } = model.engine;
    return {
      session: loads,
      n_vocab: model.nVocab,
      n_params: Number(calls.llama_model_n_params(model.model)),
      nbytes: Number(calls.llama_model_size(model.model)),
    };
  },
  close({ session }) {
    models.delete(session);
    globalThis.gc?.();
    return {};
  },
};

/** The engine's errors, and what it printed past its own log, as assertions are. */
function telling(lines, error) {
  const marked = lines.filter(line => /^(?!@@).*\S|^@@ERROR@@/.test(line));
  return [...marked.map(line => line.replace(/^@@ERROR@@/, '').trim()), String(error.message ?? error)];
}

async function answer(request) {
  const model = models.get(request.session);
  if (model?.dead && request.op !== 'close') return { died: model.dead };
  try {
    const call = OPERATIONS[request.op] ?? (asked => model[request.op](asked));
    return { ok: await call(request) };
  } catch (error) {
    if (error instanceof Wrong) return { wrong: error.message };
    const lines = telling(error.lines ?? model?.lines() ?? [], error);
    if (error instanceof Refusal) return { refused: lines };
    if (model) model.dead = lines; // an abort leaves the instance in no state to go on
    return { died: lines };
  }
}

const strays = [];
process.on('unhandledRejection', error => strays.push(error)); // an abort may reject twice
for await (const line of readline.createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(await answer(JSON.parse(line)))}\n`);
}
