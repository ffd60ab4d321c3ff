"""A job whose recipe has a budget: what is free in it, and the jobs that it might become."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from pipeline.errors import RecipeError
from pipeline.model.engines import engines_of
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_form
from pipeline.quant.types import GgmlType
from pipeline.recipe.budget_table import BudgetTable
from pipeline.recipe.choose import choose
from pipeline.recipe.rules import Rules, wording
from pipeline.solve.answer import solved_recipe
from pipeline.solve.candidates import Group, groups_of
from tasks.job import Job


class BudgetJob(Job):
    """A job whose recipe has a budget, and the jobs of what it might become."""

    @property
    def budget(self) -> BudgetTable:
        """What the recipe asks for.

        Raises:
            RecipeError: It asks for nothing.
        """
        if self.recipe.budget is None:
            raise RecipeError(
                f"recipe {self.recipe.name} has no budget to solve",
                expected="the table [budget]",
                next_step="RunRecipe runs it as it is.",
            )
        return self.recipe.budget

    @property
    def targets(self) -> tuple[TargetTensor, ...]:
        """The tensors of the target."""
        return self._targets

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """What is free, and what it may become."""
        self.budget  # noqa: B018 - raises where there is none
        return groups_of(self.recipe, self.targets, self._why_not)

    @cached_property
    def fixed(self) -> dict[str, GgmlType]:
        """The types of everything else.

        Raises:
            RecipeError: A tensor is to be as in the source, and no type is that.
        """
        free = {target.name for group in self.groups for target in group.targets}
        fixed = {}
        for target in self.targets:
            choice = choose(self.recipe, target)
            if target.name in free:
                continue
            if choice.type is None:
                lacking = wording("no_source_type", target, None)
                raise RecipeError(
                    f"recipe {self.recipe.name}: {choice.reason} asks for{lacking}",
                    tensor=target.name,
                )
            fixed[target.name] = choice.type
        return fixed

    @cached_property
    def fixed_by(self) -> dict[str, str]:
        """The entry of the recipe that gives each fixed tensor its type."""
        targets = (target for target in self.targets if target.name in self.fixed)
        return {target.name: choose(self.recipe, target).reason for target in targets}

    def become(self, types: Mapping[str, GgmlType]) -> Job:
        """The job of the recipe that gives these types to all tensors."""
        job = Job(self.parameters)
        job.recipe = solved_recipe(self.recipe, self.targets, types)
        job.source, job.grafts, job.checkpoint = self.source, self.grafts, self.checkpoint
        job.keep, job.weighing = self.keep, self.weighing
        return job

    def _why_not(self, target: TargetTensor, ggml_type: GgmlType) -> str | None:
        rule = Rules(self.recipe, self.weighing.knows).broken(target, ggml_type)
        if rule is not None:
            return wording(rule, target, ggml_type)
        if not engines_of(target_form(self.config, self.layout), {ggml_type}):
            return f" {ggml_type.name}, which no engine reads in the {self.layout} layout"
        return None


def draft_nbytes(job: Job) -> int:
    """Bytes of the draft's file, where the job makes one."""
    return sum(plan.nbytes for plan in job.plans if plan.form.is_draft)
