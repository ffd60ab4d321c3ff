"""What a published V4.1 file leaves out of its metadata or says wrong, told from what it holds.

Files made before the hash constants had keys name the engram's layers at most, and lose or change
the prefix of what they name (ikawrakow/ik_llama.cpp pull request 2506: "key not found ...
engram.pad_id"). Others store a constant in a type that loaders refuse, carry keys of the other
layout, or count rows as the other layout does. Nothing is guessed that is not proved by the rows
and the tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import GgufModel
from pipeline.model.contract.sizes import ENGRAM_NAMES
from pipeline.model.dialects import MAINLINE_TABLE, dialect_of
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.form import Architecture
from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import HeaderKeys
from pipeline.model.metadata.required import MAINLINE_KEYS, NINE_KEYS, UNION_KEYS
from pipeline.model.prefix import with_right_prefix
from pipeline.model.roles import sub_role_of
from pipeline.requant.engram_keys import engram_keys, engram_layers
from pipeline.requant.retyped import is_of, retyped

_ARCHITECTURE = Architecture.DEEPSEEK41
_P = f"{_ARCHITECTURE}."

_WANTED = {Layout.FORK: {**NINE_KEYS, **UNION_KEYS}, Layout.MAINLINE: MAINLINE_KEYS}
_FOREIGN = {Layout.FORK: f"{_P}ple.", Layout.MAINLINE: f"{_P}engram."}
"""How the other layout's keys begin."""

_PAD_ID, _RAW_PAD = f"{_P}engram.pad_id", f"{_P}engram.pad_token_id"


@dataclass(frozen=True, slots=True)
class Completed:
    """A model with the keys it should have had.

    ``added`` names those that it lacked, or had wrong; ``dropped`` those of the other layout, and
    tensors that no model has.
    """

    model: GgufModel
    added: tuple[str, ...]
    dropped: tuple[str, ...] = ()


def completed(model: GgufModel) -> Completed:
    """``model`` with the engram keys of its layout; those that agree with it stay as they are.

    Tensors of names that are no model's are left out.

    A key of another integer type gets the right one, one of the other layout goes, and constants
    that contradict the rows or the tokens are computed again where that leaves no contradiction.
    Models that are no V4.1 target need nothing.

    Raises:
        FormatError: It is of a form that other projects made up; tables do not have the rows that
            any buckets give; or what would tell a missing key is missing, too.
    """
    renamed = with_right_prefix(model)
    # Before tensors go: a dialect is told by them.
    _refuse_dialect(renamed.model)
    foreign = tuple(name for name in model.tensors if not _is_known(name))
    model = _without_tensors(renamed.model, foreign)
    said = model.key_values.get("general.architecture")
    if said is None or said.value != _ARCHITECTURE:
        return Completed(model, tuple(renamed.keys), foreign)
    layout = Layout.MAINLINE if MAINLINE_TABLE in model.tensors else Layout.FORK
    dropped = tuple(_strays(model, layout))
    typed, unlike = _in_right_types(_without(model, dropped), layout)
    model = _agreeing(_without(typed, _short_list(typed, layout)), layout)
    before, after = renamed.model.key_values, model.key_values
    changed = (key for key in after if key not in before or before[key] != after[key])
    added = tuple(dict.fromkeys([*renamed.keys, *unlike, *changed]))
    return Completed(model, added, (*dropped, *foreign))


def _refuse_dialect(model: GgufModel) -> None:
    dialect = dialect_of(model)
    if dialect is not None and not dialect.tensors_fit:
        raise FormatError(
            f"the file is no source: it is of another dialect. {dialect.why.rstrip('.')}",
            file=model.files[0].path,
            expected=" or ".join(Layout),
            found=f"{dialect.name} ({dialect.makers})",
            next_step=dialect.next_step,
        )


def _is_known(name: str) -> bool:
    try:
        sub_role_of(name)
    except KeyError:
        return False
    return True


