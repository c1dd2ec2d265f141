"""Policies by name: the built-in ones, and those that other packages register."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Model
from pyllama_kvflash.policy import Lru, Qk, QkCos, QkZmax, Scorer

if TYPE_CHECKING:
    from pyllama_kvflash.options import Options

BUILT_IN = ("qk", "qk-zmax", "qk-cos", "lru", "drafter", "crosstok")

GROUP = "pyllama_kvflash.scorers"
"""Entry points of this group name a callable without arguments that returns a Scorer."""


def policy_names() -> tuple[str, ...]:
    """All that `--kvflash-policy` takes: the built-in ones first."""
    return (*BUILT_IN, *sorted(_registered().keys() - set(BUILT_IN)))


def make_scorer(options: "Options", model: Model) -> Scorer:
    """The scorer of a policy. model: the target, next to which a drafter is looked for.

    Raises UsageError: no such policy, no drafter found, or what was registered is no scorer.
    """
    policy = options.policy
    if not isinstance(policy, str):
        return policy
    o = options
    built_in: dict[str, Callable[[], Scorer]] = {
        "qk": lambda: Qk(o.qk_summary, o.qk_query, o.qk_rerank),
        "qk-zmax": lambda: QkZmax(o.qk_summary, o.qk_aggregate, o.qk_query, o.qk_rerank),
        "qk-cos": QkCos,
        "lru": Lru,
    }
    if policy in built_in:
        return built_in[policy]()
    if policy in ("drafter", "crosstok"):
        from pyllama_kvflash.drafter import Drafter, find_drafter  # noqa: PLC0415 (it is an engine of its own)

        return Drafter(find_drafter(options.draft_model, model.path), model, options, retokenize=policy == "crosstok")
    return _load(_registered()[policy])


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> Scorer:
    where = f"policy {point.name!r}, which {point.value} registers,"
    try:
        scorer = point.load()()
    except Exception as err:  # somebody else's code
        msg = f"{where} cannot be loaded: {type(err).__name__}: {err}"
        raise UsageError(msg) from err
    if not isinstance(scorer, Scorer):
        msg = f"{where} gave a {type(scorer).__name__}: it must have name, summary, query and score()"
        raise UsageError(msg)
    return scorer
