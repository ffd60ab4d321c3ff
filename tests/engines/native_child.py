"""Runs a native llama.cpp for another process: ctypes on the C interface of an extension module.

    python native_child.py PACKAGES        then one JSON object a line in, one a line out

Only the standard library is imported, so that it starts at once. A failed assertion of the engine
ends this process; what it said then stands in its standard error.
"""

import base64
import ctypes
import json
import os
import sys
from pathlib import Path

C = ctypes

F32, OFF, LOAD_WITHOUT_MMAP = 0, 0, 0
GGML_LOG_LEVEL_ERROR = 4
N_OUTPUTS_AS_ASKED = 0

# Byte offsets of the structures of b11549 with 64-bit pointers (include/llama.h).
MODEL_PARAMS = {"load_mode": 24, "lazy_mode": 28}
MODEL_FLAGS = {"vocab_only": 72, "use_extra_bufts": 74, "no_alloc": 76}
CONTEXT_PARAMS = {
    "n_ctx": 0,
    "n_batch": 4,
    "n_ubatch": 8,
    "n_outputs_max": 20,
    "n_outputs_max_per_seq": 24,
    "n_threads": 28,
    "n_threads_batch": 32,
    "flash_attn_type": 52,
    "type_k": 104,
    "type_v": 108,
}
CONTEXT_FLAGS_AT, DEFAULT_FLAGS = 136, bytes([0, 1, 1, 1, 1, 0])
"""Where the six flags stand by default proves the layout: other builds have them elsewhere."""


class ModelParams(C.Structure):
    _fields_ = (("words", C.c_uint64 * 10),)


class ContextParams(C.Structure):
    _fields_ = (("words", C.c_uint64 * 21),)


class Batch(C.Structure):
    _fields_ = (
        ("n_tokens", C.c_int32),
        ("tokens", C.c_void_p),
        ("embeddings", C.c_void_p),
        ("positions", C.c_void_p),
        ("n_sequences", C.c_void_p),
        ("sequences", C.c_void_p),
        ("wants_logits", C.c_void_p),
    )


LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)
POINTER, INT, TEXT = C.c_void_p, C.c_int32, C.c_char_p
SIGNATURES = {
    "llama_log_set": (None, LOG, POINTER),
    "llama_model_default_params": (ModelParams,),
    "llama_model_load_from_file": (POINTER, TEXT, ModelParams),
    "llama_model_get_vocab": (POINTER, POINTER),
    "llama_model_n_params": (C.c_uint64, POINTER),
    "llama_model_size": (C.c_uint64, POINTER),
    "llama_context_default_params": (ContextParams,),
    "llama_init_from_model": (POINTER, POINTER, ContextParams),
    "llama_get_memory": (POINTER, POINTER),
    "llama_memory_clear": (None, POINTER, C.c_bool),
    "llama_decode": (INT, POINTER, Batch),
    "llama_get_logits_ith": (POINTER, POINTER, INT),
    "llama_vocab_n_tokens": (INT, POINTER),
    "llama_vocab_is_eog": (C.c_bool, POINTER, INT),
    "llama_tokenize": (INT, POINTER, TEXT, INT, POINTER, INT, C.c_bool, C.c_bool),
    "llama_token_to_piece": (INT, POINTER, INT, TEXT, INT, INT, C.c_bool),
}


class Refusal(Exception):
    """The engine said no."""


class Wrong(Exception):
    """The request makes no sense."""


def open_library(packages: Path):
    (file,) = packages.glob("xllamacpp/xllamacpp*.so")
    library = C.CDLL(str(file))
    for name, (result, *arguments) in SIGNATURES.items():
        call = getattr(library, name)
        call.restype, call.argtypes = result, arguments
    return library


