"""Tiny drafters with random weights for the tiny models: what they guess is wrong, but how they are fed is what counts."""

from pathlib import Path

from support import tiny


def eagle3(path: Path, *, n_embd_target: int, layers: tuple[int, int, int] = (0, 1, 2)) -> None:
    """An EAGLE-3 head that reads three layers of its target."""
    n_embd, n_ff, n_head, n_head_kv, n_head_dim = 64, 128, 2, 1, 32
    w = tiny.Writer(path, "eagle3")
    w.geometry(n_layer=1, n_embd=n_embd, n_ff=n_ff, n_head=n_head, n_head_kv=n_head_kv, n_head_dim=n_head_dim, rope=1e6)
    w.keys(target_layers=list(layers), target_hidden_size=n_embd_target)
    w.head(n_embd)
    w.random("fc.weight", 3 * n_embd_target, n_embd)
    w.norm("blk.0.attn_norm.weight", n_embd)
    w.norm("blk.0.attn_norm_2.weight", n_embd)
    w.random("blk.0.attn_q.weight", 2 * n_embd, n_head * n_head_dim)
    w.random("blk.0.attn_k.weight", 2 * n_embd, n_head_kv * n_head_dim)
    w.random("blk.0.attn_v.weight", 2 * n_embd, n_head_kv * n_head_dim)
    w.random("blk.0.attn_output.weight", n_head * n_head_dim, n_embd)
    w.norm("blk.0.ffn_norm.weight", n_embd)
    w.ffn("blk.0.", n_embd, n_ff)
    w.close()


def mtp(path: Path) -> None:
    """The hybrid model of `tiny`, with a head that predicts one token further."""
    w = tiny.Writer(path, "qwen35")
    tiny.qwen35(w, n_mtp=1)
    w.close()
