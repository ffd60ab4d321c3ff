"""The documents beside the shards, all from the plan, the files and the measured errors.

budget.md, budget.json, budget.png     the byte budget at each step
<name>.inventory.json                  every tensor with offset, bytes, digest
<name>.inv.json                        the planner's plain array
recipe.json                            the recipe with every type resolved
SHA256SUMS                             in the form `sha256sum --check` reads
manifest.json                          written last: where it stands, the output is whole
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pipeline import files
from pipeline.budget import Budget, budget_of, final_items, written_items
from pipeline.digest import sha256
from pipeline.gguf.model_file import GgufModel
from pipeline.plan import PlannedShard
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

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Finished:
    """A job whose shards are whole, named and verified."""

    job: Job
    records: tuple[ShardRecord, ...]
    model: GgufModel

    @property
    def errors(self) -> tuple[TensorError, ...]:
        """What every tensor lost, as it was measured when its shard was made."""
        return tuple(error for record in self.records for error in record.errors)

    def steps(self) -> tuple[Budget, ...]:
        """The budgets of all four steps."""
        plan = self.job.plan
        written = written_items(plan, range(len(self.records)))
        return (
            *self.job.budgets(),
            budget_of("written", written),
            budget_of("final", final_items(plan, self.model)),
        )


def write_documents(finished: Finished) -> tuple[Table, ...]:
    """Write everything, the manifest last; gives the tables worth showing at the end."""
    # Drawing is imported only where something is drawn: matplotlib takes a second to load.
    from pipeline.report.chart import chart_png

    job = finished.job
    steps, left_out = finished.steps(), job.left_out()
    items = final_items(job.plan, finished.model)
    tables = (
        *all_tables(steps, job.config, left_out, items=items),
        shard_table(job.plan),
        error_table(finished.errors),
    )
    documents = {
        "budget.png": chart_png(steps, job.name),
        "budget.md": budget_markdown(
            job.name, job.layout, tables, left_out, chart="budget.png"
        ).encode(),
        "budget.json": _json(budget_json(steps, job.config, left_out, items=items)),
        "recipe.json": _json(_recipe(job)),
        f"{job.name}.inventory.json": _json(_inventory(finished)),
        f"{job.name}.inv.json": _json(planner_array(job.plan)),
    }
    for name, content in documents.items():
        files.write_whole(job.folder / name, content)
    digests = {
        **{s.file_name: r.file_sha256 for s, r in _shards(finished)},
        **{name: sha256(content) for name, content in documents.items()},
    }
    files.write_whole(job.folder / SUMS, sums_text(digests))
    sizes = {name: len(content) for name, content in documents.items()}
    files.write_whole(job.folder / MANIFEST, _json(_manifest(finished, sizes, digests)))
    return (overview_table(steps, job.config), error_table(finished.errors))


def _shards(finished: Finished) -> list[tuple[PlannedShard, ShardRecord]]:
    return list(zip(finished.job.plan.shards, finished.records, strict=True))


def _inventory(finished: Finished) -> dict[str, object]:
    job = finished.job
    digests = {name: digest for r in finished.records for name, digest in r.tensors.items()}
    return inventory(
        job.plan,
        digests,
        [record.file_sha256 for record in finished.records],
        source=_source(job),
        recipe={"name": job.recipe.name, "layout": job.layout.value},
    )


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
        "types": {tensor.name: tensor.type.name for tensor in job.plan.tensors},
    }


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
        for shard, record in _shards(finished)
    ]
    documents = [{"file": name, "nbytes": n, "sha256": digests[name]} for name, n in sizes.items()]
    return {
        "schema": SCHEMA,
        "spec": job.spec,
        "name": job.name,
        "layout": job.layout.value,
        "source": _source(job),
        "recipe": job.recipe.model_dump(mode="json"),
        "quantizer": f"{job.quantizer.name} {job.quantizer.version}",
        "n_tensors": len(job.plan.tensors),
        "tensor_nbytes": job.plan.data_nbytes,
        "file_nbytes": job.plan.nbytes,
        "types": dict(Counter(t.type.name for t in job.plan.tensors)),
        "errors": [asdict(error) for error in finished.errors],
        "files": [*shards, *documents],
    }


def _json(document: object) -> bytes:
    return json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"
