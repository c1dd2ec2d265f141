"""What users give and what they get back: options, errors, events, and the number that tells models apart."""

import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pyllama_kvflash import errors, events
from pyllama_kvflash.errors import KVFlashError, UsageError, counted, number
from pyllama_kvflash.events import Checked, Done, Event, Paged, Prefill, Reselect, Stats, Token, Warn, as_dict
from pyllama_kvflash.policy import Lru

if TYPE_CHECKING:
    from pyllama_kvflash.options import Options

#
# options
#


@pytest.fixture(scope="module")
def options() -> type["Options"]:
    """The class. It takes its cache types from the compiled part."""
    found: type[Options] = pytest.importorskip("pyllama_kvflash.options", exc_type=ImportError).Options
    return found


BIG = (1 << 30) + 1

BAD: list[tuple[str, Any, str]] = [
    ("n_ctx", -1, "-1"),
    ("n_ctx", BIG, str(BIG)),
    ("n_batch", -512, "-512"),
    ("n_batch", BIG, str(BIG)),
    ("n_ubatch", 0, "0"),
    ("n_ubatch", BIG, str(BIG)),
    ("n_threads", 0, "0"),
    ("n_threads", 513, "513"),
    ("n_gpu_layers", -2, "-2"),
    ("tensor_split", (0.0, 0.0), "(0.0, 0.0)"),
    ("tensor_split", (3.0, -1.0), "(3.0, -1.0)"),
    ("tensor_split", (math.nan, 1.0), "(nan, 1.0)"),
    *(("split_mode", mode, repr(mode)) for mode in ("row", "tensor", "Layer", "")),
    *(("main_gpu", gpu, str(gpu)) for gpu in (-2, -1, 1, BIG)),  # of all GPUs there is none
    ("n_cpu_moe", -1, "-1"),
    ("n_cpu_moe", BIG, str(BIG)),
    ("n_cpu_moe", "all", "'all'"),
    ("kv_offload", False, "False"),
    ("rpc", ("localhost",), "'localhost'"),
    ("rpc", (":50052",), "':50052'"),
    ("rpc", ("localhost:rpc",), "'localhost:rpc'"),
    ("rpc", ("localhost:500520",), "'localhost:500520'"),
    ("rpc", ("a:1,b:2",), "'a:1,b:2'"),
    ("host_limit", 0, "0"),
    ("host_limit", (1 << 60) + 1, str((1 << 60) + 1)),
    ("auto_cap", 0, "0"),
    ("auto_cap", BIG, str(BIG)),
    ("tail", 0, "0"),
    ("chunk", 0, "0"),
    ("chunk", 48, "48"),
    ("chunk", 128, "128"),
    ("policy", "mru", "'mru'"),
    ("policy", None, "NoneType"),
    ("policy", Lru, "type"),  # the class, not an object of it
    ("tau", -64, "-64"),
    ("tau", BIG, str(BIG)),
    ("swaps", -8, "-8"),
    ("swaps", BIG, str(BIG)),
    ("coarse", "3", "'3'"),
    ("coarse", "2,4", "'2,4'"),
    ("coarse", 4, "4"),
    ("opening", -2, "-2"),
    ("opening", BIG, str(BIG)),
    ("share", -0.1, "-0.1"),
    ("share", 1.5, "1.5"),
    ("share", math.nan, "nan"),
    ("again", -0.1, "-0.1"),
    ("again", 1.5, "1.5"),
    ("again", math.nan, "nan"),
    ("replay", -1, "-1"),
    ("replay", BIG, str(BIG)),
    ("type_k", "f17", "'f17'"),
    ("type_v", "", "''"),
    ("flash_attn", "yes", "'yes'"),
    ("flash_attn", True, "True"),
    ("pool", 0, "0"),
    ("pool", BIG, str(BIG)),
    ("pool", "2048", "'2048'"),
    ("pins", ((5, 5),), "5:5"),
    ("pins", ((-1, 3),), "-1:3"),
    ("pins", ((0, 64), (9, 8)), "9:8"),
]


