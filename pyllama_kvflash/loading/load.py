"""Loading: from a path and options to a model and its contexts, with every possible check before the first token."""

import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyllama_kvflash.errors import KVFlashError, ModelError, NativeError, UnsupportedError, UsageError
from pyllama_kvflash.files import model_parts
from pyllama_kvflash.loading.bits import choices, first_that_fits, free_bytes, may_lodge
from pyllama_kvflash.loading.load_plan import LoadPlan, Tap, coded, context_options, plan_contexts
from pyllama_kvflash.loading.memory import check_memory, device_memory, types_of
from pyllama_kvflash.loading.need import needs_of, program_bytes
from pyllama_kvflash.loading.panes import held_bytes, open_exact
from pyllama_kvflash.loading.placement import on_host, place
from pyllama_kvflash.loading.refusals import ON_DISK, of_codes, of_memory, of_model
from pyllama_kvflash.loading.warned import idle, untrained
from pyllama_kvflash.native import Context, Model, PoolParams, add_rpc, devices, row_bytes, why_unloadable
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import Geometry, Scorer
from pyllama_kvflash.policy.coarse import FORMS
from pyllama_kvflash.policy.device import DeviceBytes
from pyllama_kvflash.policy.experts import Placement
from pyllama_kvflash.policy.fresh import Heads
from pyllama_kvflash.pool.exact import ExactReader
from pyllama_kvflash.pool.sequence import PooledSequence
from pyllama_kvflash.pool.shared import Shared
from pyllama_kvflash.pool.speculation import DraftModel, Drafts
from pyllama_kvflash.scorers.factory import make_scorer
from pyllama_kvflash.scorers.reader import OpenEngine

_GGUF_MAGIC = b"GGUF"
_NO_MEMORY = "none"
_NO_LAYER = "no layer is pooled"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, its context, and the sequences of that context.

    n_pool: cells of the pool; None: the full cache.
    n_batch: the largest batch, in tokens, that goes through the pool or the full cache.
    full_bytes: full-attention KV of the whole context, over all sequences.
    shared: what the pool's sequences share; None with the full cache.
    exact: reads prompts that the pool cannot hold; None: they go through the pool.
    drafts: each sequence's; empty without speculative decoding.
    memory: each device's memory with a full context.
    parts: closes everything.
    """

    model: Model
    options: Options
    n_pool: int | None
    n_batch: int
    full_bytes: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    shared: Shared | None
    exact: ExactReader | None
    sequences: tuple[PooledSequence, ...]
    drafts: tuple[Drafts, ...]
    memory: tuple[DeviceBytes, ...]
    parts: ExitStack

    @property
    def ctx(self) -> Context:
        """The context, pooled or stock."""
        return self.sequences[0].ctx

    def close(self) -> None:
        """Free the sequences, the contexts and the model. Harmless when called again."""
        self.parts.close()


@dataclass(frozen=True, slots=True)
class Probe:
    """Facts about a model's memory. refusal: why it cannot be pooled, and the alternative; None if it can."""

    memory_class: str
    layers: tuple[int, ...]
    geometry: Geometry
    refusal: str | None
    uncoded: str | None = None  # why it cannot have codes, and so no policy "fresh"; None if it can


def load(
    path: Path, options: Options, open_engine: OpenEngine, progress: Callable[[float], None] | None = None
) -> Loaded:
    """Load a model and make its context.

    open_engine: loads a scorer's model, if the policy has one.
    progress: called with 0.0 to 1.0 during loading.

    Raises UsageError, ModelError, UnsupportedError and NativeError.
    """
    check_file(path)
    if options.spec is not None and options.spec.model is not None:
        check_file(Path(options.spec.model))
    for server in options.rpc:
        add_rpc(server)
    placed = placement(path, options)
    options = replace(options, n_cpu_moe=placed.n_cpu_moe, pool=placed.pool)
    free = free_bytes()
    with ExitStack() as parts:
        model = Model.load(path, **where(options), on_host=on_host(placed), progress=progress)
        parts.enter_context(model)
        return _load(model, _resolved(model, options), placed, open_engine, free, parts)


