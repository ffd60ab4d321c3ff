"""What a model is: facts to put at the head of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.diagnosis.case import Case
from pipeline.diagnosis.draft import drafts_beside
from pipeline.diagnosis.finding import counted
from pipeline.diagnosis.tensors import roles_of
from pipeline.experts.keys import keep_sentence
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import GgufModel
from pipeline.model.engines import engines_of
from pipeline.model.metadata.header_keys import HeaderKeys
from pipeline.model.roles import ROLE_TITLES
from pipeline.recipe.from_file import RECIPE_KEY

_FAMILIES = {"v4.1": "DeepSeek-V4.1-Flash", "v4": "DeepSeek-V4-Flash"}
_COMMON = ("general", "tokenizer", "split", "quantize")
"""Where everybody's keys stand, beside the architecture's own."""

_OURS = "quantmill"
_RECIPE = f"{_OURS}.recipe"
_MAKERS = (
    "general.quantized_by",
    "general.author",
    "general.organization",
    "general.repo_url",
    "general.source.url",
    "general.url",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of the page: a word, and what is so called."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class RoleRow:
    """The tensors of one role; ``types`` counts them by type, the most bytes first."""

    title: str
    n_tensors: int
    nbytes: int
    types: Mapping[str, int]


def facts_of(case: Case) -> Iterator[Fact]:
    """Everything worth saying of a model whose form is known."""
    form, model = case.form, case.model
    kind = "draft (MTP/DSpark)" if form.is_draft else "target"
    layout = f", {form.layout} layout" if form.layout else ""
    yield Fact(
        "what", f"{_FAMILIES[form.family]}, {kind}{layout} (architecture {form.architecture})"
    )
    yield from general_facts(model, form.architecture)
    keys = HeaderKeys(model.key_values, form.architecture)
    n_experts, n_used = keys.find_number("expert_count"), keys.find_number("expert_used_count")
    if n_experts is not None:
        yield Fact("experts", f"{n_experts:,} a layer, {n_used or '?'} used")
    cut = keep_sentence(model.key_values.values())
    if cut or case.is_pruned:
        yield Fact("pruned", cut or "its keys say so, not by which experts")
    types = {tensor.type for tensor in case.tensors.values()}
    engines = [engine.name for engine in engines_of(form, types)]
    yield Fact("engines", "; ".join(engines) or "none: no engine knows form and types together")
    if not form.is_draft:
        drafts = [path.name for path in drafts_beside(case)]
        yield Fact("draft", ", ".join(drafts) or "none beside it")


def general_facts(model: GgufModel, architecture: str) -> Iterator[Fact]:
    """What any GGUF says of itself: name, maker, recipe, importance matrix, files."""
    entries = model.key_values
    name = _text(entries, "general.name")
    if name:
        yield Fact("name", name)
    yield Fact("made by", _maker(entries))
    foreign = _foreign_keys(entries, architecture)
    if foreign:
        yield Fact("maker's keys", ", ".join(f"{k}.* ({n})" for k, n in foreign.items()))
    yield Fact("recipe", _recipe(entries))
    dataset = _text(entries, "quantize.imatrix.dataset") or _text(entries, "quantize.imatrix.file")
    if dataset:
        yield Fact("importance", f"measured on {dataset}")
    n_tensors, nbytes = len(model.tensors), sum(file.nbytes for file in model.files)
    files = counted(len(model.files), "file")
    yield Fact("size", f"{files}, {nbytes:,} bytes, {counted(n_tensors, 'tensor')}")


def role_rows(case: Case) -> Iterator[RoleRow]:
    """Tensors and bytes by role, with the types that each is stored in."""
    for role, tensors in roles_of(case).items():
        nbytes: Counter[str] = Counter()
        for tensor in tensors:
            nbytes[tensor.type.name] += tensor.nbytes
        counts = Counter(tensor.type.name for tensor in tensors)
        ordered = {name: counts[name] for name, _ in nbytes.most_common()}
        yield RoleRow(ROLE_TITLES[role], len(tensors), sum(nbytes.values()), ordered)


def _recipe(entries: Mapping[str, KeyValue]) -> str:
    """The recipe by name, and whether the file holds it or only its name."""
    name = _text(entries, _RECIPE)
    if RECIPE_KEY in entries:
        return f"recorded{f' ({name})' if name else ''}; scripts/recipe from prints it"
    told = f"{name}, not recorded" if name else "not recorded"
    return f"{told}; scripts/recipe from derives one from the types"


def _maker(entries: Mapping[str, KeyValue]) -> str:
    ours = [key for key in entries if key.startswith(f"{_OURS}.")]
    said = [_text(entries, key) for key in _MAKERS]
    named = list(dict.fromkeys(value for value in (_OURS if ours else None, *said) if value))
    return ", ".join(named) or "not said"


def _foreign_keys(entries: Mapping[str, KeyValue], architecture: str) -> Mapping[str, int]:
    """Spaces of keys that only their maker knows, with the number of keys in each."""
    spaces = Counter(key.partition(".")[0] for key in entries)
    return {name: n for name, n in spaces.items() if name not in (*_COMMON, architecture)}


def _text(entries: Mapping[str, KeyValue], key: str) -> str | None:
    entry = entries.get(key)
    return entry.value if entry is not None and isinstance(entry.value, str) else None
