"""The other sources that a recipe takes tensors from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path, PurePath

from pipeline.digest import spec_digest
from pipeline.errors import PlanError, RecipeError
from pipeline.experts.keep import KeepList, shown
from pipeline.model.config import ModelConfig
from pipeline.model.layout import Layout
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import Keep, has_entry_per_expert
from pipeline.plan import PlannedTensor
from pipeline.recipe.choose import graft_of
from pipeline.recipe.paths import source_from
from pipeline.recipe.schema import Recipe
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.hub.address import is_address
from pipeline.source.joined import joined, labelled, labelled_checkpoint
from tasks.open_source import open_source
from tasks.origin import Origin
from tasks.source import Source

_PAIR = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")

_RELEASED_EXPERTS = {("v4.1", 40, 5120): 384, ("v4", 43, 4096): 256}
"""Family, layers and width of a released model -> the experts of its layers."""

_MAY_DIFFER = frozenset(
    {"n_experts", "candidate", "scale_block", "engram", "draft", "vision", "compress_ratios"}
)
"""What a file does not tell, or what grafted tensors are held against one by one."""

_LABEL_LENGTH = 12


def parse_grafts(text: str) -> dict[str, str]:
    """``label=path[,label=path]`` as the command line has it.

    Raises:
        RecipeError: It is not of this form, or names a label twice.
    """
    found: dict[str, str] = {}
    for word in filter(None, text.split(",")):
        match = _PAIR.fullmatch(word)
        if match is None or match[1] in found:
            raise RecipeError(
                "--graft must give each label one path",
                expected="label=path, several with commas between them",
                found=repr(word),
            )
        found[match[1]] = match[2]
    return found


def grafts_for(recipe: Recipe, words: str) -> str:
    """Of ``--graft``, the words that ``recipe`` uses: the others are for recipes beside it.

    Raises:
        RecipeError: ``words`` are not of the form.
    """
    labels = {label_of(word) for word in words_of(recipe)}
    given = parse_grafts(words).items()
    return ",".join(f"{label}={path}" for label, path in given if label in labels)


def require_used(recipes: Sequence[Recipe], words: str) -> None:
    """Refuse a label of ``--graft`` that none of ``recipes`` uses.

    Raises:
        RecipeError: There is one, or ``words`` are not of the form.
    """
    labels = list(dict.fromkeys(label_of(w) for recipe in recipes for w in words_of(recipe)))
    spare = [label for label in parse_grafts(words) if label not in labels]
    if spare:
        raise RecipeError(
            f"recipe {', '.join(recipe.name for recipe in recipes)} takes nothing from "
            + ", ".join(spare),
            expected=f"--graft with {', '.join(labels)}" if labels else "no --graft",
            next_step="A [[graft]] of the recipe says which tensors are taken.",
        )


def words_of(recipe: Recipe) -> tuple[str, ...]:
    """What ``recipe`` calls its other sources, each once."""
    return tuple(dict.fromkeys(graft.origin for graft in recipe.graft))


def label_of(word: str) -> str:
    """By which label the command line may say where else a source is: the last part of a path."""
    return PurePath(word).name


@dataclass(frozen=True, slots=True)
class Taken:
    """How many tensors come from a source, and how many bytes are made of it."""

    word: str
    n_tensors: int
    nbytes: int


class Grafts:
    """All that a tensor is taken from; a source that none is taken from is not opened.

    ``frame``: the tensors of the target, asked for when first needed.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        given: str,
        beside: Path,
        root: Path,
        frame: Callable[[], Sequence[TargetTensor]],
    ) -> None:
        require_used([recipe], given)
        self._recipe = recipe
        self._given = parse_grafts(given)
        self._beside = beside
        self._root = root
        self._frame = frame

    @cached_property
    def _all(self) -> Mapping[str, Graft]:
        """The sources by what the recipe calls them."""
        if not self._recipe.graft:
            return {}
        words = dict.fromkeys(graft_of(self._recipe, target) for target in self._frame())
        return {word: Graft(self._path(word), self._root) for word in words if word is not None}

    def _path(self, word: str) -> str:
        return self._given.get(label_of(word)) or _beside(self._recipe, word, self._beside)

    def joined(self, first: Checkpoint) -> Checkpoint:
        """``first`` with the files of all others beside its own."""
        parts = {graft.label: graft.checkpoint for graft in self._all.values()}
        return joined(first, parts) if parts else first

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Where the files of all others are, by their names in `joined`."""
        return {name: o for graft in self._all.values() for name, o in graft.origins.items()}

    def resolve(
        self,
        frame: Sequence[TargetTensor],
        own: Source,
        *,
        layout: Layout,
        keep: KeepList | None,
        recorded: KeepList | None,
    ) -> tuple[TargetTensor, ...]:
        """``frame``, each tensor as the source that the recipe says stores it.

        Experts are told by their numbers in the model before any cut.

        Args:
            frame: What is to be made.
            own: The source of all that no graft selects.
            layout: Of the file.
            keep: The experts of ``own`` that stay.
            recorded: The same in the numbering of the model before any cut.

        Raises:
            PlanError: Another source is of another model, or has not the experts.
            FormatError: A source lacks a tensor; several raise `Problems`.
        """
        groups: dict[str | None, list[TargetTensor]] = {}
        for target in frame:
            groups.setdefault(graft_of(self._recipe, target), []).append(target)
        wanted_experts = Experts.of(own, recorded)
        found: dict[str, TargetTensor] = {}
        for word, wanted in groups.items():
            if word is None:
                made = own.stored(wanted, layout, keep.layers if keep else None)
            else:
                graft = self._all[word]
                graft.require_like(own.config)
                made = graft.stored(wanted, layout, graft.keep_for(wanted, wanted_experts))
            found |= {target.name: target for target in made}
        return tuple(found[target.name] for target in frame)

    def taken(self, tensors: Iterable[PlannedTensor]) -> tuple[Taken, ...]:
        """How much of ``tensors`` comes from each other source."""
        sizes: dict[str, list[int]] = {}
        for tensor in tensors:
            word = graft_of(self._recipe, tensor.target)
            if word is not None:
                sizes.setdefault(word, []).append(tensor.nbytes)
        return tuple(Taken(word, len(found), sum(found)) for word, found in sizes.items())

    def told(self, word: str) -> dict[str, object]:
        """For documents: what a source is, and what tells it from others."""
        source = self._all[word].source
        return {**source.names, **source.identity, "release_sha256": source.release_sha256}

    def notes(self, own: Source) -> tuple[str, ...]:
        """Sources of which headers do not tell that they are of one release with ``own``."""
        return tuple(
            f"{word} comes from another config.json than the source ("
            f"{graft.source.release_sha256[:12]}, not {own.release_sha256[:12]}), as far as their "
            "headers tell: weights of two releases have the same shapes and do not fit each other."
            for word, graft in self._all.items()
            if graft.source.release_sha256 != own.release_sha256
        )


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of every layer, by their numbers in the model of ``n_all`` before any cut."""

    n_all: int
    layers: Keep
    file: Path
    """Whose they are."""

    @classmethod
    def of(cls, source: Source, keep: KeepList | None) -> Experts:
        """Those of ``source`` that ``keep`` names; without one, all that it has.

        Raises:
            PlanError: A released model has more, and nothing says which these are.
        """
        if keep is not None:
            return cls(keep.n_experts, keep.layers, source.checkpoint.folder)
        n_experts, n_layers = source.config.n_experts, source.config.n_layers
        whole = _RELEASED_EXPERTS.get((source.config.family, n_layers, source.config.hidden))
        if whole not in (None, n_experts):
            raise PlanError(
                "a source has lost experts and does not say which",
                file=source.checkpoint.folder,
                expected=f"{whole} experts, or a keep list",
                found=f"{n_experts}",
                next_step="RecoverExperts finds them; put its list beside the checkpoint as "
                "keep.json.",
            )
        return cls(n_experts, (tuple(range(n_experts)),) * n_layers, source.checkpoint.folder)

    def places_in(self, other: Experts) -> Keep | None:
        """Where each stands among those of ``other``; nothing where both are the same.

        Raises:
            PlanError: ``other`` lacks one, or both are not told by the same numbers.
        """
        if self.n_all != other.n_all:
            raise self._refusal(other, 0)
        for layer, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            if not {*mine} <= {*theirs}:
                raise self._refusal(other, layer)
        if self.layers == other.layers:
            return None
        return tuple(
            tuple(map({expert: place for place, expert in enumerate(theirs)}.__getitem__, mine))
            for mine, theirs in zip(self.layers, other.layers, strict=True)
        )

    def _refusal(self, other: Experts, layer: int) -> PlanError:
        return PlanError(
            "experts cannot be grafted: those of the other source are not those of the source",
            file=other.file,
            expected=f"{self._told(layer)}, as {self.file} with what is cut here",
            found=other._told(layer),
            next_step="Take them from a source that has all experts, or that was cut by the same "
            "list; a checkpoint that was cut by another tool tells its experts by a keep.json "
            "beside it (RecoverExperts).",
        )

    def _told(self, layer: int) -> str:
        ids = self.layers[layer]
        what = "all" if len(ids) == self.n_all else f"of layer {layer} {shown(ids)}"
        return f"{len(ids):,} of {self.n_all:,} experts ({what})"


