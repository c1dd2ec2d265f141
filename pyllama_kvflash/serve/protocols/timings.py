"""Times and progress of an answer, in llama-server's form."""

from typing import Any

from pyllama_kvflash.serve.job import Reading, Timing


def timings(timing: Timing, n_prompt: int) -> dict[str, Any]:
    """Return the times of an answer. n_prompt: tokens of its prompt, with those that were not read again."""
    res: dict[str, Any] = {"cache_n": n_prompt - timing.n_read}
    for name, n, seconds in (
        ("prompt", timing.n_read, timing.read_s),
        ("predicted", timing.n_answer, timing.answer_s),
    ):
        res |= {
            f"{name}_n": n,
            f"{name}_ms": round(seconds * 1e3, 3),
            f"{name}_per_token_ms": round(seconds * 1e3 / n, 3) if n else 0.0,
            f"{name}_per_second": round(n / seconds, 3) if seconds else 0.0,
        }
    if timing.n_drafted:
        res |= {"draft_n": timing.n_drafted, "draft_n_accepted": timing.n_accepted}
    return res


def progress(reading: Reading) -> dict[str, Any]:
    """Return how much of a prompt is read."""
    return {
        "total": reading.total,
        "cache": reading.cached,
        "processed": reading.done,
        "time_ms": round(reading.seconds * 1e3),
    }
