// Runs mainline llama.cpp, as wllama's compatibility build holds it, for another process.
//
//   node mainline.mjs NODE_MODULES        then one JSON object a line in, one a line out
//
// One process compiles the module once; every model gets an instance of its own, so an abort in one
// leaves the others alone. Answers are {ok: ...}, {refused: lines}, {died: lines} or {wrong: text}.

import readline from 'node:readline';
import { Model } from './model.mjs';
import { Refusal, Wrong } from './refusals.mjs';

const models = new Map();
let loads = 0;

const OPERATIONS = {
  async load(request) {
    const model = new Model();
    try {
      const loaded = await model.load(request);
      models.set(++loads, model);
      return { session: loads, ...loaded };
    } catch (error) {
      throw Object.assign(new Error(), { cause: error, lines: model.lines() });
    }
  },
  close({ session }) {
    models.delete(session);
    globalThis.gc?.();
    return {};
  },
};

/** The engine's errors, and what it printed past its own log, as assertions are. */
function telling(lines, error) {
  const errors = lines.filter(line => /^(?!@@).*\S|^@@ERROR@@/.test(line));
  const told = [...errors, String(error.message ?? error)];
  return told.map(line => line.replace('@@ERROR@@', '').trim());
}

async function answer(request) {
  const model = models.get(request.session);
  if (model?.dead && request.op !== 'close') return { died: model.dead };
  try {
    const call = OPERATIONS[request.op] ?? (asked => model[request.op](asked));
    return { ok: await call(request) };
  } catch (error) {
    const cause = error.cause ?? error;
    if (cause instanceof Wrong) return { wrong: cause.message };
    const lines = telling(error.lines ?? model?.lines() ?? [], cause);
    if (cause instanceof Refusal) return { refused: lines };
    if (model) model.dead = lines; // an abort leaves the instance in no state to go on
    return { died: lines };
  }
}

process.on('unhandledRejection', () => {}); // an abort that is answered may reject once more
for await (const line of readline.createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(await answer(JSON.parse(line)))}\n`);
}
