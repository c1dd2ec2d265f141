"""Option types, and the options that several commands share. Names follow llama.cpp."""

import os
from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from typing import Any

import click
from click.core import ParameterSource

from pyllama_kvflash.cli import settings
from pyllama_kvflash.cli.kinds import ALL_LAYERS, HOST_LAYERS, ByteSize, Policy, Servers, Split, TokenCount
from pyllama_kvflash.cli.read import read_text
from pyllama_kvflash.cli.roles import Declared, Harmless, Reads, TextOrFile, reads
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.files import model_parts
from pyllama_kvflash.json_schema import json_grammar
from pyllama_kvflash.native import CACHE_TYPES, SCALINGS, Rope, Sampling
from pyllama_kvflash.options import FLASH_ATTN, MODES, PREFILL, SPEC_KINDS, Spec
from pyllama_kvflash.policy.coarse import CHOICES
from pyllama_kvflash.policy.sizing import AUTO_CAP, AUTO_FULL, HOST_CAP

CACHE_SIZE = "20GiB"  # default size limit of a prefix cache


def env(name: str) -> str:
    """Return llama.cpp's environment variable for one of its options. Variables of our own options begin with KVFLASH_."""
    return f"LLAMA_ARG_{name}"


def resolve(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Options that a command's options set, including those of --set. Raises UsageError.

    A scorer model implies policy drafter, unless a policy is given.
    """
    res = values | settings.take(values, "")
    del res["settings"]
    res["rope"] = rope(res)
    model = res.get("scorer_model")
    if model:
        reads("--set scorer_model", *model_parts(model))
        if click.get_current_context().get_parameter_source("policy") == ParameterSource.DEFAULT:
            res["policy"] = "drafter"
    return res


def rope(values: dict[str, Any]) -> Rope | None:
    """Take the options of ROPE out of the values. Returns None if none is given. Raises UsageError."""
    given = {f.name: values.pop(f"rope_{f.name}") for f in fields(Rope)}
    inverse = values.pop("rope_freq_scale")
    source = click.get_current_context().get_parameter_source
    typed = [name for name in ("scale", "freq_scale") if source(f"rope_{name}") == ParameterSource.COMMANDLINE]
    if typed == ["scale"]:  # the other one is from the environment
        inverse = None
    elif typed == ["freq_scale"]:
        given["scale"] = None
    if inverse is not None:
        if not 0 < inverse <= 1 or given["scale"] is not None:
            msg = f"--rope-freq-scale is {inverse:g}: give a number up to 1, such as 0.25 for --rope-scale 4, and only one of the two"
            raise UsageError(msg)
        given["scale"] = 1 / inverse
    given = {name: value for name, value in given.items() if value is not None}
    return Rope(**given) if given else None


def rope_flags(rope: Rope | None) -> list[str]:
    """Return the command-line options for a scaling of RoPE."""
    named = ((option, name) for option, name, *_ in _ROPE if hasattr(rope, name))
    given = ((option, getattr(rope, name)) for option, name in named if getattr(rope, name) != getattr(Rope(), name))
    return [text for option, value in given for text in (option, str(value))]


def cache_size() -> int:
    """Return the size limit of a prefix cache, in bytes: from the server's environment variable, else the default."""
    return ByteSize().read(os.environ.get("KVFLASH_PREFIX_CACHE_SIZE") or CACHE_SIZE)


def sampling(values: dict[str, Any], seed: int | None) -> Sampling:
    """Take the options of SAMPLING out of the values. seed: replaces a negative seed."""
    given = {f.name: values.pop(f.name) for f in fields(Sampling) if f.name in values}
    given |= settings.take(values, "sampling.")
    given["grammar"] = _grammar(given["grammar"], values.pop("json_schema"))
    return Sampling(**given | ({"seed": seed} if given["seed"] < 0 else {}))


def is_grammar(text: str) -> bool:
    """Return whether a text is a grammar, which has a rule, rather than the name of a grammar's file."""
    return "::=" in text


def is_schema(text: str) -> bool:
    """Return whether a text is a JSON schema rather than the name of a schema's file."""
    return text.strip().startswith("{") or text.strip() in {"true", "false"}


def _grammar(grammar: str | None, schema: str | None) -> str:
    """Return the grammar of the answer; "": any text. Raises UsageError."""
    if grammar is not None and schema is not None:
        msg = "several grammars are given: give one of --grammar and --json-schema"
        raise UsageError(msg)
    if grammar is not None:
        text = read_text(grammar, "grammar") if grammar and not is_grammar(grammar) else grammar
        if not text.strip():
            msg = 'the grammar is empty: give one with a rule, such as root ::= "yes" | "no", or leave --grammar out'
            raise UsageError(msg)
        return text
    if schema is None:
        return ""
    return json_grammar(read_text(schema, "JSON schema") if schema and not is_schema(schema) else schema, note=_warn)


def _warn(text: str) -> None:
    click.echo(f"kvflash: warning: {text}", err=True)


def spec(values: dict[str, Any]) -> Spec | None:
    """Take the options of SPEC out of the values. Returns None if nothing is drafted. Raises UsageError."""
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


_EXACT = "exactly"  # the parameter of --kvflash-exact


_CHOOSE_GPUS = (
    "set CUDA_VISIBLE_DEVICES=0,1 in the environment, or give --set split_mode=none --set main_gpu=N for one GPU"
)

NOT_HERE = {
    "-sm": "give --set split_mode=none for one GPU; layer is the default, and row is not supported",
    "-mg": "give --set split_mode=none --set main_gpu=N",
    "-dev": _CHOOSE_GPUS,
    "--device": _CHOOSE_GPUS,
    "--mlock": "a model's file is mapped, and stays in memory while it is used; leave it out",
}
"""Options of llama.cpp that kvflash does not have, each with what to do instead. Undeclared, -sm and -mg would be read as -s m and -m g."""


def _not_here(name: str) -> Callable[[Any], Any]:
    """Return a hidden option whose use is an error that says what to do instead."""
    says = f"{name} is not an option here: {NOT_HERE[name]}"

    def refuse(_ctx: click.Context, _param: click.Parameter, value: Any) -> None:
        if value:
            raise UsageError(says)

    return click.option(
        name, f"not_here_{name.strip('-')}", hidden=True, expose_value=False, callback=refuse, help=says,
        is_flag=name == "--mlock", default=None,
    )  # fmt: skip


def _mode(ctx: click.Context, _param: click.Parameter, value: str) -> str:
    """Return the mode, which --kvflash-exact may have chosen."""
    if not ctx.meta.get(f"kvflash.{_EXACT}"):
        return value
    if value != "lossless" and ctx.get_parameter_source("mode") == ParameterSource.COMMANDLINE:
        msg = f"--kvflash-exact is short for --kvflash-mode lossless, and --kvflash-mode is {value}: leave one of the two out"
        raise UsageError(msg)
    return "lossless"


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

_ROPE: tuple[tuple[str, str, str, Any, str], ...] = (
    ("--rope-scaling", "scaling", "ROPE_SCALING_TYPE", click.Choice(SCALINGS[1:]), "RoPE frequency scaling method."),
    ("--rope-scale", "scale", "ROPE_SCALE", float, "RoPE context scaling factor, expands context by a factor of N."),
    ("--rope-freq-scale", "freq_scale", "ROPE_FREQ_SCALE", float, "RoPE frequency scaling factor, expands context by a factor of 1/N."),
    ("--rope-freq-base", "freq_base", "ROPE_FREQ_BASE", float, "RoPE base frequency, used by NTK-aware scaling."),
    ("--yarn-orig-ctx", "orig_ctx", "YARN_ORIG_CTX", TokenCount(), "YaRN: original context size of model."),
    ("--yarn-ext-factor", "ext_factor", "YARN_EXT_FACTOR", float, "YaRN: extrapolation mix factor."),
    ("--yarn-attn-factor", "attn_factor", "YARN_ATTN_FACTOR", float, "YaRN: scale sqrt(t) or attention magnitude."),
    ("--yarn-beta-slow", "beta_slow", "YARN_BETA_SLOW", float, "YaRN: high correction dim or alpha."),
    ("--yarn-beta-fast", "beta_fast", "YARN_BETA_FAST", float, "YaRN: low correction dim or beta."),
)  # fmt: skip
"""llama.cpp's options for contexts longer than the trained one. --help hides them, since they are many; the help of -c names them."""

ROPE = options(
    *(click.option(option, f"rope_{name}", type=kind, default=None, hidden=True, envvar=env(variable), help=what)
      for option, name, variable, kind, what in _ROPE),
)  # fmt: skip

SYSTEM = click.option("-sys", "--system-prompt", "system", metavar="TEXT", default=None,
                      help="System prompt to use with the model's chat template.")  # fmt: skip

ANSWER_LENGTH = click.option("-n", "--predict", "--n-predict", "n_predict", type=int, default=-1, show_default=True, envvar=env("N_PREDICT"),
                             help="Most tokens to predict in an answer, -1: until the context is full.")  # fmt: skip

CONTEXT = options(
    click.option("-c", "--ctx-size", "n_ctx", type=TokenCount(), default=0, envvar=env("CTX_SIZE"), show_default=True,
                 help="Context size in tokens, 0: loaded from the model. Without a pool, the memory for all of it is allocated at"
                 " once; with a pool, the memory of two layers, to read prompts (1 GiB at 128K tokens of an 8B model), and on a GPU"
                 " that of the codes. Beyond the trained context, some models need --rope-scaling yarn --rope-scale 4;"
                 " llama.cpp's other options for RoPE and YaRN work, too (docs/FAQ.md)."),
    click.option("-ctk", "--cache-type-k", "type_k", type=click.Choice(list(CACHE_TYPES)), default="f16",
                 show_default=True, envvar=env("CACHE_TYPE_K"), help="KV cache data type for K."),
    click.option("-ctv", "--cache-type-v", "type_v", type=click.Choice(list(CACHE_TYPES)), default="f16",
                 show_default=True, envvar=env("CACHE_TYPE_V"),
                 help="KV cache data type for V; a quantised type needs -fa."),
    click.option("-fa", "--flash-attn", "flash_attn", type=click.Choice(FLASH_ATTN), default="auto",
                 show_default=True, envvar=env("FLASH_ATTN"), help="Flash attention."),
    ROPE,
)  # fmt: skip

COMPUTE = options(
    click.option("-b", "--batch-size", "n_batch", type=TokenCount(), default=0, show_default=True,
                 envvar=env("BATCH"), help="Logical batch size: prompt tokens per decode call, which the pool must"
                 " hold. 0: as many as it can hold, at most 2048."),
    click.option("-ub", "--ubatch-size", "n_ubatch", type=TokenCount(), default=512, show_default=True,
                 envvar=env("UBATCH"), help="Physical batch size: prompt tokens computed at once; lowered to 128 if codes fit"
                 " a GPU only then (--kvflash-coarse auto)."),
    click.option("-t", "--threads", "n_threads", type=int, default=None, envvar=env("THREADS"),
                 help="CPU threads.  [default: all cores]"),
    click.option("-ngl", "--n-gpu-layers", "n_gpu_layers", metavar="N|all", type=ALL_LAYERS, default="all",
                 show_default=True, envvar=env("N_GPU_LAYERS"),
                 help="Layers to offload to the GPU, with their KV; the KV of the other layers stays on the host."),
    click.option("-ts", "--tensor-split", "tensor_split", metavar="N0,N1,...", type=Split(), default="",
                 envvar=env("TENSOR_SPLIT"),
                 help="Each GPU's share of the layers and their KV: 3,1 gives the first GPU three quarters of them."
                 " Devices of --rpc come first.  [default: by their free memory]"),
    click.option("-ncmoe", "--n-cpu-moe", "n_cpu_moe", metavar="N|auto", type=HOST_LAYERS, default=0,
                 show_default=True, envvar=env("N_CPU_MOE"),
                 help="Keep the experts of the first N layers in host memory, or the feed-forward weights if the model has no"
                 " experts. auto: as few layers as make room for the pool. If all layers and the full cache fit the GPU, no pool is"
                 " used, unless --kvflash is a number."),
    click.option("--rpc", metavar="HOST:PORT,...", type=Servers(), default="", envvar=env("RPC"),
                 help="RPC servers whose devices are used, too. Start llama.cpp's rpc-server on each machine; it trusts"
                 " every client."),
)  # fmt: skip

VERBOSITY = click.option("-q/-v", "--quiet/--verbose", "quiet", default=None,
                         help="-q: print only warnings, errors and, on a terminal, progress on stderr. -v: also print how the cache"
                         " was chosen, what takes memory, and llama.cpp's log.")  # fmt: skip

POOL = options(
    click.option("--kvflash", "pool", metavar="N|auto|off", type=TokenCount("auto", "off"), default="auto",
                 show_default=True, envvar="KVFLASH_POOL",
                 help="Pool size in tokens; off: the full cache; auto: the full cache if it fits, up to"
                 f" {AUTO_FULL:,} tokens on a GPU, or 1 GiB without a GPU; else a pool of half the free device memory, at most"
                 f" {AUTO_CAP:,} tokens, or {HOST_CAP:,} without a GPU (--set auto_cap)."),
    click.option("--kvflash-prefill", "prefill", type=click.Choice(PREFILL), default="exact", show_default=True,
                 envvar="KVFLASH_PREFILL",
                 help="How to read a prompt that the pool cannot hold. exact: every token sees all tokens before it, as with the"
                 " full cache; their KV comes from host memory, layer by layer. pool: a token sees what the pool holds; this"
                 " takes less memory, but answers get worse. auto: exact, or pool with a warning if memory is short."),
    click.option("--kvflash-mode", "mode", type=click.Choice(MODES), default="fast", show_default=True,
                 envvar="KVFLASH_MODE", callback=_mode,
                 help="How to decode an answer. fast: its tokens see the pool. lossless: the pool drafts them, and one pass"
                 " over the whole text checks the draft. The answer is then the full cache's, except where two tokens are so close"
                 " that the batch size decides, as in any speculative decoding. --kvflash-exact is short for lossless. --set"
                 " min_agreement=0.9 switches from fast to lossless when less than 90 % of the compared tokens are the full cache's."),
    click.option("--kvflash-exact", _EXACT, is_flag=True, is_eager=True, hidden=True, expose_value=False, callback=_keep,
                 help="--kvflash-mode lossless."),
    click.option("--kvflash-host", "host_limit", metavar="SIZE", type=ByteSize(), default=None, envvar="KVFLASH_HOST",
                 help="Most host memory for the records of chunks, such as 64GiB or 512M. A prompt that needs more is"
                 " refused before it runs.  [default: no limit]"),
    click.option("--kvflash-disk", "disk", metavar="DIR", type=Harmless("files without a name"), default=None,
                 envvar="KVFLASH_DISK",
                 help="Folder on a fast disk for the records beyond --kvflash-host. Give that option, too: without it, records"
                 " go to disk only once no memory is left. The files have no names, and vanish with the process. With a GPU,"
                 " policy auto is then qk."),
    click.option("--kvflash-coarse", "coarse", metavar="4|4,2|2|off|auto", type=click.Choice(CHOICES), default="auto",
                 show_default="auto: the most bits that fit, on the CPU and with CUDA", envvar="KVFLASH_COARSE",
                 help="Bits per value of the codes; 4,2: 4 for keys, 2 for values. Every token attends to the pool exactly, and to"
                 " the codes of everything outside it. Codes of 4 bits take 26 % of an f16 cache, 4,2 takes 20 % and 2 takes 13 %"
                 " (heads of 128). off: tokens see nothing outside the pool, policy auto is qk, and only the pool takes device"
                 " memory."),
    click.option("--kvflash-policy", "policy", metavar="NAME", type=Policy(), default="auto",
                 show_default="auto: fresh where there are codes, else qk",
                 envvar="KVFLASH_POLICY",
                 help="Policy that decides which chunks stay in the pool, and which come back. fresh: each layer chooses for itself,"
                 " for every token, in units of 16 tokens. qk: the same chunks for all layers, by the model's own attention."
                 " drafter: by the attention of a small model with the same tokens; crosstok: with other tokens. lru: the most"
                 " recent chunks. qk-cos: a published formula, for comparison. Packages can register more."),
    settings.OPTION,
    *map(_not_here, NOT_HERE),
    click.option("--jinja", is_flag=True, hidden=True, expose_value=False, help="llama.cpp's option; templates are always Jinja."),
)  # fmt: skip

SPEC = options(
    click.option("--spec", "spec_kind", metavar="TYPE", type=click.Choice(["off", *SPEC_KINDS]), default="off",
                 show_default=True, envvar="KVFLASH_SPEC",
                 help="Speculative decoding: draft tokens, and verify them in one batch. draft: by a smaller model with"
                 " the same tokens; dflash, eagle3: by a drafter made for this model (kvflash convert-draft); mtp: by"
                 " the model's own heads; ngram: by the tokens that followed the last ones earlier in the text. Of a tree of"
                 " drafts, only the best chain runs."),
    click.option("-md", "--model-draft", "--spec-draft-model", "spec_model", metavar="FILE", type=Reads(), default=None,
                 envvar=env("SPEC_DRAFT_MODEL"), help="Draft model, a .gguf file."),
    click.option("--draft-max", "--spec-draft-n-max", "spec_n_max", type=int, default=0, envvar=env("SPEC_DRAFT_N_MAX"),
                 help="Most tokens to draft.  [default: 1 to 8, as many as pay]  `kvflash bench"
                 " spec --draft-max 3,6,8` compares lengths."),
)  # fmt: skip

SAMPLING = options(
    click.option("--temp", "temperature", type=float, default=0.8, show_default=True, envvar=env("TEMPERATURE"), help="Temperature, 0: greedy."),
    click.option("--top-k", type=int, default=40, show_default=True, envvar=env("TOP_K"), help="Top-k, 0: off."),
    click.option("--top-p", type=float, default=0.95, show_default=True, envvar=env("TOP_P"), help="Top-p, 1: off."),
    click.option("--min-p", type=float, default=0.05, show_default=True, envvar=env("MIN_P"), help="Min-p, 0: off."),
    click.option("--repeat-penalty", type=float, default=1.0, show_default=True, envvar=env("REPEAT_PENALTY"), help="Repeat penalty, 1: off."),
    click.option("--grammar", "--grammar-file", "grammar", metavar="GRAMMAR|FILE", type=TextOrFile(is_grammar),
                 default=None, help="BNF-like grammar (GBNF) to constrain the answer, or a file with one."),
    click.option("-j", "--json-schema", "-jf", "--json-schema-file", "json_schema", metavar="SCHEMA|FILE",
                 type=TextOrFile(is_schema), default=None,
                 help="JSON schema (https://json-schema.org) to constrain the answer, {} for any JSON, or a file with one."),
    click.option("-s", "--seed", type=int, default=-1, show_default=True, help="Seed, -1: a random one."),
)  # fmt: skip
