"""A finished GGUF as a job's source: a target, perhaps with a draft beside it, or a draft alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.budget import Item, NotCarried, plan_items
from pipeline.cut.earlier import earlier_keep
from pipeline.cut.file_plan import plan_of_file
from pipeline.errors import PlanError, SourceError, raise_problems
from pipeline.experts.keep import KeepList
from pipeline.experts.keys import PREFIX as KEEP_PREFIX
from pipeline.experts.keys import has_keep_keys
from pipeline.experts.routing import routing_of
from pipeline.gguf.as_source import as_checkpoint
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import GgufModel, model_stem, read_draft, read_model
from pipeline.model.config import ModelConfig
from pipeline.model.contract.form import form_of
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.form import Form
from pipeline.model.layout import Layout
from pipeline.model.metadata.file_config import config_of
from pipeline.model.metadata.file_facts import read_hash_facts, read_source_facts
from pipeline.model.metadata.vocabulary import CarriedVocabulary
from pipeline.model.roles import Role
from pipeline.model.targets.draft import draft_tensors
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import Keep, target_tensors
from pipeline.recipe.values import DraftMode
from pipeline.requant.complete import Completed, completed
from pipeline.requant.keys import RELEASE_KEY, carried_keys
from pipeline.requant.targets import carried_targets, stored_targets
from pipeline.requant.vocabulary import carried_vocabulary
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.joined import joined, labelled, labelled_checkpoint
from tasks.origin import Origin

_DRAFT = "draft"
"""Label of the draft's files and tensors, whose names are those of a small target."""


def is_gguf(path: Path) -> bool:
    """Whether what lies at ``path`` is read as a GGUF: a file, or a folder of such files only."""
    if path.is_dir():
        return not any(path.glob("*.safetensors*")) and any(path.glob("*.gguf"))
    return path.suffix.lower() == ".gguf"