@pytest.mark.native
@pytest.mark.parametrize(("name", "value", "named"), BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_bad_value_is_a_usage_error_in_one_sentence(
    options: Callable[..., object], name: str, value: Any, named: str
) -> None:
    """It names the option, the value, and what is possible."""
    with pytest.raises(UsageError) as err:
        options(**{name: value})
    message = str(err.value)
    if type(value) in {int, float}:
        named = number(value)
    assert re.search(rf"(?<![\w-]){re.escape(named)}(?!\w)", message), message
    assert name.removesuffix("s") in message or name in message
    assert "must be" in message or "give" in message
    assert "\n" not in message
    assert ". " not in message
    assert not message.endswith(".")


@pytest.mark.native
@pytest.mark.parametrize(
    "good",
    [
        {},
        {"n_ctx": 0},
        {"n_ctx": 1 << 30},
        {"n_batch": 1, "n_ubatch": 1},
        {"n_threads": None},
        {"n_threads": 512},
        {"n_gpu_layers": -1},
        *({"tensor_split": shares} for shares in ((), (3.0, 1.0), (0.0, 1.0), (0.5,))),
        *({"split_mode": "none", "main_gpu": gpu} for gpu in (-1, 0, 3)),
        *({"n_cpu_moe": n} for n in (0, 1, 999, "auto")),
        *({"rpc": servers} for servers in ((), ("localhost:50052",), ("10.0.0.1:1", "gpu-2.lan:65535"))),
        *({"host_limit": limit} for limit in (None, 1, 1 << 60)),
        *({"auto_cap": cap} for cap in (1, 16_384, 1 << 30)),
        {"tail": 1},
        *({"chunk": n} for n in (16, 32, 64)),
        *({"policy": name} for name in ("auto", "qk", "fresh", "qk-cos", "lru", "drafter", "crosstok")),
        {"policy": Lru()},
        {"n_batch": 0},
        {"tau": 0},
        {"tau": 1 << 30},
        *({"swaps": n} for n in (0, 1, 1 << 30)),
        *({"coarse": bits, "policy": name} for bits in ("auto", "4", "4,2", "2") for name in ("auto", "fresh", "lru")),
        *({"coarse": "off", "policy": name} for name in ("auto", "qk", "lru", Lru())),
        {"coarse": "off", "policy": "fresh", "pool": "off"},
        *({"opening": n} for n in (-1, 0, 1, 1 << 30)),
        *({"share": share} for share in (0, 0.05, 1)),
        *({"again": share} for share in (0, 1e-9, 0.03, 1)),
        {"replay": 0},
        {"replay": 1 << 30},
        {"scorer_model": "other.gguf"},
        {"type_k": "q8_0", "type_v": "q4_0"},
        *({"flash_attn": mode} for mode in ("auto", "on", "off")),
        *({"pool": size} for size in ("auto", "off", 1, 1 << 30)),
        {"pins": ((0, 1), (0, 1), (10**6, 10**6 + 1))},
    ],
    ids=lambda good: str(
        {name: value if type(value).__repr__ is not object.__repr__ else type(value) for name, value in good.items()}
    ),
)
def test_values_at_the_limits_are_taken(options: Callable[..., object], good: dict[str, Any]) -> None:
    made = options(**good)
    assert {name: getattr(made, name) for name in good} == good


@pytest.mark.native
def test_resolved_fills_in_what_the_model_and_the_machine_decide(options: type["Options"]) -> None:
    made = options().resolved(4096)
    assert made.n_ctx == 4096
    assert made.n_threads is not None
    assert made.n_threads >= 1
    assert options(n_ctx=100).resolved(4096).n_ctx == 100
    assert options(n_threads=3).resolved(4096).n_threads == 3


@pytest.mark.native
@pytest.mark.parametrize(("n_ctx", "n_batch", "want"), [(4096, 512, 512), (100, 512, 100), (100, 0, 0), (4096, 0, 0)])
def test_resolved_batch_fits_the_context(options: type["Options"], n_ctx: int, n_batch: int, want: int) -> None:
    """0 stays: what the pool allows is not known yet."""
    assert options(n_ctx=n_ctx, n_batch=n_batch).resolved(8192).n_batch == want


@pytest.mark.native
def test_scoring_by_default(options: type["Options"]) -> None:
    """Every second token, unless a batch of guesses would end there; what is asked for stays."""
    from pyllama_kvflash.options import Spec  # noqa: PLC0415 (needs what is built, and some tests here do not)

    made = options(policy="qk")
    assert (made.interval, made.share, made.again, made.n_swaps) == (2, 0.03, 0.03, 4)
    assert options(spec=Spec(kind="ngram")).interval == 64
    for tau in (1, 2, 64, 100):
        assert options(tau=tau).interval == options(tau=tau, spec=Spec(kind="ngram")).interval == tau


@pytest.mark.native
@pytest.mark.parametrize(
    ("policy", "n_swaps", "n_opening"), [("qk", 4, 32), ("lru", 4, 32), ("fresh", 32, 32), ("auto", 32, 32)]
)
def test_a_policy_decides_what_is_left_out(options: type["Options"], policy: str, n_swaps: int, n_opening: int) -> None:
    """How much is exchanged, and how an answer opens; what is asked for stays."""
    made = options(policy=policy)
    assert (made.n_swaps, made.n_opening) == (n_swaps, n_opening)
    made = options(policy=policy, swaps=3, opening=5)
    assert (made.n_swaps, made.n_opening) == (3, 5)
    assert options(policy=policy, opening=0).n_opening == 0
    for coarse, n in (("4", 0), ("4,2", 32), ("2", 32)):
        assert options(policy=policy, coarse=coarse).n_opening == (n if policy == "fresh" else 32)


@pytest.mark.native
def test_options_cannot_be_changed_unchecked(options: type["Options"]) -> None:
    made = options()
    with pytest.raises(AttributeError):
        made.chunk = 7  # type: ignore[misc]
    with pytest.raises(TypeError):
        options(4096)  # type: ignore[call-arg]


#
# errors
#

TREE = dict(re.findall(r"^\W*(\w+)  +(\d+)\b", errors.__doc__ or "", re.MULTILINE))
CLASSES: dict[str, type[KVFlashError]] = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, KVFlashError) and kind.__module__ == errors.__name__
}


