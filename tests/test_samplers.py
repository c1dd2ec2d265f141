"""llama.cpp's samplers: each as in a chain built by hand, in any order, copied and guessed with; values that are refused."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import lossless, serving, snapshots
from support.changes import ENGINE
from support.commands import check_error, good, in_process, invoke
from support.lossless import chosen_alike
from support.oracles import ON_CPU, ON_GPU
from support.rounding import Chosen
from support.runs import BY_SIXTEEN, TOKENS, Open
from support.serving import Running

from pyllama_kvflash import KVFlash, Sampling, Token
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Sampler
from pyllama_kvflash.native.lib import ffi, lib
from pyllama_kvflash.native.order import order_of
from pyllama_kvflash.native.sampler import MAX_BREAKERS, RANGES
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.policy.lookahead import Length, Lookahead

pytestmark = pytest.mark.native

known = lossless.known
wordless = snapshots.wordless


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(max_body=64 << 10, **ON_CPU) as running:
        yield running


SMALL: dict[str, Any] = {**BY_SIXTEEN, "pool": 256, "panes": 2, "mode": "lossless"}
FULL = {**SMALL, "pool": "off", "mode": "fast"}

ALL_TOKENS = "root ::= [^\\x00]*"  # as a grammar
SEED = 7

DEFAULTS: dict[str, Any] = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0, "top_n_sigma": -1.0, "min_keep": 0,
    "xtc_probability": 0.0, "xtc_threshold": 0.1, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
    "repeat_last_n": 64, "repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ("\n", ":", '"', "*"), "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
    "samplers": "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature",
}  # fmt: skip
"""llama.cpp's, of common_params_sampling."""

OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
DRY = {"dry_multiplier": 50.0, "dry_allowed_length": 1}
CASES: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.3},
    "typical_p of all": {**OPEN, "typical_p": 0.5},
    "top_n_sigma": {**OPEN, "top_n_sigma": 2.0, "temperature": 2.0},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "xtc of all": {**OPEN, "xtc_probability": 1.0, "xtc_threshold": 0.02},
    "dry": DRY,
    "dry of all": {**OPEN, **DRY, "dry_base": 3.0, "dry_penalty_last_n": 12},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5},
    "dynatemp": {**OPEN, "temperature": 1.0, "dynatemp_range": 0.7, "dynatemp_exponent": 2.0},
    "dynatemp from 0": {"temperature": 0.0, "dynatemp_range": 3.0},
    "min_keep": {"top_p": 0.1, "min_p": 0.9, "min_keep": 6},
    "another order": {"temperature": 2.0, "samplers": "temperature;top_p"},
    "cut before penalties": {"top_k": 5, "repeat_penalty": 1.8, "samplers": "top-k;penalties;temp"},
    "no temperature": {"temperature": 0.0, "samplers": "top_k"},
    "no samplers": {"samplers": ""},
    "xtc before a temperature of 0": {"temperature": 0.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "typical_p before a temperature of 0": {"temperature": 0.0, "typical_p": 0.2},
    "dry before a temperature of 0": {"temperature": 0.0, **DRY},
    "penalties after top_k, at a temperature of 0": {
        "temperature": 0.0, "top_k": 3, "repeat_penalty": 2.0, "samplers": "top_k;penalties;min_p;temperature"
    },
    "all": {
        **DRY, "top_n_sigma": 3.0, "typical_p": 0.9, "xtc_probability": 0.3, "xtc_threshold": 0.05, "repeat_penalty": 1.2,
        "dynatemp_range": 0.5, "min_keep": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def kv() -> Iterator[KVFlash]:
    options: dict[str, Any] = {"n_ctx": 512, "pool": "off", "n_threads": 1}
    with KVFlash.from_file(BUNDLED_MODEL, **options) as kv:
        kv.decode(kv.tokenize("The code of the"))
        yield kv


@pytest.fixture(scope="module")
def usual(kv: KVFlash) -> npt.NDArray[np.bool_]:
    """Tokens (n_vocab,) that the grammar of all texts allows everywhere, but for those that end one."""
    res = np.array([not kv.model.is_eog(t) and kv.model.piece(t).isascii() for t in range(kv.model.n_vocab)])
    return res & np.array([len(kv.model.piece(t)) > 0 and b"\0" not in kv.model.piece(t) for t in range(len(res))])


def logits_of(usual: npt.NDArray[np.bool_], n: int) -> list[npt.NDArray[np.float32]]:
    """Logits of n tokens in a row, no two the same. The same few tokens are likely again and again."""
    rng = np.random.default_rng(5)
    base = rng.normal(0, 1, len(usual))
    base[np.flatnonzero(usual)[rng.permutation(usual.sum())[:60]]] += 6
    return [(base + rng.normal(0, 1, len(usual)) - 60 * ~usual).astype(np.float32) for _ in range(n)]


def put(kv: KVFlash, logits: npt.NDArray[np.float32]) -> None:
    """Have them be those of the last token."""
    ptr = lib.llama_get_logits_ith(kv.ctx.output.native, kv.ctx.output.row(-1))
    ffi.buffer(ptr, logits.nbytes)[:] = logits.tobytes()


def drawn(kv: KVFlash, sampler: Sampler, rows: list[npt.NDArray[np.float32]]) -> list[int]:
    res = []
    for logits in rows:
        put(kv, logits)
        res.append(sampler.sample(kv.ctx))
    return res


def by_hand(kv: KVFlash, rows: list[npt.NDArray[np.float32]], read: list[int], **given: Any) -> list[int]:
    """What llama.cpp's own chain draws, with every sampler that is there by default, used or not. read: what DRY has read."""
    s = {**DEFAULTS, **given}
    chain = ffi.gc(lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params()), lib.llama_sampler_free)
    breakers = [ffi.new("char[]", text.encode()) for text in s["dry_sequence_breakers"]]
    dry = [s[f"dry_{name}"] for name in ("multiplier", "base", "allowed_length", "penalty_last_n")]
    penalties = [s[f"{name}_penalty"] for name in ("repeat", "frequency", "presence")]
    n, keep = kv.model.n_vocab, s["min_keep"]
    make: dict[str, Callable[[], Any]] = {
        "penalties": lambda: lib.llama_sampler_init_penalties(n, s["repeat_last_n"], *penalties),
        "dry": lambda: lib.llama_sampler_init_dry(kv.model.vocab, *dry, breakers, len(breakers)),
        "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(s["top_n_sigma"]),
        "top_k": lambda: lib.llama_sampler_init_top_k(s["top_k"]),
        "typ_p": lambda: lib.llama_sampler_init_typical(s["typical_p"], keep),
        "top_p": lambda: lib.llama_sampler_init_top_p(s["top_p"], keep),
        "min_p": lambda: lib.llama_sampler_init_min_p(s["min_p"], keep),
        "xtc": lambda: lib.llama_sampler_init_xtc(s["xtc_probability"], s["xtc_threshold"], keep, SEED),
        "temperature": lambda: lib.llama_sampler_init_temp_ext(
            s["temperature"], s["dynatemp_range"], s["dynatemp_exponent"]
        ),
    }
    if s["mirostat"]:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(s["temperature"]))
        how = SEED, s["mirostat_tau"], s["mirostat_eta"]
        last = (
            lib.llama_sampler_init_mirostat(n, *how, 100)
            if s["mirostat"] == 1
            else lib.llama_sampler_init_mirostat_v2(*how)
        )
    else:
        for name in order_of(s["samplers"]):
            one = make[name]()
            for token in read if name == "dry" else []:
                lib.llama_sampler_accept(one, token)
            lib.llama_sampler_chain_add(chain, one)
        last = lib.llama_sampler_init_dist(SEED)
    lib.llama_sampler_chain_add(chain, last)
    output, res = kv.ctx.output, []
    for logits in rows:
        put(kv, logits)
        res.append(int(lib.llama_sampler_sample(chain, output.native, output.row(-1))))
    return res


#
# what is drawn
#


def test_the_defaults_are_llama_cpps() -> None:
    ours = {f.name: f.default for f in fields(Sampling)}
    assert {name: ours[name] for name in DEFAULTS} == DEFAULTS
    assert set(ours) - set(DEFAULTS) == {"logit_bias", "grammar", "seed", "n_probs", "ignore_eos"}


@pytest.mark.sampled(ENGINE)
@pytest.mark.parametrize("name", CASES)
def test_the_tokens_are_those_of_llama_cpps_chain(kv: KVFlash, usual: npt.NDArray[np.bool_], name: str) -> None:
    """With the same seed, token for token; with a grammar that allows all of them, too. Other tokens than by default."""
    rows, given = logits_of(usual, 60), CASES[name]
    sampling = Sampling(seed=SEED, **given)
    read = drawn(kv, Sampler(Sampling(seed=1), kv.model), rows[:20])
    want = by_hand(kv, rows, read, **given)
    for grammar in ("", ALL_TOKENS):
        sampler = Sampler(replace(sampling, grammar=grammar), kv.model)
        sampler.read(np.array(read, np.int32))
        assert drawn(kv, sampler, rows) == want
    plain = {"temperature": given["temperature"]} if "temperature" in given else {}
    assert drawn(kv, Sampler(Sampling(seed=SEED, **plain), kv.model), rows) != want


