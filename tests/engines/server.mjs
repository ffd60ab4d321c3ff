// wllama's own server: the only part of the module that drafts. It takes texts and answers in JSON,
// which fails if a generated token is no text by itself, as a byte of a longer character is none.

import { FOLDERS } from './instance.mjs';
import { Refusal } from './refusals.mjs';

// Where wllama keeps its `common_params` (common/common.h), and what --spec-type draft-dspark sets.
const OPTIONS = { at: 2213528, nBatch: 8, nUbatch: 12, draftTypes: 2016 };
const NO_DRAFTING = 0;
const DRAFTING_BY_DSPARK = 5;

/** Turns drafting on in the server's options, which wllama's message has no field for. */
function chooseDrafting(instance) {
  const p = OPTIONS;
  const read = offset => instance.integers()[(p.at + offset) / 4];
  const [types, end] = [read(p.draftTypes), read(p.draftTypes + 4)];
  const stands = read(p.nBatch) === 2048 && read(p.nUbatch) === 512 && end - types === 4
    && instance.integers()[types / 4] === NO_DRAFTING;
  if (!stands) throw new Error('the options of the server are not where the pinned build has them');
  instance.integers()[types / 4] = DRAFTING_BY_DSPARK;
}

/** The server with a target and its draft, in an instance of its own. */
export class Server {
  constructor(instance) {
    this.instance = instance;
  }

  static async open(instance, { files, draft, n_ctx: nCtx }) {
    chooseDrafting(instance);
    const { success } = await instance.ask('load', 'load_req', {
      model_paths: [instance.addFiles(files, FOLDERS.model)],
      spec_draft_model: instance.addFiles([draft], FOLDERS.draft),
      spec_draft_n_max: 5, spec_draft_p_min: 0,
      n_ctx: nCtx, n_ctx_auto: false, n_parallel: 1, kv_unified: true, n_threads: 1,
      n_gpu_layers: 0, use_mmap: false, use_mlock: false, warmup: false, log_level: 2,
      cache_type_k: 'f32', cache_type_v: 'f32', flash_attn: false,
    });
    if (!success) throw new Refusal('the model was not loaded');
    instance.removeFiles();
    return new Server(instance);
  }

  /** The likeliest `n` tokens after `prompt`, but for the `banned` ones. */
  async complete(prompt, n, banned) {
    const body = {
      prompt, n_predict: n, temperature: 0, ignore_eos: true,
      logit_bias: banned.map(token => [token, false]),
      return_tokens: true, verbose: true, stream: false, cache_prompt: false,
    };
    const { req_id: id } = await this.instance.ask('completion', 'cmpl_req',
      { is_chat: false, is_asr: false, files: [], data_json: JSON.stringify(body) });
    for (;;) {
      const part = await this.instance.ask('get_result', 'gres_req', { req_id: id });
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
