// The messages between wllama's JavaScript and its module: `GLUE`, a version, an eight-letter name,
// then the fields in their order, each with a type number in front (0 = absent).
// Source: cpp/glue.hpp and src/glue/messages.ts of @wllama/wllama, which lists the fields of each.

import fs from 'node:fs';

const MAGIC = 'GLUE';
const VERSION = 1;
const TYPES = ['null', 'bool', 'int', 'float', 'str', 'raw'];
const FIRST_ARRAY = TYPES.length;

const number = method => (buffer, value) => buffer[method](value, 0);
const four = write => value => {
  const bytes = Buffer.alloc(4);
  write(bytes, value);
  return bytes;
};
const u32 = four(number('writeUInt32LE'));
const sized = bytes => Buffer.concat([u32(bytes.length), bytes]);

const WRITE = {
  bool: value => u32(value ? 1 : 0),
  int: four(number('writeInt32LE')),
  float: four(number('writeFloatLE')),
  str: value => sized(Buffer.from(value)),
  raw: value => sized(Buffer.from(value)),
};

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  take(n) {
    this.at += n;
    return this.bytes.subarray(this.at - n, this.at);
  }

  u32() { return this.take(4).readUInt32LE(); }
  bool() { return this.u32() !== 0; }
  int() { return this.take(4).readInt32LE(); }
  float() { return this.take(4).readFloatLE(); }
  raw() { return this.take(this.u32()); }
  str() { return this.raw().toString(); }
}

/** The fields of every message, as the package itself lists them. */
export function readPrototypes(messagesFile) {
  const source = fs.readFileSync(messagesFile, 'utf8');
  const start = source.indexOf('{', source.indexOf('=', source.indexOf('GLUE_MESSAGE_PROTOTYPES')));
  const end = source.indexOf('\n};', start) + 2;
  return JSON.parse(source.slice(start, end));
}

/** Bytes of the message `name` with `values`; what is not given is absent. */
export function encode(prototypes, name, values) {
  const parts = [Buffer.from(MAGIC), u32(VERSION), Buffer.from(name)];
  for (const { name: field, type } of prototypes[name].fields) {
    const value = values[field];
    const single = type.replace(/^arr_/, '');
    if (value === undefined || value === null) {
      parts.push(u32(0));
    } else if (single === type) {
      parts.push(u32(TYPES.indexOf(type)), WRITE[type](value));
    } else {
      parts.push(u32(FIRST_ARRAY + TYPES.indexOf(single) - 1), u32(value.length));
      parts.push(...value.map(WRITE[single]));
    }
  }
  return Buffer.concat(parts);
}

/** The fields of a message by name. */
export function decode(prototypes, bytes) {
  const reader = new Reader(bytes);
  if (reader.take(4).toString() !== MAGIC || reader.u32() !== VERSION) {
    throw new Error('the module did not answer with a message');
  }
  const values = {};
  for (const { name, type } of prototypes[reader.take(8).toString()].fields) {
    const single = type.replace(/^arr_/, '');
    if (reader.u32() === 0) values[name] = null;
    else if (single === type) values[name] = reader[type]();
    else values[name] = Array.from({ length: reader.u32() }, () => reader[single]());
  }
  return values;
}
