"""A finished GGUF as a source: its tensors under their names, read as any checkpoint's are."""

from __future__ import annotations

from pipeline import files
from pipeline.digest import sha256, spec_digest
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufFile
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.header import SourceFile, SourceTensor


def as_checkpoint(model: GgufModel) -> Checkpoint:
    """``model`` as a checkpoint, whose dtypes are names of ggml types.

    There is no config.json: what a GGUF is stands in its metadata.

    Raises:
        SourceError: A file cannot be read.
    """
    read = {file.path.name: _source_file(file) for file in model.files}
    headers = [file.header_sha256 for file in read.values()]
    return Checkpoint(
        folder=model.files[0].path.parent,
        config={},
        config_sha256=spec_digest(headers),
        index_sha256=None,
        files=dict(sorted(read.items())),
        weight_map={name: file for file, one in read.items() for name in one.tensors},
        total_size=None,
    )


def header_bytes(file: GgufFile) -> bytes:
    """Everything in front of the file's data.

    Raises:
        SourceError: The file cannot be read.
    """
    return files.read_bytes(file.path, 0, min(file.data_offset, file.nbytes))


def _source_file(file: GgufFile) -> SourceFile:
    return SourceFile(
        path=file.path,
        nbytes=file.nbytes,
        header_nbytes=file.data_offset,
        header_sha256=sha256(header_bytes(file)),
        tensors={
            tensor.name: SourceTensor(
                tensor.name, tensor.type.name, tensor.shape, tensor.offset, tensor.nbytes
            )
            for tensor in file.tensors.values()
        },
        modified_ns=file.modified_ns,
    )