def where(options: Options) -> dict[str, Any]:
    """Return the devices of a model, as arguments of Model.load()."""
    mtp = options.spec is not None and options.spec.kind == "mtp" and options.spec.model is None
    return {**options.where, "mtp": mtp}


def placement(path: Path, options: Options) -> Placement:
    """Decide which experts stay on the host, and which pool to request. Raises the errors of load()."""
    if options.n_cpu_moe == 0:
        return Placement(0, options.pool)
    with Model.load(path, **where(options), no_alloc=True) as model:
        return _place(model, _resolved(model, options))


def _resolved(model: Model, options: Options) -> Options:
    if model.refusal is not None:
        msg = f"{model.path} cannot be run: {of_model(model.refusal)}"
        raise UnsupportedError(msg)
    return options.resolved(model.n_ctx_train)


def check_runs(model: Model, options: Options) -> None:
    """Raise UnsupportedError for a model that cannot be run with these options."""
    _probed(model, _resolved(model, options))


def _place(model: Model, options: Options) -> Placement:
    """Place experts for the most accurate codes that fit. Codes share the panes' memory if that keeps more experts on the GPU."""
    seen, best, coarse = _probed(model, options), None, ""
    for tried in bits_of(options, seen):
        if best and tried.coarse != coarse:
            break
        placed = place(model, seen.geometry, tried, options.shape.floor(options.n_batch))
        if placed.fits and (best is None or placed.n_cpu_moe < best.n_cpu_moe):
            best, coarse = placed, tried.coarse
    return best or placed


def _probed(model: Model, options: Options) -> Probe:
    seen = probe(model, options)
    if seen.memory_class == _NO_MEMORY:
        msg = f"{model.path} cannot be run: {seen.refusal}"
        raise UnsupportedError(msg)
    if seen.refusal is not None and options.pool != "off":
        msg = f"{model.path} cannot be run with a pool: {seen.refusal}"
        raise UnsupportedError(msg)
    check_codes(model, options, seen)
    return seen


def check_codes(model: Model, options: Options, seen: Probe) -> None:
    """Raise UnsupportedError if the options ask for codes or policy "fresh", and the model cannot have codes."""
    if seen.uncoded is None or options.pool == "off":
        return
    given = options.coarse not in ("auto", "off")
    if given or options.policy == "fresh":
        what = f"`coarse` {options.coarse}" if given else "policy fresh"
        msg = f"{model.path} cannot be run with {what}: {of_codes(seen.uncoded)}"
        raise UnsupportedError(msg)


def _load(
    model: Model,
    options: Options,
    placed: Placement,
    open_engine: OpenEngine,
    free: Mapping[str, int],
    parts: ExitStack,
) -> Loaded:
    """Make the contexts, with the most accurate codes that fit in memory. free: as for bits.fits()."""
    program, seen = program_bytes(model), _probed(model, options)

    def opened(tried: Options) -> Loaded:
        with ExitStack() as its:
            return _opened(model, seen, tried, placed, open_engine, program, its)

    found = first_that_fits(options, bits_of(options, seen), free, opened)
    parts.push(found.parts)
    other = _other_policy(options, found.options, seen) if found.n_pool is not None else ()
    if found.options.n_ubatch < options.n_ubatch:
        other += (f"`n_ubatch` {found.options.n_ubatch}, not {options.n_ubatch}: more would leave no memory for codes",)
    return replace(found, notes=found.notes + other, parts=parts.pop_all())


