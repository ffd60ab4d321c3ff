"""Runs a draft's block beside its target in the native llama.cpp, for another process.

    python draft_child.py PACKAGES        then one JSON object a line in, one a line out

The engine's own server keeps what a draft says to itself; this asks the same functions that it
calls (llama.cpp common/speculative.cpp, include/llama-ext.h) and hands over the numbers.
"""

import base64
import json
import os
import sys
from pathlib import Path

import native_child as native
from native_child import INT, POINTER, C

OTHER_CONTEXT_AT = 160
"""Byte offset of llama_context_params.ctx_other in b11549."""

# The C++ names of functions that have no C name.
SET_LAYER_INPUT = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
GET_LAYER_INPUT = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
SET_EMBEDDINGS = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
GET_EMBEDDINGS = "_Z26llama_get_embeddings_nextnP13llama_context"
TARGET_LAYERS = "_Z28llama_model_target_layer_idsPK11llama_model"
N_TARGET_LAYERS = "_Z30llama_model_target_layer_ids_nPK11llama_model"

SIGNATURES = {
    SET_LAYER_INPUT: (None, POINTER, C.c_uint32, C.c_bool),
    GET_LAYER_INPUT: (POINTER, POINTER, C.c_uint32),
    SET_EMBEDDINGS: (None, POINTER, C.c_bool, C.c_bool),
    GET_EMBEDDINGS: (POINTER, POINTER),
    TARGET_LAYERS: (C.POINTER(INT), POINTER),
    N_TARGET_LAYERS: (C.c_uint32, POINTER),
    "llama_set_causal_attn": (None, POINTER, C.c_bool),
    "llama_model_n_embd": (INT, POINTER),
    "llama_vocab_mask": (INT, POINTER),
}


def block(library, target: str, draft: str, tokens: list[int], n_block: int):
    """What the draft proposes after the last token, when the target has read those before it."""
    *read, last = tokens
    trunk, context = _opened(library, target, len(tokens))
    stages, beside = _opened(library, draft, len(tokens) + n_block, other=context)
    width = library.llama_model_n_embd(trunk)
    captured = getattr(library, TARGET_LAYERS)(stages)
    layers = captured[: getattr(library, N_TARGET_LAYERS)(stages)]
    for layer in layers:
        getattr(library, SET_LAYER_INPUT)(context, layer, True)
    getattr(library, SET_EMBEDDINGS)(beside, True, True)
    library.llama_set_causal_attn(beside, False)

    _decode(library, context, tokens=read)
    inputs = [
        C.string_at(getattr(library, GET_LAYER_INPUT)(context, layer), 4 * width * len(read))
        for layer in layers
    ]
    _decode(library, beside, rows=_side_by_side(inputs, 4 * width))
    mask = library.llama_vocab_mask(library.llama_model_get_vocab(stages))
    _decode(library, beside, tokens=[last] + [mask] * (n_block - 1), begin=len(read))
    n_vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(trunk))
    logits = (library.llama_get_logits_ith(beside, i) for i in range(n_block))
    # Every confidence fills a row of its own.
    confidence = C.string_at(getattr(library, GET_EMBEDDINGS)(beside), 4 * width * n_block)
    return {
        "layers": layers,
        "inputs": [_text(rows) for rows in inputs],
        "logits": _text(b"".join(C.string_at(row, 4 * n_vocab) for row in logits)),
        "confidence": _text(b"".join(confidence[4 * width * i :][:4] for i in range(n_block))),
    }


def _opened(library, file: str, n_ctx: int, other=None):
    """A model and a context of F32 caches."""
    params = library.llama_model_default_params()
    native._set(params, native.MODEL_PARAMS, load_mode=native.LOAD_WITHOUT_MMAP)
    model = library.llama_model_load_from_file(os.fsencode(file), params)
    params = library.llama_context_default_params()
    native._set(
        params,
        native.CONTEXT_PARAMS,
        n_ctx=n_ctx,
        n_batch=n_ctx,
        n_ubatch=n_ctx,
        n_outputs_max=native.N_OUTPUTS_AS_ASKED,
        n_outputs_max_per_seq=native.N_OUTPUTS_AS_ASKED,
        n_threads=1,
        n_threads_batch=1,
        flash_attn_type=native.OFF,
        type_k=native.F32,
        type_v=native.F32,
    )
    C.c_uint64.from_buffer(params, OTHER_CONTEXT_AT).value = other or 0
    context = model and library.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"{file} was not opened")
    return model, context


def _decode(library, context, tokens=(), rows=(), begin=0):
    """A batch of tokens, or of rows of floats, at the positions from ``begin`` on."""
    n = len(tokens or rows)
    ids = (INT * n)(*tokens) if tokens else None
    floats = C.create_string_buffer(b"".join(rows)) if rows else None
    positions = (INT * n)(*range(begin, begin + n))
    wants = (C.c_int8 * n)(*[1] * n)
    batch = native.Batch(
        n_tokens=n,
        tokens=ids and C.addressof(ids),
        embeddings=floats and C.addressof(floats),
        positions=C.addressof(positions),
        wants_logits=C.addressof(wants),
    )
    code = library.llama_decode(context, batch)
    if code:
        raise RuntimeError(f"llama_decode returned {code}")


def _side_by_side(inputs: list[bytes], row_nbytes: int) -> list[bytes]:
    n = len(inputs[0]) // row_nbytes
    return [b"".join(rows[row_nbytes * i :][:row_nbytes] for rows in inputs) for i in range(n)]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    library = native.open_library(Path(sys.argv[1]))
    for name, (result, *arguments) in SIGNATURES.items():
        call = getattr(library, name)
        call.restype, call.argtypes = result, arguments
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        assert request.pop("op") == "block"
        answers.write(json.dumps({"ok": block(library, **request)}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
