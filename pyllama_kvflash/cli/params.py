"""Option types, and the options that several commands share. Names follow llama.cpp."""

from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from typing import Any

import click
from click.core import ParameterSource

from pyllama_kvflash import removed
from pyllama_kvflash.cli import settings
from pyllama_kvflash.cli.kinds import ByteSize, HostLayers, Layers, LogitBias, Policy, Servers, Spans, Split, TokenCount
from pyllama_kvflash.cli.read import read_text
from pyllama_kvflash.cli.roles import Declared, Harmless, Reads
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import CACHE_TYPES, Sampling, json_grammar
from pyllama_kvflash.options import CHUNKS, FLASH_ATTN, PREFILL, SPEC_KINDS, Spec
from pyllama_kvflash.policy.sizing import AUTO_CAP


def env(name: str) -> str:
    """Return the environment variable of an option of llama.cpp's, which is its own. Ours have KVFLASH_."""
    return f"LLAMA_ARG_{name}"


def resolve(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Options for values of POOL and SCORERS: pins joined, and policy drafter if a scorer model is
    given.
    """
    res = values | settings.take(values, "")
    del res["settings"]
    res["chunk"] = int(res["chunk"])
    prefix, spans = res.pop("pin_prefix"), res.pop("pin_spans")
    res["pins"] = (((0, prefix),) if prefix else ()) + spans
    typed = click.get_current_context().get_parameter_source("policy")
    if res["scorer_model"] and typed == ParameterSource.DEFAULT:
        res["policy"] = "drafter"
    return res


def sampling(values: dict[str, Any], seed: int | None) -> Sampling:
    """Take the options of SAMPLING out of the values. seed: replaces a negative one."""
    given = {f.name: values.pop(f.name) for f in fields(Sampling) if f.name in values}
    given |= settings.take(values, "sampling.")
    texts = given["grammar"], *(values.pop(name) for name in ("grammar_file", "json_schema", "json_schema_file"))
    given["grammar"] = _grammar(*texts)
    return Sampling(**given | ({"seed": seed} if given["seed"] < 0 else {}))


def _grammar(grammar: str, grammar_file: str | None, json_schema: str | None, json_schema_file: str | None) -> str:
    """Return the grammar that the answer keeps to. Raises UsageError."""
    if sum(bool(text) for text in (grammar, grammar_file, json_schema, json_schema_file)) > 1:
        msg = "several grammars are given: give one of --grammar, --grammar-file, --json-schema, --json-schema-file"
        raise UsageError(msg)
    if grammar_file:
        return read_text(grammar_file, "grammar")
    schema = read_text(json_schema_file, "JSON schema") if json_schema_file else json_schema
    return json_grammar(schema, note=_warn) if schema else grammar


def _warn(text: str) -> None:
    click.echo(f"kvflash: warning: {text}", err=True)


def spec(values: dict[str, Any]) -> Spec | None:
    """Take the options of SPEC out of the values. Returns None for no drafting. Raises UsageError."""
    given = {f.name: values.pop(f"spec_{f.name}") for f in fields(Spec) if f"spec_{f.name}" in values}
    set_ = settings.take(values, "spec.")
    if given["kind"] == "off" and set_:
        msg = f"--set spec.{next(iter(set_))} is about drafting, and --spec is off: add --spec, or leave it out"
        raise UsageError(msg)
    given |= set_
    if given["kind"] != "off":
        return Spec(**given)
    if given["model"] is not None:
        msg = f"a drafter is given (-md {given['model']}), but not how it drafts: add --spec {' or '.join(SPEC_KINDS[:-1])}"
        raise UsageError(msg)
    return None


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Join several click options into one decorator. Help shows them in the order given."""
    return lambda f: reduce(lambda g, d: d(g), reversed(decorators), f)


def _gone(name: str) -> Callable[[Any], Any]:
    """Return an option that was removed, which help does not show: a value is an error that says what to do now."""

    def refuse(_ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise UsageError(removed.option(name))

    own = name.removeprefix("--").removeprefix("kvflash-").upper().replace("-", "_")
    says = removed.option(name)
    return click.option(name, hidden=True, expose_value=False, envvar=f"KVFLASH_{own}", callback=refuse, help=says)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    ctx.meta[f"kvflash.{param.name}"] = value  # for cli/fetch.py, so that no command has to pass it on
    return value


MODEL = options(
    click.argument("model_arg", metavar="[MODEL.gguf]", type=Declared(), required=False, default=None),
    click.option("-m", "--model", metavar="FILE", type=Declared(), envvar=env("MODEL"),
                 help="Model path; the same as MODEL.gguf."),
    click.option("-hf", "-hfr", "--hf-repo", "hf_repo", metavar="USER/MODEL[:QUANT]", envvar=env("HF_REPO"),
                 expose_value=False, callback=_keep,
                 help="Hugging Face model repository, downloaded into the Hub's cache: user/model:Q8_0, or"
                 " user/model@revision:Q8_0. Without QUANT: Q4_K_M, else Q8_0, else the repository's first GGUF."),
    click.option("-hff", "--hf-file", "hf_file", metavar="FILE", type=Harmless("it is in the repository"),
                 envvar=env("HF_FILE"), expose_value=False, callback=_keep,
                 help="File of that repository, instead of QUANT."),
    click.option("--offline", is_flag=True, envvar=env("OFFLINE"),
                 expose_value=False, callback=_keep, help="With -hf: use only what was downloaded before."),
)  # fmt: skip

CONTEXT = options(
    click.option("-c", "--ctx-size", "n_ctx", type=TokenCount(), default=0, envvar=env("CTX_SIZE"), show_default=True,
                 help="Context size in tokens, 0: loaded from the model. It costs device memory only without a pool."),
    click.option("-ctk", "--cache-type-k", "type_k", type=click.Choice(list(CACHE_TYPES)), default="f16",
                 show_default=True, envvar=env("CACHE_TYPE_K"), help="KV cache data type for K."),
    click.option("-ctv", "--cache-type-v", "type_v", type=click.Choice(list(CACHE_TYPES)), default="f16",
                 show_default=True, envvar=env("CACHE_TYPE_V"),
                 help="KV cache data type for V; a quantised one needs -fa."),
    click.option("-fa", "--flash-attn", "flash_attn", type=click.Choice(FLASH_ATTN), default="auto",
                 show_default=True, envvar=env("FLASH_ATTN"), help="Flash attention."),
)  # fmt: skip

COMPUTE = options(
    click.option("-b", "--batch-size", "n_batch", type=TokenCount(), default=0, show_default=True,
                 envvar=env("BATCH"), help="Logical batch size: prompt tokens per decode call, which the pool must"
                 " hold. 0: as many as it can hold, at most 2048."),
    click.option("-ub", "--ubatch-size", "n_ubatch", type=TokenCount(), default=512, show_default=True,
                 envvar=env("UBATCH"), help="Physical batch size: prompt tokens computed at once."),
    click.option("-t", "--threads", "n_threads", type=int, default=None, envvar=env("THREADS"),
                 help="CPU threads.  [default: all cores]"),
    click.option("-ngl", "--n-gpu-layers", "n_gpu_layers", metavar="N|all", type=Layers(), default="all",
                 show_default=True, envvar=env("N_GPU_LAYERS"),
                 help="Layers to offload to the GPU, with their KV; the KV of the other layers stays on the host."),
    click.option("-ts", "--tensor-split", "tensor_split", metavar="N0,N1,...", type=Split(), default="",
                 envvar=env("TENSOR_SPLIT"),
                 help="Each GPU's share of the layers and their KV: 3,1 gives the first GPU three quarters of them."
                 " Devices of --rpc come first.  [default: by their free memory]"),
    click.option("-ncmoe", "--n-cpu-moe", "n_cpu_moe", metavar="N|auto", type=HostLayers(), default=0,
                 show_default=True, envvar=env("N_CPU_MOE"),
                 help="Keep the experts (MoE) of the first N layers in host memory; auto: of as few layers as leave"
                 " room for the pool, and without a pool if the full cache fits beside all experts, unless --kvflash is"
                 " a number."),
    click.option("--rpc", metavar="HOST:PORT,...", type=Servers(), default="", envvar=env("RPC"),
                 help="RPC servers whose devices are used, too. Start llama.cpp's rpc-server on each machine; it trusts"
                 " whoever reaches it."),
)  # fmt: skip

POOL = options(
    click.option("--kvflash", "pool", metavar="N|auto|off", type=TokenCount("auto", "off"), default="auto",
                 show_default=True, envvar="KVFLASH_POOL",
                 help="Pool size in tokens; auto: half of the free device memory, at most"
                 " --kvflash-auto-cap; off: the full cache."),
    click.option("--kvflash-prefill", "prefill", type=click.Choice(PREFILL), default="exact", show_default=True,
                 envvar="KVFLASH_PREFILL",
                 help="How a prompt that the pool cannot hold is read. exact: every token sees all before it, as with the"
                 " full cache, layer by layer from host memory; pool: a token sees what the pool holds, which takes less"
                 " memory and costs answers; auto: exact, or pool with a warning if the memory is not there."),
    click.option("--kvflash-opening", "opening", metavar="N", type=TokenCount(), default=-1,
                 show_default="32; 0 with policy fresh by name", envvar="KVFLASH_OPENING",
                 help="The first N tokens of an answer are decoded as with --kvflash-exact, so that short answers are the"
                 " full cache's, and the pool then holds what they looked at. 0: none; -1: the default. Models with a"
                 " recurrent state, and --kvflash-prefill pool, have none."),
    click.option("--kvflash-exact", "exact", is_flag=True, envvar="KVFLASH_EXACT",
                 help="Lossless: draft tokens through the pool, and check them in one pass over the whole text. The answer"
                 " is the full cache's, but for near ties by the width of batches, as in any speculative decoding. How"
                 " many to draft follows from how many are right and what both cost."),
    click.option("--kvflash-meter", "meter", metavar="SHARE", type=float, default=0.0, show_default=True,
                 envvar="KVFLASH_METER",
                 help="Compare tokens with the full cache now and then, in at most this share of the time for prompt and"
                 " answer, and show how many are the same. The text is the same with the meter and without. 0: compare nothing."),
    click.option("--kvflash-min-agreement", "min_agreement", metavar="X", type=float, default=0.0, show_default=True,
                 envvar="KVFLASH_MIN_AGREEMENT",
                 help="Go over to lossless decoding (--kvflash-exact) when fewer tokens than this share, 0 to 1, are the"
                 " full cache's. Implies --kvflash-meter 0.05. 0: never."),
    click.option("--kvflash-panes", "panes", metavar="N", type=int, default=0, show_default="2; all if the"
                 " full cache fits beside an automatic pool, or lossless answers run on a CPU; for lossless answers beside an"
                 " automatic pool, as many as fit", envvar="KVFLASH_PANES",
                 help="Layers whose whole KV is on a device for exact prompts and lossless answers: N - 2 stay there, the"
                 " others are streamed. More make lossless answers faster; 1 takes the least memory, and waits for each"
                 " layer."),
    click.option("--kvflash-auto-cap", "auto_cap", type=TokenCount(), default=AUTO_CAP, show_default=True,
                 envvar="KVFLASH_AUTO_CAP",
                 help="Largest pool that auto chooses, in tokens. A larger pool keeps more, but decodes more slowly."),
    click.option("--kvflash-host", "host_limit", metavar="SIZE", type=ByteSize(), default=None, envvar="KVFLASH_HOST",
                 help="Most host memory for the records of chunks, such as 64GiB or 512M. A prompt that needs more is"
                 " refused before it runs.  [default: what there is]"),
    click.option("--kvflash-disk", "disk", metavar="DIR", type=Harmless("files without a name"), default=None,
                 envvar="KVFLASH_DISK",
                 help="Folder on a fast disk for the records beyond --kvflash-host. They are in unnamed files, which"
                 " vanish with the process."),
    click.option("--kvflash-chunk", "chunk", type=click.Choice([str(c) for c in CHUNKS]), default="64",
                 show_default=True, envvar="KVFLASH_CHUNK", help="Tokens that are paged together."),
    click.option("--kvflash-policy", "policy", metavar="NAME", type=Policy(), default="auto",
                 show_default="auto: fresh where each layer can choose (the CPU so far), else qk",
                 envvar="KVFLASH_POLICY",
                 help="Policy that decides which chunks stay and come back. fresh: each layer chooses its own, by 16"
                 " tokens, for every token that it computes; qk: those that the model's own attention asks for, the same"
                 " for all layers; drafter: those that a small model's attention asks for (crosstok: through its own tokenizer);"
                 " lru: the most recent ones; qk-cos: a published formula, for comparison; or a policy that a package"
                 " registered."),
    click.option("--kvflash-swaps", "swaps", type=TokenCount(), default=0,
                 show_default="32 guests a layer with policy fresh; else 4 chunks", envvar="KVFLASH_SWAPS",
                 help="Most chunks that come back after a scoring while decoding. With policy fresh: most guests (16 tokens"
                 " each) that a layer exchanges for a token, or for a batch of them. 0: the default."),
    click.option("--kvflash-index", "index", metavar="BITS", type=int, default=0,
                 show_default="2 for heads of up to 96 values, 1 for larger ones", envvar="KVFLASH_INDEX",
                 help="With policy fresh: bits for each value of a key in the index by which layers choose, 1, 2 or 4. It is"
                 " in host memory, or in a GPU's where layers choose there; more bits choose better, and take more of it."
                 " 0: the default."),
    click.option("--pin-prefix", metavar="N", type=TokenCount(), default=0, show_default=True,
                 help="Keep the first N tokens on the device."),
    click.option("--pin-spans", metavar="A:B,C:D", type=Spans(), default="",
                 help="Keep these positions on the device, each span from A up to, not including, B. BOS is position"
                 " 0."),
    settings.OPTION,
)  # fmt: skip

SCORERS = options(
    click.option("--scorer-model", "--draft-scorer", "scorer_model", metavar="FILE", type=Reads(), default=None,
                 envvar="KVFLASH_SCORER_MODEL",
                 help="Small model that reads along, for policy drafter, which it makes the default.  [default:"
                 " MODEL-draft.gguf or draft-scorer.gguf next to the model, in $KVFLASH_DRAFT_DIR, or in"
                 " ~/.cache/kvflash]"),
    click.option("--scorer-pool", "--draft-pool", "scorer_pool", type=TokenCount(), default=2048, show_default=True,
                 envvar="KVFLASH_SCORER_POOL",
                 help="Pool size of the scorer model in tokens."),
    *(_gone(name) for name in removed.OPTIONS),
)  # fmt: skip

SPEC = options(
    click.option("--spec", "spec_kind", metavar="TYPE", type=click.Choice(["off", *SPEC_KINDS]), default="off",
                 show_default=True, envvar="KVFLASH_SPEC",
                 help="Speculative decoding: draft tokens, and verify them in one batch. draft: by a smaller model with"
                 " the same tokens; dflash, eagle3: by a drafter made for this model (kvflash convert-draft); mtp: by"
                 " the model's own heads; ngram: by what followed the last tokens earlier in the text. Of a tree of"
                 " drafts, only the best chain runs."),
    click.option("-md", "--model-draft", "spec_model", metavar="FILE", type=Reads(), default=None,
                 envvar=env("SPEC_DRAFT_MODEL"), help="Draft model, a .gguf file."),
    click.option("--draft-max", "spec_n_max", type=int, default=0, envvar=env("SPEC_DRAFT_N_MAX"),
                 help="Most tokens to draft.  [default: 1 to 8, as many as pay]  `kvflash bench"
                 " spec --draft-max 3,6,8` compares."),
    click.option("--draft-p-min", "spec_p_min", type=float, default=0.0, show_default=True, envvar=env("SPEC_DRAFT_P_MIN"),
                 help="Minimum probability: a token that the drafter finds less likely ends the draft."),
    click.option("--draft-window", "spec_window", type=TokenCount(), default=2048, show_default=True,
                 envvar="KVFLASH_DRAFT_WINDOW", help="Last tokens that the drafter remembers."),
    click.option("--spec-gate", "spec_gate", type=float, default=1.0, show_default=True, envvar="KVFLASH_SPEC_GATE",
                 help="Decode plainly while a drafted step is worth less than this many plain ones, as measured; 0:"
                 " always draft."),
    click.option("--spec-sustain", "spec_sustain", type=int, default=4, show_default=True,
                 envvar="KVFLASH_SPEC_SUSTAIN",
                 help="Drafted steps in a row that may be worth less before drafting stops."),
)  # fmt: skip

SAMPLING = options(
    click.option("--temp", "temperature", type=float, default=0.8, show_default=True, envvar=env("TEMPERATURE"), help="Temperature, 0: greedy."),
    click.option("--top-k", type=int, default=40, show_default=True, envvar=env("TOP_K"), help="Top-k, 0: off."),
    click.option("--top-p", type=float, default=0.95, show_default=True, envvar=env("TOP_P"), help="Top-p, 1: off."),
    click.option("--min-p", type=float, default=0.05, show_default=True, envvar=env("MIN_P"), help="Min-p, 0: off."),
    click.option("--repeat-penalty", type=float, default=1.0, show_default=True, envvar=env("REPEAT_PENALTY"), help="Repeat penalty, 1: off."),
    click.option("--repeat-last-n", type=int, default=64, show_default=True, help="Last tokens to penalize, 0: off."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True, envvar=env("PRESENCE_PENALTY"),
                 help="What a token that was said loses, 0: off."),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True, envvar=env("FREQUENCY_PENALTY"),
                 help="What a token loses for each time that it was said, 0: off."),
    click.option("-l", "--logit-bias", metavar="TOKEN(+/-)BIAS", type=LogitBias(), multiple=True,
                 help="Make a token likelier or less likely: 15043+1, 15043-inf. It can be given several times."),
    click.option("--grammar", metavar="GRAMMAR", default="", help="BNF-like grammar (GBNF) that the answer keeps to."),
    click.option("--grammar-file", metavar="FILE", type=Reads(), default=None, help="File with such a grammar."),
    click.option("-j", "--json-schema", metavar="SCHEMA", default=None,
                 help="JSON schema (https://json-schema.org) that the answer keeps to: {} for any JSON."),
    click.option("-jf", "--json-schema-file", metavar="FILE", type=Reads(), default=None,
                 help="File with such a schema."),
    click.option("-s", "--seed", type=int, default=-1, show_default=True, help="Seed, -1: a random one."),
)  # fmt: skip
