"""What a recipe cost in accuracy where it was measured: a word beside every verdict, which is about time."""

from __future__ import annotations

from horovod_sparse.feedback import BestFeedback, ErrorFeedback, MomentumCorrection, Recipe

#: that `--optimizer` takes
OPTIMIZERS = ("sgd", "momentum", "adamw")
#: from here on a residual is sent before it is old; below it momentum and AdamW lose
DENSE_ENOUGH = 0.1
#: small models at density 0.01 with error feedback beside dense ones: a perceptron with every schedule
#: (docs/measurements/schedules.json), a GPT of 0.84 million parameters (gpt.json)
_MEASURED = {
    "sgd": "SGD without momentum kept up: a perceptron ended 1.1 points behind to 2.1 before dense",
    "momentum": "momentum lost 1.4 to 3.9 points where the rate ended at 0, and up to 9.8 where it did not",
    "adamw": "AdamW lost 2.4 to 6.8 points, and a small GPT 0.68 bits per byte (0.24 at density 0.05)",
}
#: the feedback that goes with an optimizer in place of "error"
BETTER = {"momentum": "best", "adamw": "adam"}
_REMEDIES = {
    "momentum": "write feedback='best', or SGD without momentum at rate / (1 - momentum), which lost nothing",
    "adamw": "write feedback='adam', which normalizes before it selects",
}


def loses(recipe: Recipe, optimizer: str | None) -> str:
    """What momentum or AdamW behind error feedback cost at low densities; empty for all else."""
    sparsifier = recipe.sparsifier
    low = sparsifier.has_density and sparsifier.density < DENSE_ENOUGH
    if optimizer not in _REMEDIES or not low or not isinstance(recipe.feedback, ErrorFeedback):
        return ""
    return f"in small trainings at density 0.01 {_MEASURED[optimizer]}"


def remedy(optimizer: str) -> str:
    """What to write in place of it."""
    return _REMEDIES[optimizer]


def accuracy(recipe: Recipe, optimizer: str | None) -> str:
    """A sentence for the verdict."""
    if told := loses(recipe, optimizer):
        return f"{told}: {remedy(str(optimizer))}"
    if isinstance(recipe.feedback, MomentumCorrection):
        known = (
            "switch off the optimizer's own momentum; so a perceptron lost 1.8 and 3.0 points with restarts"
        )
    elif isinstance(recipe.feedback, BestFeedback) and optimizer == "momentum":
        known = f"momentum goes, and {_MEASURED['sgd']} in small trainings at density 0.01"
    elif not isinstance(recipe.feedback, ErrorFeedback):
        known = "docs/results.md has feedbacks other than 'error'"
    elif not recipe.sparsifier.has_density or recipe.sparsifier.density >= DENSE_ENOUGH:
        known = "docs/results.md has quantizers and densities from 0.1 on"
    elif optimizer == "sgd":
        known = f"in small trainings at density 0.01 {_MEASURED['sgd']}"
    else:
        every = "; ".join(_MEASURED.values())
        known = f"in small trainings at density 0.01 {every}. --optimizer says what to write"
    return f"unknown for large models; {known}"
