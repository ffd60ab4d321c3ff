"""The file under examination, as every check sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeline.diagnosis import commands
from pipeline.diagnosis.anew import why_not_anew
from pipeline.diagnosis.finding import Graft, Mend
from pipeline.diagnosis.opened import by_name
from pipeline.errors import QuantmillError
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufTensor
from pipeline.model.form import Form
from pipeline.model.layout import Layout
from pipeline.model.roles import SubRole

_CUT_KEY = re.compile(r"quantmill\.experts\.|(\w+\.)?(reap|prun)", re.IGNORECASE)
"""How files that lost experts say so: this project's keys, and the words others use."""

_OF_EXPERTS = (SubRole.ROUTED_GATE, SubRole.ROUTED_UP, SubRole.ROUTED_DOWN, SubRole.ROUTER)

_ANEW = "Make it anew, with the types of the published draft:"
_DRAFT = (commands.make_draft(),)

_ON_CUT = (
    "; as the file lost experts, from a checkpoint that lost the same ones (CutCheckpoint, by the "
    "same keep list)"
)


_FILES_FIRST = "First mend the files themselves, see above."


@dataclass(frozen=True)
class Case:
    """A model whose form is known, its keys under the right names.

    ``is_readable``: its files themselves are sound, so that our own tasks can take it as a source.
    ``is_whole``: no shard is missing.
    """

    path: Path
    model: GgufModel
    form: Form
    is_readable: bool
    is_whole: bool = True

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """Every tensor by name."""
        return by_name(self.model)

    @property
    def layout(self) -> Layout | None:
        """The layout, for a V4.1 target."""
        return self.form.layout

    @property
    def is_pruned(self) -> bool:
        """Whether the file says that it lost experts."""
        return any(_CUT_KEY.match(key) for key in self.model.key_values)

    @cached_property
    def refusal(self) -> QuantmillError | None:
        """Why it cannot be written anew, every tensor in its type; nothing if it can."""
        return why_not_anew(self.model, self.form)

    def _first(self, sentence: str) -> Mend | None:
        """What is done instead of writing it anew: a draft is made again, files mended before."""
        if self.form.is_draft:
            return Mend(_ANEW, _DRAFT)
        return None if self.is_readable else Mend(f"{_ended(sentence)} {_FILES_FIRST}")

    def rewritten(self, sentence: str) -> Mend:
        """Write it anew, no weight touched, if it can be; what is unreadable has to be mended."""
        first = self._first(sentence)
        if first is not None:
            return first
        if self.refusal is not None:
            return Mend(
                f"It cannot be written anew: {_ended(self.refusal.message())} Make its like from "
                "the checkpoint:",
                alike=True,
            )
        return Mend(sentence, (commands.keep_all(self.path, self.layout),))

    def grafted(self, sentence: str, grafts: tuple[Graft, ...]) -> Mend:
        """Write it anew with ``grafts`` from the checkpoint, by the recipe of the diagnosis.

        A draft is small and made of the checkpoint altogether.
        """
        first = self._first(sentence)
        if first is not None:
            return first
        if self.refusal is not None:
            return Mend(
                f"{_ended(sentence)} First mend what keeps it from being written anew: "
                f"{_ended(self.refusal.what)}"
            )
        if self.is_pruned and any(graft.sub_role in _OF_EXPERTS for graft in grafts):
            sentence += _ON_CUT
        return Mend(sentence, grafts=grafts)


def _ended(sentence: str) -> str:
    """``sentence`` with a full stop, whatever it ends in."""
    return f"{sentence.rstrip(' .:;')}."
