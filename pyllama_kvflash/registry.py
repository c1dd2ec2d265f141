"""The names of policies: built-in ones, and those that other packages register. scorers.factory makes the scorers."""

from importlib.metadata import EntryPoint, entry_points

from pyllama_kvflash.errors import UsageError

BUILT_IN = ("auto", "fresh", "qk", "qk-cos", "lru", "drafter", "crosstok")

REMOVED = {"qk-zmax": "give qk, which keeps more of what an answer needs, or leave the policy out"}
"""Removed policies, each with what to do instead."""

GROUP = "pyllama_kvflash.scorers"
"""Group of entry points, each of which names a callable without arguments that returns a Scorer."""


def policy_names() -> tuple[str, ...]:
    """Return all names that `policy` takes, the built-in ones first."""
    return (*BUILT_IN, *sorted(registered().keys() - set(BUILT_IN)))


def check_not_removed(name: str) -> None:
    """Raise UsageError for a policy that was removed."""
    if name in REMOVED:
        msg = f"`policy` {name!r} was removed: {REMOVED[name]}"
        raise UsageError(msg)


def registered() -> dict[str, EntryPoint]:
    """Return the entry points that other packages register, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}