@pytest.mark.sampled(ENGINE)
@pytest.mark.parametrize("name", CASES)
def test_a_copy_goes_on_as_the_original(kv: KVFlash, usual: npt.NDArray[np.bool_], name: str) -> None:
    rows = logits_of(usual, 40)
    for grammar in ("", ALL_TOKENS):
        sampler = Sampler(Sampling(seed=SEED, grammar=grammar, **CASES[name]), kv.model)
        sampler.read(np.array(drawn(kv, sampler, rows[:10]), np.int32))
        copies = [sampler.fork(), sampler.fork()]
        assert drawn(kv, copies[0], rows[10:]) == drawn(kv, copies[1], rows[10:]) == drawn(kv, sampler, rows[10:])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"top_k": 2, "top_p": 0.1, "min_p": 0.9, "min_keep": 3},
        {"top_n_sigma": 1.0},
        {"samplers": ("temperature", "typ_p", "xtc"), "typical_p": 0.1, "xtc_probability": 1.0},
        {"mirostat": 1},
        {"mirostat": 2, "dynatemp_range": 1.0},
        {"dynatemp_range": 1e-12},
    ],
    ids=str,
)
def test_a_temperature_of_0_is_greedy_whatever_is_cut_off(
    kv: KVFlash, usual: npt.NDArray[np.bool_], given: dict[str, Any]
) -> None:
    rows = logits_of(usual, 20)
    sampling = Sampling(temperature=0, **given)
    assert sampling.greedy
    assert drawn(kv, Sampler(sampling, kv.model), rows) == [int(row.argmax()) for row in rows]


@pytest.mark.parametrize(
    "given",
    [
        {"xtc_probability": 0.5},
        {"dynatemp_range": 1e-9},
        {"dynatemp_range": 0.5},
        {"samplers": "top_k;top_p"},
        {"temperature": 0.1},
    ],
    ids=str,
)
def test_what_is_left_to_chance_is_not_greedy(given: dict[str, Any]) -> None:
    """So statistics tell its seed."""
    assert not Sampling(**{"temperature": 0.0, **given}).greedy


#
# what each is for
#


def one_row(kv: KVFlash, likely: dict[int, float]) -> list[npt.NDArray[np.float32]]:
    """Logits of which a few tokens have these probabilities, and the others next to none."""
    row = np.full(kv.model.n_vocab, -30, np.float32)
    for token, probability in likely.items():
        row[token] = np.log(probability)
    return [row] * 40


LIKELY = {300: 0.5, 301: 0.3, 302: 0.15, 303: 0.05}


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1.0, "dynatemp_range": 1.0, "dynatemp_exponent": 30.0},
        {"temperature": 0.1, "dynatemp_range": 2.0, "dynatemp_exponent": 100.0},
        {"temperature": 0.0, "dynatemp_range": 1e-9, "dynatemp_exponent": 5.0},
    ],
    ids=str,
)
def test_a_temperature_that_goes_down_to_0_takes_the_most_likely_token(kv: KVFlash, given: dict[str, float]) -> None:
    """Logits divided by next to nothing are infinite, and any token was drawn."""
    sampling = Sampling(seed=SEED, **OPEN, **given)
    assert set(drawn(kv, Sampler(sampling, kv.model), one_row(kv, LIKELY))) == {300}


def test_an_answer_that_does_not_end(kv: KVFlash) -> None:
    """No token that ends it is drawn, whatever its bias; and a grammar says itself where it ends."""
    end, other = kv.model.ends[0], 300
    rows = one_row(kv, {end: 0.99, other: 0.01})[:1]
    for given in ({"temperature": 0.0}, {"temperature": 0.0, "logit_bias": ((end, 100.0), (5, 1.0))}):
        assert drawn(kv, Sampler(Sampling(**given), kv.model), rows) == [end]
        assert drawn(kv, Sampler(Sampling(**given, ignore_eos=True), kv.model), rows) == [other]
    with pytest.raises(UsageError, match="`ignore_eos` and a grammar cannot be combined"):
        kv.generation(np.array([1], np.int32), sampling=Sampling(ignore_eos=True, grammar='root ::= "a"'))


