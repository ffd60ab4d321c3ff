"""What a person runs: `luigi --module recipes <Task>`.

    RunRecipe      checkpoint -> verified GGUF shards, reports, inventory, manifest
    RunRecipes     several recipes in one pass over the checkpoint
    TryLayers      a few layers of the same job, to see what they lose before the rest is fetched
    PlanRecipe     the same job from headers alone: exact bytes, nothing written
    SolveBudget    a recipe with a limit of bytes -> the types that lose the least within it
    InspectSource  index, shards and config of a checkpoint held against each other
    CheckEngram    engram row counts and hash keys of a checkpoint or a GGUF
    Relayout       a finished model to the other layout, without requantizing
    ObserveExperts saliency measured on the checkpoint itself, over a text (PlanObservation: what it
                   will take, nothing written)
    SelectExperts  saliency -> a keep list: the experts that stay, and a page that says why
    RecoverExperts the keep list of a published pruned checkpoint, from its routers
    CutExperts     a finished model without some of its experts, by one keep list or several
    PlanCut        the same from headers alone: exact bytes, nothing written
    CutImatrix     an importance matrix for such a model
    CutCheckpoint  a checkpoint without some of its experts, still one: in the released form
                   (PlanCheckpointCut: from headers alone, nothing written)
    VerifyOutput   a finished output, hashed again

From here to a written block: `RunRecipe` requires a `tasks.shard.WriteShard` per shard of the
`pipeline.plan.Plan`; that hands its blocks to `pipeline.fill.fill_blocks`, which decodes, quantizes
and writes row blocks through `pipeline.gguf.part.ShardPart`.

Importing this module sets luigi's defaults (see `tasks.runtime`) where the user's luigi.cfg is
silent: real exit codes, a local scheduler, children that end with their parent.
"""

from tasks.runtime import apply_defaults, end_children_on_sigterm

apply_defaults()
end_children_on_sigterm()

from tasks.cut.checkpoint import CutCheckpoint, PlanCheckpointCut  # noqa: E402
from tasks.cut.experts import CutExperts  # noqa: E402 - luigi reads its settings when tasks are defined
from tasks.cut.imatrix import CutImatrix  # noqa: E402
from tasks.cut.plan import PlanCut  # noqa: E402
from tasks.engram import CheckEngram  # noqa: E402
from tasks.inspect import InspectSource  # noqa: E402
from tasks.keep.recover import RecoverExperts  # noqa: E402
from tasks.keep.select import SelectExperts  # noqa: E402
from tasks.observe.experts import ObserveExperts, PlanObservation  # noqa: E402
from tasks.output import RunRecipe, VerifyOutput  # noqa: E402
from tasks.plan import PlanRecipe  # noqa: E402
from tasks.relayout import Relayout  # noqa: E402
from tasks.solve import SolveBudget  # noqa: E402
from tasks.together import RunRecipes  # noqa: E402
from tasks.trial import TryLayers  # noqa: E402

__all__ = [
    "CheckEngram",
    "CutCheckpoint",
    "CutExperts",
    "CutImatrix",
    "InspectSource",
    "ObserveExperts",
    "PlanCheckpointCut",
    "PlanCut",
    "PlanObservation",
    "PlanRecipe",
    "RecoverExperts",
    "Relayout",
    "RunRecipe",
    "RunRecipes",
    "SelectExperts",
    "SolveBudget",
    "TryLayers",
    "VerifyOutput",
]
