"""The names of policies: the built-in ones, and those that other packages register. `scorers.factory` makes the scorers."""

from importlib.metadata import EntryPoint, entry_points

BUILT_IN = ("qk", "qk-zmax", "qk-cos", "lru", "drafter", "crosstok")

GROUP = "pyllama_kvflash.scorers"
"""Entry points of this group name a callable without arguments that returns a Scorer."""


def policy_names() -> tuple[str, ...]:
    """All that `--kvflash-policy` takes: the built-in ones first."""
    return (*BUILT_IN, *sorted(registered().keys() - set(BUILT_IN)))


def registered() -> dict[str, EntryPoint]:
    """What other packages register, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}