@pytest.mark.sampled(ENGINE)
@pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order")
@pytest.mark.parametrize(
    "given",
    [
        {"dry_multiplier": 2.0, "xtc_probability": 0.5},
        {"mirostat": 2},
    ],
    ids=str,
)
def test_lossless_decoding_with_samplers_that_remember(
    opened: Open,
    known: Callable[..., Chosen],
    wordless: None,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is drafted asks a copy: token for token, the text is the full cache's."""
    monkeypatch.setattr(Lookahead, "next", Length(3))  # no clock
    chosen, sampling = known(), Sampling(seed=3, **given)
    kv, full = opened(), opened(**FULL)
    for prompt, how in ((TOKENS[:600], {}), (TOKENS[600:650], {"append": True})):
        chosen.rows.clear()
        want, got = (chosen_alike(chosen, one, prompt, 40, sampling, **how) for one in (full, kv))
        assert got == want
        assert kv.decoder.lossless is not None
        assert kv.decoder.lossless.stats.drafted > 0


#
# refused
#


@pytest.mark.parametrize("name", RANGES)
def test_values_out_of_range(name: str) -> None:
    _, low, high = RANGES[name]
    for value in (low, high):
        Sampling(**{name: value})
    for value in (low - 1, high + 1, float("nan")):
        with pytest.raises(UsageError, match=f"^`{name}` is .*, and must be from"):
            Sampling(**{name: value})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samplers": "top_k;tfs_z"}, "`samplers` has 'tfs_z', which is not a sampler: the names are penalties, dry, "),
        ({"samplers": ("top_k", "temp", "top-k")}, "`samplers` has top_k twice"),
        ({"dry_sequence_breakers": ("a", "")}, "`dry_sequence_breakers` has '': give texts of 1 to 40 bytes"),
        ({"dry_sequence_breakers": ("x" * 41,)}, "give texts of 1 to 40 bytes without NUL"),
        ({"dry_sequence_breakers": ("a\0",)}, "give texts of 1 to 40 bytes without NUL"),
        ({"dry_sequence_breakers": ("\ud800",)}, "a text of `dry_sequence_breakers` is not Unicode"),
        ({"dry_sequence_breakers": ("a",) * (MAX_BREAKERS + 1)}, "has 33 texts, and may have 32: leave some out"),
    ],
    ids=str,
)
def test_values_that_are_none(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as err:
        Sampling(**given)
    assert words in str(err.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("dry_multiplier=x", ("--set sampling.dry_multiplier: 'x' is not a number",)),
        ("repeat_last_n=-1", ("--set sampling.repeat_last_n is -1", "from 0 to 1,048,576")),
        ("samplers=top_k;best", ("--set sampling.samplers has 'best'", "the names are")),
        ("ignore_eos=true", ()),
        ("ignore_eos=maybe", ("'maybe' is not true or false",)),
    ],
)
def test_settings_of_the_command_line(setting: str, words: tuple[str, ...]) -> None:
    args = "run", str(BUNDLED_MODEL), "-p", "x", "-c", "512", "-n", "1", "--set", f"sampling.{setting}"
    if words:
        check_error(invoke(*args), 2, *words)
    else:
        good(*args)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--samplers", "samplers"),
        ("--ignore-eos", "ignore_eos"),
        ("-l", "logit_bias"),
    ],
)
def test_options_of_llama_cpp_are_settings(option: str, field: str) -> None:
    words = f"no such option '{option}': give --set sampling.{field}=VALUE; "
    check_error(in_process("run", option, "2"), 2, words)
    assert "sampling" not in check_error(in_process("plot", option, "2"), 2, f"no such option '{option}'")


def test_the_command_line_sets_them() -> None:
    """The same seed, another answer for each."""

    def said(*settings: str) -> str:
        more = [word for setting in settings for word in ("--set", f"sampling.{setting}")]
        return good("run", str(BUNDLED_MODEL), "-p", "One day", "-c", "512", "-n", "20", "-s", "1", *more).stdout

    plain = said()
    assert said("dry_multiplier=0", "repeat_last_n=32") == plain
    assert said("samplers=top_k;temperature") != plain


#
# requests
#


@pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order")
def test_requests_have_the_tokens_of_their_settings(server: Running) -> None:
    """Those that Python draws with the same Sampling, each after others of the same server."""
    with serving.open_needle()(lambda _: None) as alone:
        for name, given in CASES.items():
            sampling = Sampling(seed=3, **given)
            want = "".join(
                e.text for e in alone.generate("One day the", max_tokens=10, sampling=sampling) if isinstance(e, Token)
            )
            body = {"prompt": "One day the", "max_tokens": 10, "seed": 3, "temperature": 0.8, **given}
            assert server.text(**body) == want, name
            alone.clear()