def test_errors_are_those_of_the_tree_in_their_docstring() -> None:
    assert {name: str(kind.exit_code) for name, kind in CLASSES.items()} == TREE
    assert issubclass(errors.UnsupportedError, errors.ModelError)


#
# events
#

STATS = Stats(
    n_prompt=1000,
    n_generated=11,
    prefill_s=2.0,
    decode_s=0.5,
    n_ctx=65536,
    n_pool=2048,
    kv_device_bytes=1 << 28,
    kv_full_bytes=1 << 33,
    pane_bytes=1 << 27,
    compute_bytes=1 << 26,
    other_device_bytes=0,
    host_bytes=1 << 30,
    chunks=16,
    resident=7,
    stored=15,
    pages_out=12,
    pages_in=3,
    reselects=4,
    reselect_s=0.125,
    summary_bytes=1 << 20,
    seed=None,
)
RATES = ("prefill_rate", "decode_rate", "acceptance", "mean_committed", "agreement", "kld")
EVENTS: list[Event] = [
    Prefill(512, 1000, 0.25, 1 << 28, 1 << 20),
    Paged(1024, (3, 1, 2), ()),
    Reselect(1088, "decode", (None, 1.5, -0.25, None), (3,), (1, 2), 0.125, 0.0625),
    Reselect(1088, "decode", (None, 0.5, 0.25, None), (3,), (1,), 0.125, 0.0625, 0.5),
    Checked(1088, 16, 15, 0.0625, 0.5),
    Warn("drafter cannot score; using qk"),
    Token(42, 'é "\n\u2028'),
    Done("stop", "", STATS),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_json(event: Event) -> None:
    """Every field comes back; nothing is added but the name, and the rates to the statistics."""
    wire = json.loads(json.dumps(as_dict(event), allow_nan=False))
    kind = getattr(events, wire["event"].capitalize())
    assert kind is type(event)
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in wire.items() if name != "event"
    }
    if kind is Done:
        stats = dict(fields["stats"])
        assert stats.pop("prefill_rate") == 500.0
        assert stats.pop("decode_rate") == 20.0
        assert stats.pop("acceptance") == stats.pop("mean_committed") == 0.0
        assert stats.pop("agreement") is stats.pop("kld") is None
        fields["stats"] = Stats(**stats)
    assert kind(**fields) == event


def test_every_event_has_a_form() -> None:
    assert {type(event) for event in EVENTS} == set(Event.__args__)


@pytest.mark.parametrize(
    ("n_prompt", "prefill_s", "n_generated", "decode_s", "rates"),
    [
        (0, 0.0, 0, 0.0, (0.0, 0.0)),
        (100, 0.0, 1, 0.0, (0.0, 0.0)),
        (100, 0.5, 1, 0.5, (200.0, 0.0)),
        (100, 0.5, 3, 0.5, (200.0, 4.0)),
    ],
)
def test_rates_never_divide_by_zero(
    n_prompt: int, prefill_s: float, n_generated: int, decode_s: float, rates: tuple[float, float]
) -> None:
    values = as_dict(Done("eos", "", STATS))["stats"] | {
        "n_prompt": n_prompt,
        "prefill_s": prefill_s,
        "n_generated": n_generated,
        "decode_s": decode_s,
    }
    for name in RATES:
        del values[name]
    stats = Stats(**values)
    assert (stats.prefill_rate, stats.decode_rate) == rates
    assert (stats.acceptance, stats.mean_committed) == (0.0, 0.0)
    drafted = replace(stats, drafted=40, accepted=30, draft_steps=5)
    assert (drafted.acceptance, drafted.mean_committed) == (0.75, 7.0)
    checked = replace(stats, checked=40, agreed=30, kld_sum=2.0)
    assert (checked.agreement, checked.kld) == (0.75, 0.05)


def test_a_reselect_of_a_scorer_that_says_nothing_of_shares_missed_nothing() -> None:
    assert [event.missed for event in EVENTS if isinstance(event, Reselect)] == [0.0, 0.5]
    assert as_dict(EVENTS[3])["missed"] == 0.5


def test_events_cannot_be_changed() -> None:
    for event in EVENTS:
        with pytest.raises(AttributeError):
            setattr(event, next(iter(as_dict(event).keys() - {"event"})), 0)


def test_one_thing_is_not_several() -> None:
    assert [counted(n, "token") for n in (0, 1, 2, 2048)] == ["0 tokens", "1 token", "2 tokens", "2,048 tokens"]