def _opened(
    model: Model,
    seen: Probe,
    options: Options,
    placed: Placement,
    open_engine: OpenEngine,
    program: int,
    parts: ExitStack,
) -> Loaded:
    """Make the contexts. options: with `coarse` and the policy resolved. parts: receives everything that is opened."""
    ground = _Loading(model, seen.geometry, options, open_engine, parts)
    plan = plan_contexts(seen.geometry, options, ground, model.fingerprint)
    size, pool = plan.size, plan.pool
    if pool is None:
        n_all = options.n_ctx * options.n_parallel
        memory = device_memory(seen.geometry, replace(options, pool="off"))
        check_memory(memory, n_all, "the full cache", "a pool (`pool`) or a smaller `n_ctx`")
    lodges = ground.exact.ctx if ground.exact and options.codes_in_panes else None
    ctx = parts.enter_context(open_context(model, options, plan, lodges))
    draft_model = _draft_model(ctx, options, options.drafter_batch(plan.n_batch))
    if draft_model is not None:
        parts.callback(draft_model.close)
    shared = Shared(ctx, options, size.n_pool) if size.n_pool is not None else None
    if shared is not None:
        parts.callback(shared.close)
    drafts: list[Drafts] = []
    sequences: list[PooledSequence] = []
    for i in range(options.n_parallel):
        own = ctx.sequence(i)
        scorer = ground.scorers[i] if ground.scorers else None
        sequence = PooledSequence(own, options, sequences, shared, scorer, ground.exact)
        parts.callback(sequence.close)
        if draft_model is not None:
            drafts.append(Drafts(draft_model, own))
            parts.callback(drafts[-1].close)
    at = range(len(devices()))
    drafter = drafts[0].n_bytes(at, options.n_parallel) if drafts else [0 for _ in at]
    n_cells = ctx.n_ctx * (options.n_parallel if pool else 1)  # a stock context counts all sequences
    return Loaded(
        model,
        options,
        size.n_pool,
        plan.n_batch,
        seen.geometry.token_bytes(row_bytes, *types_of(options)) * n_cells,
        placed.notes + size.notes + ground.notes,
        placed.warnings
        + ground.warnings
        + size.warnings
        + untrained(model, options.n_ctx)
        + idle(options, size.n_pool),
        shared,
        ground.exact,
        tuple(sequences),
        tuple(drafts),
        needs_of(seen.geometry, options, size.n_pool, ctx, ground.exact_bytes(), drafter, program),
        parts.pop_all(),
    )


