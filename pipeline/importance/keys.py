"""What a file's metadata says of the importance matrix that it was made with.

The keys of llama.cpp's ``tools/quantize``. Its strings end after 127 bytes; it names one dataset of
several. Counts are u32 since pull request 14182, as here; before, and in ik_llama.cpp, i32.
"""

from __future__ import annotations

from pipeline.gguf.keys import KeyValue, text, u32
from pipeline.importance.matrix import ImportanceMatrix

FILE_KEY = "quantize.imatrix.file"
DATASET_KEY = "quantize.imatrix.dataset"
ENTRIES_KEY = "quantize.imatrix.entries_count"
CHUNKS_KEY = "quantize.imatrix.chunks_count"
SHA256_KEY = "quantmill.imatrix.sha256"

_MOST_NBYTES = 127


def importance_keys(matrix: ImportanceMatrix) -> tuple[KeyValue, ...]:
    """The metadata of a file whose tensors were quantized with ``matrix``.

    The name of the file is given without its folder, which concerns nobody.
    """
    dataset = (text(DATASET_KEY, _cut(matrix.datasets[0])),) if matrix.datasets else ()
    chunks = (u32(CHUNKS_KEY, matrix.n_chunks),) if matrix.n_chunks else ()
    return (
        text(FILE_KEY, _cut(matrix.path.name)),
        *dataset,
        u32(ENTRIES_KEY, matrix.n_entries),
        *chunks,
        text(SHA256_KEY, matrix.sha256),
    )


def _cut(words: str) -> str:
    """As many characters as fit."""
    return words.encode()[:_MOST_NBYTES].decode(errors="ignore")
