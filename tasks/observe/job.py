"""What an observation reads and where it leaves things, from what a user says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pipeline.digest import sha256, spec_digest
from pipeline.errors import ConfigError, SourceError
from pipeline.experts.importers.canonical import read_provenance
from pipeline.model.config import ModelConfig
from pipeline.observe.calibration import documents_of, encoded
from pipeline.observe.observable import require_observable
from pipeline.observe.sequences import Sequences, packed
from pipeline.recipe.values import DraftMode
from pipeline.source.checkpoint import Checkpoint
from tasks.model_source import ModelSource, SourceParameters
from tasks.origin import at_hand

FORMAT_VERSION = 1
"""Raised by hand whenever the same spec would give other sums."""

_READ = ("layers.", "embed.", "head.", "norm.")
"""How names of the tensors begin that an observation reads."""


@dataclass(frozen=True, slots=True)
class ObserveParameters:
    """What a user says of an observation, but for how fast it should go."""

    source: str
    calibration: str
    out: str
    tokens: int
    sequence: int
    device: str
    precision: str


class ObserveJob:
    """Everything that follows from `ObserveParameters`; computed when first asked for."""

    def __init__(self, parameters: ObserveParameters) -> None:
        self.parameters = parameters

    @property
    def out(self) -> Path:
        """The saliency file."""
        return Path(self.parameters.out)

    @property
    def _root(self) -> Path:
        return self.out.parent / ".quantmill"

    @property
    def folder(self) -> Path:
        """Where the state between layers lies, while it is kept on disk."""
        return self._root / "observe" / self.spec[:16]

    @cached_property
    def source(self) -> ModelSource:
        """The checkpoint; its draft may be absent."""
        root = self._root / "sources"
        return ModelSource(SourceParameters(self.parameters.source, root, draft=DraftMode.DROP))

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.source.config

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint with every file that is read where it lies.

        Raises:
            SourceError: A file of a hub checkpoint is not here yet.
        """
        origins = {name: self.source.origins[name] for name in self._files}
        missing = [name for name, origin in origins.items() if not origin.has(name)]
        if missing:
            raise SourceError(
                "an observation reads files of the hub that are not here",
                file=missing[0],
                expected=f"{len(origins):,} files",
                found=f"all but {len(missing):,}",
                next_step="Download the checkpoint and name its folder, or let RunRecipe fetch it "
                "into the same folder (--keep-source yes).",
            )
        remote = {name: o.path(name) for name, o in origins.items() if o.is_remote}
        return at_hand(self.source.checkpoint, remote)

    @cached_property
    def sequences(self) -> Sequences:
        """The calibration text as tokens.

        Raises:
            SourceError: There is none.
        """
        parameters, config = self.parameters, self.config
        longest = parameters.sequence
        if not 2 <= longest <= config.context:
            raise ConfigError(
                "--sequence must be a number of tokens that the model can read",
                expected=f"2 to {config.context:,}",
                found=longest,
            )
        path = Path(parameters.calibration)
        image = self.source.checkpoint.config.get("image_token_id")
        documents = encoded(
            documents_of(path),
            self.source.tokenizer_json,
            refused=image if isinstance(image, int) else None,
        )
        read = packed(documents, bos=config.bos_token, longest=longest, most=parameters.tokens)
        if not read.tokens:
            raise SourceError("the calibration text is empty", file=path)
        return read

    @cached_property
    def spec(self) -> str:
        """The identity of the observation: what its sums depend on."""
        return spec_digest(
            {
                "format": FORMAT_VERSION,
                "config": self.source.checkpoint.config_sha256,
                "sources": [self.source.origins[name].stamp(name) for name in self._files],
                "tokenizer": sha256(self.source.tokenizer_json),
                "tokens": self.sequences.sha256,
                "device": self.parameters.device.partition(":")[0],
                "precision": self.parameters.precision,
            }
        )

    def provenance(self, log_likelihood: float) -> dict[str, object]:
        """What the saliency file says of its measurement."""
        parameters, sequences = self.parameters, self.sequences
        return {
            "spec": self.spec,
            "source": self.source.identity | {"names": self.source.first.names},
            "calibration": {
                "name": Path(parameters.calibration).name,
                "documents": sequences.n_documents,
                "sequences": len(sequences.tokens),
                "longest": max(sequences.lengths),
                "tokens": sequences.n_tokens,
                "sha256": sequences.sha256,
            },
            "device": parameters.device,
            "precision": parameters.precision,
            "mean_log_likelihood": log_likelihood,
        }

    @property
    def is_observed(self) -> bool:
        """Whether ``out`` is this very observation's."""
        if not self.out.exists():
            return False
        try:
            return read_provenance(self.out).get("spec") == self.spec
        except SourceError:
            return False

    def require_sound(self) -> None:
        """Refuse what cannot be observed, before anything is measured.

        Raises:
            PlanError: The model cannot lose experts.
            ConfigError: Its forward pass is another.
            SourceError: The checkpoint disagrees with itself.
        """
        require_observable(self.config, self.source.checkpoint.config)
        self.source.require_sound()

    @cached_property
    def _files(self) -> Sequence[str]:
        listed = self.source.checkpoint.weight_map
        return sorted({file for name, file in listed.items() if name.startswith(_READ)})


@lru_cache(maxsize=4)
def open_observation(parameters: ObserveParameters) -> ObserveJob:
    """The job of ``parameters``, once per process."""
    return ObserveJob(parameters)