class Model:
    """A loaded model, and with a draft the package's server for it."""

    n_vocab = 0
    context = server = None

    def __init__(self, library, packages: Path) -> None:
        self.library, self.packages = library, packages
        self.errors: list[str] = []
        self._listener = LOG(self._hear)  # kept, or the engine would call what is gone
        library.llama_log_set(self._listener, None)

    def _hear(self, level, text, _):
        if level == GGML_LOG_LEVEL_ERROR:
            self.errors.append(text.decode(errors="replace").strip())

    def load(self, files, n_ctx, draft=None, vocab_only=False, no_alloc=False):
        self.n_ctx = n_ctx
        params = self.library.llama_model_default_params()
        _set(params, MODEL_PARAMS, load_mode=LOAD_WITHOUT_MMAP, lazy_mode=OFF)
        flags = {
            "vocab_only": vocab_only,
            "no_alloc": no_alloc,
            "use_extra_bufts": not no_alloc,
        }
        for name, value in flags.items():
            C.c_uint8.from_buffer(params, MODEL_FLAGS[name]).value = value
        self.model = self.library.llama_model_load_from_file(os.fsencode(files[0]), params)
        if not self.model:
            raise Refusal("the model was not loaded")
        self.vocab = self.library.llama_model_get_vocab(self.model)
        self.n_vocab = self.library.llama_vocab_n_tokens(self.vocab)
        if not vocab_only and not no_alloc:
            self._open_context(files, draft)
        return {
            "session": 0,
            "n_vocab": self.n_vocab,
            "n_params": self.library.llama_model_n_params(self.model),
            "nbytes": self.library.llama_model_size(self.model),
        }

    def _open_context(self, files, draft):
        params = self.library.llama_context_default_params()
        if bytes(params)[CONTEXT_FLAGS_AT:][:6] != DEFAULT_FLAGS:
            raise RuntimeError("llama_context_params has another layout than the pinned build")
        n_ctx = self.n_ctx
        _set(
            params,
            CONTEXT_PARAMS,
            n_ctx=n_ctx,
            n_batch=n_ctx,
            n_ubatch=min(n_ctx, 512),
            n_outputs_max=N_OUTPUTS_AS_ASKED,
            n_outputs_max_per_seq=N_OUTPUTS_AS_ASKED,
            n_threads=1,
            n_threads_batch=1,
            flash_attn_type=OFF,
            type_k=F32,
            type_v=F32,
        )
        self.context = self.library.llama_init_from_model(self.model, params)
        if not self.context:
            raise Refusal("no context was made")
        if draft:
            self.server = self._open_server(files[0], draft)

    def tokenize(self, text, special):
        data = text.encode()
        room = len(data) + 8
        tokens = (INT * room)()
        n = self.library.llama_tokenize(self.vocab, data, len(data), tokens, room, False, special)
        return tokens[:n]

    def logits(self, tokens):
        self._check(tokens, 0)
        self._forget()
        return base64.b64encode(self._decode(tokens)).decode()

    def generate(self, tokens, n):
        self._check(tokens, n)
        return self._complete(tokens, n) if self.server else self._follow(tokens, n)

    def _check(self, tokens, n_more):
        if not self.context:
            raise Wrong("the tensors are not loaded")
        if not tokens:
            raise Wrong("no tokens are given")
        if len(tokens) + n_more > self.n_ctx:
            raise Wrong(f"more tokens than the context of {self.n_ctx}")
        if not all(0 <= token < self.n_vocab for token in tokens):
            raise Wrong("a token is not in the vocabulary")

    def _forget(self):
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def _decode(self, tokens) -> bytes:
        n = len(tokens)
        ids, wants = (INT * n)(*tokens), (C.c_int8 * n)(*[1] * n)
        batch = Batch(n_tokens=n, tokens=C.addressof(ids), wants_logits=C.addressof(wants))
        code = self.library.llama_decode(self.context, batch)
        if code:
            raise Refusal(f"llama_decode returned {code}")
        rows = (self.library.llama_get_logits_ith(self.context, i) for i in range(n))
        return b"".join(C.string_at(row, 4 * self.n_vocab) for row in rows)

    def _printable(self):
        """Tokens that may be generated: those that spell printable ASCII."""
        room = C.create_string_buffer(256)
        for token in range(self.n_vocab):
            n = self.library.llama_token_to_piece(self.vocab, token, room, 256, 0, False)
            spells = n > 0 and all(0x20 <= byte <= 0x7E for byte in room.raw[:n])
            yield spells and not self.library.llama_vocab_is_eog(self.vocab, token)

    def _follow(self, tokens, n):
        """The best printable token, n times."""
        allowed = [token for token, may in enumerate(self._printable()) if may]
        self._forget()
        generated, more = [], tokens
        while len(generated) < n:
            row = memoryview(self._decode(more)[-4 * self.n_vocab :]).cast("f")
            more = [max(allowed, key=row.__getitem__)]
            generated += more
        return {"tokens": generated, "n_drafted": 0, "n_accepted": 0}

    def _open_server(self, target, draft):
        """The package's server, which drafts; in this process and asked without a network."""
        sys.path.insert(0, str(self.packages))
        import xllamacpp as x

        params = x.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = target, self.n_ctx, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.n_gpu_layers, params.port = 0, 0
        params.warmup = params.fit_params = False
        params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        guess = params.speculative.draft
        guess.mparams.path, guess.n_max, guess.p_min = draft, 5, 0
        params.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK]
        for each in (params, guess):
            each.cache_type_k = each.cache_type_v = x.ggml_type.GGML_TYPE_F32
        said_before = os.fstat(2).st_size
        try:
            return x.Server(params)
        except RuntimeError as error:
            self.errors += _errors_said_since(said_before)
            raise Refusal(str(error)) from error

    def _complete(self, tokens, n):
        banned = [[token, False] for token, may in enumerate(self._printable()) if not may]
        whole = self.server.handle_completions(
            {
                "prompt": tokens,
                "n_predict": n,
                "temperature": 0,
                "logit_bias": banned,
                "ignore_eos": True,
                "return_tokens": True,
                "verbose": True,
                "stream": False,
                "cache_prompt": False,
            }
        )
        if "timings" not in whole:
            raise Refusal(json.dumps(whole))
        return {
            "tokens": whole["__verbose"]["tokens"],
            "n_drafted": whole["timings"].get("draft_n", 0),
            "n_accepted": whole["timings"].get("draft_n_accepted", 0),
        }


def _errors_said_since(at: int) -> list[str]:
    """The server's error lines: it logs past our listener, into the file that takes fd 2."""
    try:
        said = os.pread(2, os.fstat(2).st_size - at, at).decode(errors="replace")
    except OSError:  # not a file, for a person's trial
        return []
    return [line.strip() for line in said.splitlines() if " E " in line]


def _set(params, offsets, **values):
    for name, value in values.items():
        INT.from_buffer(params, offsets[name]).value = value


def answer(model: Model, op: str, request):
    try:
        return {"ok": getattr(model, op)(**request)}
    except Wrong as error:
        return {"wrong": str(error)}
    except Refusal as error:
        return {"refused": [*model.errors, str(error)]}


def main() -> None:
    packages = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is no answer
    model = Model(open_library(packages), packages)
    for line in sys.stdin:
        request = json.loads(line)
        request.pop("session", None)
        answers.write(json.dumps(answer(model, request.pop("op"), request)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
