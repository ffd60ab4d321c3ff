// One instance of wllama's compatibility build, which is llama.cpp as WebAssembly, and its memory.

import fs from 'node:fs';
import path from 'node:path';
import { createRequire } from 'node:module';
import { withExports } from './doors.mjs';
import { decode, encode, readPrototypes } from './glue.mjs';
import { Refusal } from './refusals.mjs';

const FUNCTIONS = [
  'emscripten_builtin_malloc', 'emscripten_builtin_free',
  'llama_model_load_from_file', 'llama_model_get_vocab', 'llama_model_n_params', 'llama_model_size',
  'llama_context_default_params', 'llama_init_from_model', 'llama_get_memory', 'llama_memory_clear',
  'llama_decode', 'llama_get_logits_ith', 'llama_tokenize', 'llama_detokenize',
  'llama_vocab::n_tokens()', 'llama_vocab::is_eog',
];

export const FOLDERS = { model: '/model', draft: '/draft' };

const packages = path.join(process.argv[2], '@wllama');
const script = path.join(packages, 'wllama-compat/wasm/wllama.js');
const prototypes = readPrototypes(path.join(packages, 'wllama/src/glue/messages.ts'));

// The module asks for a GPU by the browser's way.
globalThis.navigator ??= {};
Object.defineProperty(globalThis.navigator, 'gpu', {
  value: { requestAdapter: async () => null }, configurable: true,
});

// Compiled once for all instances of this process.
const wasm = fs.readFileSync(path.join(packages, 'wllama-compat/wasm/wllama.wasm'));
const compiled = await WebAssembly.compile(withExports(wasm, FUNCTIONS));
const start = new Function('Module', 'require', '__filename', '__dirname', 'Atomics',
  `${fs.readFileSync(script, 'utf8')}\n;return Module;`);

// A module that waits for messages of other threads is never collected; here it has no others.
const patience = Object.create(Atomics, { waitAsync: { value: undefined } });

/** An instance with the files it reads and the lines it logs; `calls` are its C functions. */
export class Instance {
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
    const { cwrap } = self.module;
    await cwrap('wllama_start', 'string', [], { async: true })();
    self.log.length = 0; // it has looked for a GPU
    self.action = cwrap('wllama_action', 'number', ['string', 'number'], { async: true });
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
      const [, , ...names] = FS.readdir(folder); // the first are . and ..
      names.forEach(name => FS.unlink(`${folder}/${name}`));
    }
  }

  /** wllama's own way in: a named action with a message, answered by a message. */
  async ask(action, name, values) {
    const message = encode(prototypes, name, values);
    const at = this.module._wllama_malloc(message.length, 0);
    this.bytes().set(message, at);
    const reply = Number(await this.action(action, at));
    if (!reply) throw new Refusal(`${action} was not answered`);
    const nbytes = this.integers()[at / 4];
    return decode(prototypes, Buffer.from(this.bytes().slice(reply, reply + nbytes)));
  }
}