def _beside(recipe: Recipe, word: str, folder: Path) -> str:
    path = source_from(folder, word)
    if not is_address(path) and not Path(path).exists():
        raise RecipeError(
            f"recipe {recipe.name} takes tensors from {word!r}, and nothing says where that is",
            expected=f"--graft {label_of(word)}=PATH, or a file or folder of that name",
            found=f"no {path}",
        )
    return path


class Graft:
    """One other source: what it is read as, and the label of its files and tensors."""

    def __init__(self, path: str, root: Path) -> None:
        if is_address(path):
            raise RecipeError(
                "tensors are grafted from what is here",
                expected="a folder or a file",
                found=path,
                next_step="Fetch it first, whole or the shards that hold these tensors, and name "
                "its folder.",
            )
        self._path = path
        self._root = root

    @cached_property
    def source(self) -> Source:
        """The source."""
        return open_source(self._path, self._root)

    @cached_property
    def label(self) -> str:
        """A digest of what identifies its files, so that no word of a recipe is in a shard's."""
        origins = self.source.origins
        stamps = [origin.stamp(name) for name, origin in sorted(origins.items())]
        return spec_digest(stamps)[:_LABEL_LENGTH]

    @property
    def checkpoint(self) -> Checkpoint:
        """Its files under their own names; `joined` gives them the label."""
        return self.source.checkpoint

    def stored(
        self, wanted: Sequence[TargetTensor], layout: Layout, keep: Keep | None
    ) -> tuple[TargetTensor, ...]:
        """Tensors of a target as they are stored here, under the label.

        Raises:
            SourceError: A shard that holds one is not here.
        """
        made = self.source.stored(wanted, layout, keep)
        for name in (name for target in made for name in target.source_names):
            self.checkpoint.locate(name)
        return tuple(
            replace(target, matrices=tuple(labelled(m, self.label) for m in target.matrices))
            for target in made
        )

    def keep_for(self, wanted: Iterable[TargetTensor], experts: Experts) -> Keep | None:
        """Which of its experts are ``experts``; nothing where all are, or none are ``wanted``.

        Raises:
            PlanError: It has not all of them, or does not tell.
        """
        if not any(map(has_entry_per_expert, wanted)):
            return None
        return experts.places_in(Experts.of(self.source, self.source.earlier_keep))

    @cached_property
    def origins(self) -> Mapping[str, Origin]:
        """Where its files are, by their labelled names."""
        checkpoint = labelled_checkpoint(self.checkpoint, self.label)
        return dict.fromkeys(checkpoint.files, Origin(checkpoint))

    def require_like(self, config: ModelConfig) -> None:
        """Refuse a source of another model than that of ``config``.

        Raises:
            PlanError: A size or a constant differs.
        """
        other = self.source.config
        names = (field.name for field in fields(ModelConfig) if field.name not in _MAY_DIFFER)
        for name in names:
            if getattr(other, name) != getattr(config, name):
                raise PlanError(
                    "tensors cannot be grafted from another model",
                    file=self._path,
                    expected=f"{name} {getattr(config, name)}",
                    found=getattr(other, name),
                )