class _Loading:
    """The Ground of a plan that is executed: measures free memory, and opens the exact pass. parts: receives what is opened."""

    def __init__(
        self, model: Model, geometry: Geometry, options: Options, open_engine: OpenEngine, parts: ExitStack
    ) -> None:
        self.scorers: list[Scorer] = []
        self.exact: ExactReader | None = None
        self.notes: tuple[str, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self._model, self._geometry, self._options = model, geometry, options
        self._open_engine = open_engine
        self._parts = parts

    def memory(self) -> list[DeviceBytes]:
        return device_memory(self._geometry, self._options, lodged=self.exact is not None)

    def asks(self) -> tuple[str, str]:
        for _ in range(self._options.n_parallel):
            self.scorers.append(make_scorer(self._options, self._model, self._open_engine))
        return self.scorers[0].name, self.scorers[0].query

    def read_exactly(self, n_pane: int, tap: Tap) -> bool:
        self.exact, self.notes, self.warnings = open_exact(self._model, self._geometry, self._options, n_pane, tap)
        if self.exact is not None:
            self._parts.callback(self.exact.close)
        return self.exact is not None

    def exact_bytes(self) -> dict[int, DeviceBytes]:
        return held_bytes(self.exact.ctx, self._geometry, self._options) if self.exact else {}


def _draft_model(ctx: Context, options: Options, n_batch: int) -> DraftModel | None:
    if options.spec is None:
        return None
    return DraftModel(
        options.spec,
        ctx,
        n_batch=n_batch,
        n_ubatch=min(options.n_ubatch, n_batch),
        where=options.where,
        n_threads=options.n_threads or 1,
    )


def open_context(model: Model, options: Options, plan: LoadPlan, lodges: Context | None = None) -> Context:
    """Make the context of a pool, or of the full cache. lodges: as for Context. Raises the errors of Context()."""
    pool = plan.pool
    try:
        return Context(
            model,
            n_ctx=options.n_ctx,
            n_batch=plan.n_batch,
            n_ubatch=min(options.n_ubatch, plan.n_batch),
            pool=pool,
            lodges=lodges,
            **context_options(options),
        )
    except KVFlashError as err:
        kind = f"a pool of {pool.n_pool:,} tokens" if pool else "the full cache"
        types = f"cache types {options.type_k}/{options.type_v}"
        refused = pool is not None and pool.coarse_k and isinstance(err, UnsupportedError)
        said = str(err)  # the error itself would hold the model until the next garbage collection
        why = of_codes(said) if refused else said
        msg = f"no context of {options.n_ctx:,} tokens with {kind} and {types} can be made: {why}"
        raise type(err)(msg) from None


def bits_of(options: Options, seen: Probe) -> tuple[Options, ...]:
    """Return the options to try, as bits.choices() does."""
    possible = seen.uncoded is None and bool(seen.geometry.rows)
    return choices(options, possible=possible, lodged=may_lodge(options, seen.geometry))


def _other_policy(given: Options, options: Options, seen: Probe) -> tuple[str, ...]:
    """Return a note if policy "auto" became qk, unless the options turn codes off."""
    if given.policy != "auto" or options.policy == "fresh" or given.coarse == "off":
        return ()
    return (f"policy qk, not fresh: {seen.uncoded or 'there is no memory for codes of all positions'}",)


def probe(model: Model, options: Options) -> Probe:
    """Probe a model's memory with small contexts: a stock one, and pools with and without codes.

    Raises the errors of Context() for the stock context.
    """
    small = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64}
    types: dict[str, Any] = {"type_k": options.type_k, "type_v": options.type_v, "flash_attn": options.flash_attn}
    types["offload_kqv"] = options.kv_offload
    try:
        with Context(model, **small, **types) as ctx:  # type: ignore[arg-type]
            memory_class = ctx.memory_class
            layers = ctx.layers()
    except KVFlashError as err:
        msg = f"{model.path} cannot be run with cache types {options.type_k}/{options.type_v}: {err}"
        raise type(err)(msg) from None
    kind = "encoder" if memory_class == _NO_MEMORY else model.refusal
    refusal = of_model(kind) if kind else None
    rows = tuple((layer.n_embd_k, layer.n_embd_v) for layer in layers)
    heads = tuple(map(Heads.of, layers))
    geometry = Geometry(rows, tuple(layer.device for layer in layers), heads)
    seen = Probe(memory_class, tuple(layer.il for layer in layers), geometry, refusal)
    pool = PoolParams(n_pool=256)
    bits = coded(pool, replace(options, policy="qk", coarse=FORMS[0]))
    uncoded = _refused(model, pool=bits, **small, **types) if layers else _NO_LAYER
    if uncoded is not None and (error := _refused(model, pool=pool, **small, **types)):
        refusal = refusal or of_memory(memory_class, len(layers), error)
    if options.disk is not None and _on_gpu(geometry):
        uncoded = uncoded or ON_DISK.reason
    return replace(seen, refusal=refusal, uncoded=uncoded)


def _on_gpu(geometry: Geometry) -> bool:
    """Return whether a GPU holds the rows of any layer."""
    return any(devices()[i].gpu for i in geometry.devices)


def _refused(model: Model, **params: Any) -> str | None:
    """Return the error that making a context with these parameters gives; None if it can be made."""
    try:
        Context(model, **params).close()
    except (UnsupportedError, NativeError) as err:
        return str(err)
    return None


def check_file(path: Path) -> None:
    """Raise UsageError or ModelError for a path that cannot be a GGUF model. The message is one sentence."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            msg = f"{path} is a directory: give the .gguf file in it"
            raise UsageError(msg)
        if not stat.S_ISREG(mode):  # opening a pipe would block for ever
            msg = f"{path} is not a regular file: give the path of a .gguf model"
            raise UsageError(msg)
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        msg = f"{path} does not exist: give the path of a .gguf model"
        raise UsageError(msg) from None
    except OSError as err:
        msg = f"{path} cannot be read: {err.strerror}"
        raise UsageError(msg) from None
    if magic != _GGUF_MAGIC:
        what = "is empty" if not magic else f"begins with {magic!r}, not {_GGUF_MAGIC!r}"
        msg = f"{path} is not a GGUF model: it {what}; convert it with llama.cpp, or download a .gguf file"
        raise ModelError(msg)
    if any(part.exists() and not part.is_file() for part in model_parts(path)) and (why := why_unloadable(path)):
        msg = f"{path} cannot be loaded: {why}"  # checked here, because opening a pipe would block for ever
        raise ModelError(msg)