class GgufSource:
    """Everything that follows from a file's headers; computed when asked for."""

    def __init__(self, path: Path, draft: DraftMode) -> None:
        self._path = path
        self._mode = draft

    @cached_property
    def _named(self) -> Completed:
        return completed(read_model(self._path))

    @cached_property
    def _form(self) -> Form:
        return form_of(self._named.model)

    @property
    def _target(self) -> GgufModel | None:
        return None if self._form.is_draft else self._named.model

    @cached_property
    def _draft(self) -> GgufModel | None:
        if self._form.is_draft:
            return self._named.model
        if self._mode is DraftMode.DROP:
            return None
        return read_draft(self._named.model.files[0].path)

    @cached_property
    def _checkpoints(self) -> tuple[Checkpoint | None, Checkpoint | None]:
        target = None if self._target is None else as_checkpoint(self._target)
        draft = None if self._draft is None else as_checkpoint(self._draft)
        return target, draft

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Headers of all files; the draft's under a label."""
        target, draft = self._checkpoints
        if target is None:
            assert draft is not None
            return labelled_checkpoint(draft, _DRAFT)
        return target if draft is None else joined(target, {_DRAFT: draft})

    @cached_property
    def origins(self) -> Mapping[str, Origin]:
        """All files are local."""
        target, draft = self._checkpoints
        found: dict[str, Origin] = {}
        if target is not None:
            found |= dict.fromkeys(target.files, Origin(target))
        if draft is not None:
            here = labelled_checkpoint(draft, _DRAFT)
            found |= dict.fromkeys(here.files, Origin(here))
        return found

    @property
    def names(self) -> Mapping[str, object]:
        """Folder and name of the file."""
        first = self._named.model.files[0].path
        return {"folder": first.resolve().parent.name, "gguf": model_stem(first)}

    @property
    def identity(self) -> Mapping[str, object]:
        """Digest of all headers: a GGUF has neither config.json nor index."""
        return {"config_sha256": self.checkpoint.config_sha256, "index_sha256": None}

    @property
    def notes(self) -> Sequence[str]:
        """The keys that the file should have had, and what it should not."""
        named, notes = self._named, []
        if named.added:
            notes.append(
                f"The source lacks {len(named.added)} keys or has them wrong; what else it holds "
                f"tells them: {', '.join(named.added)}."
            )
        if named.dropped:
            notes.append(f"Left out, for no loader wants it: {', '.join(named.dropped)}.")
        return tuple(notes)

    @property
    def release_sha256(self) -> str:
        """Digest of the config.json that it says it comes from, else of its headers."""
        said = self._named.model.key_values.get(RELEASE_KEY)
        return self.checkpoint.config_sha256 if said is None else str(said.value)

    @cached_property
    def config(self) -> ModelConfig:
        """The model in the metadata; of a draft alone, the draft as a model.

        Raises:
            FormatError: A key is missing that no other tells.
        """
        if self._draft is None or self._form.is_draft:
            return config_of(self._named.model, self._form)
        return config_of(self._named.model, self._form, (self._draft, form_of(self._draft)))

    @property
    def layout(self) -> Layout | None:
        """The file's layout; V4 and a draft have one each, of which there is no choice."""
        return self._form.layout

    @cached_property
    def tokenizer(self) -> CarriedVocabulary:
        """The vocabulary's keys as they are."""
        return carried_vocabulary(self._named.model, self.config.family)

    @cached_property
    def token_map(self) -> NDArray[np.int32]:
        """The map in the metadata."""
        assert self._form.layout is not None
        facts = read_hash_facts(self._named.model, self._form.layout)
        return np.array(facts.token_map, np.int32)

    @cached_property
    def earlier_keep(self) -> KeepList | None:
        """What the metadata says was cut.

        Raises:
            FormatError: Its keys are damaged.
        """
        keys = self._named.model.key_values
        return earlier_keep(keys, routing_of(self.config)) if has_keep_keys(keys) else None

    @property
    def own_keys(self) -> Sequence[KeyValue]:
        """What this project wrote into the file, said as what it was."""
        return carried_keys(self._named.model, without=KEEP_PREFIX)

    def require_sound(self) -> None:
        """Refuse tables that do not fit their buckets, and a file that lacks what no other tells.

        Raises:
            Problems: Something is wrong; one error is raised as itself.
        """
        model = self._named.model
        if not self._form.is_draft:
            raise_problems(str(model.files[0].path), check_gguf_engram(model).problems)
        if self._form.layout is not None:
            read_source_facts(model)

    def frame(self, layout: Layout, keep: Keep | None) -> tuple[TargetTensor, ...]:
        """The tensors of the target, but for optional ones that the file lacks.

        Raises:
            PlanError: It is a draft alone.
        """
        if self._target is None:
            raise PlanError(
                "the source is a draft alone, and the recipe makes a target of it",
                file=self._path,
                next_step='Name the target, or say [draft] mode = "only" in the recipe.',
            )
        return carried_targets(target_tensors(self.config, layout, keep), self._target)

    def draft_frame(self) -> tuple[TargetTensor, ...]:
        """The tensors of the draft.

        Raises:
            SourceError: There is none beside the target.
        """
        if self._draft is None:
            raise SourceError(
                "the source has no draft beside it, and the recipe makes one",
                file=self._named.model.files[0].path,
                expected="a file of the target's name that ends in -draft",
                next_step='Say [draft] mode = "drop" in the recipe, or take the draft from the '
                'released checkpoint: a recipe with mode = "only" makes it.',
            )
        return draft_tensors(self.config)

    def stored(
        self, wanted: Sequence[TargetTensor], layout: Layout, keep: Keep | None
    ) -> tuple[TargetTensor, ...]:
        """Tensors of a frame as rows of these files.

        Raises:
            FormatError: One is missing or has another shape; several raise `Problems`.
        """
        del layout
        if not any(target.is_draft for target in wanted):
            model = self._target
            assert model is not None or not wanted
            return stored_targets(wanted, model, self.config, keep) if model else ()
        assert self._draft is not None
        found = stored_targets(wanted, self._draft, self.config, None)
        return tuple(
            replace(target, matrices=tuple(labelled(m, _DRAFT) for m in target.matrices))
            for target in found
        )

    @cached_property
    def _items(self) -> Mapping[bool, Sequence[Item]]:
        """Every tensor of the draft (True) and of the target."""
        target = [] if self._target is None else plan_items(plan_of_file(self._target, self._draft))
        draft = [] if self._draft is None else plan_items(plan_of_file(self._draft))
        return {False: target, True: draft}

    def items(self, frame: Sequence[TargetTensor]) -> list[Item]:
        """Every tensor of every file."""
        del frame
        return [item for items in self._items.values() for item in items]

    def left_out(self, frame: Sequence[TargetTensor]) -> tuple[NotCarried, ...]:
        """What files that carry ``frame`` leave out: tensors, and experts of stacks.

        Engram tensors count as carried under the names of either layout.
        """
        shares = {(target.is_draft, target.name): target.n_params for target in frame}
        left: dict[Role, list[int]] = {role: [] for role in Role}
        for is_draft, items in self._items.items():
            for item in items:
                n_params = shares.get((is_draft, item.name), 0)
                if n_params < item.n_params and item.role is not Role.ENGRAM:
                    left[item.role].append(item.nbytes - item.nbytes * n_params // item.n_params)
        return tuple(NotCarried(r, len(sizes), sum(sizes)) for r, sizes in left.items() if sizes)
