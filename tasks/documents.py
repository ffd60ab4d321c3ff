"""The documents beside the shards, all from the plan, the files and the measured errors.

budget.md, budget.json, budget.png     the byte budget at each step
<file>.inventory.json                  of target and draft: every tensor with offset, bytes, digest
<file>.inv.json                        the planner's plain array
recipe.toml                            the recipe in full: as a recipe file that extends nothing
recipe.json or keep.json               the recipe with its types resolved, or the keep list of a cut
imatrix.json                           what the importance matrix knows, where one was used
SHA256SUMS                             in the form `sha256sum --check` reads
manifest.json                          written last: where it stands, the output is whole
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pipeline import files
from pipeline.budget import Budget, Item, budget_of, final_items
from pipeline.digest import sha256, spec_digest
from pipeline.experts.keep_json import keep_spec
from pipeline.gguf.model_file import GgufModel
from pipeline.importance.coverage import coverage_json
from pipeline.measure import TensorError
from pipeline.model.engines import engines_sentence
from pipeline.plan import Plan, PlannedShard
from pipeline.recipe.dump import recipe_toml
from pipeline.report.budget_json import budget_json
from pipeline.report.budget_page import all_tables, budget_markdown
from pipeline.report.budget_report import overview_table
from pipeline.report.error_report import error_table
from pipeline.report.inventory import inventory, planner_array
from pipeline.report.plan_report import shard_table
from pipeline.report.requant_report import requant_tables
from pipeline.report.tables import Table
from pipeline.requant.twice import requantized
from pipeline.store import ShardRecord
from tasks.described import Described
from tasks.job import Job
from tasks.model_source import KEEP_NAME
from tasks.naming import MANIFEST, SUMS, sums_text

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A target or a draft whose shards are whole, named and verified."""

    plan: Plan
    records: tuple[ShardRecord, ...]
    model: GgufModel

    @property
    def shards(self) -> list[tuple[PlannedShard, ShardRecord]]:
        """Each planned shard with its record."""
        return list(zip(self.plan.shards, self.records, strict=True))

    @property
    def sha256(self) -> str:
        """One digest for all shards: of the list of theirs."""
        return spec_digest([record.file_sha256 for record in self.records])


@dataclass(frozen=True, slots=True)
class Told:
    """What the documents say of an output beyond its plans and bytes.

    ``source`` is where it came from, ``request`` names what it was asked to be; ``manifest`` are
    further entries of the manifest, ``documents`` further JSON documents by file name, ``texts``
    documents that are text.
    """

    source: Mapping[str, object]
    request: Mapping[str, object]
    manifest: Mapping[str, object]
    documents: Mapping[str, object]
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """An output whose files are all whole and verified."""

    output: Described
    told: Told
    files: tuple[FinishedFile, ...]

    @property
    def shards(self) -> list[tuple[PlannedShard, ShardRecord]]:
        """Each shard of each file with its record."""
        return [pair for file in self.files for pair in file.shards]

    @property
    def errors(self) -> tuple[TensorError, ...]:
        """What every tensor lost, as it was measured when its shard was made."""
        return tuple(error for _, record in self.shards for error in record.errors)

    def final_items(self) -> list[Item]:
        """Every tensor, as the finished files' own headers tell."""
        return [item for file in self.files for item in final_items(file.plan, file.model)]

    def steps(self) -> tuple[Budget, ...]:
        """The budgets of all four steps."""
        written = self.output.written_items(range(len(self.shards)))
        return (
            *self.output.budgets(),
            budget_of("written", written),
            budget_of("final", self.final_items()),
        )


def write_documents(finished: Finished) -> tuple[Table, ...]:
    """Write everything, the manifest last; gives the tables worth showing at the end."""
    # Drawing is imported only where something is drawn: matplotlib takes a second to load.
    from pipeline.report.chart import chart_png

    output = finished.output
    steps, left_out, items = finished.steps(), output.left_out(), finished.final_items()
    measured = (error_table(finished.errors),) if finished.errors else ()
    tables = (
        *all_tables(steps, output.model, left_out, items=items),
        *(shard_table(plan) for plan in output.plans),
        *requant_tables(output.plans),
        *measured,
    )
    page = budget_markdown(output.name, output.plans, tables, left_out, chart="budget.png")
    documents = {
        "budget.png": chart_png(steps, output.name),
        "budget.md": page.encode(),
        "budget.json": _json(budget_json(steps, output.model, left_out, items=items)),
        **{name: _json(document) for name, document in finished.told.documents.items()},
        **{name: text.encode() for name, text in finished.told.texts.items()},
    }
    for file in finished.files:
        documents |= {
            f"{file.plan.name}.inventory.json": _json(_inventory(finished.told, file)),
            f"{file.plan.name}.inv.json": _json(planner_array(file.plan)),
        }
    for name, content in documents.items():
        files.write_whole(output.folder / name, content)
    digests = {
        **{shard.file_name: record.file_sha256 for shard, record in finished.shards},
        **{name: sha256(content) for name, content in documents.items()},
    }
    files.write_whole(output.folder / SUMS, sums_text(digests))
    sizes = {name: len(content) for name, content in documents.items()}
    files.write_whole(output.folder / MANIFEST, _json(_manifest(finished, sizes, digests)))
    return (overview_table(steps, output.model), *measured)


