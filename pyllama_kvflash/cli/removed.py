"""Options that the command line does not have, or no longer, and former environment variables: each with what to do now."""

OPTIONS = {
    "--kvflash-tau": "fresh chooses at every token, and qk scores as often as pays",
    "--kvflash-share": "fresh needs no time for it, and qk scores in at most 3 % of the time",
    "--kvflash-again": "fresh chooses before a token attends, and qk decodes a token again by itself",
    "--kvflash-replay": "where the end of a prompt must run again, it does by itself",
    "--qk-summary": "qk keeps four centroids of each chunk's keys",
    "--qk-aggregate": "it was for policy qk-zmax, which is gone, too",
    "--qk-query": "qk scores by the queries of the last four tokens",
    "--qk-rerank": "qk looks at the best eight times as many chunks as fit by itself",
}
"""Options of the command line, each with why nobody needs it any more."""

MOVED = {
    "--kvflash-opening": "--set opening=N",
    "--kvflash-meter": "--set meter=SHARE",
    "--kvflash-panes": "--set panes=N",
    "--kvflash-auto-cap": "--set auto_cap=N",
    "--kvflash-chunk": "--set chunk=N",
    "--kvflash-swaps": "--set swaps=N",
    "--pin-prefix": "--set pins=0:N",
    "--pin-spans": "--set pins=A:B,C:D",
    "--scorer-model": "--set scorer_model=FILE",
    "--draft-scorer": "--set scorer_model=FILE",
    "--scorer-pool": "--set scorer_pool=N",
    "--draft-pool": "--set scorer_pool=N",
    "--draft-p-min": "--set spec.p_min=P",
    "--draft-window": "--set spec.window=N",
    "--spec-gate": "--set spec.gate=X",
    "--spec-sustain": "--set spec.sustain=N",
    "--repeat-last-n": "--set sampling.repeat_last_n=N",
    "--presence-penalty": "--set sampling.presence_penalty=X",
    "--frequency-penalty": "--set sampling.frequency_penalty=X",
    "-l": "--set sampling.logit_bias=TOKEN+BIAS",
    "--logit-bias": "--set sampling.logit_bias=TOKEN+BIAS",
    "--prefix-cache-size": "--set cache.size=SIZE",
}
"""Options whose field only experiments turn, each with how it is set now. `bench` and `serve` still have some."""

SET = {
    "-sm": "--set split_mode=none for one GPU; layer is the default, and row is not run",
    "-mg": "--set split_mode=none --set main_gpu=N",
}
"""Options of llama.cpp that only `--set` has here, and which would be read as others: -s m and -m g."""

NEEDLESS = {
    "--mlock": "a model's file is mapped, and stays in memory while it is used; leave it out",
    "-dev": "set CUDA_VISIBLE_DEVICES=0,1 in the environment, or give --set split_mode=none --set main_gpu=N for one GPU",
    "--device": "set CUDA_VISIBLE_DEVICES=0,1 in the environment, or give --set split_mode=none --set main_gpu=N for one GPU",
}
"""Options of llama.cpp that nobody needs here, each with why."""

VARIABLES = {
    **{
        f"KVFLASH_{name}": f"LLAMA_ARG_{name}"
        for name in (
            *("MODEL", "HF_REPO", "HF_FILE", "OFFLINE", "N_PREDICT", "CTX_SIZE", "CACHE_TYPE_K", "CACHE_TYPE_V"),
            *("FLASH_ATTN", "BATCH", "UBATCH", "THREADS", "N_GPU_LAYERS", "TENSOR_SPLIT", "N_CPU_MOE", "RPC"),
            *("PORT", "N_PARALLEL", "ALIAS", "CHAT_TEMPLATE_FILE"),
        )
    },
    **{
        f"{prefix}_{name}": now
        for prefix in ("KVFLASH", "LLAMA_ARG")
        for name, now in (
            ("MODEL_DRAFT", "LLAMA_ARG_SPEC_DRAFT_MODEL"),
            ("DRAFT_MAX", "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
            ("API_KEY", "LLAMA_API_KEY"),
            ("WEBUI", "LLAMA_ARG_UI"),
        )
    },
    "KVFLASH_EXACT": "KVFLASH_MODE",
}
"""Former environment variables, each with the one that the option has now. docs/ENVIRONMENT.md lists those."""


def option(name: str) -> str:
    """Return the sentence for an option."""
    if name in NEEDLESS:
        return f"{name} is not an option here: {NEEDLESS[name]}"
    if name in SET:
        return f"{name} is not an option here: give {SET[name]}"
    if name in MOVED:
        return f"{name} was removed: give {MOVED[name]}"
    return f"{name} was removed: {OPTIONS[name]}; leave it out"


def variable(name: str) -> str:
    """Return the sentence for an environment variable."""
    return f"the environment variable {name} was renamed: set {VARIABLES[name]} instead"
