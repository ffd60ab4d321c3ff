"""A checkpoint that loses experts in its released form: what is read, planned, written where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pipeline import files
from pipeline.digest import sha256, spec_digest
from pipeline.errors import OutputError, SourceError
from pipeline.experts.importers.open import read_keep
from pipeline.experts.keep import KeepList, compose
from pipeline.experts.keep_json import FORMAT, keep_digest, parse_keep
from pipeline.experts.routing import routing_of
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.presence import DRAFT_OPTIONAL, require_tensors
from pipeline.prune.config_json import config_bytes, cut_config
from pipeline.prune.plan import PrunedFile, PrunedPlan, plan_pruned
from pipeline.prune.records import FileRecord, Records, file_spec
from pipeline.prune.write import missing_nbytes
from pipeline.report.pruned_report import CutDisk
from pipeline.source.checkpoint import CONFIG_NAME, INDEX_NAME, Checkpoint, open_checkpoint
from pipeline.source.hub.address import is_address
from pipeline.source.index import SHARD_SUFFIX
from tasks.naming import MANIFEST, SUMS
from tasks.targets import read_document

CARD = "README.md"
FIRST_CARD = "README.original.md"
KEEP = "keep.json"
STATE = ".unfinished"
"""Folder for what is known of an unfinished cut; gone at its end."""
ACCEPTED = "plan.json"
"""What was accepted, in that folder; written before anything else."""

_OURS = frozenset({CONFIG_NAME, INDEX_NAME, CARD, KEEP, MANIFEST, SUMS, "generated.json"})
"""What a cut writes itself, and what would say of it what is true of another checkpoint only."""
_MOST_NBYTES = 64 << 20
"""Of a file that lies beside the shards and is taken along."""


@dataclass(frozen=True, slots=True)
class CheckpointCutParameters:
    """What a user says."""

    source: str
    keep: str
    out: str


class CheckpointCutJob:
    """Everything that follows from the parameters; computed when first asked for."""

    def __init__(self, parameters: CheckpointCutParameters) -> None:
        self.parameters = parameters

    @property
    def folder(self) -> Path:
        """Where the cut checkpoint comes to lie."""
        return Path(self.parameters.out)

    @property
    def name(self) -> str:
        """What the checkpoint is called: as its folder."""
        return self.source.folder.resolve().name

    @cached_property
    def source(self) -> Checkpoint:
        """The headers of the checkpoint that is cut.

        Raises:
            SourceError: It is on a hub, or cannot be opened.
        """
        if is_address(self.parameters.source):
            raise SourceError(
                "a checkpoint is cut where it lies, and this one is on a hub",
                file=self.parameters.source,
                next_step="Fetch it (hf download) and name its folder. RunRecipe --keep takes a "
                "hub's checkpoint to GGUF as it is fetched.",
            )
        return open_checkpoint(Path(self.parameters.source), scope=DRAFT_OPTIONAL)

    @cached_property
    def config(self) -> ModelConfig:
        """What it describes, once all its parts agree."""
        path = self.source.path(CONFIG_NAME)
        config = read_config(self.source.config, file=path, stored=self.source.weight_map)
        require_tensors(self.source, config, DRAFT_OPTIONAL)
        return config

    @cached_property
    def keep(self) -> KeepList:
        """The experts that stay, in the numbering of this checkpoint."""
        return read_keep(Path(self.parameters.keep), routing_of(self.config))

    @cached_property
    def told_keep(self) -> KeepList:
        """The same in the numbering of the first model, where this one was cut before."""
        earlier = self._earlier()
        return compose(earlier, self.keep) if earlier else self.keep

    def _earlier(self) -> KeepList | None:
        """The list of an earlier cut, where the checkpoint is one that `CutCheckpoint` made."""
        path = self.source.path(KEEP)
        entries = read_document(path) or {}
        if entries.get("format") != FORMAT:
            return None
        earlier = parse_keep(entries, path)
        is_of_it = self._source_manifest.get("told_keep_sha256") == keep_digest(earlier)
        return earlier if is_of_it and earlier.n_kept == self.keep.n_experts else None

    @property
    def first_name(self) -> str:
        """What the first model is called, where this one was cut before."""
        said = self._source_manifest.get("source")
        if self.told_keep is self.keep or not isinstance(said, dict):
            return self.name
        return str(said.get("folder"))

    @property
    def _source_manifest(self) -> Mapping[str, object]:
        return read_document(self.source.path(MANIFEST)) or {}

    @cached_property
    def plan(self) -> PrunedPlan:
        """What becomes of every file."""
        return plan_pruned(self.source, self.config, self.keep)

    @cached_property
    def entries(self) -> Mapping[str, object]:
        """config.json of what is left, parsed."""
        return cut_config(self.source.config, self.config, self.keep)

    @property
    def config_text(self) -> bytes:
        """config.json of what is left; the source's own where nothing goes."""
        if self.keep.n_kept == self.keep.n_experts:
            return files.read_bytes(self.source.path(CONFIG_NAME))
        return config_bytes(self.entries)

    @cached_property
    def carried(self) -> Mapping[str, Path]:
        """Name -> file of the source, of the small files that are taken along as they are."""
        carried = {path.name: path for path in self._beside() if path.name not in _OURS}
        card = self.source.path(CARD)
        if card.is_file() and FIRST_CARD not in carried:  # else it is of an earlier cut
            carried[FIRST_CARD] = card
        return carried

    def _beside(self) -> Iterator[Path]:
        for path in sorted(self.source.folder.iterdir()):
            is_plain = path.is_file() and not path.name.startswith(".")
            if is_plain and path.suffix != SHARD_SUFFIX and path.stat().st_size <= _MOST_NBYTES:
                yield path

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """What lies beside the shards and is not taken along: folders, and large files."""
        taken = {path.name for path in self.carried.values()} | _OURS
        names = (path for path in sorted(self.source.folder.iterdir()) if path.name not in taken)
        return tuple(
            f"{path.name}/" if path.is_dir() else path.name
            for path in names
            if not path.name.startswith(".") and path.name not in self.source.files
        )

    def file(self, name: str) -> PrunedFile:
        """The planned file of that name."""
        return next(file for file in self.plan.files if file.name == name)

    @cached_property
    def specs(self) -> Mapping[str, str]:
        """The identity of every file."""
        return {file.name: file_spec(file, self.keep, self.source) for file in self.plan.files}

    @cached_property
    def spec(self) -> str:
        """The identity of the whole output."""
        carried = {name: sha256(files.read_bytes(path)) for name, path in self.carried.items()}
        return spec_digest({"files": self.specs, "carried": carried, **self.identity})

    @property
    def identity(self) -> dict[str, object]:
        """What tells this cut from another, whenever its files were last touched."""
        return {
            "config_sha256": self.source.config_sha256,
            "index_sha256": self.source.index_sha256,
            "keep_sha256": keep_digest(self.keep),
            "told_keep_sha256": keep_digest(self.told_keep),
        }

    @property
    def records(self) -> Records:
        """What is known of files that are whole."""
        return Records(self.folder / STATE, self.folder)

    def listed(self) -> dict[str, FileRecord]:
        """What the manifest of a finished output says of its files."""
        listed = (read_document(self.folder / MANIFEST) or {}).get("files", [])
        entries = listed if isinstance(listed, list) else []
        return {
            str(entry["file"]): FileRecord(entry["spec"], entry["nbytes"], 0, entry["sha256"])
            for entry in entries
            if isinstance(entry, dict) and {"file", "spec", "nbytes", "sha256"} <= entry.keys()
        }

    def disk(self) -> CutDisk:
        """Disk that the cut still takes, and what is free."""
        lacking = [f for f in self.plan.files if not self._stands(f)]
        missing = sum(missing_nbytes(f, self.source, self.folder / f.name) for f in lacking)
        return CutDisk(missing, files.free_nbytes(self.folder))

    def _stands(self, file: PrunedFile) -> bool:
        """Whether a file of that length is there; its bytes are looked at when its turn comes."""
        stamp = files.stamp(self.folder / file.name)
        return stamp is not None and stamp[0] == file.nbytes

    def refuse_standing(self) -> None:
        """Refuse a folder that holds anything but this very cut, finished or not.

        Raises:
            OutputError: It does, or is the source's own.
        """
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise OutputError("a file stands where the folder should be", file=folder)
        if not folder.exists() or {path.name for path in folder.iterdir()} <= {STATE}:
            return
        if folder.resolve() == self.source.folder.resolve():
            raise OutputError(
                "the output folder is the checkpoint's own",
                file=folder,
                next_step="Choose another --out.",
            )
        known = [read_document(folder / STATE / ACCEPTED), read_document(folder / MANIFEST)]
        said = [{key: one.get(key) for key in self.identity} for one in known if one]
        if self.identity not in said:
            raise OutputError(
                "the folder holds another cut, or files of another origin",
                file=folder,
                expected="a new folder, or one that this very cut was begun in",
                next_step="Choose another --out; nothing was changed in this one.",
            )


@lru_cache(maxsize=8)
def open_checkpoint_cut(parameters: CheckpointCutParameters) -> CheckpointCutJob:
    """The job of these parameters; one per process, since a plan costs seconds at full size."""
    return CheckpointCutJob(parameters)