def told_of(job: Job) -> Told:
    """What the documents say of a conversion by a recipe."""
    return Told(
        source=_source(job),
        request={"name": job.recipe.name},
        manifest={
            "recipe": job.recipe.model_dump(mode="json"),
            "quantizer": job.quantizer.version_of(
                {tensor.type for plan in job.plans for tensor in plan.tensors if tensor.is_encoded}
            ),
        },
        documents={
            "recipe.json": _recipe(job),
            **({KEEP_NAME: keep_spec(job.recorded_keep)} if job.recorded_keep else {}),
            **({"imatrix.json": coverage_json(job.coverage)} if job.coverage else {}),
        },
        texts={"recipe.toml": recipe_toml(job.recipe)},
    )


def _inventory(told: Told, file: FinishedFile) -> dict[str, object]:
    digests = {name: digest for r in file.records for name, digest in r.tensors.items()}
    return inventory(
        file.plan,
        digests,
        [record.file_sha256 for record in file.records],
        source=told.source,
        recipe={**told.request, "layout": _layout(file.plan)},
    )


def _layout(plan: Plan) -> str | None:
    return plan.layout.value if plan.layout else None


def _source(job: Job) -> dict[str, object]:
    grafts, notes = job.told_grafts(), job.notes()
    return {
        **job.source.names,
        **job.source.identity,
        "n_tensors": len(job.source.checkpoint.weight_map),
        **({"grafts": grafts} if grafts else {}),
        **({"notes": list(notes)} if notes else {}),
    }


def _recipe(job: Job) -> dict[str, object]:
    return {
        "recipe": job.recipe.model_dump(mode="json"),
        "types": {
            _kind(plan): {tensor.name: tensor.type.name for tensor in plan.tensors}
            for plan in job.plans
        },
    }


def _kind(plan: Plan) -> str:
    return "draft" if plan.form.is_draft else "target"


def _manifest(
    finished: Finished, sizes: Mapping[str, int], digests: Mapping[str, str]
) -> dict[str, object]:
    output = finished.output
    shards = [
        {
            "file": shard.file_name,
            "nbytes": shard.nbytes,
            "sha256": record.file_sha256,
            "kind": shard.kind,
            "spec": record.spec,
        }
        for shard, record in finished.shards
    ]
    documents = [{"file": name, "nbytes": n, "sha256": digests[name]} for name, n in sizes.items()]
    return {
        "schema": SCHEMA,
        "spec": output.spec,
        "name": output.name,
        "source": finished.told.source,
        **finished.told.manifest,
        **_models(finished.files),
        "requantized": [
            asdict(one) for one in requantized(t for plan in output.plans for t in plan.typed)
        ],
        "errors": [asdict(error) for error in finished.errors],
        "files": [*shards, *documents],
    }


def _models(made: Sequence[FinishedFile]) -> dict[str, object]:
    """``target`` and ``draft``: what each is, and by its digest the one that it runs with."""
    return {
        _kind(file.plan): {
            "name": file.plan.name,
            "architecture": file.plan.form.architecture.value,
            "layout": _layout(file.plan),
            "engines": engines_sentence(file.plan.form, {t.type for t in file.plan.tensors}),
            "n_tensors": len(file.plan.tensors),
            "tensor_nbytes": file.plan.data_nbytes,
            "file_nbytes": file.plan.nbytes,
            "types": dict(Counter(tensor.type.name for tensor in file.plan.tensors)),
            "sha256": file.sha256,
            **{f"{_kind(other.plan)}_sha256": other.sha256 for other in made if other is not file},
        }
        for file in made
    }


def _json(document: object) -> bytes:
    return json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"
