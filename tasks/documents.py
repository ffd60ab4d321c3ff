"""The documents beside the shards, all from the plan, the files and the measured errors.

budget.md, budget.json, budget.png     the byte budget at each step
<file>.inventory.json                  of target and draft: every tensor with offset, bytes, digest
<file>.inv.json                        the planner's plain array
recipe.json                            the recipe with every type resolved
SHA256SUMS                             in the form `sha256sum --check` reads
manifest.json                          written last: where it stands, the output is whole
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pipeline import files
from pipeline.budget import Budget, Item, budget_of, final_items
from pipeline.digest import sha256, spec_digest
from pipeline.gguf.model_file import GgufModel
from pipeline.plan import Plan, PlannedShard
from pipeline.report.budget_json import budget_json
from pipeline.report.budget_page import all_tables, budget_markdown
from pipeline.report.budget_report import overview_table
from pipeline.report.error_report import error_table
from pipeline.report.inventory import inventory, planner_array
from pipeline.report.plan_report import shard_table
from pipeline.report.tables import Table
from pipeline.store import ShardRecord
from pipeline.verify import TensorError
from tasks.job import Job
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
class Finished:
    """A job whose files are all whole, named and verified."""

    job: Job
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
        written = self.job.written_items(range(len(self.shards)))
        return (
            *self.job.budgets(),
            budget_of("written", written),
            budget_of("final", self.final_items()),
        )


def write_documents(finished: Finished) -> tuple[Table, ...]:
    """Write everything, the manifest last; gives the tables worth showing at the end."""
    # Drawing is imported only where something is drawn: matplotlib takes a second to load.
    from pipeline.report.chart import chart_png

    job = finished.job
    steps, left_out, items = finished.steps(), job.left_out(), finished.final_items()
    tables = (
        *all_tables(steps, job.model, left_out, items=items),
        *(shard_table(plan) for plan in job.plans),
        error_table(finished.errors),
    )
    page = budget_markdown(job.name, job.plans, tables, left_out, chart="budget.png")
    documents = {
        "budget.png": chart_png(steps, job.name),
        "budget.md": page.encode(),
        "budget.json": _json(budget_json(steps, job.model, left_out, items=items)),
        "recipe.json": _json(_recipe(job)),
    }
    for file in finished.files:
        documents |= {
            f"{file.plan.name}.inventory.json": _json(_inventory(job, file)),
            f"{file.plan.name}.inv.json": _json(planner_array(file.plan)),
        }
    for name, content in documents.items():
        files.write_whole(job.folder / name, content)
    digests = {
        **{shard.file_name: record.file_sha256 for shard, record in finished.shards},
        **{name: sha256(content) for name, content in documents.items()},
    }
    files.write_whole(job.folder / SUMS, sums_text(digests))
    sizes = {name: len(content) for name, content in documents.items()}
    files.write_whole(job.folder / MANIFEST, _json(_manifest(finished, sizes, digests)))
    return (overview_table(steps, job.model), error_table(finished.errors))


def _inventory(job: Job, file: FinishedFile) -> dict[str, object]:
    digests = {name: digest for r in file.records for name, digest in r.tensors.items()}
    return inventory(
        file.plan,
        digests,
        [record.file_sha256 for record in file.records],
        source=_source(job),
        recipe={"name": job.recipe.name, "layout": _layout(file.plan)},
    )


def _layout(plan: Plan) -> str | None:
    return plan.layout.value if plan.layout else None


def _source(job: Job) -> dict[str, object]:
    checkpoint, second = job.checkpoint, job.source.second
    return {
        **job.source.first.names,
        **({"supplement": second.names} if second else {}),
        **job.source.identity,
        "n_tensors": len(checkpoint.weight_map),
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
    job = finished.job
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
        "spec": job.spec,
        "name": job.name,
        "source": _source(job),
        "recipe": job.recipe.model_dump(mode="json"),
        "quantizer": f"{job.quantizer.name} {job.quantizer.version}",
        **_models(finished.files),
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
