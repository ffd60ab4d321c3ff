// A loaded model, asked by llama.cpp's C functions for numbers and by wllama's server for drafting.

import { FOLDERS, Instance } from './instance.mjs';
import { Refusal, Wrong } from './refusals.mjs';
import { Server } from './server.mjs';

// Byte offsets of the C structures of b12211 with 32-bit pointers (include/llama.h).
const MODEL_PARAMS = { nbytes: 52, splitMode: 12, vocabOnly: 44, useExtraBuffers: 46 };
const CONTEXT_PARAMS = {
  nbytes: 140, nCtx: 0, nBatch: 4, nUbatch: 8, nOutputsMax: 20, nOutputsMaxPerSequence: 24,
  nThreads: 28, nThreadsBatch: 32, flashAttention: 52, typeK: 96, typeV: 100, flags: 120,
};
const DEFAULT_FLAGS = [0, 1, 1, 1, 1, 0]; // where they stand proves the layout
const BATCH = { nbytes: 28, nTokens: 0, tokens: 4, wantsLogits: 24 };
const SPLIT_BY_LAYER = 1;
const F32 = 0;
const OFF = 0;

export class Model {
  constructor() {
    this.instances = [];
  }

  async load(request) {
    const { files, n_ctx: nCtx, vocab_only: vocabOnly } = request;
    if (request.draft) this.server = await Server.open(await this.newInstance(), request);
    this.engine = await this.newInstance();
    const { calls } = this.engine;
    this.model = this.loadModel(files, vocabOnly);
    this.vocab = calls.llama_model_get_vocab(this.model);
    this.nVocab = calls['llama_vocab::n_tokens()'](this.vocab);
    if (!vocabOnly) this.context = this.openContext(this.nCtx = nCtx);
    return {
      n_vocab: this.nVocab,
      n_params: Number(calls.llama_model_n_params(this.model)),
      nbytes: Number(calls.llama_model_size(this.model)),
    };
  }

  async newInstance() {
    const instance = await Instance.open();
    this.instances.push(instance);
    return instance;
  }

  /** What its instances have logged. */
  lines() {
    return this.instances.flatMap(({ log }) => log);
  }

  loadModel(files, vocabOnly) {
    const { engine } = this;
    const file = engine.addFiles(files, FOLDERS.model);
    const p = MODEL_PARAMS;
    const params = engine.set(engine.zeros(p.nbytes), [[p.splitMode, SPLIT_BY_LAYER]]);
    engine.bytes()[params + p.useExtraBuffers] = 1;
    engine.bytes()[params + p.vocabOnly] = vocabOnly ? 1 : 0;
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
    const { llama_tokenize: split } = engine.calls;
    const n = split(this.vocab, from, bytes.length, to, room, 0, special ? 1 : 0);
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
    const { llama_detokenize: join } = engine.calls;
    const n = join(this.vocab, from, tokens.length, to, room, 0, special ? 1 : 0);
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
    const reasons = [
      [!this.context, 'the tensors are not loaded'],
      [!tokens.length, 'no tokens are given'],
      [tokens.length + nMore > this.nCtx, `more tokens than the context of ${this.nCtx}`],
      [tokens.some(t => !(t >= 0 && t < this.nVocab)), 'a token is not in the vocabulary'],
    ];
    const reason = reasons.find(([holds]) => holds);
    if (reason) throw new Wrong(reason[1]);
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

  /** The same by the server. */
  async complete(tokens, n) {
    const prompt = this.piece(tokens, true).toString();
    const again = this.tokenize({ text: prompt, special: true });
    if (again.join() !== tokens.join()) {
      throw new Wrong('with a draft, the prompt must be what tokenizing its own text gives');
    }
    const banned = this.printable().flatMap((may, token) => (may ? [] : [token]));
    return this.server.complete(prompt, n, banned);
  }
}
