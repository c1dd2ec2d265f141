"""Create the scorer of a policy."""

from collections.abc import Callable
from importlib.metadata import EntryPoint

from pyllama_kvflash import registry
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Model
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Fresh, Lru, Qk, QkCos, Scorer
from pyllama_kvflash.scorers.reader import OpenEngine, Reader, find_scorer_model


def make_scorer(options: Options, model: Model, open_engine: OpenEngine) -> Scorer:
    """Return the scorer of a policy.

    model: the target. A scorer's model is searched for next to it.
    open_engine: loads the scorer's model.

    Raises UsageError if there is no model for it, or if the registered object is not a scorer.
    """
    policy = options.policy
    if not isinstance(policy, str):
        return policy
    o = options
    built_in: dict[str, Callable[[], Scorer]] = {
        "qk": Qk,
        "qk-cos": QkCos,
        "lru": Lru,
        "fresh": Fresh,
        "drafter": lambda: Reader(find_scorer_model(o.scorer_model, model.path), model, o, open_engine),
        "crosstok": lambda: Reader(
            find_scorer_model(o.scorer_model, model.path), model, o, open_engine, retokenize=True
        ),
    }
    return built_in[policy]() if policy in built_in else _load(registry.registered()[policy])


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