def _without_tensors(model: GgufModel, names: Collection[str]) -> GgufModel:
    if not names:
        return model
    kept = (
        {name: tensor for name, tensor in file.tensors.items() if name not in names}
        for file in model.files
    )
    return GgufModel(
        tuple(replace(file, tensors=own) for file, own in zip(model.files, kept, strict=True))
    )


def _strays(model: GgufModel, layout: Layout) -> Iterator[str]:
    """Keys of the other layout, by which some readers would look up wrong rows."""
    for key in model.key_values:
        if key.startswith(_FOREIGN[layout]) and key not in _WANTED[layout]:
            yield key


def _in_right_types(model: GgufModel, layout: Layout) -> tuple[GgufModel, tuple[str, ...]]:
    """Integers in the type that loaders ask for; engram keys that hold none go, to be made."""
    entries, fixed, lost = model.key_values, list[KeyValue](), list[str]()
    for key, wanted in _WANTED[layout].items():
        entry = entries.get(key)
        if entry is None or is_of(entry, wanted):
            continue
        right = retyped(entry, wanted)
        if right is not None:
            fixed.append(right)
        elif _is_engram(key):
            lost.append(key)
    model = _with(_without(model, lost), fixed)
    return model, (*(entry.key for entry in fixed), *lost)


def _is_engram(key: str) -> bool:
    return key.removeprefix(_P).startswith(("engram.", "ple.", "embedding_length_per_layer"))


def _short_list(model: GgufModel, layout: Layout) -> tuple[str, ...]:
    """The list of the engram's layers where it names others than have a table: some do."""
    keys, name = HeaderKeys(model.key_values, _ARCHITECTURE), ENGRAM_NAMES[layout]["layers"]
    said = keys.find_numbers(name)
    return () if said in (None, engram_layers(model, layout)) else (keys.full(name),)


def _agreeing(model: GgufModel, layout: Layout) -> GgufModel:
    """``model`` with all engram keys, as few of its own made again as take every contradiction out.

    Where none of it helps, its own stay, for the check of the tables to tell what is wrong.
    """
    first: GgufModel | FormatError | None = None
    for doubted in _doubts(model, layout):
        try:
            bare = _without(model, doubted)
            made = _with(
                bare, (e for e in engram_keys(bare, layout) if e.key not in bare.key_values)
            )
        except FormatError as error:
            first = error if first is None else first
            continue
        if check_gguf_engram(made).ok:
            return made
        first = made if first is None else first
    if isinstance(first, FormatError):
        raise first
    assert first is not None
    return first


def _doubts(model: GgufModel, layout: Layout) -> Iterator[frozenset[str]]:
    """Sets of keys to make again, each larger than the one before."""
    names = {fact: f"{_P}{name}" for fact, name in ENGRAM_NAMES[layout].items()}
    token_map = HeaderKeys(model.key_values, _ARCHITECTURE).find_numbers("engram.token_map")
    raw = HeaderKeys(model.key_values, _ARCHITECTURE).find_number("engram.pad_token_id")
    doubted: frozenset[str] = frozenset()
    yield doubted
    doubted |= {names["offsets"], _PAD_ID}
    if raw is not None and not 0 <= raw < len(token_map or ()):
        doubted |= {_RAW_PAD}
    yield doubted
    doubted |= {names["sizes"], f"{_P}engram.vocab_size"}
    yield doubted
    # The multipliers are drawn for the map's ids, so a map that they do not fit is the tokens' no
    # more than they are.
    yield doubted | {names["multipliers"], f"{_P}engram.token_map"}


def _with(model: GgufModel, entries: Iterable[KeyValue]) -> GgufModel:
    return _keyed(model, [*model.key_values.values(), *entries])


def _without(model: GgufModel, keys: Collection[str]) -> GgufModel:
    if not keys:
        return model
    return _keyed(model, (e for e in model.key_values.values() if e.key not in keys))


def _keyed(model: GgufModel, entries: Iterable[KeyValue]) -> GgufModel:
    first = replace(model.files[0], key_values={entry.key: entry for entry in entries})
    return GgufModel((first, *model.files[1:]))
