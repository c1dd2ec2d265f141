"""Make the scorer of a policy."""

from importlib.metadata import EntryPoint

from pyllama_kvflash import registry
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Model
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import SCORERS, Scorer
from pyllama_kvflash.scorers.reader import OpenEngine, Reader, find_scorer_model


def query_of(options: Options) -> tuple[str, str]:
    """Return the name and the query of a policy's scorer, without loading its model. Raises UsageError."""
    policy = options.policy
    if policy in registry.BY_MODEL:
        return str(policy), Reader.query
    scorer = _made(policy) if isinstance(policy, str) else policy
    return scorer.name, scorer.query


def make_scorer(options: Options, model: Model, open_engine: OpenEngine) -> Scorer:
    """Return the scorer of a policy.

    model: the target. A scorer's model is searched for next to it.
    open_engine: loads the scorer's model.

    Raises UsageError if the scorer's model is not found, or if the registered object is not a scorer.
    """
    policy = options.policy
    if policy in registry.BY_MODEL:
        found = find_scorer_model(options.scorer_model, model.path)
        return Reader(found, model, options, open_engine, retokenize=policy == "crosstok")
    return _made(policy) if isinstance(policy, str) else policy


def _made(policy: str) -> Scorer:
    """Return the scorer of a policy without a model."""
    return SCORERS[policy]() if policy in SCORERS else _load(registry.registered()[policy])


def _load(point: EntryPoint) -> Scorer:
    where = f"policy {point.name!r}, which {point.value} registers,"
    try:
        scorer = point.load()()
    except Exception as err:  # third-party code
        msg = f"{where} cannot be loaded: {type(err).__name__}: {err}"
        raise UsageError(msg) from err
    if not isinstance(scorer, Scorer):
        msg = f"{where} gave a {type(scorer).__name__}: it must have name, summary, query and score()"
        raise UsageError(msg)
    return scorer
