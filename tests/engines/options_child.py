"""Has the command line of the native llama.cpp's server parsed by its own parser.

    python options_child.py PACKAGES      then one JSON object a line in, one a line out

Its module has no door for this, but exports the parser; a `CommonParams` of the module holds the
structure that the parser fills, behind the head of a Python object.
"""

import ctypes as C
import json
import os
import sys
from pathlib import Path

PARSE = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
SERVER = 12
"""`LLAMA_EXAMPLE_SERVER` of b11549 (common/common.h): only then are the server's options known."""

OBJECT_HEAD_NBYTES = 16


def parsed(xllamacpp, parse, words):
    """What the parser makes of ``words``, the program's name among them; None if it refuses."""
    params = xllamacpp.CommonParams()
    arguments = (C.c_char_p * (len(words) + 1))(*map(os.fsencode, words), None)
    if not parse(len(words), arguments, id(params) + OBJECT_HEAD_NBYTES, SERVER, None):
        return None
    draft = params.speculative.draft
    return {
        "model": params.model.path,
        "draft": draft.mparams.path,
        "draft_n_max": draft.n_max,
        "speculation": [kind.name for kind in params.speculative.types],
        "lazy_mode": int(params.lazy_mode),
        "fit": params.fit_params,
        "placement": params.tensor_buft_overrides,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is no answer
    sys.path.insert(0, str(Path(sys.argv[1])))
    import xllamacpp

    parse = C.CDLL(xllamacpp.xllamacpp.__file__)[PARSE]
    parse.restype = C.c_bool
    parse.argtypes = (C.c_int, C.c_void_p, C.c_void_p, C.c_int, C.c_void_p)
    for line in sys.stdin:
        request = json.loads(line)
        said_before = os.fstat(2).st_size
        options = parsed(xllamacpp, parse, request["words"])
        said = os.pread(2, os.fstat(2).st_size - said_before, said_before).decode()
        refused = [line for line in said.splitlines() if line.startswith("error")]
        answer = {"refused": refused} if options is None else {"ok": options}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
