// What may come of a request but an answer or an abort.

/** The request makes no sense. */
export class Wrong extends Error {}

/** The engine said no. */
export class Refusal extends Error {}
