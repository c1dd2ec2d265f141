"""The names of policies: built-in ones, and those that other packages register. scorers.factory creates the scorers."""

from importlib.metadata import EntryPoint, entry_points

from pyllama_kvflash.policy import SCORERS

BY_MODEL = ("drafter", "crosstok")
"""Policies that read a scorer model: scorers.reader.Reader scores for them."""

BUILT_IN = ("auto", *SCORERS, *BY_MODEL)

GROUP = "pyllama_kvflash.scorers"
"""Group of entry points, each of which names a callable without arguments that returns a Scorer."""


def policy_names() -> tuple[str, ...]:
    """Return all names that `policy` takes, the built-in ones first."""
    return (*BUILT_IN, *sorted(registered().keys() - set(BUILT_IN)))


def registered() -> dict[str, EntryPoint]:
    """Return the entry points that other packages register, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}
