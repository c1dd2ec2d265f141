"""Warnings about options that do not suit the model, the machine, or each other."""

from pyllama_kvflash.native import Model, devices
from pyllama_kvflash.options import Options, cores


def untrained(model: Model, n_ctx: int) -> tuple[str, ...]:
    """Return warnings about a context beyond the model's reach (its training context, scaled by RoPE), and about RoPE options that are
    meant for longer contexts or do nothing for this model.
    """
    return _beyond(model, n_ctx) + _without_yarn(model)


def _beyond(model: Model, n_ctx: int) -> tuple[str, ...]:
    n_most = model.n_reach
    if n_ctx > n_most:
        scaled = f", scaled by `rope.scale` to {n_most:,}" if n_most > model.n_ctx_train else ""
        trained = f"the {model.n_ctx_train:,} the model was trained on{scaled}"
        hint = "" if scaled else "; `rope.scaling` yarn and `rope.scale` are for models that support them"
        return (f"a context of {n_ctx:,} tokens is longer than {trained}: text beyond that may come out wrong{hint}",)
    if model.rope.scale > 1 and n_ctx <= model.n_ctx_train:
        beyond = f"`rope.scale` is for contexts beyond the {model.n_ctx_train:,} tokens of training"
        return (f"{beyond}, and this one has {n_ctx:,}: it costs quality here; leave it out, or give a larger `n_ctx`",)
    return ()


def _without_yarn(model: Model) -> tuple[str, ...]:
    rope = model.rope
    given = [name for name in ("beta_slow", "beta_fast") if getattr(rope, name) != -1] + ["orig_ctx"] * bool(
        rope.orig_ctx
    )
    theirs = model.meta(f"{model.meta('general.architecture')}.rope.scaling.type")
    if not given or "yarn" in (rope.scaling, theirs) or rope.ext_factor > 0:
        return ()
    return (
        f"`rope.{given[0]}` does nothing: it belongs to YaRN, which this model does not use; give `rope.scaling` yarn, or leave it out",
    )


def idle(options: Options, n_pool: int | None) -> tuple[str, ...]:
    """Return warnings about options that do not help on this machine, or without a pool."""
    res, n = [], cores()
    if options.meter_share and n_pool is None and options.pool != "off":
        res.append("there is no pool, so the meter has nothing to compare: every token is the full cache's")
    if options.n_gpu_layers > 0 and not any(device.gpu for device in devices()):
        res.append(f"`n_gpu_layers` {options.n_gpu_layers} does nothing: there is no GPU, or this build cannot use it")
    if (options.n_threads or 0) > n:
        res.append(
            f"`n_threads` is {options.n_threads}, and this process may use {n} cores: more threads wait for each other"
        )
    return tuple(res)
