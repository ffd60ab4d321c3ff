// Exports more functions of a compiled WebAssembly module, by the names in its `name` section.
//
// wllama's module exports completions only, and answers them as JSON, which has no way to write
// the text of a single byte. llama.cpp's own C functions are in the module all the same, with their
// names. Here they get entries in the export section; no other byte of the module changes.
// Formats: WebAssembly core specification, "Binary Format" (sections, LEB128) and "Name Section".

const CUSTOM = 0;
const EXPORT = 7;
const FUNCTION_NAMES = 1;
const FUNCTION = 0;

class Cursor {
  constructor(bytes, at = 0) {
    this.bytes = bytes;
    this.at = at;
  }

  byte() {
    return this.bytes[this.at++];
  }

  number() {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = this.byte();
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  }

  take(n) {
    this.at += n;
    return this.bytes.subarray(this.at - n, this.at);
  }

  name() {
    return this.take(this.number()).toString();
  }
}

function leb128(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value & 127) | 128);
  return Buffer.from([...bytes, value]);
}

function* sections(bytes) {
  const cursor = new Cursor(bytes, 8); // after magic and version
  while (cursor.at < bytes.length) yield [cursor.byte(), cursor.take(cursor.number())];
}

function functionIndices(bytes, wanted) {
  const found = new Map();
  for (const [id, body] of sections(bytes)) {
    const cursor = new Cursor(body);
    if (id !== CUSTOM || cursor.name() !== 'name') continue;
    while (cursor.at < body.length) {
      const kind = cursor.byte();
      const names = new Cursor(cursor.take(cursor.number()));
      if (kind !== FUNCTION_NAMES) continue;
      for (let n = names.number(); n > 0; n--) {
        const index = names.number();
        const name = names.name();
        if (wanted.includes(name)) found.set(name, index);
      }
    }
  }
  const missing = wanted.filter(name => !found.has(name));
  if (missing.length) throw new Error(`the module has no ${missing.join(', ')}`);
  return found;
}

/** `bytes` with one more export for each of the functions named in `wanted`. */
export function withExports(bytes, wanted) {
  const added = [...functionIndices(bytes, wanted)].map(([name, index]) => Buffer.concat(
    [leb128(name.length), Buffer.from(name), Buffer.from([FUNCTION]), leb128(index)]));
  const parts = [bytes.subarray(0, 8)];
  for (const [id, body] of sections(bytes)) {
    const cursor = new Cursor(body);
    const whole = id !== EXPORT ? body
      : Buffer.concat([leb128(cursor.number() + added.length), body.subarray(cursor.at), ...added]);
    parts.push(Buffer.from([id]), leb128(whole.length), whole);
  }
  return Buffer.concat(parts);
}
