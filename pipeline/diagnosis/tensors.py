"""Tensors that loaders miss, do not expect, or cannot run in the type they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pipeline.diagnosis import commands
from pipeline.diagnosis.case import Case
from pipeline.diagnosis.finding import Finding, Graft, Mend, Severity, counted, spread
from pipeline.diagnosis.opened import stale_totals
from pipeline.errors import FormatError
from pipeline.gguf.model_file import SPLIT_TENSORS_COUNT
from pipeline.gguf.reader import GgufTensor
from pipeline.model.contract.shapes import Ne
from pipeline.model.contract.sizes import Sizes, read_sizes
from pipeline.model.contract.sources import check_candidates, check_sources
from pipeline.model.contract.tensors import check_tensors, expected_ne
from pipeline.model.form import Architecture
from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import HeaderKeys
from pipeline.model.roles import Role, SubRole, role_of, sub_role_of

_EXPERT_NAMES = ("_exps.", "ffn_gate_inp.", "exp_probs_b")
"""Whose last dimension counts experts."""


def sizes_of(case: Case) -> Sizes | None:
    """The sizes that the keys state; nothing where a key for them is missing (see `keys`)."""
    try:
        return read_sizes(case.model, case.form)
    except FormatError:
        return None


def check_case_tensors(case: Case) -> Iterator[Finding]:
    """Findings about the list of tensors, their shapes and types, and the rules between layers."""
    sizes = sizes_of(case)
    if sizes is None:
        yield from check_total(case, are_all_there=False)
        return
    found = case.tensors
    wanted = expected_ne(sizes, case.form)
    problems = [p for p in check_tensors(case.model, sizes, case.form) if p.tensor]
    missing = [p for p in problems if p.tensor not in found]
    extra = [p for p in problems if p.tensor in found and p.tensor not in wanted]
    known = [p for p in problems if p.tensor in found and p.tensor in wanted]
    shapes = [p for p in known if p.found == found[str(p.tensor)].ne]
    yield from check_total(case, are_all_there=not missing)
    yield from _count_findings(case, missing, extra)
    yield from _shape_findings(case, sizes, [found[str(p.tensor)] for p in shapes], wanted)
    yield from _type_findings(case, [p for p in known if p not in shapes])
    if case.form.architecture is Architecture.DEEPSEEK41:
        keys = HeaderKeys(case.model.key_values, case.form.architecture)
        for problem in (*check_sources(sizes), *check_candidates(keys, sizes)):
            yield _between(case, problem)


def check_total(case: Case, *, are_all_there: bool) -> Iterator[Finding]:
    """A finding where shards state another number of tensors than the set holds.

    ``are_all_there``: no tensor is missing, so that only the number is wrong.
    """
    stale = stale_totals(case.model) if case.is_whole else ()
    if not stale:
        return
    total = sum(len(file.tensors) for file in case.model.files)
    is_settable = are_all_there and all(
        tensor.type.family == "mainline" for file in stale for tensor in file.tensors.values()
    )
    said = stale[0].key_values[SPLIT_TENSORS_COUNT].value
    yield Finding(
        Severity.STOPS,
        f"{SPLIT_TENSORS_COUNT} says {said}, the set holds {counted(total, 'tensor')}",
        tuple(file.path.name for file in stale),
        Mend(
            "Set the number right where it stands; nothing else in the file changes:",
            tuple(commands.set_key(file.path, SPLIT_TENSORS_COUNT, total) for file in stale),
        )
        if is_settable
        else Mend("Make its like from the checkpoint:", alike=True),
        f"corrupted model: {said} tensors expected but {total} found",
    )


def _count_findings(
    case: Case, missing: Sequence[FormatError], extra: Sequence[FormatError]
) -> Iterator[Finding]:
    n_found = len(case.tensors)
    says = "wrong number of tensors; expected {}, got {}"
    if missing and case.is_whole:
        names = [str(problem.tensor) for problem in missing]
        yield Finding(
            Severity.STOPS,
            f"{counted(len(names), 'tensor')} missing",
            (spread(names),),
            Mend("They are in no file at hand. Make its like from the checkpoint:", alike=True),
            f"missing tensor '{names[0]}'",
        )
    if extra:
        names = [str(problem.tensor) for problem in extra]
        causes = list(dict.fromkeys(p.next_step for p in extra if p.next_step))
        yield Finding(
            Severity.STOPS,
            f"{counted(len(names), 'tensor')} too many. {' '.join(causes[:2])}",
            (spread(names),),
            case.rewritten("Write it anew, without them:"),
            says.format(n_found - len(extra) + len(missing), n_found),
        )


def _shape_findings(
    case: Case, sizes: Sizes, tensors: Sequence[GgufTensor], wanted: Mapping[str, Ne]
) -> Iterator[Finding]:
    experts = [t for t in tensors if any(part in t.name for part in _EXPERT_NAMES)]
    if experts:
        yield _expert_finding(case, sizes, experts)
    rest = [tensor for tensor in tensors if tensor not in experts]
    if rest:
        first = rest[0]
        yield Finding(
            Severity.STOPS,
            f"{counted(len(rest), 'tensor')} of another shape than the file's own keys imply: "
            f"{first.name} is {first.ne}, expected {wanted[first.name]}",
            (spread(tensor.name for tensor in rest),),
            case.rewritten("The tables prove other keys. Write it anew; no weight changes:")
            if case.refusal is None
            else Mend(
                "Keys and tensors are of two models. Make its like from the checkpoint:",
                alike=True,
            ),
            "tensor has wrong shape",
        )


def _expert_finding(case: Case, sizes: Sizes, tensors: Sequence[GgufTensor]) -> Finding:
    """A cut that reached some tensors only, or not the key, or each layer to another depth."""
    counts = Counter(
        tensor.ne[-1]
        for name, tensor in case.tensors.items()
        if any(part in name for part in _EXPERT_NAMES)
    )
    shown = ", ".join(f"{n:,} in {counted(k, 'tensor')}" for n, k in sorted(counts.items()))
    agree = len(counts) == 1
    return Finding(
        Severity.STOPS,
        f"expert counts disagree: expert_count says {sizes.n_experts:,}, the tensors have {shown}. "
        "Loaders take one number for all layers",
        (spread(tensor.name for tensor in tensors),),
        Mend(
            "The cut did not reach the key. Cut the whole model again, with the keep list it was "
            "cut by (CutExperts), or ask its maker."
            if agree
            else "Some layers or some tensors were cut, others not. Cut the whole model again "
            "(CutExperts takes the uncut file and the keep list), or ask its maker."
        ),
        "tensor has wrong shape",
    )


def _type_findings(case: Case, problems: Sequence[FormatError]) -> Iterator[Finding]:
    """Types that abort the engine, or that mainline does not know, by what they are expected as."""
    by_wanted: dict[str, list[FormatError]] = {}
    for problem in problems:
        by_wanted.setdefault(str(problem.expected), []).append(problem)
    for expected, members in by_wanted.items():
        names = [str(problem.tensor) for problem in members]
        if expected in ("F32", "I32"):
            yield _aborting(case, expected, names)
        else:
            yield _unknown_to_mainline(case, names)


def _aborting(case: Case, expected: str, names: Sequence[str]) -> Finding:
    types = sorted({case.tensors[name].type.name for name in names})
    n_lossy = sum(1 for name in names if case.tensors[name].type.name not in ("F32", "F16", "BF16"))
    grafts = tuple(
        Graft(sub_role, expected)
        for sub_role in dict.fromkeys(sub_role_of(name) for name in names)
        if sub_role in (SubRole.NORM, SubRole.BIAS, SubRole.ATTENTION, SubRole.HYPER_CONNECTION)
    )
    return Finding(
        Severity.STOPS,
        f"{counted(len(names), 'tensor')} (norms, biases, sinks, gates) stored as "
        f"{', '.join(types)} instead of {expected}: the file loads, then decoding aborts",
        (spread(names),),
        case.grafted("Take them from the checkpoint, which has them in F32", grafts)
        if n_lossy and grafts
        else case.rewritten("Write it anew; they become F32 again, and lost little or nothing:"),
        "unsupported types in binary_op, or a failed assertion",
    )


def _unknown_to_mainline(case: Case, names: Sequence[str]) -> Finding:
    types = sorted({case.tensors[name].type.name for name in names})
    return Finding(
        Severity.STOPS,
        f"{counted(len(names), 'tensor')} in types of ik_llama.cpp ({', '.join(types)}) in a file "
        "of mainline's layout: ik does not read the layout, mainline not the types",
        (spread(names),),
        Mend(
            "In the fork layout ik_llama.cpp reads it:",
            (commands.relayout(case.path, Layout.FORK),),
        ),
        f"invalid ggml type {case.tensors[names[0]].type.type_id}",
    )


def _between(case: Case, problem: FormatError) -> Finding:
    found = "" if problem.found is None else f": {problem.found}, expected {problem.expected}"
    return Finding(Severity.STOPS, f"{problem.what}{found}", (case.path.name,))


def roles_of(case: Case) -> Mapping[Role, list[GgufTensor]]:
    """The tensors by role, in the order of roles; all of a draft is its own role."""
    found: dict[Role, list[GgufTensor]] = {role: [] for role in Role}
    for name, tensor in case.tensors.items():
        found[Role.DRAFT if case.form.is_draft else role_of(name)].append(tensor)
    return {role: tensors for role, tensors in found.items() if tensors}
