"""llama.cpp's own quantizing of a whole file, in a process of its own: ctypes on its libraries.

    python quantize_child.py LIBRARIES       one JSON object in on stdin

``{"source", "target", "types": [[name, type id]], "importance": [[name, [numbers]]]}``; what the
engine says goes to standard error, and the exit code is its answer: 0 for done. Only the standard
library is imported. ``llama_model_quantize`` is all that the tool `llama-quantize` calls once it
has read its command line and its importance matrix.
"""

import ctypes
import json
import os
import re
import sys
from pathlib import Path

C = ctypes

Q8_0_FILE, DEFAULT_THREADS, N_THREADS = 7, 0, 2
GGML_TYPE_COUNT = 43


class Importance(C.Structure):
    _fields_ = (("name", C.c_char_p), ("data", C.POINTER(C.c_float)), ("size", C.c_size_t))


class TypeOverride(C.Structure):
    _fields_ = (("pattern", C.c_char_p), ("type", C.c_int))


class Params(C.Structure):
    """``llama_model_quantize_params`` of v0.5.0 (include/llama.h), and room behind it."""

    _fields_ = (
        ("nthread", C.c_int32),
        ("ftype", C.c_int),
        ("output_tensor_type", C.c_int),
        ("token_embedding_type", C.c_int),
        *(
            (flag, C.c_bool)
            for flag in (
                "allow_requantize",
                "quantize_output_tensor",
                "only_copy",
                "pure",
                "keep_split",
                "dry_run",
            )
        ),
        ("imatrix", C.POINTER(Importance)),
        ("kv_overrides", C.c_void_p),
        ("tt_overrides", C.POINTER(TypeOverride)),
        ("prune_layers", C.c_void_p),
        ("behind", C.c_uint8 * 64),
    )


FLAGS_END = Params.dry_run.offset + 1
"""What lies between the flags and the first pointer is left as it was."""


def open_library(folder: Path):
    (file,) = folder.glob("libllama.v*.so")
    library = C.CDLL(str(file))
    library.llama_model_quantize_default_params.restype = Params
    library.llama_model_quantize.restype = C.c_uint32
    library.llama_model_quantize.argtypes = (C.c_char_p, C.c_char_p, C.POINTER(Params))
    return library


def default_params(library) -> Params:
    """The engine's own; they prove the layout, since other builds have others elsewhere."""
    params = library.llama_model_quantize_default_params()
    wanted = Params(
        nthread=DEFAULT_THREADS,
        ftype=Q8_0_FILE,
        output_tensor_type=GGML_TYPE_COUNT,
        token_embedding_type=GGML_TYPE_COUNT,
        quantize_output_tensor=True,
    )
    found, expected = bytes(params), bytes(wanted)
    for begin, end in ((0, FLAGS_END), (Params.imatrix.offset, Params.behind.offset)):
        if found[begin:end] != expected[begin:end]:
            raise RuntimeError(f"llama_model_quantize_params has another layout: {found.hex()}")
    return params


def type_overrides(types):
    """Name by name, ended by a null pattern."""
    made = (TypeOverride * (len(types) + 1))()
    for one, (name, type_id) in zip(made, types, strict=False):
        one.pattern, one.type = f"^{re.escape(name)}$".encode(), type_id
    return made


def importance(entries):
    """Entry by entry, ended by a null name."""
    made = (Importance * (len(entries) + 1))()
    for one, (name, numbers) in zip(made, entries, strict=False):
        one.name, one.data = name.encode(), (C.c_float * len(numbers))(*numbers)
        one.size = len(numbers)
    return made


def main() -> None:
    library = open_library(Path(sys.argv[1]))
    asked = json.load(sys.stdin)
    params = default_params(library)
    params.nthread, params.pure = N_THREADS, True
    params.tt_overrides = type_overrides(asked["types"])
    if asked["importance"]:
        params.imatrix = importance(asked["importance"])
    paths = (os.fsencode(asked[name]) for name in ("source", "target"))
    sys.exit(library.llama_model_quantize(*paths, C.byref(params)))


if __name__ == "__main__":
    main()
